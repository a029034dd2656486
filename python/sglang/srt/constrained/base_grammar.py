"""Protocols of a grammar library: compile a source, then follow one request.

Knows nothing about a concrete library, threads or batches.
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
    """The source was not compiled for reasons outside of it; a retry may succeed."""


class CompilationCancelledError(Exception):
    """The result is no longer needed."""


class GrammarLimitError(RuntimeError):
    """The compiled state has grown to a limit and can no longer serve requests.

    The tokens so far are replayed on fresh state (`GrammarBackend.resume`).
    """


class EosInsideGrammarError(RuntimeError):
    """The grammar requires an EOS token before its end, because of an error in the
    source.
    """


class Cancellation:
    """Tells a compilation in another thread that its result is no longer needed."""

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
            CompilationCancelledError: it was cancelled before or during the block.
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
    """The position of one request in its grammar. Not thread-safe."""

    @property
    def num_accepted(self) -> int:
        """Number of tokens accepted and not undone."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            GrammarLimitError: the compiled state has grown to a limit.
            EosInsideGrammarError: the mask allowed an EOS token, but the grammar is not
                complete after it.
            RuntimeError: the grammar does not allow the token here; the state is
                unchanged.
        """
        ...

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        """Write the ids allowed next into `bitmask_row`, host int32 [ceil(V / 32)].

        Bit i % 32 of word i // 32 is set where id i is allowed; every word is written.
        A complete grammar allows only the EOS ids.

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
            ValueError: fewer tokens were accepted.
        """
        ...

    def fork(self) -> Grammar:
        """Return a copy that advances independently. Copies share compiled state, which
        grows with all of them and stops serving all of them at its limit.
        """
        ...

    def is_usable(self) -> bool:
        """Whether the shared compiled state is within its limits."""
        ...

    def shared_bytes(self) -> int:
        """Estimated memory of the shared compiled state, determined by its history."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer. May be called from any thread."""

    def compile(
        self, kind: str, source: str, *, cancellation: Cancellation | None = None
    ) -> Grammar:
        """Return a grammar in its initial state.

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
        next mask prepared, on fresh unshared state.

        Raises:
            GrammarLimitError: a single step exceeds the limits.
        """
        ...

    def close(self) -> None:
        """Release processes; `compile` must not be called afterwards."""
        ...
