"""With `--kv-canary heal` every fault in window slots leaves the answers of all
requests as they are without it, and every window page has one holder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_canary.faults.catalogue import POOL_FAULTS, WINDOW_FAULTS, in_serving
from kv_canary.faults.fault import Serving
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.heal_traffic import Healed, check_exact, run_healing
from sglang.test.hole_traffic import Engine
from sglang.test.scale import count, is_full
from sglang.test.spec_canary_traffic import write_mock_models

register_cpu_ci(est_time=10, suite="cpu", full_time=200)
register_cuda_ci(est_time=100, suite="cuda")

SEEDS = range(count(ci=1, full=20))
WINDOW = 24
WINDOWS = (None, WINDOW)
ENGINES = [
    Engine(page_size=page_size, overlap=overlap)
    for page_size in (1, 4, 16)
    for overlap in (True, False)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_mock_models(
        tmp_path_factory.mktemp("mock"),
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
    )


def check_all(name: str, models: dict[str, Path], *, group: str) -> None:
    healed = []
    for seed in SEEDS:
        turn = seed + sum(map(ord, name))
        engine = ENGINES[turn % len(ENGINES)]
        run = run_healing(
            name,
            engine,
            models,
            seed=seed,
            group=group,
            checks_steps=name != "early_window_free",
        )
        check_exact(run, engine, models, seed=seed, windows=WINDOWS)
        check_pages(run)
        healed.append(len(run.incidents) > 0)
    # A fault may find no opportunity, and a request may end before it is read.
    assert len(SEEDS) < 20 or any(healed)


def check_pages(run: Healed) -> None:
    """All window pages are free or cached: those that were watched came back."""
    cache = run.harness.scheduler.cache
    cache.check()
    (group,) = cache.groups
    assert group.usable_size() == group.slots.size


@pytest.mark.parametrize(
    "name", sorted(in_serving(WINDOW_FAULTS, Serving.PLAIN))[:: count(ci=2, full=1)]
)
def test_faults_in_window_slots(models: dict[str, Path], name: str) -> None:
    check_all(name, models, group="swa")


@pytest.mark.parametrize("name", sorted(POOL_FAULTS)[:: 1 if is_full() else 4])
def test_faults_in_full_slots(models: dict[str, Path], name: str) -> None:
    check_all(name, models, group="full")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
