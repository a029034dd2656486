"""Puts a driver around a canary's launches, from outside.

A driver wraps methods of one `CanaryManager`, so that faults are planted before a
launch and before a draft step, and repaired after the launch. It also adds its state to
checkpoints, and what it was asked for to records, so that a replay plants the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
from torch import nn

from sglang.faults.driver import Armed, PerturbDriver, SavedPerturb
from sglang.faults.settings import PerturbSettings
from sglang.srt.forward.context import get_forward_context
from sglang.srt.replay.playing import player
from sglang.srt.replay.recording import recorder, written

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager, SavedCanary
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.replay.recording.record_file import RecordedRound, RecordFile

# Attribute of a canary with a driver. A dictionary by canary would keep both: a driver
# refers to its canary.
_DRIVER = "perturb_driver"
_NOTHING = PerturbSettings()


def drivers_of(
    scheduler: Scheduler, settings: PerturbSettings = _NOTHING
) -> list[PerturbDriver]:
    """Return the drivers of a scheduler's canaries, target first; see `driver_of`."""
    cache, worker = scheduler.cache, scheduler.worker
    return [
        driver_of(
            manager, cache=cache, model=worker.model_runner.model, settings=settings
        )
        for manager in worker.canary_managers()
    ]


def driver_of(
    manager: CanaryManager,
    *,
    cache: BasePrefixCache | None = None,
    model: nn.Module | None = None,
    settings: PerturbSettings = _NOTHING,
) -> PerturbDriver:
    """Return the driver of a canary. The first call makes and attaches it.

    Args:
        cache: the prefix cache whose slots some faults damage.
        model: the target's, whose layers some faults wrap.
        settings: what to plant by chance.
    """
    driver = _attached(manager)
    if driver is None:
        driver = PerturbDriver(
            manager.target, settings=settings, cache=cache, model=model
        )
        vars(manager)[_DRIVER] = driver
        _wrap_launches(manager, driver)
        _wrap_checkpoints(manager, driver)
        join_recording()
    return driver


def _attached(manager: CanaryManager) -> PerturbDriver | None:
    driver: PerturbDriver | None = vars(manager).get(_DRIVER)
    return driver


def _wrap_launches(manager: CanaryManager, driver: PerturbDriver) -> None:
    launch = manager.with_ops_outside_graph
    before_model = manager.pre_ops_maybe_inside_graph
    is_launched = False

    def is_due() -> bool:
        # Warm-ups, captures and forwards that rebuild a pool are checked and sound.
        return not driver.is_idle and manager._is_init_finished

    @contextmanager
    def with_faults(
        *,
        single_forward_indices: Sequence[int],
        maybe_inaccurate_forward_batch: ForwardBatch,
    ) -> Iterator[None]:
        nonlocal is_launched
        batch = maybe_inaccurate_forward_batch
        if is_due():
            # Everything due before a fault must be done when it is planted.
            manager.settle()
            driver.before_forward(batch)
        with launch(
            single_forward_indices=single_forward_indices,
            maybe_inaccurate_forward_batch=batch,
        ):
            is_launched = True
            try:
                yield
            finally:
                is_launched = False
        if is_due():
            driver.after_forward(batch)

    def with_step_faults(forward_batch: ForwardBatch, **options: Any) -> None:
        if is_launched and manager.active is not None and is_due():
            driver.before_step(
                forward_batch,
                step=manager.active.index,
                backend=get_forward_context().attn_backend,
            )
        before_model(forward_batch, **options)

    vars(manager)["with_ops_outside_graph"] = with_faults
    vars(manager)["pre_ops_maybe_inside_graph"] = with_step_faults


def _wrap_checkpoints(manager: CanaryManager, driver: PerturbDriver) -> None:
    save, load = manager.save, manager.load

    def save_with_faults() -> SavedCanary:
        perturb = None if driver.is_idle else msgspec.to_builtins(driver.save())
        return replace(save(), perturb=perturb)

    def load_with_faults(saved: SavedCanary) -> None:
        load(saved)
        if saved.perturb is not None:
            driver.load(msgspec.convert(saved.perturb, SavedPerturb))

    vars(manager)["save"] = save_with_faults
    vars(manager)["load"] = load_with_faults


def _begin(canary: SavedCanary) -> tuple[int, int]:
    """Return the first forward after a checkpoint, and how many faults its own state
    covers: one that waits for an opportunity there is not asked for again."""
    number = 0 if canary.perturb is None else canary.perturb["num_asked"]
    return canary.next_forward, number


@cache
def join_recording() -> None:
    """From now on records say which faults drivers were asked for, and replays ask for
    them before the same forwards."""
    to_record = written.to_record
    init, play_round = player._Player.__init__, player._Player._play_round
    left: WeakKeyDictionary[player._Player, list[list[Armed]]] = WeakKeyDictionary()

    def to_record_with_faults(
        *, managers: Sequence[CanaryManager], **parts: Any
    ) -> RecordFile:
        record = to_record(managers=managers, **parts)
        begin = [(0, 0)] * len(managers)
        if record.checkpoint is not None:
            begin = [_begin(canary) for canary in record.checkpoint.canaries]
        drivers = map(_attached, managers)
        asked = [[] if driver is None else driver.asked for driver in drivers]
        return replace(
            record,
            armed=[
                [asdict(armed) for armed in of_pool[number:] if armed.clock >= clock]
                for of_pool, (clock, number) in zip(asked, begin, strict=True)
            ],
        )

    def init_with_faults(self: player._Player, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        drivers_of(self._scheduler)
        left[self] = [
            [Armed(**armed) for armed in of_pool] for of_pool in self._record.armed
        ]

    def play_round_with_faults(self: player._Player, round_: RecordedRound) -> None:
        # A player that was built before this has a record without armed faults.
        if self._setting.with_faults and self in left:
            for manager, armed in zip(self._managers, left[self], strict=True):
                while armed and armed[0].clock <= manager.next_forward:
                    fault = armed.pop(0)
                    driver_of(manager).arm(
                        fault.name, seed=fault.seed, group=fault.group
                    )
        play_round(self, round_)

    for owner, name, method in (
        (recorder, "to_record", to_record_with_faults),
        (player._Player, "__init__", init_with_faults),
        (player._Player, "_play_round", play_round_with_faults),
    ):
        setattr(owner, name, method)
