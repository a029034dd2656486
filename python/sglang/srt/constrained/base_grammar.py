"""Protocols of a grammar library: compile a source, then follow one request.

Knows nothing of a concrete library, of threads or of batches.
"""

from __future__ import annotations

from typing import Protocol

import torch


class GrammarTimeoutError(ValueError):
    """A source took too long to compile on this machine at this moment."""


class Grammar(Protocol):
    """The state of one request inside its grammar. Not thread-safe."""

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            RuntimeError: the grammar does not allow the token here (the state is as
                before), or met a resource limit (the request cannot go on).
        """
        ...

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        """Write the ids allowed next into `bitmask_row`, host int32 [ceil(V / 32)].

        Bit i % 32 of word i // 32 is set where id i is allowed; every word is written.
        A complete grammar allows the EOS ids only.

        Raises:
            RuntimeError: the grammar met a resource limit; the request cannot go on.
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
        """Return an independent copy of this state."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer. `compile` may be called from any thread."""

    def compile(self, kind: str, source: str) -> Grammar:
        """Return a grammar in its first state.

        `kind` is "json_schema", "regex" or "ebnf".

        Raises:
            ValueError: `source` is not a grammar of this kind, or is too large; the
                message quotes the grammar library.
            GrammarTimeoutError: it was not compiled in time.
        """
        ...

    def compile_checked(self, kind: str, source: str) -> Grammar:
        """Compile a source that `compile` has accepted in another process."""
        ...

    def fill_eos_mask(self, bitmask_row: torch.Tensor) -> None:
        """Allow the EOS ids only."""
        ...

    def close(self) -> None:
        """Release processes; `compile` is not called any more."""
        ...
