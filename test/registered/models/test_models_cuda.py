"""Every architecture on a GPU, with graphs and overlap, beside torch's ops on the CPU.

Windows of four tokens, experts, and latents; with draft trees too. The KV canary
raises throughout.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import (
    CONTEXT,
    Traffic,
    answer_all,
    assert_parity,
    check_no_leak,
    make_asks,
)
from sglang.test.spec_world import (
    TINY,
    WINDOWED,
    ModelFolders,
    Reference,
    plain_engine,
    spec_engine,
)

register_cuda_ci(est_time=240, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_CPU = {"device": "cpu", "attention_backend": "torch_native", "kv_canary": "none"}
CHECKED = {
    "kv_canary": "raise",
    "kv_canary_real_data": "all",
    "kv_canary_sweep_interval": 8,
}
GRAPHS = {"cuda_graph_bs": [1, 2, 4, 8, 16], "disable_cuda_graph": False}
EAGER = {"disable_cuda_graph": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


class CpuReferences:
    """Requests and torch's answers of each model, computed on first use."""

    def __init__(self, folders: ModelFolders) -> None:
        self._folders = folders
        self._made: dict[str, Reference] = {}

    def __getitem__(self, model: str) -> Reference:
        if model not in self._made:
            total = count(ci=48, full=400)
            rng = random.Random(model)
            asks = make_asks(rng, total=total, vocab_size=264, new_tokens=40)
            engine = plain_engine(self._folders.target(model), **ON_CPU)
            answers = answer_all(engine, asks)
            self._made[model] = Reference(engine=engine, asks=asks, answers=answers)
        return self._made[model]


@pytest.fixture(scope="module")
def references(folders: ModelFolders) -> CpuReferences:
    assert not torch.backends.cuda.matmul.allow_tf32
    return CpuReferences(folders)


def serve(reference: Reference, engine: EngineHarness, seed: str) -> None:
    """Random arrivals and aborts; every answer is the reference's, no slot is lost."""
    traffic = Traffic(engine, reference.asks, random.Random(seed))
    found = traffic.run()
    assert_parity(
        reference.asks,
        reference.answers,
        found,
        aborted=traffic.aborted,
        reference=reference.engine,
    )
    check_no_leak(engine)


def replays(engine: EngineHarness) -> int:
    runner = engine.scheduler.worker.model_runner.graph_runner
    return 0 if runner is None else runner.num_replays


@pytest.mark.parametrize(("page_size", "graphs"), [(1, True), (16, False), (64, True)])
@pytest.mark.parametrize("model", TINY)
def test_answers_are_those_of_the_cpu(
    folders: ModelFolders,
    references: CpuReferences,
    model: str,
    page_size: int,
    graphs: bool,
) -> None:
    engine = EngineHarness(
        folders.target(model),
        device="cuda",
        dtype="float32",
        page_size=page_size,
        context_length=CONTEXT,
        max_total_tokens=1024,
        max_running_requests=16,
        chunked_prefill_size=64,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        **CHECKED,
        **(GRAPHS if graphs else EAGER),
    )
    assert engine.scheduler.max_in_flight == 1
    has_slots = bool(engine.scheduler.cache.allocator.secondary)
    assert has_slots == (model in WINDOWED and model != "mistral")
    serve(references[model], engine, f"{model} {page_size}")
    assert (replays(engine) > 0) == graphs
    if page_size < 64:  # few of the prompts share so long a beginning
        assert engine.scheduler.stats_snapshot().cached_tokens_total > 0


@pytest.mark.parametrize(
    ("topk", "page_size", "graphs"), [(1, 1, False), (4, 16, True)]
)
@pytest.mark.parametrize("model", TINY)
def test_drafts_change_no_answer(
    folders: ModelFolders,
    references: CpuReferences,
    model: str,
    topk: int,
    page_size: int,
    graphs: bool,
) -> None:
    """Paths longer than the window, in target and draft."""
    config = SpecConfig(
        algorithm="STANDALONE",
        topk=topk,
        page_size=page_size,
        num_steps=6,
        nodes=None if topk == 1 else "middle",
        backend="triton",
        overlap=True,
        model=model,
        variant=None,
    )
    options: dict[str, Any] = CHECKED | (GRAPHS if graphs else EAGER)
    engine = spec_engine(folders, config, **options)
    serve(references[model], engine, str(config))
    assert (replays(engine) > 0) == graphs


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
