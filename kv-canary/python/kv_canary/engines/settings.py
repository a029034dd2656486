"""The plugins' settings: environment variables, parsed only here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kv_canary.layout import FingerprintMode
from kv_canary.runtime.host import HEALING_MODES, PLUGIN_MODES
from kv_canary.runtime.mode import Mode as Mode

PREFIX = "KV_CANARY"

REAL_DATA = {
    "none": FingerprintMode.NONE,
    "partial": FingerprintMode.PARTIAL,
    "rotate": FingerprintMode.ROTATE,
    "all": FingerprintMode.ALL,
}
DEFAULT_REAL_DATA = "rotate"
_OFF = ("off", "none")
_MODES = {"off" if mode is Mode.OFF else mode.value: mode for mode in HEALING_MODES}
_YES_NO = {"0": False, "1": True}
_MAX_PORT = 65_535


class SettingsError(ValueError):
    """A variable has an invalid value; the text names both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a process.

    Fields:
        mode: KV_CANARY.
        real_data: KV_CANARY_REAL_DATA, which bytes are fingerprinted.
        sweep_interval: KV_CANARY_SWEEP_INTERVAL, forwards between two passes over slots
            that only the prefix cache holds; 0 disables them.
        report_dir: KV_CANARY_REPORT_DIR, receives one JSON file per incident.
        report_tokens: KV_CANARY_REPORT_TOKENS, whether reports include token ids.
        max_reports: KV_CANARY_MAX_REPORTS, most files per process; 0 for no limit.
        sample: KV_CANARY_SAMPLE, the part of the requests whose reads are verified.
            Records are kept for all.
        units_dir: KV_CANARY_UNITS_DIR, receives what is recorded of full blocks for a
            connector's store, which survives the process; None: only memory.
        metrics_port: KV_CANARY_METRICS_PORT, port of rank 0 on 127.0.0.1, followed by
            the other ranks; 0 disables metrics.
    """

    mode: Mode = Mode.OFF
    real_data: str = DEFAULT_REAL_DATA
    sweep_interval: int = 0
    report_dir: Path | None = None
    report_tokens: bool = False
    max_reports: int = 1000
    sample: float = 1.0
    units_dir: Path | None = None
    metrics_port: int = 0

    @property
    def fingerprint(self) -> FingerprintMode:
        return REAL_DATA[self.real_data]

    @property
    def mode_name(self) -> str:
        """The mode as KV_CANARY spells it."""
        return next(name for name, mode in _MODES.items() if mode is self.mode)


def read_settings(
    environ: Mapping[str, str] = os.environ,
    *,
    real_data: str = DEFAULT_REAL_DATA,
    modes: Sequence[Mode] = PLUGIN_MODES,
) -> Settings:
    """Read the settings in `environ`; missing ones have their defaults.

    Args:
        real_data: the host's default of KV_CANARY_REAL_DATA. modes: what it can do.

    Raises:
        SettingsError: a value is invalid, or a variable is unknown.
    """
    given = {name: value for name, value in environ.items() if _is_ours(name)}
    readers: dict[str, tuple[str, Callable[[str, str], object]]] = {
        PREFIX: ("mode", partial(_mode, modes)),
        f"{PREFIX}_REAL_DATA": ("real_data", _real_data),
        f"{PREFIX}_SWEEP_INTERVAL": ("sweep_interval", _count),
        f"{PREFIX}_REPORT_DIR": ("report_dir", _folder),
        f"{PREFIX}_REPORT_TOKENS": ("report_tokens", _yes_no),
        f"{PREFIX}_MAX_REPORTS": ("max_reports", _count),
        f"{PREFIX}_SAMPLE": ("sample", _part),
        f"{PREFIX}_UNITS_DIR": ("units_dir", _folder),
        f"{PREFIX}_METRICS_PORT": ("metrics_port", _port),
    }
    unknown = sorted(given.keys() - readers.keys())
    if unknown:
        raise SettingsError(
            f"{unknown[0]}={given[unknown[0]]!r}: no such variable; there are "
            f"{', '.join(readers)}"
        )
    values: dict[str, object] = {"real_data": real_data}
    for name, value in given.items():
        field, read = readers[name]
        values[field] = read(name, value)
    return Settings(**values)  # type: ignore[arg-type]


def _is_ours(name: str) -> bool:
    return name == PREFIX or name.startswith(PREFIX + "_")


def _mode(modes: Sequence[Mode], name: str, value: str) -> Mode:
    known = [word for word, mode in _MODES.items() if mode in modes]
    return _MODES[_choice(name, "off" if value in _OFF else value, known)]


def _real_data(name: str, value: str) -> str:
    return _choice(name, "none" if value in _OFF else value, list(REAL_DATA))


def _yes_no(name: str, value: str) -> bool:
    return _YES_NO[_choice(name, value, list(_YES_NO))]


def _choice(name: str, value: str, choices: list[str]) -> str:
    if value not in choices:
        raise SettingsError(f"{name}={value!r}: choose from {', '.join(choices)}")
    return value


def _count(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise SettingsError(f"{name}={value!r}: a whole number, 0 or more")
    return int(value)


def _part(name: str, value: str) -> float:
    try:
        part = float(value)
    except ValueError:
        part = math.nan
    if not 0 < part <= 1:
        raise SettingsError(f"{name}={value!r}: a number above 0, at most 1")
    return part


def _port(name: str, value: str) -> int:
    port = _count(name, value)
    if port > _MAX_PORT:
        raise SettingsError(f"{name}={value!r}: a port, up to {_MAX_PORT}")
    return port


def _folder(name: str, value: str) -> Path:
    """Return a writable folder, creating it if necessary."""
    path = Path(value)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{name}={value!r}: {error}") from error
    if not os.access(path, os.W_OK):
        raise SettingsError(f"{name}={value!r}: not writable")
    return path
