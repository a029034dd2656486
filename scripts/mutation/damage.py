"""Damages an engine that heals, every few steps, with faults of the catalogue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kv_canary.faults.catalogue import (
    DRAFT_FAULTS,
    POOL_FAULTS,
    STEP_FAULTS,
    WINDOW_FAULTS,
    in_serving,
)
from kv_canary.faults.fault import Serving
from scripts.mutation.worlds import World
from sglang.faults.steps.planters import PLANTERS
from sglang.faults.steps.site import planted
from sglang.srt.kv_canary.perturb import drivers_of
from sglang.test.harness import EngineHarness

FULL, WINDOW = "full", "swa"
# A fault between two parts of a step, rather than in a pool.
STEPS = -1
# Of the faults in slots, those that a draft's pool can have.
IN_DRAFTS = ("real_kv_used", "real_kv_post_forward", "record", "early_free")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Faults to choose from; `pool` is the index of a driver, or `STEPS`."""

    pool: int
    group: str
    names: Sequence[str]


def choices(world: World) -> list[Choice]:
    """Return the faults that can damage a world's engine."""
    serving = Serving.TREE if world.draft else Serving.PLAIN
    found = [
        Choice(pool=0, group=FULL, names=sorted(POOL_FAULTS)),
        Choice(pool=STEPS, group=FULL, names=in_serving(STEP_FAULTS, serving)),
    ]
    if world.draft:
        names = sorted({*DRAFT_FAULTS, *IN_DRAFTS})
        found.append(Choice(pool=1, group=FULL, names=names))
    if world.model == "windows":
        found.append(Choice(pool=0, group=WINDOW, names=sorted(WINDOW_FAULTS)))
    return found


class Damage:
    """Steps an engine, damaging it in every `damage_every`-th step."""

    def __init__(self, harness: EngineHarness, world: World, *, seed: int) -> None:
        self._scheduler = harness.scheduler
        self._rng = random.Random(seed)
        self._every = world.damage_every
        self._choices = choices(world)
        self._num_steps = 0

    def step(self) -> bool:
        """Return what `Scheduler.step` returns."""
        self._num_steps += 1
        if self._num_steps % self._every:
            return self._scheduler.step()
        choice = self._rng.choice(self._choices)
        name = self._rng.choice(choice.names)
        if choice.pool == STEPS:
            with planted(PLANTERS[name], self._scheduler, rng=self._rng):
                return self._scheduler.step()
        driver = drivers_of(self._scheduler)[choice.pool]
        # A fault that has found no opportunity makes room.
        driver._armed.clear()
        driver.arm(name, seed=self._rng.randrange(1000), group=choice.group)
        return self._scheduler.step()
