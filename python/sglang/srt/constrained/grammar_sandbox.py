"""The parent's side of the sandbox process that compiles each grammar first.

Owns one child process. Knows nothing about grammars.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.constrained.base_grammar import (
    Cancellation,
    CompilationCancelledError,
    CompilerUnavailableError,
    GrammarTooComplexError,
)
from sglang.srt.environ import child_environment

_SCRIPT = Path(__file__).with_name("llguidance_compiler.py")
# Exit codes that say nothing about the source: the child was ended from outside, or
# waited for the CPU too long.
_NOT_THE_SOURCE = frozenset(
    -number
    for number in (
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGALRM,
    )
)


class GrammarSandbox:
    """One child process, started at the first check and restarted after it has died.

    Used by one thread at a time; a cancellation may come from another one.

    Args:
        cpu_seconds: maximum CPU time of a source. Not wall time, so a busy machine does
            not make a source fail.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        cpu_seconds: float,
    ) -> None:
        self._setup = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_ids": list(eos_ids),
            "cpu_seconds": cpu_seconds,
        }
        self._cpu_seconds = cpu_seconds
        self._child: subprocess.Popen[str] | None = None

    def check(self, kind: str, source: str, cancellation: Cancellation) -> None:
        """Compile in the child.

        Raises:
            ValueError: the source is invalid.
            GrammarTooComplexError: the source made the child die.
            CompilerUnavailableError: something else made the child die.
            CompilationCancelledError: it was cancelled and the child killed.
            RuntimeError: the child does not start.
        """
        if self._child is None:
            self._child = self._start()
        child = self._child
        try:
            with cancellation.stops(child.kill):
                answer = _ask(child, {"kind": kind, "source": source})
        except CompilationCancelledError:
            self.close()
            raise
        if not answer:
            raise self._death(kind, self._reap(child))
        error = json.loads(answer)["error"]
        if error is not None:
            raise ValueError(error)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._reap(self._child)

    def _death(self, kind: str, code: int) -> Exception:
        if code in _NOT_THE_SOURCE:
            return CompilerUnavailableError(
                f"the compiler of this {kind} was ended by "
                f"{signal.Signals(-code).name}; try again later"
            )
        if code == -signal.SIGPROF:
            return GrammarTooComplexError(
                f"{kind} is too complex: its compilation takes more than "
                f"{self._cpu_seconds:g} seconds of CPU time"
            )
        return GrammarTooComplexError(
            f"{kind} is too complex: its compiler ended with {code}"
        )

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
            # Ctrl-C is for the parent; the child exits when its standard input closes.
            start_new_session=True,
        )
        if not _ask(child, self._setup):
            code = self._reap(child)
            raise RuntimeError(f"the grammar sandbox did not start: exit code {code}")
        return child

    def _reap(self, child: subprocess.Popen[str]) -> int:
        """Wait for a child that is dead or dying; return its exit code."""
        self._child = None
        child.communicate()
        return child.returncode


def _ask(child: subprocess.Popen[str], message: dict[str, Any]) -> str:
    """Send `message`; return the child's answer line, "" if the child has died."""
    if child.stdin is None or child.stdout is None:
        raise ValueError("the sandbox needs pipes as standard input and output")
    try:
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()
        return child.stdout.readline()
    except BrokenPipeError:
        return ""
