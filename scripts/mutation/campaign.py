"""The work of one child: a fault in its worlds, or before its tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest

from scripts.mutation.answers import Expected
from scripts.mutation.choice import Fault
from scripts.mutation.outcomes import (
    WorldRow,
    as_json,
    classify,
    lost,
    needs_unwatched,
    worst,
)
from scripts.mutation.planting import EquivalentError, NotPlantableError, planted
from scripts.mutation.ranks import run_in_ranks
from scripts.mutation.runner import Done, Send, Work, run_all
from scripts.mutation.runs import Run, right_answers, run_world
from scripts.mutation.targets import (
    REPO,
    TESTS,
    Area,
    Kind,
    find_references,
    short_path,
)
from scripts.mutation.worlds import ModelFolders, World, worlds_for

# A world may run with and then without the canary, on a busy machine.
SILENCE = 6
OnRow = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Children at a time, CPU seconds of one world, seconds of one fault's tests."""

    jobs: int
    world: float
    tests: float


def promise_run(
    faults: Sequence[Fault], *, seeds: Sequence[int], limits: Limits, on_row: OnRow
) -> None:
    """Plant each fault in running engines; `on_row` gets the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        folders = ModelFolders(Path(folder))
        kinds = reduce(or_, {fault.area.worlds for fault in faults})
        expected = undamaged(kinds, folders, seeds=seeds, limits=limits)
        works: list[Work] = [
            partial(_in_worlds, fault, folders, seeds, expected, limits.world)
            for fault in faults
        ]
        silence = SILENCE * limits.world
        for done in run_all(works, jobs=limits.jobs, silence=silence):
            on_row(_promise_row(faults[done.job], done))


def undamaged(
    kinds: Kind, folders: ModelFolders, *, seeds: Sequence[int], limits: Limits
) -> dict[tuple[str, int], Expected]:
    """Return what engines without a fault yield, by world and seed.

    Raises:
        RuntimeError: a world is wrong without a fault, so results would be meaningless.
    """
    places = [(world, seed) for world in worlds_for(kinds) for seed in seeds]

    def work(world: World, seed: int, send: Send) -> None:
        expected, run = healthy_run(world, folders, seed=seed, seconds=limits.world)
        send({"is_right": is_right(run), "run": asdict(run), **expected.to_json()})

    expected: dict[tuple[str, int], Expected] = {}
    works: list[Work] = [partial(work, *place) for place in places]
    for done in run_all(works, jobs=limits.jobs, silence=SILENCE * limits.world):
        world, seed = places[done.job]
        if not done.messages or not done.messages[0]["is_right"]:
            found = done.messages and done.messages[0]["run"]
            raise RuntimeError(
                f"{world.name}, seed {seed}: wrong without any fault: {found or done}"
            )
        expected[world.name, seed] = Expected.from_json(done.messages[0])
    return expected


def healthy_run(
    world: World, folders: ModelFolders, *, seed: int, seconds: float
) -> tuple[Expected, Run]:
    """Return what an engine without a fault yields, and how its run ended."""
    right = right_answers(world, folders, seed=seed, seconds=seconds)
    run = run_as_asked(
        world, folders, seed=seed, canary=True, expected=right, seconds=seconds
    )
    return replace(right, verified=run.verified), run


def is_right(run: Run) -> bool:
    wrong = (run.wrong_sent, run.wrong_ends, run.failed, run.lost)
    return run.end == "idle" and not any(wrong)


def _in_worlds(
    fault: Fault,
    folders: ModelFolders,
    seeds: Sequence[int],
    expected: dict[tuple[str, int], Expected],
    seconds: float,
    send: Send,
) -> None:
    mutant = fault.mutant
    try:
        with planted(mutant, references=find_references(mutant.module)):
            for world in worlds_for(fault.area.worlds):
                for seed in seeds:
                    send({"begin": world.name, "seed": seed})
                    found = in_world(
                        world, folders, seed, expected[world.name, seed], seconds
                    )
                    send({"row": as_json(found)})
    except NotPlantableError as error:
        send({"skipped": f"not plantable: {error}"})
    except EquivalentError:
        send({"skipped": "equivalent"})


def in_world(
    world: World,
    folders: ModelFolders,
    seed: int,
    expected: Expected,
    seconds: float,
) -> WorldRow:
    """Return the outcome of the currently planted fault in one world."""
    run = partial(
        run_as_asked, world, folders, seed=seed, expected=expected, seconds=seconds
    )
    watched = run(canary=True)
    # Nothing heals without the canary, so there is no engine to compare with.
    is_comparable = not world.damage_every
    is_needed = is_comparable and needs_unwatched(watched)
    unwatched = run(canary=False) if is_needed else None
    return classify(world.name, seed, watched, unwatched)


def run_as_asked(
    world: World,
    folders: ModelFolders,
    *,
    seed: int,
    canary: bool,
    expected: Expected | None,
    seconds: float,
) -> Run:
    """Run a world in this process, or in a process per rank."""
    run = run_world if world.ranks == 1 else run_in_ranks
    return run(
        world, folders, seed=seed, canary=canary, expected=expected, seconds=seconds
    )


def description(fault: Fault) -> dict[str, Any]:
    mutant = fault.mutant
    return {
        "id": mutant.id,
        "area": fault.area.name,
        "place": f"{short_path(mutant.module)}:{mutant.line}",
        "function": mutant.qualname,
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
    }


def _promise_row(fault: Fault, done: Done) -> dict[str, Any]:
    row = description(fault) | {"seconds": round(done.seconds, 2)}
    skipped = [m["skipped"] for m in done.messages if "skipped" in m]
    if skipped:
        return row | {"outcome": "skipped", "why": skipped[0], "worlds": []}
    rows = [WorldRow(**m["row"]) for m in done.messages if "row" in m]
    begun = [(m["begin"], m["seed"]) for m in done.messages if "begin" in m]
    if len(begun) > len(rows):
        rows.append(lost(*begun[-1], done.end))
    if not rows:
        return row | {"outcome": "skipped", "why": done.end, "worlds": []}
    speaks = worst(rows)
    return row | {
        "outcome": speaks.outcome,
        "changes": speaks.changes,
        "why": speaks.detail,
        "in": f"{speaks.world}, seed {speaks.seed}",
        "worlds": [as_json(found) for found in rows],
    }


# -- tests -----------------------------------------------------------------------------


def test_run(faults: Sequence[Fault], *, limits: Limits, on_row: OnRow) -> None:
    """Run each fault's tests; `on_row` gets killed, survived or timeout.

    Raises:
        RuntimeError: tests fail without a fault, so results would be meaningless.
    """
    areas = list({fault.area.name: fault.area for fault in faults}.values())
    controls: list[Work] = [partial(_run_area_tests, area) for area in areas]
    for done in run_all(controls, jobs=limits.jobs, silence=limits.tests):
        if not done.messages or done.messages[0]["code"]:
            name = areas[done.job].name
            raise RuntimeError(f"tests of {name} fail without any fault: {done}")
    works: list[Work] = [partial(_under_tests, fault) for fault in faults]
    for done in run_all(works, jobs=limits.jobs, silence=limits.tests):
        row = description(faults[done.job]) | {"seconds": round(done.seconds, 2)}
        on_row(row | _test_outcome(done))


class FirstFailure:
    """A pytest plugin that keeps the name of the first test that failed."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def _run_area_tests(area: Area, send: Send) -> None:
    os.chdir(REPO)
    failure = FirstFailure()
    files = [TESTS + name for name in area.tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = int(pytest.main([*options, *files], plugins=[failure]))
    send({"code": code, "by": failure.name})


def _under_tests(fault: Fault, send: Send) -> None:
    try:
        with planted(fault.mutant):
            _run_area_tests(fault.area, send)
    except NotPlantableError as error:
        send({"skipped": f"not plantable: {error}"})
    except EquivalentError:
        send({"skipped": "equivalent"})


def _test_outcome(done: Done) -> dict[str, Any]:
    if done.end == "killed":
        return {"outcome": "timeout", "why": ""}
    if not done.messages:
        return {"outcome": "killed", "why": "the process died"}
    message = done.messages[0]
    if "skipped" in message:
        return {"outcome": "skipped", "why": message["skipped"]}
    survived = message["code"] == 0
    return {"outcome": "survived" if survived else "killed", "why": message["by"]}
