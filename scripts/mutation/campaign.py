"""The work of one child: a fault in its worlds, or before its tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

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
from scripts.mutation.runner import Done, Send, Work, run_all
from scripts.mutation.runs import run_world
from scripts.mutation.targets import REPO, TESTS, Area, find_references, short_path
from scripts.mutation.worlds import ModelFolders, World, worlds_for

# A world may run with and then without the canary, on a busy machine.
SILENCE = 6
Expected = dict[tuple[str, int], dict[str, tuple[int, int]]]
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
        expected = undamaged(folders, seeds=seeds, limits=limits)
        works: list[Work] = [
            partial(_in_worlds, fault, folders, seeds, expected, limits.world)
            for fault in faults
        ]
        silence = SILENCE * limits.world
        for done in run_all(works, jobs=limits.jobs, silence=silence):
            on_row(_promise_row(faults[done.job], done))


def undamaged(
    folders: ModelFolders, *, seeds: Sequence[int], limits: Limits
) -> Expected:
    """Return verified and accepted tokens of each request without a fault, by world and
    seed.

    Raises:
        RuntimeError: a world is wrong without a fault, so results would be meaningless.
    """
    places = [(world, seed) for world in worlds_for("both") for seed in seeds]

    def work(world: World, seed: int, send: Send) -> None:
        run = run_world(
            world, folders, seed=seed, canary=True, expected={}, seconds=limits.world
        )
        is_right = not (run.wrong_sent or run.wrong_ends or run.wrong_drafts)
        send({"verified": run.verified, "is_right": is_right and run.end == "idle"})

    expected: Expected = {}
    works: list[Work] = [partial(work, *place) for place in places]
    for done in run_all(works, jobs=limits.jobs, silence=SILENCE * limits.world):
        world, seed = places[done.job]
        if not done.messages or not done.messages[0]["is_right"]:
            raise RuntimeError(f"{world.name}, seed {seed}: wrong without any fault")
        found = done.messages[0]["verified"]
        expected[world.name, seed] = {rid: (a, b) for rid, (a, b) in found.items()}
    return expected


def _in_worlds(
    fault: Fault,
    folders: ModelFolders,
    seeds: Sequence[int],
    expected: Expected,
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
    expected: dict[str, tuple[int, int]],
    seconds: float,
) -> WorldRow:
    """Return the outcome of the currently planted fault in one world."""
    run = partial(
        run_world, world, folders, seed=seed, expected=expected, seconds=seconds
    )
    watched = run(canary=True)
    unwatched = run(canary=False) if needs_unwatched(watched) else None
    return classify(world.name, seed, watched, unwatched)


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
