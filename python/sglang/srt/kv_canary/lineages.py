"""Lineages of requests' prefixes, from the tokens that the host knows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from kv_canary.records import TokenRun, draft_seed, extend_lineages

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingRow


class TokenOwner(Protocol):
    """A request: its tokens so far, of which the first `prompt_len` are its client's,
    the salt of its cache namespace, its number, and how it is sampled."""

    tokens: array[int]
    salt: int
    serial: int
    sampling_row: SamplingRow

    @property
    def prompt_len(self) -> int: ...


class PrefixLineages:
    """Lineages in one pool, each token counted once while its request lives.

    Args:
        token_offset: slot p holds token p + this; those before it are in the seed.
    """

    def __init__(self, *, token_offset: int) -> None:
        self._offset = token_offset
        # Of how many slots the lineage is known, and the lineage.
        self._known: WeakKeyDictionary[TokenOwner, tuple[int, int]] = (
            WeakKeyDictionary()
        )

    def seed(self, owner: TokenOwner) -> int:
        """The lineage before position 0."""
        return draft_seed(owner.tokens[0], owner.salt) if self._offset else 0

    def prefixes(
        self, owners: Sequence[TokenOwner], lengths: Sequence[int]
    ) -> list[int]:
        """Lineages of the first `lengths[i]` slots of `owners[i]`."""
        runs = [
            self._missing(owner, length)
            for owner, length in zip(owners, lengths, strict=True)
        ]
        values = extend_lineages(runs)
        for owner, length, value in zip(owners, lengths, values, strict=True):
            if length:
                self._known[owner] = (length, value)
        return values

    def announcement(
        self, owners: Sequence[TokenOwner], lengths: Sequence[int]
    ) -> list[list[int]]:
        """`records.Expected` of owners who go on from their first `lengths` slots."""
        return [
            self.prefixes(owners, lengths),
            [self.seed(owner) for owner in owners],
            [owner.serial for owner in owners],
        ]

    def _missing(self, owner: TokenOwner, length: int) -> TokenRun:
        """The tokens between what is known of `owner` and its first `length` slots."""
        known, value = self._known.get(owner, (0, 0))
        if known == 0 or length < known:
            known, value = 0, self.seed(owner)
        # A copy: as long as there is a view of them nothing can be appended.
        tokens = owner.tokens[known + self._offset : length + self._offset]
        values = np.frombuffer(tokens, dtype=np.int64)
        return TokenRun(value, values, start_position=known, salt=owner.salt)
