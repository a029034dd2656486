"""The warm-up serves requests of every kind, which fit, and leaves no trace."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.forward.graph_capture import RehearsalBackend
from sglang.srt.layers.ops.linear.triton_table import (
    MAX_ROWS,
    lookup,
    lookup_quantized,
)
from sglang.srt.lora.pool import AdapterPool
from sglang.srt.managers.messages.io_struct import LoraRef, SchedulerStats
from sglang.srt.managers.scheduler import build
from sglang.srt.managers.scheduler.warm_up import compile_ahead, is_warmed_up, warm_up
from sglang.srt.managers.scheduler.warm_up_scenes import SceneLimits, scenes
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.memory_plan import prefill_token_counts
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.kernel_loads import KernelLoads
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.recording_backend import RecordingBackend
from sglang.test.scale import is_full
from sglang.test.spec_world import ModelFolders, matrix, spec_engine
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=25, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

PROMPTS = [[5, 6, 7], [5, 6, 9, 8], list(range(20, 60))]
COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 7}
CANARY = {**COMMON, "kv_canary": "raise", "kv_canary_real_data": "all"}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": COMMON,
    "canary": {**CANARY, "kv_canary_sweep_interval": 3},
    "pages": {**CANARY, "page_size": 16, "chunked_prefill_size": 64},
    "no cache": {**CANARY, "disable_radix_cache": True},
    "heal": {**CANARY, "kv_canary": "heal"},
    "hidden states": {**COMMON, "enable_return_hidden_states": True},
    "few slots": {**CANARY, "max_total_tokens": 48, "max_running_requests": 2},
    "adapters": {
        **CANARY,
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_target_modules": ["all"],
        "max_loras_per_batch": 1,
    },
    "record": {**CANARY, "kv_canary_record": 50},
}
# Counters that depend on the wall clock.
TIMES = ("gen_throughput", "queue_time_seconds")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    return write_tiny_model(folder, "Gemma3ForCausalLM")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("spec"))


Create = Callable[[], EngineHarness]


def assert_leaves_no_trace(create: Create) -> None:
    """An engine that has warmed up is in the state of one that has not, and both then
    serve alike."""
    fresh, warm = create(), create()
    warm_up(warm.server_args, warm.scheduler.worker, None)
    assert_alike(fresh, warm)


def assert_alike(fresh: EngineHarness, warm: EngineHarness) -> None:
    assert state_of(warm) == state_of(fresh)
    for one, other in zip(arenas_of(warm), arenas_of(fresh), strict=True):
        assert torch.equal(one, other)
    for prompt in PROMPTS:
        options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 6}
        answers = [engine.generate(prompt, **options) for engine in (fresh, warm)]
        assert answers[0].output_ids == answers[1].output_ids
        assert answers[0].cached_tokens == answers[1].cached_tokens
    assert state_of(warm) == state_of(fresh)


def state_of(engine: EngineHarness) -> dict[str, Any]:
    """State of the host that warm-up must leave as it was."""
    scheduler = engine.scheduler
    allocator, rows = scheduler.cache.allocator, scheduler.cache.req_to_token_pool
    stats = scheduler.stats_snapshot()
    managers = scheduler.worker.canary_managers()
    adapters = scheduler.worker.model_runner.adapters
    return {
        "adapters": adapters and (adapters.loaded, _slots_of(adapters.pool)),
        "stats": [getattr(stats, name) for name in _counted(stats)],
        "pages": allocator.save().tolist(),
        "secondary": [group.available_size() for group in allocator.secondary],
        "rows": rows.save_rows(),
        "created": scheduler.num_created,
        "forwards": [(m.num_forwards, m.next_forward, m.counters) for m in managers],
        "sweeps": [m.num_sweep_passes for m in managers],
        "findings": [m.reporter.total for m in managers],
        "rid": [m.serials.rid(serial) for m in managers for serial in range(4)],
    }


def _slots_of(pool: AdapterPool[Any]) -> list[Any]:
    revisions = pool.revisions_in(np.arange(1, 1 + pool.num_slots))
    return [pool.num_placed, revisions]


def _counted(stats: SchedulerStats) -> list[str]:
    return [name for name in stats.__struct_fields__ if name not in TIMES]


def arenas_of(engine: EngineHarness) -> list[torch.Tensor]:
    found = []
    for manager in engine.scheduler.worker.canary_managers():
        found += [group.state.arena for group in manager.target.groups]
    return found


@pytest.mark.parametrize(
    ("name", "overlap"),
    # In CI each engine once, in order or overlapped.
    [*itertools.product(ENGINES, [False, True])]
    if is_full()
    else [*zip(ENGINES, itertools.cycle([False, True]), strict=False)],
)
def test_it_leaves_no_trace(
    tiny: Path, tmp_path: Path, name: str, overlap: bool
) -> None:
    options: dict[str, Any] = {"max_running_requests": 16, "max_total_tokens": 2048}
    if name == "record":
        options["kv_canary_report_dir"] = str(tmp_path)
    options |= ENGINES[name]
    assert_leaves_no_trace(lambda: EngineHarness(tiny, overlap=overlap, **options))


class Unset:
    """The mark of a machine that has compiled nothing."""

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        pass


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_rehearsal_leaves_no_trace_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a model with layers that it leaves out, and with graphs."""
    few = {"num_hidden_layers": 4, "max_position_embeddings": 128}
    model = write_tiny_model(tmp_path, name, **few)
    # One more than the largest graph has.
    options: dict[str, Any] = {"max_running_requests": 5, "max_total_tokens": 512}
    if not torch.cuda.is_available():
        options["attention_backend"] = "torch_native"  # which runs layer by layer
        counts = prefill_token_counts(16)
        monkeypatch.setattr(ModelRunner, "graph_sizes", lambda self: [1, 4])
        monkeypatch.setattr(
            ModelRunner, "prefill_graph_token_counts", lambda self: counts
        )
        monkeypatch.setattr(model_runner, "cuda_graph_backend", RecordingBackend)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_compiled_mark", lambda self, draft: Unset())
        patch.setattr(build, "is_warmed_up", lambda args: True)
        warm = EngineHarness(model, **options, **CANARY)
    # After it: kernels that this one loaded would have come late to an engine before.
    fresh = EngineHarness(model, **options, **CANARY)
    runner = warm.scheduler.worker.model_runner
    assert runner.compiles_ahead
    assert runner.graph_runner is not None
    assert runner.prefill_graph_runner is not None
    assert_alike(fresh, warm)


