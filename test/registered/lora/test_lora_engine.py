"""Adapters in the Python engine, over ranks, and beside drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.utils.paths import bundled_demo_draft_path, bundled_demo_model_path
from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count, sampled
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=12, suite="cpu")

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 8}
DRAFTS = [
    {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
    {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4, "page_size": 4},
    {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 2},
]


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """And load, unload and refuse alike."""
    model = write_tiny_model(tmp_path / "m", "Qwen3ForCausalLM", num_key_value_heads=1)
    other = write_tiny_model(tmp_path / "o", "Qwen3ForCausalLM", intermediate_size=80)
    paths = {
        "a": write_adapter(tmp_path / "a", model, rank=4, seed=1),
        "b": write_adapter(tmp_path / "b", model, rank=8, seed=2),
        "bad": write_adapter(tmp_path / "bad", other),
    }
    rng = random.Random(0)
    prompts = [rng.choices(range(200), k=rng.randrange(5, 60)) for _ in range(9)]
    names = [(None, "a", "b")[i % 3] for i in range(len(prompts))]
    alone = EngineHarness(
        model,
        skip_tokenizer_init=True,
        lora_paths=[f"{name}={paths[name]}" for name in "ab"],
    )
    due = [
        alone.generate(prompt, lora=name, max_new_tokens=8, ignore_eos=True).output_ids
        for prompt, name in zip(prompts, names, strict=True)
    ]
    with sglang.Engine(
        model_path=str(model),
        tp_size=2,
        lora_paths={"a": paths["a"]},
        max_lora_rank=8,
        max_loras_per_batch=1,
        chunked_prefill_size=32,
        max_total_tokens=640,
        kv_canary="raise",
        skip_tokenizer_init=True,
    ) as engine:
        assert list(engine.load_lora_adapter("b", str(paths["b"]))) == ["a", "b"]
        for _ in range(2):
            answers = engine.generate(
                input_ids=prompts, sampling_params=GREEDY, lora_path=names
            )
            assert [answer["output_ids"] for answer in answers] == due
        with pytest.raises(ValueError, match="another base model"):
            engine.load_lora_adapter("c", str(paths["bad"]))
        assert list(engine.unload_lora_adapter("b")) == ["a"]
        with pytest.raises(ValueError, match="no adapter 'b'"):
            engine.generate(input_ids=[1], lora_path="b")


@pytest.mark.parametrize("draft", sampled(DRAFTS, key=type, ci=1), ids=str)
@pytest.mark.parametrize("overlap", sampled([True, False], key=type, ci=1))
def test_drafts_change_no_answer(
    tmp_path: Path, draft: dict[str, Any], overlap: bool
) -> None:
    """They run without the adapter."""
    model = bundled_demo_model_path()
    adapters = [
        f"{name}={write_adapter(tmp_path / name, model, seed=i, size=0.1)}"
        for i, name in enumerate("abc")
    ]
    usual = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "lora_paths": adapters,
        "max_loras_per_batch": 2,
        "max_total_tokens": 8192,
        "context_length": 256,
        "kv_canary": "raise",
    }
    plain = EngineHarness(model, disable_radix_cache=True, **usual)
    drafting = EngineHarness(
        model,
        overlap=overlap,
        speculative_draft_model_path=str(
            bundled_demo_draft_path(draft["speculative_algorithm"])
        ),
        speculative_num_steps=3,
        speculative_num_draft_tokens=4 if draft["speculative_eagle_topk"] == 1 else 8,
        **usual | draft,
    )
    rng = random.Random(0)
    prompts = [rng.choices(range(1000), k=20) for _ in range(3)]
    options = {"max_new_tokens": 12, "ignore_eos": True}
    due, rids = {}, []
    for _ in range(count(ci=12, full=100)):
        key = rng.randrange(3), rng.choice((None, "a", "b", "c"))
        prompt = prompts[key[0]]
        if key not in due:
            due[key] = plain.generate(prompt, lora=key[1], **options).output_ids
        rids.append((drafting.submit(prompt, lora=key[1], **options), key))
    found = drafting.run()
    assert [found[rid].output_ids for rid, _ in rids] == [due[key] for _, key in rids]
    assert len({tuple(ids) for ids in due.values()}) > 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
