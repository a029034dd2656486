"""As `test_hole_injectors.py`, with speculation, on a chain and on trees; and attention
is called with the very tensors that the canary was shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_canary.checks import Reason
from kv_canary.faults.catalogue import STEP_FAULTS
from kv_canary.faults.fault import Serving
from kv_canary.view import KVReadView
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.layers.attention.cpu_backends import (
    CpuNativeAttnBackend,
)
from sglang.srt.layers.attention.paged_backend import (
    PagedAttnBackend,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.hole_traffic import Engine, check_named, does_damage, stop_by
from sglang.test.scale import count, is_full
from sglang.test.spec_canary_traffic import CONTEXT, VOCAB, SpecTraffic
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=54, suite="cpu", full_time=1450)

SEEDS = range(count(ci=1, full=20))
SHAPES = [((1, 4, 5), 4), ((4, 4, 12), 1), ((4, 4, 12), 4), ((8, 3, 16), 64)]
ENGINES = [
    Engine(page_size=page_size, overlap=overlap, tree=tree)
    for tree, page_size in SHAPES
    for overlap in (False, True)
]


def engines_of(name: str) -> list[Engine]:
    """Those in which a fault can occur."""
    serving = STEP_FAULTS[name].serving
    return [
        engine
        for engine in ENGINES
        if engine.tree is not None
        and (Serving.CHAIN if engine.tree[0] == 1 else Serving.TREE) in serving
    ]


NAMES = [name for name in STEP_FAULTS if engines_of(name)]
# In CI each fault meets one engine, and they take turns.
CASES = [
    (name, engine)
    for turn, name in enumerate(NAMES)
    for place, engine in enumerate(engines_of(name))
    if is_full() or place == turn % len(engines_of(name))
]


Models = dict[str, Path]


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    """Target and draft for an injector, by name: what the draft proposes hangs on KV,
    or on hidden states where these are damaged."""
    folder = tmp_path_factory.mktemp("mock")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    target = write_mock_model(folder / "target", **sizes)
    drafts = {
        source: write_mock_draft(folder / source, kind="EAGLE", source=source, **sizes)
        for source in ("attention", "hidden")
    }

    def models(name: str) -> Models:
        fault = STEP_FAULTS.get(name)
        is_carried = fault is not None and fault.reasons == Reason.CARRIED_STATE
        source = "hidden" if is_carried else "attention"
        return {"model": target, "draft": drafts[source]}

    return models


@pytest.fixture(scope="module")
def models(models_of: Callable[[str], Models]) -> Models:
    return models_of("")


@pytest.mark.parametrize(("name", "engine"), CASES, ids=str)
def test_is_named_before_a_wrong_token_is_sent(
    models_of: Callable[[str], Models], name: str, engine: Engine
) -> None:
    for seed in SEEDS:
        check_named(name, stop_by(name, engine, models_of(name), seed=seed))


# In CI every third one: all of them are named above.
@pytest.mark.parametrize("name", NAMES[:: count(ci=5, full=1)])
def test_does_its_damage_where_nobody_looks(
    models_of: Callable[[str], Models], name: str
) -> None:
    engine, models = engines_of(name)[0], models_of(name)
    assert any(does_damage(name, engine, models, seed=seed) for seed in range(20))


def test_a_state_has_no_branch(models_of: Callable[[str], Models]) -> None:
    """Its row is a request, though the launch is one of draft steps."""
    engine = Engine(page_size=4, overlap=False, tree=(4, 4, 12))
    stopped = stop_by(
        "gather_neighbours", engine, models_of("gather_neighbours"), seed=0
    )
    found = [v for v in stopped.violations if "carried_state" in v["reasons"]]
    assert found
    for violation in found:
        assert violation["branch"] == -1 and "step" not in violation


class Calls:
    """The arguments of each attention call, beside the last view of its backend."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.decodes = self.extends = 0
        self._view: KVReadView | None = None
        self._batch: ForwardBatch | None = None
        read_view = PagedAttnBackend.read_view

        def viewed(
            backend: PagedAttnBackend, batch: ForwardBatch
        ) -> Sequence[KVReadView]:
            views = read_view(backend, batch)
            (self._view,), self._batch = views, batch
            return views

        patch.setattr(PagedAttnBackend, "read_view", viewed)
        for name in ("decode_op", "extend_op"):
            noted = self._noted(getattr(CpuNativeAttnBackend, name))
            patch.setattr(CpuNativeAttnBackend, name, staticmethod(noted))

    def _noted(self, op: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **given: Any) -> None:
            view, batch = self._view, self._batch
            assert view is not None and batch is not None
            for name in ("page_table", "row_index", "page_size"):
                assert given[name] is getattr(view, name)
            if batch.forward_mode.is_decode:
                self.decodes += 1
                assert given["read_lens"] is view.read_lens
            else:
                self.extends += 1
                for name in ("qo_indptr", "prefix_lens", "tree_mask"):
                    assert given[name] is getattr(batch, name)
            op(*args, **given)

        return call


@pytest.mark.parametrize("engine", [Engine(page_size=4), *ENGINES[::2]], ids=str)
def test_attention_is_called_with_what_the_canary_saw(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table, rows and lengths are the view's tensors, or in an extend the batch's: a
    change of what attention is given is a change of what the canary is given."""
    calls = Calls(monkeypatch)
    harness = engine.build(models, kv_canary="raise")
    traffic = SpecTraffic(harness, seed=0)
    for number in range(12):
        traffic.on_step(number)
        harness.scheduler.step()
    assert calls.decodes > 0 and calls.extends > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
