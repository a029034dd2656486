"""With `--kv-canary heal` every planted fault leaves the answers of all requests as
they are without it, token by token; nothing leaks, and the incident says what was done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.kv_canary.perturb.injectors import INJECTORS
from sglang.srt.kv_canary.perturb.spec_injectors import SPEC_INJECTORS
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.heal_traffic import Healed, check_exact, run_healing
from sglang.test.hole_injectors import HOLE_INJECTORS
from sglang.test.hole_traffic import Engine
from sglang.test.holes.site import Where
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
MOVES = {"moved_without_record", "record_without_kv", "skipped_move"}
# A chain has no branches and moves nothing.
NEED_BRANCHES = {"branch_offset", "small_index_buffer", *MOVES}
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


# In CI every other one; all of them are named in test_injectors.
@pytest.mark.parametrize("name", sorted(INJECTORS)[:: count(ci=2, full=1)])
def test_injectors(models: dict[str, Path], name: str) -> None:
    check_all(name, PLAIN, models)


@pytest.mark.parametrize(
    "name",
    # In CI every other one; all of them are named in test_hole_injectors.
    [n for n, hole in HOLE_INJECTORS.items() if Where.PLAIN in hole.where][
        :: count(ci=2, full=1)
    ],
)
def test_holes(models: dict[str, Path], name: str) -> None:
    check_all(name, PLAIN, models)


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        *(("draft", name) for name in sorted({*SPEC_INJECTORS, *IN_BOTH})),
        *(("target", name) for name in sorted({*MOVES, *IN_BOTH})),
        # In CI every other one; all of them are named in test_spec_injectors.
    ][:: count(ci=2, full=1)],
)
def test_injectors_of_speculation(
    models: dict[str, Path], pool: str, name: str
) -> None:
    engines = TREES if name in NEED_BRANCHES else [CHAIN, *TREES]
    check_all(name, engines, models, pool=pool)


@pytest.mark.parametrize(
    "name",
    # In CI every other one; all of them are named there (test_spec_hole_injectors).
    [n for n, hole in HOLE_INJECTORS.items() if hole.where & Where.SPECULATION][
        :: count(ci=2, full=1)
    ],
)
def test_holes_of_speculation(models: dict[str, Path], name: str) -> None:
    where = HOLE_INJECTORS[name].where
    check_all(name, [CHAIN, *TREES] if Where.CHAIN in where else TREES, models)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
