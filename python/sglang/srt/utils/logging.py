"""The log format of every process of the engine."""

from __future__ import annotations

import logging
import sys

ROOT = "sglang"
FORMAT = "[%(asctime)s] %(levelname)s %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def configure_logging(level: str) -> None:
    """Send the loggers below `sglang`, and uvicorn's warnings, to stderr in one format.

    Args:
        level: a value of `--log-level`. Calling again changes the level only.
    """
    logger = logging.getLogger(ROOT)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
        uvicorn = logging.getLogger("uvicorn")
        uvicorn.addHandler(handler)
        uvicorn.propagate = False
        uvicorn.setLevel(logging.WARNING)
    logger.setLevel(level.upper())
