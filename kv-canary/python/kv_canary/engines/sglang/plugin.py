"""The entry point `sglang.srt.plugins`: SGLang calls `register` in each process."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable

from kv_canary.engines.hooks import Refusal, import_failure, require
from kv_canary.engines.settings import Mode, SettingsError, read_settings
from kv_canary.engines.sglang.hooks_of import EVERYTHING, REGISTRY
from kv_canary.engines.sglang.wrappers import wrap_engine

logger = logging.getLogger(__name__)

DISTRIBUTION = "sglang"
OLDEST = (0, 5, 11)
VARIABLE = "SGLANG_PLUGINS"
"""SGLang's variable: names of the plugins that may load, separated by commas."""
NAME = "kv_canary"
REAL_DATA = "partial"
"""Default of `KV_CANARY_REAL_DATA`. Here `rotate` compares slots in turn, not layers: a
slot that is overwritten whole is only named when its turn comes."""
SELF_TEST = "SELFTEST_OF_KV_CANARY"
"""Set only by the self-test: its plan for the scheduler's process."""

_undo: list[Callable[[], None]] = []


def host_version() -> str | None:
    """Return `name version` of the stock SGLang that is installed, or None.

    Engines that only share the package name have another distribution name, or lack a
    registry of hooks.
    """
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"{DISTRIBUTION} {version}" if _has_registry() else None


def _has_registry() -> bool:
    """Whether the package has the registry, or fails to import, which `doctor`
    reports."""
    module, _, name = REGISTRY.partition(":")
    if import_failure(module) is not None:
        return True
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def register() -> None:
    """Wrap what makes and runs forwards if `KV_CANARY` asks for it; otherwise do
    nothing.

    Raises:
        SystemExit: in mode `raise`, if SGLang is not as expected or a variable has an
            invalid value. SGLang swallows every `Exception` of a plugin, and a server
            that should be checked would run unchecked.
    """
    try:
        settings = read_settings(real_data=REAL_DATA)
    except SettingsError as error:
        raise SystemExit(f"kv_canary: {error}") from error
    if settings.mode is Mode.OFF or _undo:
        return
    try:
        _require_version()
        require(EVERYTHING)
    except Refusal as refusal:
        text = (
            f"kv_canary cannot attach to {host_version() or 'this engine'}: {refusal}. "
            "Unset KV_CANARY, or see `kv-canary doctor`"
        )
        if settings.mode is Mode.RAISE:
            logger.critical(text)
            raise SystemExit(text) from None
        logger.error("%s. NOTHING IS CHECKED", text)
        return
    if os.environ.get(SELF_TEST):
        # Inside the canary's own wrapper. Nothing else imports the room of faults.
        planting = importlib.import_module("kv_canary.faults.sglang.planting")
        _undo.append(planting.plant(os.environ[SELF_TEST]))
    _undo.extend(wrap_engine(settings))


def unregister() -> None:
    """Undo `register`. For tests."""
    while _undo:
        _undo.pop()()


def _require_version() -> None:
    found = host_version()
    numbers = tuple(int(part) for part in re.findall(r"\d+", found or "")[:3])
    if found is None or numbers < OLDEST:
        raise Refusal(
            f"looked for {DISTRIBUTION} {'.'.join(map(str, OLDEST))} or later with "
            f"{REGISTRY}, found {found or 'none'}"
        )
