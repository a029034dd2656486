"""With `--kv-canary heal` every fault in recurrent states leaves the answers of all
requests as they are without it, and no checkpoint is lost."""

from __future__ import annotations

import itertools
from operator import itemgetter
from pathlib import Path

import pytest
from heal_world import is_exact
from state_world import (
    ENGINES,
    LENGTHS,
    ROWS,
    STATES,
    drafting,
    options,
    write_model,
)

from kv_canary.faults.catalogue import STATE_FAULTS, in_serving
from kv_canary.faults.fault import Serving
from sglang.test.canary_traffic import WARM_STEPS, PlantTraffic, faults_of
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=20, suite="cpu", full_time=400)
register_cuda_ci(est_time=120, suite="cuda")

SEEDS = range(count(ci=1, full=20))
STEPS = 72


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mock"))


@pytest.mark.parametrize("name", list(STATE_FAULTS)[:: count(ci=2, full=1)])
def test_faults_in_states(model: Path, name: str) -> None:
    for seed in SEEDS:
        # In CI the faults are spread over the engines.
        engine = ENGINES[(seed + sum(map(ord, name))) % len(ENGINES)]
        harness = EngineHarness(
            model,
            kv_canary="heal",
            kv_canary_heal_limit=0,
            kv_canary_real_data="all",
            **options(*engine),
        )
        check_healed(harness, name, seed)


@pytest.mark.parametrize(
    ("tree", "name"),
    sampled(
        itertools.product(
            [(1, 3, 4), (4, 3, 12)], in_serving(STATE_FAULTS, Serving.SPECULATION)
        ),
        key=itemgetter(0),
        ci=1,
    ),
    ids=str,
)
def test_while_drafting(
    model: Path, tmp_path: Path, tree: tuple[int, int, int], name: str
) -> None:
    drafts = drafting(tmp_path, tree)
    for seed in SEEDS:
        harness = EngineHarness(
            model,
            kv_canary="heal",
            kv_canary_heal_limit=0,
            kv_canary_real_data="all",
            **options((1, 4, 16)[seed % 3], bool(seed % 2), -1) | drafts,
        )
        check_healed(harness, name, seed)


def check_healed(harness: EngineHarness, name: str, seed: int) -> None:
    scheduler, faults = harness.scheduler, faults_of(harness)
    traffic = PlantTraffic(harness, seed=seed, lengths=LENGTHS, ignore_eos=True)

    def on_step(step: int) -> None:
        if step < STEPS:
            traffic.on_step(step)
        if step == WARM_STEPS:
            faults.arm(name, seed=seed, group="state")
        traffic.meet(faults.planted)

    answers = harness.run(on_step=on_step)
    assert len(faults.planted) == 1
    assert scheduler.own_incidents()
    assert all(not one["healing"]["ended"] for one in scheduler.own_incidents())
    assert set(answers) == set(traffic.asked)
    for rid, answer in answers.items():
        assert answer.output_ids and is_exact(traffic.asked[rid], answer), rid
    scheduler.cache.check()
    scheduler.cache.reset()
    checkpoints = scheduler.cache.checkpoints
    assert checkpoints is not None
    assert checkpoints.slots.available_size() == STATES - ROWS


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
