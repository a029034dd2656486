"""Plants faults in the forwards of a running SGLang: the part of a self-test that runs
in the scheduler's process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_canary.engines.hooks import wrap
from kv_canary.engines.sglang import hooks_of
from kv_canary.engines.sglang.attachment import get_canary
from kv_canary.engines.sglang.batch import forward_mode_name, has_trees
from kv_canary.engines.sglang.plugin import SELF_TEST
from kv_canary.faults.sglang.planters import IN_TREES, PLANTERS, Due, RunnerScene

if TYPE_CHECKING:
    from kv_canary.engines.sglang.runner_canary import RunnerCanary
    from kv_canary.violation import Violation

PLAN = SELF_TEST
"""Variable: a file that receives a line of JSON per fault. If unset, nothing is
planted. Its name ends with `.MODE.N`: N faults of each class, in forwards of that
mode."""

_EVERY = 3
_MIN_LENGTH = 8
_MIN_FREE = 32


class Planter:
    """Plants the faults of all classes, a few forwards apart.

    Args:
        file: receives the outcomes. mode: mode of the forwards. seeds: faults per
            class.
    """

    def __init__(self, file: Path, mode: str, seeds: int) -> None:
        self._file = file
        self._mode = mode
        faults = IN_TREES if has_trees(mode) else PLANTERS
        self._left = [(name, seed) for seed in range(seeds) for name in faults]
        self._used: set[int] = set()
        self._borrowed: set[int] = set()
        self._forwards = 0

    def around(
        self, method: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """Wrap the forward of a runner, inside the canary's wrapper."""
        canary = get_canary(runner)
        # A draft model's forwards may be captured, and nothing may wait for them.
        if canary is None or forward_mode_name(batch) != self._mode:
            return method(runner, batch, *args, **kw)
        free = _free_slots(runner.token_to_kv_pool_allocator)
        if len(free) < _MIN_FREE or not self._is_due(batch):
            return method(runner, batch, *args, **kw)
        name, seed = self._left.pop(0)
        # Freed slots are written again before they are read.
        self._used.difference_update(free)
        if len(self._borrowed) > len(free) // 2:
            self._borrowed.clear()
        scene = RunnerScene(
            batch=batch,
            pool=runner.token_to_kv_pool,
            table=runner.req_to_token_pool.req_to_token,
            free=free,
            rng=random.Random(f"{name} {seed}"),
            used=self._used,
            borrowed=self._borrowed,
        )
        with PLANTERS[name](scene) as due:
            result = method(runner, batch, *args, **kw)
        self._note(name, seed, due, canary)
        self._used.update(batch.out_cache_loc.tolist())
        return result

    def _is_due(self, batch: Any) -> bool:
        if batch.batch_size < 2 or not self._left:
            return False
        if int(batch.seq_lens.min()) < _MIN_LENGTH:
            return False
        self._forwards += 1
        return self._forwards % _EVERY == 0

    def _note(self, name: str, seed: int, due: list[Due], canary: RunnerCanary) -> None:
        found = canary.found_now()
        outcome = {
            "fault": name,
            "seed": seed,
            "named": is_named(due, found),
            "due": due[:2],
            "found": [
                f"{v.diagnosis}: {v.rid} slot {v.slot} position {v.position} {v.labels}"
                for v in found[:4]
            ],
            "left": len(self._left),
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")


def is_named(due: list[Due], found: list[Violation]) -> bool:
    """Return whether a finding names a due request, slot and position."""
    return any(
        violation.rid == rid
        and violation.position == position
        and slot in (-1, violation.slot)
        for violation in found
        for rid, slot, position in due
    )


def _free_slots(allocator: Any) -> list[int]:
    size = int(allocator.page_size)
    return [int(page) * size for page in allocator.free_pages.tolist()]


def plant(plan: str) -> Callable[[], None]:
    """Plant what the variable `PLAN` says; return a function that undoes it."""
    file = Path(plan)
    mode, seeds = file.name.split(".")[-2:]
    planter = Planter(file, mode, int(seeds))
    return wrap(hooks_of.FORWARD, planter.around)
