"""Opens the room of faults: what its variables ask for, around a scheduler's start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.faults.attachment import drivers_of
from sglang.faults.fault_points import open_fault_point
from sglang.faults.oracle_tokens import TokenOracle
from sglang.faults.settings import FULL, PerturbSettings
from sglang.srt.environ import envs
from sglang.srt.kv_canary.config import CanaryConfig, refuse_without_windows
from sglang.srt.managers.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.server_args import ServerArgs


@contextmanager
def opened(server_args: ServerArgs) -> Iterator[None]:
    """Scope of the construction of a scheduler, which gets the faults that are set.

    A fault point and the token oracle are in everything that is built here. Chances
    begin at the end, when the engine is warm: made-up requests stay sound.

    Raises:
        ValueError: a variable has an impossible value, or cannot act with these
            arguments; names the variable.
    """
    config = CanaryConfig.from_server_args(server_args)
    settings = PerturbSettings.from_environment(server_args, config)
    oracles: dict[Worker, TokenOracle] = {}
    built: list[Scheduler] = []

    def on_built(scheduler: Scheduler) -> None:
        built.append(scheduler)
        worker = scheduler.worker
        # Warm-ups have schedulers of their own on the same worker, or on one that only
        # compiles.
        is_checked = bool(worker.canary_managers())
        if config.use_token_oracle and is_checked and worker not in oracles:
            oracles[worker] = TokenOracle(worker)

    with open_fault_point(server_args), _each_new(Scheduler, on_built):
        yield
        if built:
            oracle = oracles.get(built[-1].worker)
            _attach(built[-1], settings, oracle)


@contextmanager
def _each_new(owner: type[Any], on_made: Callable[[Any], None]) -> Iterator[None]:
    """Scope that calls `on_made` with each instance of a class that is made in it."""
    init = owner.__init__

    def init_and_tell(instance: Any, *args: Any, **kwargs: Any) -> None:
        init(instance, *args, **kwargs)
        on_made(instance)

    owner.__init__ = init_and_tell
    try:
        yield
    finally:
        owner.__init__ = init


def _attach(
    scheduler: Scheduler, settings: PerturbSettings, oracle: TokenOracle | None
) -> None:
    managers = scheduler.worker.canary_managers()
    if not managers:
        return
    target = managers[0].target
    if settings.group != FULL and target.group(settings.group) is None:
        refuse_without_windows(envs.SGLANG_KV_CANARY_PERTURB_TARGET_GROUP)
    drivers = drivers_of(scheduler, settings)
    if oracle is not None:
        oracle.perturb = drivers[0]
