"""Runs a world of tensor parallelism: one process per rank, forked from this one."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from scripts.mutation.answers import Expected
from scripts.mutation.runner import Send, Work, run_all
from scripts.mutation.runs import Run, run_world
from scripts.mutation.worlds import ModelFolders, World, build
from sglang.srt.distributed.parallel_state import init_tensor_parallel

# Ranks that do not agree wait for each other; they must end before this process does.
SILENCE = 2


def run_in_ranks(
    world: World,
    folders: ModelFolders,
    *,
    seed: int,
    canary: bool,
    expected: Expected | None,
    seconds: float,
) -> Run:
    """Serve one world's traffic with `world.ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"

        def lead(send: Send) -> None:
            _connect(world, 0, store)
            run = run_world(
                world,
                folders,
                seed=seed,
                canary=canary,
                expected=expected,
                seconds=seconds,
            )
            send({"run": asdict(run)})

        def follow(rank: int, send: Send) -> None:
            _connect(world, rank, store)
            scheduler = build(
                world, folders, overlap=seed % 2 == 0, canary=canary
            ).scheduler
            while True:
                scheduler.step()

        works: list[Work] = [lead]
        works += [partial(follow, rank) for rank in range(1, world.ranks)]
        ranks = run_all(works, jobs=world.ranks, silence=SILENCE * seconds)
        # The others end with the generator.
        for done in ranks:
            if done.job == 0:
                ranks.close()
                if done.messages:
                    return _run(done.messages[0]["run"])
                return _stopped("time" if done.end == "killed" else "error", done.end)
    raise AssertionError("the first rank is always run")


def _connect(world: World, rank: int, store: Path) -> None:
    init_tensor_parallel(rank=rank, size=world.ranks, device="cpu", store=store)


def _run(raw: dict) -> Run:  # type: ignore[type-arg]
    verified = {rid: (a, b) for rid, (a, b) in raw.pop("verified").items()}
    return Run(verified=verified, **raw)


def _stopped(end: str, detail: str) -> Run:
    """Return the run of a first rank that reported nothing."""
    return Run(
        end=end,
        detail=detail,
        steps=0,
        sent=0,
        wrong_sent=0,
        wrong_ends=0,
        verified={},
        wrong_drafts=0,
        retracted=0,
    )