def test_window_slots_are_left_alike(windowed: Path) -> None:
    options: dict[str, Any] = {"max_running_requests": 8, "max_total_tokens": 1024}
    options |= CANARY
    assert_leaves_no_trace(lambda: EngineHarness(windowed, **options))


@pytest.mark.parametrize("topk", [1, 4])
def test_drafts_are_left_alike(folders: ModelFolders, topk: int) -> None:
    config = next(
        c for c in matrix("llama", "qwen3", "mock") if (c.topk > 1) == (topk > 1)
    )
    options: dict[str, Any] = {"max_running_requests": 5, **CANARY}
    assert_leaves_no_trace(lambda: spec_engine(folders, config, **options))


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
def test_a_rehearsal_with_drafts_leaves_no_trace(
    folders: ModelFolders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    topk: int,
) -> None:
    """Its graphs do nothing. No others are captured here, because attention with tree
    masks waits for its results on the CPU."""
    configs = matrix("llama", "qwen3", "mock")
    config = next(
        c
        for c in configs
        if (c.algorithm, c.topk > 1, c.backend) == (algorithm, topk > 1, "cpu_native")
    )

    def sizes_of(runner: ModelRunner) -> list[int]:
        return [1, 4] if runner.make_backend is RehearsalBackend else []

    monkeypatch.setattr(ModelRunner, "graph_sizes", sizes_of)
    monkeypatch.setattr(ModelRunner, "prefill_graph_token_counts", sizes_of)
    options: dict[str, Any] = {"max_running_requests": 5, **CANARY}
    fresh, warm = (spec_engine(folders, config, **options) for _ in range(2))
    worker = warm.scheduler.worker
    worker.model_runner.compiles_ahead = True
    with caplog.at_level(logging.DEBUG, logger="sglang"):
        compile_ahead(warm.server_args, worker)
    said = " ".join(record.getMessage() for record in caplog.records)
    for kind in ("target_verify", "draft", "draft extend"):
        assert said.count(f"Captured 2 {kind} graphs") == 1
    assert said.count("Captured 2 prefill graphs") == 2  # of either model
    worker.capture_graphs()
    # No capture may take what was rehearsed for requests.
    workspace = worker.draft_worker.workspace
    rows = workspace.rows(workspace.max_rows)
    for left in (rows.identity, rows.seq_lens, rows.draft_lens, rows.node_ends):
        assert not left.any()
    assert_alike(fresh, warm)


