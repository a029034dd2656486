"""The log of every engine process: its format and its limits."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TextIO, cast

from sglang.srt.utils.line_writer import DATE_FORMAT
from sglang.srt.utils.standard_streams import guarded_stderr, open_missing_descriptors

ROOTS = ("sglang", "kv_canary")
FORMAT = "[%(asctime)s] %(levelname)s %(message)s"

REPEATS = 100
REPEAT_SECONDS = 60.0


def configure_logging(level: str) -> None:
    """In the engine's own processes, send the loggers of engine and canary and
    uvicorn's warnings to stderr in one format.

    Args:
        level: a value of `--log-level`. Further calls change only the level.
    """
    loggers = [logging.getLogger(name) for name in ROOTS]
    if not loggers[0].handlers:
        handler = _handler()
        uvicorn = logging.getLogger("uvicorn")
        for logger in (*loggers, uvicorn):
            logger.addHandler(handler)
            logger.propagate = False
        uvicorn.setLevel(logging.WARNING)
    _set_levels(level)


def configure_embedded_logging(level: str) -> None:
    """Log inside a host application: through its own handlers if it has any, otherwise
    to stderr.

    Args:
        level: as in `configure_logging`.
    """
    open_missing_descriptors()
    if not any(logging.getLogger(name).handlers for name in ROOTS):
        handler = _handler()
        # Checked for each record, because a host may configure its logging later.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        for name in ROOTS:
            logging.getLogger(name).addHandler(handler)
    _set_levels(level)


def _handler() -> logging.Handler:
    handler = LimitedHandler(cast(TextIO, guarded_stderr()))
    handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
    return handler


def _set_levels(level: str) -> None:
    for name in ROOTS:
        logging.getLogger(name).setLevel(level.upper())


@dataclass(slots=True)
class _Repeats:
    """Number of lines from one place in the code since `began`."""

    began: float
    count: int = 0


class LimitedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes at most `REPEATS` warnings or errors from one place in the code per
    `REPEAT_SECONDS`; the others are counted, and the count is written.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._repeats: dict[tuple[str, int], _Repeats] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or self._may_write(record):
            super().emit(record)

    def _may_write(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        place = (record.pathname, record.lineno)
        seen = self._repeats.setdefault(place, _Repeats(now))
        if now - seen.began >= REPEAT_SECONDS:
            held_back = seen.count - REPEATS
            if held_back > 0:
                self._say_held_back(record, held_back, now - seen.began)
            seen.began, seen.count = now, 0
        seen.count += 1
        return seen.count <= REPEATS

    def _say_held_back(
        self, record: logging.LogRecord, count: int, seconds: float
    ) -> None:
        more = logging.makeLogRecord(record.__dict__)
        more.exc_info = more.exc_text = more.stack_info = None
        more.msg = f"{count} more lines like the next one in the {seconds:.0f} s before"
        more.args = None
        super().emit(more)
