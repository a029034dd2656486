"""Reporters and refusals of a worker, from the plugins' settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kv_canary.engines.hooks import Refusal
from kv_canary.reporter import ReportOptions, ViolationReporter
from kv_canary.violation import GROUPS

if TYPE_CHECKING:
    from kv_canary.engines.settings import Settings
    from kv_canary.serials import SerialMap


logger = logging.getLogger(__name__)

_PACKAGE = "kv_canary"
REQUEST_LINES = 64
"""Lines a minute about requests that are touched by damage of a known diagnosis."""
Canary = TypeVar("Canary")


def log_through(host: str) -> None:
    """Log through the handlers of the host's logger; ours would otherwise have none.

    vLLM configures its own logger but not the root, so a plugin's INFO lines are
    dropped and the others appear without the host's format.
    """
    ours, theirs = logging.getLogger(_PACKAGE), logging.getLogger(host)
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = theirs.propagate


def unless_refused(create: Callable[[], Canary], settings: Settings) -> Canary | None:
    """Create a canary. In mode `log`, a refusal returns None and logs an error.

    Raises:
        Refusal: in a strict mode, if something cannot be checked.
    """
    try:
        return create()
    except Refusal as refusal:
        if settings.mode.is_strict:
            raise
        logger.error("kv_canary: NOTHING IS CHECKED: %s", refusal)
        return None


def create_worker_reporter(
    settings: Settings,
    *,
    page_size: int,
    serials: SerialMap,
    ring_capacity: int,
    rank: int,
    groups: Sequence[str] = GROUPS,
) -> ViolationReporter:
    """Create a reporter that writes where the settings say."""
    return ViolationReporter(
        ReportOptions(
            mode=settings.mode.value,
            real_data=settings.real_data,
            folder=settings.report_dir,
            with_tokens=settings.report_tokens,
            tokens_option="KV_CANARY_REPORT_TOKENS=1",
            request_lines=REQUEST_LINES,
            max_files=settings.max_reports,
            max_files_option="KV_CANARY_MAX_REPORTS",
            ring_capacity=ring_capacity,
            ring_capacity_option="ring_capacity",
        ),
        page_size=page_size,
        serials=serials,
        rank=rank,
        groups=groups,
    )
