"""With `--kv-canary heal` every planted fault leaves the answers of all requests as
they are without it, token by token; nothing leaks, and the incident says what was done.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kv_canary.faults.catalogue import (
    DRAFT_FAULTS,
    POOL_FAULTS,
    STEP_FAULTS,
    in_serving,
)
from kv_canary.faults.fault import Serving, SlotGroup
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.heal_traffic import Healed, check_exact, run_healing
from sglang.test.hole_traffic import Engine
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import write_mock_models

register_cpu_ci(est_time=70, suite="cpu", full_time=1150)
register_cuda_ci(est_time=300, suite="cuda")

# Each fault meets every engine in turn.
SEEDS = range(count(ci=1, full=20))
PLAIN = [
    Engine(page_size=page_size, overlap=overlap)
    for page_size in (1, 4, 16)
    for overlap in (True, False)
]
CHAIN = Engine(page_size=4, tree=(1, 4, 5))
TREES = [
    Engine(page_size=4, tree=(4, 4, 12), overlap=True),
    Engine(page_size=1, tree=(4, 4, 12)),
    Engine(page_size=64, tree=(8, 3, 16), overlap=True),
]
MOVES = {name for name, fault in DRAFT_FAULTS.items() if SlotGroup.FULL in fault.groups}
# A chain has no branches and moves nothing.
NEED_BRANCHES = set(DRAFT_FAULTS) - {*in_serving(DRAFT_FAULTS, Serving.CHAIN)}
IN_BOTH = ["real_kv_used", "real_kv_post_forward", "record", "early_free"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_mock_models(tmp_path_factory.mktemp("mock"))


def check_all(
    name: str, engines: list[Engine], models: dict[str, Path], *, pool: str = "target"
) -> None:
    healed = []
    for seed in SEEDS:
        # In CI the faults, too, are spread over the engines.
        turn = seed + sum(map(ord, name))
        engine = engines[turn % len(engines)]
        run = run_healing(name, engine, models, seed=seed, pool=pool)
        check_exact(run, engine, models, seed=seed)
        if run.harmed:
            healed.append(check_incidents(run))
    # A fault may find no opportunity, and a request may end before it is read.
    assert len(SEEDS) < 20 or any(healed)


def check_incidents(run: Healed) -> bool:
    """Whether something was healed; each time the incident says what was done."""
    done = [incident["healing"] for incident in run.incidents]
    heals = dict(run.stats.kv_canary_heals_total)
    # A finding of the step before, in a request that has ended since.
    elsewhere = heals.pop("found elsewhere")
    assert len(done) == sum(heals.values())
    assert all(not healing["ended"] for healing in done)
    tokens = sum(about["tokens"] for healing in done for about in healing["recomputed"])
    healed = run.stats.kv_canary_healed_tokens_total
    assert tokens == healed or (elsewhere and tokens < healed)
    return len(done) > 0


# In CI every ninth one; all of them are named in test_injectors.
@pytest.mark.parametrize("name", sorted(POOL_FAULTS)[:: count(ci=5, full=1)])
def test_injectors(models: dict[str, Path], name: str) -> None:
    check_all(name, PLAIN, models)


@pytest.mark.parametrize(
    "name",
    # In CI every ninth one; all of them are named in test_hole_injectors.
    in_serving(STEP_FAULTS, Serving.PLAIN)[:: count(ci=5, full=1)],
)
def test_holes(models: dict[str, Path], name: str) -> None:
    check_all(name, PLAIN, models)


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        *(("draft", name) for name in sorted({*DRAFT_FAULTS, *IN_BOTH})),
        *(("target", name) for name in sorted({*MOVES, *IN_BOTH})),
        # In CI every ninth one; all of them are named in test_spec_injectors.
    ][:: count(ci=5, full=1)],
)
def test_injectors_of_speculation(
    models: dict[str, Path], pool: str, name: str
) -> None:
    engines = TREES if name in NEED_BRANCHES else [CHAIN, *TREES]
    if pool == "draft" and name in MOVES:
        # There only tails of pages are copied.
        engines = [replace(engine, draft_layout="paged") for engine in TREES]
    check_all(name, engines, models, pool=pool)


@pytest.mark.parametrize(
    "name",
    # In CI every ninth one; all of them are named there (test_spec_hole_injectors).
    in_serving(STEP_FAULTS, Serving.SPECULATION)[:: count(ci=9, full=1)],
)
def test_holes_of_speculation(models: dict[str, Path], name: str) -> None:
    serving = STEP_FAULTS[name].serving
    check_all(name, [CHAIN, *TREES] if Serving.CHAIN in serving else TREES, models)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
