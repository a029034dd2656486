"""On a GPU nothing is compiled or loaded once an engine is ready, whatever comes."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.head_models import add_head
from sglang.test.hybrid_models import write_text_model
from sglang.test.spec_world import ModelFolders, matrix, spec_engine

register_cuda_ci(est_time=240, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CANARY = {"kv_canary": "raise", "kv_canary_sweep_interval": 8}
WARM = {"skip_server_warmup": False, "skip_tokenizer_init": True}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "canary": CANARY,
    "all bytes": {**CANARY, "kv_canary_real_data": "all"},
    "pages and tiers": {
        **CANARY,
        "page_size": 16,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 0.5,
    },
    "no graphs": {
        **CANARY,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
    },
    "small graphs": {**CANARY, "cuda_graph_max_bs": 4},
    "no chunks": {**CANARY, "chunked_prefill_size": -1},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.1},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.0}},
    {"min_new_tokens": 2, "stop_token_ids": [4, 5]},
    {"return_logprob": True, "top_logprobs_num": 2},
    {"return_logprob": True, "logprob_start_len": 0},
)


def serve_anything(
    engine: EngineHarness,
    *,
    context: int,
    seed: int,
    loras: Sequence[str | None] = (None,),
) -> None:
    """Rounds of random requests: prompts of all lengths, fresh and behind prefixes,
    alone and many, with every option and any of the adapters."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(200) for _ in range(context // 2)] for _ in range(3)]
    for _ in range(40):
        for _ in range(rng.choice([1, 1, 2, 3, 5, 9, 17, 33])):
            prefix = rng.choice(prefixes)[: rng.choice([0, 1, 16, 40, context // 2])]
            most = min(rng.choice([1, 4, 20, 70, context // 2 - 12]), context // 2 - 12)
            tail = [rng.randrange(200) for _ in range(rng.randint(1, most))]
            engine.submit(
                prefix + tail,
                max_new_tokens=rng.randint(1, 10),
                lora=rng.choice(loras),
                **rng.choice(OPTIONS),
            )
        engine.run()


def assert_nothing_came_late(engine: EngineHarness) -> None:
    late = engine.scheduler.worker.model_runner.late_kernels
    late.stop()
    assert dict(late.names) == {}


@pytest.fixture(autouse=True)
def no_kernels() -> None:
    """Those of other tests must be loaded again."""
    from triton.runtime.jit import JITFunction

    for kernel in gc.get_objects():
        if issubclass(type(kernel), JITFunction):
            kernel.device_caches.clear()


ARCHITECTURES = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_text_model(folder, request.param, max_position_embeddings=2048)


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_comes_late(model: Path, name: str) -> None:
    engine = EngineHarness(
        model, **{**WARM, "max_running_requests": 32, **ENGINES[name]}
    )
    serve_anything(engine, context=1500, seed=len(name))
    assert_nothing_came_late(engine)


@pytest.mark.parametrize("name", ["plain", "no graphs", "small graphs"])
def test_nothing_comes_late_to_adapters(name: str, tmp_path: Path) -> None:
    """Of a model that is wide enough for the kernels of few rows."""
    model = write_text_model(
        tmp_path / "model",
        "LlamaForCausalLM",
        max_position_embeddings=2048,
        hidden_size=1024,
        intermediate_size=2048,
    )
    adapters = [write_adapter(tmp_path / f"a{i}", model, seed=i) for i in range(2)]
    engine = EngineHarness(
        model,
        **{**WARM, "max_running_requests": 32, **ENGINES[name]},
        lora_paths=[f"{each.name}={each}" for each in adapters],
    )
    loras = [None, *(each.name for each in adapters)]
    serve_anything(engine, context=1500, seed=len(name), loras=loras)
    assert_nothing_came_late(engine)


@pytest.mark.parametrize("topk", [1, 4])
def test_nothing_comes_late_to_drafts(
    topk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = ModelFolders(tmp_path_factory.mktemp("spec"))
    config = next(
        c for c in matrix("llama", "qwen3", "mock") if (c.topk > 1) == (topk > 1)
    )
    engine = spec_engine(folders, config, **WARM, **CANARY)
    serve_anything(engine, context=engine.scheduler.model_config.context_len, seed=topk)
    assert_nothing_came_late(engine)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_nothing_comes_late_to_heads_of_hybrids(
    architecture: str, topk: int, tmp_path: Path
) -> None:
    folder = write_text_model(tmp_path, architecture, max_position_embeddings=2048)
    add_head(folder, architecture)
    engine = EngineHarness(
        folder,
        **{**WARM, **CANARY, "max_running_requests": 32},
        speculative_algorithm="NEXTN",
        speculative_num_steps=3,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=4 if topk == 1 else 8,
    )
    serve_anything(engine, context=1500, seed=topk)
    assert_nothing_came_late(engine)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
