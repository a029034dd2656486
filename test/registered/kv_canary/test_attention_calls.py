"""Calls of attention that differ from what the canary verified, and forwards that do
not run: the engine stops before a token of them is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.test.canary_traffic import CONTEXT, VOCAB
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.spec_canary_traffic import speculating, worker_of
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=15, suite="cpu")

SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
Call = Callable[..., None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mock")
    return {
        "model": write_mock_model(folder / "target", **SIZES),
        "draft": write_mock_draft(
            folder / "draft", kind="EAGLE", source="attention", **SIZES
        ),
    }


def serve(models: dict[str, Path], *, speculates: bool) -> EngineHarness:
    """An engine in the middle of two requests."""
    if speculates:
        harness = speculating(**models, tree=(4, 4, 12))
    else:
        harness = EngineHarness(
            models["model"],
            max_total_tokens=512,
            skip_tokenizer_init=True,
            kv_canary="raise",
        )
    for i in range(2):
        prompt = [(17 * i + 3 * j) % VOCAB for j in range(20 + i)]
        harness.submit(prompt, rid=f"q{i}", max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        harness.scheduler.step()
    return harness


def backend_of(harness: EngineHarness) -> PagedAttnBackend:
    backend = harness.scheduler.worker.model_runner.attn_backend
    assert isinstance(backend, PagedAttnBackend)
    return backend


def nothing(call: Call, *args: Any, **options: Any) -> None:
    """Leave the call out."""


def twice(call: Call, *args: Any, **options: Any) -> None:
    call(*args, **options)
    call(*args, **options)


def with_copy(*names: str) -> Callable[..., None]:
    """A fault that gives the call copies of these tensors of the batch."""

    def fault(call: Call, *args: Any, **options: Any) -> None:
        *rest, batch = args
        assert isinstance(batch, ForwardBatch)
        copies = {name: getattr(batch, name).clone() for name in names}
        call(*rest, dataclasses.replace(batch, **copies), **options)

    return fault


def with_first_layer(call: Call, *args: Any, **options: Any) -> None:
    """Every layer works on the first one's K and V."""
    q, k, v, layer, batch = args
    before, layer.layer_id = layer.layer_id, 0
    try:
        call(q, k, v, layer, batch, **options)
    finally:
        layer.layer_id = before


FAULTS: dict[str, tuple[str, Callable[..., None], str]] = {
    "no store": ("store", nothing, r"0 layers stored K and V"),
    "no attention": ("attend", nothing, r"0 attended"),
    "attention twice": ("attend", twice, r"over other K or V|after all"),
    "other slots": ("store", with_copy("out_cache_loc"), "another out_cache_loc"),
    "other positions": ("store", with_copy("positions"), "another positions"),
    "other rows": ("attend", with_copy("req_pool_indices"), "another row_index"),
    "store in the first layer": ("store", with_first_layer, "over other K or V"),
    "read the first layer": ("attend", with_first_layer, "over other K or V"),
}
OF_DECODE = {"other lengths": ("attend", with_copy("seq_lens"), "another read_lens")}
OF_TREES = {
    f"other {name}": ("attend", with_copy(name), f"another {name}")
    for name in ("prefix_lens", "qo_indptr", "tree_mask")
} | {"other node positions": ("attend", with_copy("positions"), "another positions")}
PLAIN, TREES = FAULTS | OF_DECODE, FAULTS | OF_TREES
CASES = [*((name, False) for name in PLAIN), *((name, True) for name in TREES)]


@pytest.mark.parametrize(("name", "speculates"), CASES)
def test_a_call_that_differs_stops_the_engine(
    models: dict[str, Path],
    name: str,
    speculates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, fault, message = (TREES if speculates else PLAIN)[name]
    harness = serve(models, speculates=speculates)
    backend, due = backend_of(harness), ForwardMode.DECODE
    if speculates:
        due = ForwardMode.TARGET_VERIFY
    call = getattr(backend, method)

    def faulty(*args: Any, **options: Any) -> None:
        if args[4].forward_mode is due:
            fault(call, *args, **options)
        else:
            call(*args, **options)

    monkeypatch.setattr(backend, method, faulty)
    with pytest.raises(RuntimeError, match=f"KV canary: .*({message})"):
        harness.run()


def test_a_level_of_the_draft_that_is_left_out(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = serve(models, speculates=True)
    phase = worker_of(harness).draft_worker.phase
    run_step, outputs = phase.run_step, []

    def fewer(level: int, batch: ForwardBatch) -> Any:
        if level < 2:
            outputs.append(run_step(level, batch))
        return outputs[-1]

    monkeypatch.setattr(phase, "run_step", fewer)
    with pytest.raises(RuntimeError, match="2 forwards ran in a launch of 3"):
        harness.run()


def test_a_draft_that_does_not_run(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = serve(models, speculates=True)
    phase = worker_of(harness).draft_worker.phase
    monkeypatch.setattr(phase, "forward", lambda live, seq_lens: None)
    with pytest.raises(RuntimeError, match="0 forwards ran in a launch of 3"):
        harness.run()


def test_hidden_states_of_another_width(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = serve(models, speculates=True)
    worker = worker_of(harness)
    take = worker._take_accepted
    monkeypatch.setattr(
        worker,
        "_take_accepted",
        lambda live, hidden, states: take(live, hidden[:, :-2], states),
    )
    with pytest.raises(RuntimeError, match=r"width 510, but the draft reads 512"):
        harness.run()
