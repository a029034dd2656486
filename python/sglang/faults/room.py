"""Opens the room of faults: what its variables ask for, around a scheduler's start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.faults.attachment import drivers_of
from sglang.faults.fault_points import open_fault_point
from sglang.faults.oracle_tokens import install_token_oracle
from sglang.faults.settings import FULL, PerturbSettings
from sglang.srt.environ import envs
from sglang.srt.kv_canary.config import CanaryConfig, refuse_without_windows
from sglang.srt.managers.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


@contextmanager
def opened(server_args: ServerArgs) -> Iterator[None]:
    """Scope of the construction of a scheduler, which gets the faults that are set.

    A fault point is in everything that is built here. Chances and the token oracle
    begin at the end, when the engine is warm: made-up requests stay sound.

    Raises:
        ValueError: a variable has an impossible value, or cannot act with these
            arguments; names the variable.
    """
    config = CanaryConfig.from_server_args(server_args)
    settings = PerturbSettings.from_environment(server_args, config)
    with open_fault_point(server_args), _newest(Scheduler) as built:
        yield
        if built:
            _attach(built[-1], settings)


@contextmanager
def _newest(owner: type[Any]) -> Iterator[list[Any]]:
    """Scope that lists the instances of a class which were made in it."""
    init, made = owner.__init__, []

    def init_and_list(instance: Any, *args: Any, **kwargs: Any) -> None:
        init(instance, *args, **kwargs)
        made.append(instance)

    owner.__init__ = init_and_list
    try:
        yield made
    finally:
        owner.__init__ = init


def _attach(scheduler: Scheduler, settings: PerturbSettings) -> None:
    managers = scheduler.worker.canary_managers()
    if not managers:
        return
    target = managers[0].target
    if settings.group != FULL and target.group(settings.group) is None:
        refuse_without_windows(envs.SGLANG_KV_CANARY_PERTURB_TARGET_GROUP)
    drivers = drivers_of(scheduler, settings)
    if target.config.use_token_oracle:
        install_token_oracle(scheduler.worker, drivers[0])
