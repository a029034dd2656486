"""Helpers of the benchmarks' command lines: exit codes, flags, optional packages."""

from __future__ import annotations

import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from sglang.bench_utils.report import Json, print_report
from sglang.srt.utils.json_file import parse_json_object
from sglang.srt.utils.quoting import quoted

CONFIGURATION_ERROR = 2
FLUSH_ATTEMPTS = 100
FLUSH_PAUSE_SECONDS = 0.02


def run_cli(run: Callable[[], int]) -> int:
    """Return the exit code of `run`; 2, with one line on stderr, for a ValueError."""
    try:
        return run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIGURATION_ERROR


def run_report(
    parse: Callable[[Sequence[str] | None], Namespace],
    run: Callable[[Namespace], Json],
    show: Callable[[Json], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark: parse `argv`, show its table, end with its line of JSON.

    Args:
        parse: returns flags with `output_file`.

    Returns:
        The exit code, as of `run_cli`.
    """

    def run_and_show() -> int:
        args = parse(argv)
        report = run(args)
        show(report)
        print_report(report, output_file=args.output_file)
        return 0

    return run_cli(run_and_show)


def json_object_flag(name: str, text: str | None) -> dict[str, Any]:
    """Parse the JSON object in the flag `name`; empty if unset.

    Raises:
        ValueError: not a JSON object; names the flag.
    """
    if text is None:
        return {}
    return parse_json_object(text, where=f"{name} {quoted(text)}")


def import_extra(name: str) -> ModuleType:
    """Import a package of the extra `bench`.

    Raises:
        ValueError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"this benchmark needs {name}, which is not installed: "
            "pip install 'sglang-canary[bench]'"
        ) from error


def flush_when_idle(flush: Callable[[], bool]) -> None:
    """Empty a prefix cache right after the last answer.

    An engine may need another moment until it is idle.

    Raises:
        RuntimeError: `flush` still returns False after two seconds.
    """
    for _ in range(FLUSH_ATTEMPTS):
        if flush():
            return
        time.sleep(FLUSH_PAUSE_SECONDS)
    raise RuntimeError("the prefix cache cannot be flushed: requests are running")