def test_nothing_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a tokenizer, so that a grammar is among it."""
    model = bundled_demo_model_path()
    engine = EngineHarness(model, max_running_requests=4, max_total_tokens=2048)
    tokenizer = load_tokenizer(str(model))
    with caplog.at_level(logging.INFO, logger="sglang"):
        warm_up(engine.server_args, engine.scheduler.worker, tokenizer)
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if line.startswith("Warmed up with")]
    assert not [line for line in said if line.startswith("Not warmed up")]


def test_the_cpu_does_not_wait_for_it(tiny: Path) -> None:
    engine = EngineHarness(tiny, device="cpu", skip_tokenizer_init=True)
    assert not is_warmed_up(engine.server_args)


@settings(deadline=None, max_examples=200)
@given(
    st.builds(
        SceneLimits,
        rows=st.integers(1, 300),
        slots=st.integers(8, 4000),
        context=st.integers(8, 4000),
        batch_tokens=st.integers(1, 5000),
        has_chunks=st.booleans(),
        vocab_size=st.integers(2, 1000),
        graph_rows=st.integers(0, 300),
        is_prefill_only=st.booleans(),
        has_prefix_cache=st.booleans(),
        has_grammars=st.booleans(),
        has_hidden_states=st.booleans(),
    )
)
def test_every_request_fits(limits: SceneLimits) -> None:
    for requests in scenes(limits):
        assert 0 < len(requests) <= limits.rows + 1
        for request in requests:
            params = request.sampling_params
            length = len(request.input_ids) + params.max_new_tokens
            assert len(request.input_ids) > 0
            assert length <= min(limits.context, limits.slots)
            assert max(request.input_ids) < limits.vocab_size
            assert params.max_new_tokens == 1 or not limits.is_prefill_only
            if not limits.has_chunks:
                assert len(request.input_ids) <= limits.batch_tokens + 96


@pytest.mark.parametrize(("device", "left"), [("cpu", 3), ("cuda", 1)])
def test_one_thread_of_the_host_serves_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, left: int
) -> None:
    froze = []
    monkeypatch.setattr(build.gc, "freeze", lambda: froze.append(1))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        args: Any = SimpleNamespace(device=device)
        build.settle(args)
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)
    assert froze


LIMITS = SceneLimits(
    rows=96,
    slots=1 << 20,
    context=1 << 15,
    batch_tokens=8192,
    has_chunks=True,
    vocab_size=1000,
    graph_rows=96,
    is_prefill_only=False,
    has_prefix_cache=True,
    has_grammars=False,
    has_hidden_states=False,
)


def test_full_batches_are_admitted_from_the_cache() -> None:
    """Without one these would be prefilled, all of them."""

    def alike(limits: SceneLimits) -> list[tuple[int, int]]:
        """Rows and tokens of the scenes whose requests are all the same."""
        asks = [[(r.input_ids, r.extra_key) for r in each] for each in scenes(limits)]
        return [
            (len(ask), len(ask[0][0]))
            for ask in asks
            if len(ask) > 1 and all(one == ask[0] for one in ask)
        ]

    assert alike(LIMITS) == [(rows, 2730) for rows in (96, 48, 24, 12, 6, 3)]
    assert alike(replace(LIMITS, has_prefix_cache=False)) == []


@pytest.mark.parametrize("k", [2048, 4096, 8192, 14336])
@pytest.mark.parametrize("n", [4096, 6144, 28672, 57344])
def test_prompts_with_adapters_are_warm(n: int, k: int) -> None:
    """Without a GPU nothing else tells that the products of any number of tokens have
    run."""

    def variant(rows: int) -> Any:
        stored = lookup_quantized(rows=min(rows, MAX_ROWS), n=n, k=k, group=128)
        least = min(max(16, 1 << (rows - 1).bit_length()), 2 * MAX_ROWS)
        plain = lookup(rows=rows, n=n, k=k, gated=False)
        return rows == 1, plain, rows <= MAX_ROWS and (stored, least)

    asks = scenes(replace(LIMITS, lora=LoraRef(name="a", path="", revision="r")))
    adapted = [ask[0] for ask in asks if ask[0].lora is not None]
    warm = [len(req.input_ids) for req in adapted if req.return_logprob]
    assert {variant(rows) for rows in warm} == {variant(rows) for rows in range(1, 300)}
    assert all(r.lora is None for ask in scenes(LIMITS) for r in ask)


def test_late_kernels_are_counted_and_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    loaded = triton.knobs.runtime.kernel_load_end_hook
    # Engines of other tests warn, too.
    monkeypatch.setattr(loaded, "calls", [])
    silent, late = KernelLoads(), KernelLoads(warns=True)
    with caplog.at_level(logging.WARNING):
        for loads in (silent, late):
            loads.start()
        for name in ("verify_kernel", "verify_kernel", "gemm_kernel"):
            loaded(None, None, name, {}, "digest")
        for loads in (silent, late):
            loads.stop()
        loaded(None, None, "after_the_end", {}, "digest")
    assert silent.names == late.names == {"verify_kernel": 2, "gemm_kernel": 1}
    named = [record.getMessage().split(":")[0] for record in caplog.records]
    assert named == ["verify_kernel", "gemm_kernel"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
