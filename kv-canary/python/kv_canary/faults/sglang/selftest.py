"""Plants faults of each class in the installed SGLang, and reports which were named."""

from __future__ import annotations

import importlib
import json
import os
import random
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kv_canary.engines.sglang.batch import VERIFY
from kv_canary.faults.sglang.planters import IN_TREES, PLANTERS
from kv_canary.faults.sglang.planting import PLAN

VOCABULARY = 512
_MAX_WAVES = 400
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


_DRAFT = {
    **_MODEL,
    "architectures": ["LlamaForCausalLMEagle"],
    "num_hidden_layers": 1,
    # SGLang sets the target's embedding and head on it, one after the other.
    "tie_word_embeddings": False,
}
_TREES = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}


class Kind(NamedTuple):
    """The subject of a self-test. Fields: mode: mode of the forwards with a fault."""

    mode: str
    faults: Collection[str]


KINDS = {"plain": Kind("DECODE", PLANTERS), "eagle": Kind(VERIFY, IN_TREES)}


def run(kind: str, seeds: int, **options: Any) -> bool:
    """Run the faults under `KV_CANARY=log`; return whether all were named.

    Prints a line per fault, then a line of JSON.

    Args:
        kind: one of `KINDS`: decodes, or verifications of a draft model's trees.
        options: further options of SGLang's `Engine`.
    """
    if not torch.cuda.is_available() and "device" not in options:
        print(
            "selftest: SGLang needs a CUDA device, and there is none; its wheels do "
            "not import without one"
        )
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        if kind == "eagle":
            draft = path / "draft"
            draft.mkdir()
            (draft / "config.json").write_text(json.dumps(_DRAFT), encoding="utf-8")
            options = {"speculative_draft_model_path": str(draft), **_TREES, **options}
        mode, faults = KINDS[kind]
        outcomes = path / f"outcomes.{mode}.{seeds}"
        os.environ[PLAN] = str(outcomes)
        _traffic(path, outcomes, options)
        lines = outcomes.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    named = {
        name: sum(o["named"] for o in found if o["fault"] == name) for name in faults
    }
    for name, count in named.items():
        texts = [text for o in found if o["fault"] == name for text in o["found"]]
        print(f"{name:20} {count}/{seeds}  {'; '.join(texts[:1])}")
    print(json.dumps({"model": kind, "seeds": seeds, "named": named}), flush=True)
    return all(count == seeds for count in named.values())


def _traffic(model: Path, outcomes: Path, options: dict[str, Any]) -> None:
    """Send requests with shared prefixes until all faults were planted.

    Raises:
        RuntimeError: faults are left after the last wave.
    """
    engine = importlib.import_module("sglang").Engine(
        **{
            "model_path": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_total_tokens": 1024,
            "max_running_requests": 8,
            "context_length": 512,
            "chunked_prefill_size": 64,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "log_level": "error",
            **options,
        }
    )
    rng = random.Random(0)
    shared = _tokens(rng, 90)
    try:
        for _ in range(_MAX_WAVES):
            prompts = [
                shared[: rng.randrange(91)] + _tokens(rng, rng.randrange(1, 60))
                for _ in range(8)
            ]
            params = {"temperature": 0.7, "max_new_tokens": 24, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=params)
            if _is_done(outcomes):
                return
    finally:
        engine.shutdown()
    raise RuntimeError(f"selftest: faults are left after {_MAX_WAVES} waves")


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def _is_done(outcomes: Path) -> bool:
    if not outcomes.exists():
        return False
    last = outcomes.read_text(encoding="utf-8").splitlines()[-1]
    return bool(json.loads(last)["left"] == 0)
