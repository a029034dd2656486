"""The log format of every process of the engine."""

from __future__ import annotations

import logging
import sys

ROOTS = ("sglang", "kv_canary")
FORMAT = "[%(asctime)s] %(levelname)s %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def configure_logging(level: str) -> None:
    """Send the loggers of engine and canary, and uvicorn's warnings, to stderr in one
    format.

    Args:
        level: a value of `--log-level`. Calling again changes the level only.
    """
    loggers = [logging.getLogger(name) for name in ROOTS]
    if not loggers[0].handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
        uvicorn = logging.getLogger("uvicorn")
        for logger in (*loggers, uvicorn):
            logger.addHandler(handler)
            logger.propagate = False
        uvicorn.setLevel(logging.WARNING)
    for logger in loggers:
        logger.setLevel(level.upper())
