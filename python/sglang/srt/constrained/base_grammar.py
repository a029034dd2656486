"""Protocols of a grammar library: compile a source, then follow one request.

Knows nothing of a concrete library, of threads or of batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch


class GrammarTooComplexError(ValueError):
    """A source that exceeds the compiler's own limits of CPU time or memory."""


class CompilerUnavailableError(Exception):
    """The source was not compiled, through no fault of its own: try again."""


class CompilationCancelledError(Exception):
    """Nobody waits for the result any more."""


class GrammarLimitError(RuntimeError):
    """The compiled state has grown to a limit, and serves no request any more.

    The tokens so far are followed again on fresh state (`GrammarBackend.resume`).
    """


class EosInsideGrammarError(RuntimeError):
    """The grammar wants an EOS token before its end; the source is at fault."""


class Cancellation:
    """Tells a compilation in another thread that nobody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._stop: Callable[[], None] | None = None

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stops(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` on a cancellation during the block, from the other thread.

        Raises:
            CompilationCancelledError: it was cancelled before or in the block.
        """
        with self._lock:
            self._raise_if_cancelled()
            self._stop = stop
        try:
            yield
        finally:
            with self._lock:
                self._stop = None
                self._raise_if_cancelled()

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise CompilationCancelledError("the compilation was cancelled")


class Grammar(Protocol):
    """The state of one request inside its grammar. Not thread-safe."""

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            GrammarLimitError: the compiled state has grown to a limit.
            EosInsideGrammarError: an EOS token that the mask allowed, but after which
                the grammar is not complete.
            RuntimeError: the grammar does not allow the token here; the state is as
                before.
        """
        ...

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        """Write the ids allowed next into `bitmask_row`, host int32 [ceil(V / 32)].

        Bit i % 32 of word i // 32 is set where id i is allowed; every word is written.
        A complete grammar allows the EOS ids only.

        Raises:
            GrammarLimitError: the compiled state has grown to a limit.
        """
        ...

    def is_terminated(self) -> bool:
        """Whether only EOS may follow, or EOS has been accepted."""
        ...

    def rollback(self, n_tokens: int) -> None:
        """Undo the last `n_tokens` accepted tokens.

        Raises:
            ValueError: more than were accepted.
        """
        ...

    def fork(self) -> Grammar:
        """Return a copy that advances by itself. Copies share compiled state, which
        grows with all of them and serves none of them beyond its limit."""
        ...

    def is_usable(self) -> bool:
        """Whether the shared compiled state is within its limits."""
        ...

    def shared_bytes(self) -> int:
        """Estimated memory of the shared compiled state, a function of its history."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer. May be called from any thread."""

    def compile(
        self, kind: str, source: str, *, cancellation: Cancellation | None = None
    ) -> Grammar:
        """Return a grammar in its first state.

        `kind` is "json_schema", "regex", "ebnf" or "structural_tag".

        Raises:
            ValueError: `source` is not a grammar of this kind, or is too large; the
                message quotes the grammar library.
            GrammarTooComplexError: it needs too much CPU time or memory.
            CompilerUnavailableError: the compiler was killed, or the machine is busy.
            CompilationCancelledError: `cancellation` was cancelled.
        """
        ...

    def compile_checked(self, kind: str, source: str) -> Grammar:
        """Compile a source that `compile` has accepted, here or in another process."""
        ...

    def resume(self, kind: str, source: str, tokens: Sequence[int]) -> Grammar:
        """Return a grammar of a checked source that has accepted `tokens`, with its
        next mask prepared, on fresh state that it shares with nobody.

        Raises:
            GrammarLimitError: one step alone exceeds the limits.
        """
        ...

    def close(self) -> None:
        """Release processes; `compile` is not called any more."""
        ...
