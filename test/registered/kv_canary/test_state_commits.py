"""What a verification accepts, and nothing else, is folded into recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sglang.srt.layers.state.forward import StateForward
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.spec_canary_traffic import speculating, worker_of, write_mock_models
from sglang.test.tiny_models import MOCK_STATE

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=15, suite="cuda")

Commit = Callable[..., None]


def right(
    runner: ModelRunner, slots: Tensor, path: Tensor, lens: Tensor, **due: Any
) -> None:
    runner.commit_states(slots, path, lens, **due)


def skipped(
    runner: ModelRunner, slots: Tensor, path: Tensor, lens: Tensor, **due: Any
) -> None:
    pass


def of_other_rows(
    runner: ModelRunner, slots: Tensor, path: Tensor, lens: Tensor, **due: Any
) -> None:
    runner.commit_states(slots.flip(0), path, lens, **due)


def on_another_path(
    runner: ModelRunner, slots: Tensor, path: Tensor, lens: Tensor, **due: Any
) -> None:
    runner.commit_states(slots, path.flip(0), lens, **due)


def as_many_as_others(
    runner: ModelRunner, slots: Tensor, path: Tensor, lens: Tensor, **due: Any
) -> None:
    runner.commit_states(slots, path, lens.flip(0), **due)


OTHERS = "other rows, paths or lengths were folded"


@pytest.mark.parametrize("tree", [(1, 3, 4), (4, 3, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("commit", "error"),
    [
        (right, None),
        (skipped, "accepted nodes were not folded"),
        (of_other_rows, OTHERS),
        (on_another_path, OTHERS),
        (as_many_as_others, OTHERS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_commits_are_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commit: Commit,
    error: str | None,
    tree: tuple[int, int, int],
) -> None:
    models = write_mock_models(tmp_path, **MOCK_STATE)
    engine = speculating(models["model"], models["draft"], tree=tree)
    worker = worker_of(engine)

    class Runner:
        """The target's, but for its commits."""

        def __getattr__(self, name: str) -> object:
            return getattr(runner, name)

        def commit_states(self, *accepted: Tensor, **due: Any) -> None:
            commit(runner, *accepted, **due)

    runner = worker.model_runner
    monkeypatch.setattr(worker, "model_runner", Runner())
    for start in (1, 40):
        engine.submit(list(range(start, start + 20)), max_new_tokens=12)
    if error is None:
        assert all(len(a.output_ids) == 12 for a in engine.run().values())
        return
    with pytest.raises(RuntimeError, match=error):
        engine.run()


@pytest.mark.parametrize("what", ["parent_index", "mask", "trees"])
def test_states_follow_the_trees_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    models = write_mock_models(tmp_path, **MOCK_STATE)
    # The forwards that graphs replay were made before.
    engine = speculating(
        models["model"], models["draft"], tree=(4, 3, 12), disable_cuda_graph=True
    )
    of = StateForward.of

    def other(*made_of: Any) -> StateForward:
        state = of(*made_of)
        if state.trees is None:
            return state
        if what == "trees":
            return replace(state, trees=None)
        same = getattr(state.trees, what).clone()
        return replace(state, trees=replace(state.trees, **{what: same}))

    monkeypatch.setattr(StateForward, "of", other)
    engine.submit(list(range(20)), max_new_tokens=12)
    with pytest.raises(RuntimeError, match="along other trees than attention's"):
        engine.run()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
