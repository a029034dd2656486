"""The parent's side of the sandbox process that compiles each grammar first.

Owns one child process. Knows nothing of what a grammar is.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.constrained.base_grammar import GrammarTimeoutError
from sglang.srt.environ import child_environment

_SCRIPT = Path(__file__).with_name("llguidance_compiler.py")


class GrammarSandbox:
    """One child process, started at the first check and restarted after it has died.

    Used by one thread at a time.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._setup = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_ids": list(eos_ids),
            "timeout_s": timeout_s,
        }
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[str] | None = None

    def check(self, kind: str, source: str) -> None:
        """Compile in the child.

        Raises:
            ValueError: the source is invalid, or the child died of it.
            GrammarTimeoutError: the child did not compile it in time.
            RuntimeError: the child does not start.
        """
        if self._child is None:
            self._child = self._start()
        answer = _ask(self._child, {"kind": kind, "source": source})
        if not answer:
            code = self._reap(self._child)
            if code == -signal.SIGALRM:
                raise GrammarTimeoutError(
                    f"{kind} is too complex: it was not compiled within "
                    f"{self._timeout_s:g} seconds"
                )
            raise ValueError(f"{kind} is too complex: its compiler ended with {code}")
        error = json.loads(answer)["error"]
        if error is not None:
            raise ValueError(error)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._reap(self._child)

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
            # Ctrl-C is for the parent: the child ends when its standard input does.
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
