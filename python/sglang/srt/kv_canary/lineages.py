"""Lineages of requests' prefixes, from the tokens that the host knows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kv_canary.records import TokenRun, draft_seed, extend_lineages

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingRow


class TokenOwner(Protocol):
    """A request: its tokens so far, of which the first `prompt_len` are its client's,
    the salt of its cache namespace, its number, its row of the request table, and how
    it is sampled."""

    tokens: array[int]
    salt: int
    serial: int
    req_pool_idx: int
    sampling_row: SamplingRow

    @property
    def prompt_len(self) -> int: ...


class KnownTokens(NamedTuple):
    """How many tokens a request has, and the lineage of all of them."""

    length: int
    lineage: int


def known_tokens(
    owners: Sequence[TokenOwner], lengths: Sequence[int]
) -> list[KnownTokens]:
    """The first `lengths[i]` tokens of `owners[i]`, every one hashed anew."""
    runs = [
        TokenRun(0, _copied(owner.tokens[:length]), start_position=0, salt=owner.salt)
        for owner, length in zip(owners, lengths, strict=True)
    ]
    return [
        KnownTokens(len(run.tokens), lineage)
        for run, lineage in zip(runs, extend_lineages(runs), strict=True)
    ]


def _copied(tokens: array[int]) -> npt.NDArray[np.int64]:
    """The tokens of a slice. As long as there is a view of an array nothing can be
    appended to it."""
    return np.frombuffer(tokens, dtype=np.int64)


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
        # What owners must begin with when they are announced the next time.
        self._due: WeakKeyDictionary[TokenOwner, KnownTokens] = WeakKeyDictionary()

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
        """`records.Expected` of owners who go on from their first `lengths` slots.

        Raises:
            RuntimeError: an owner has other tokens than `expect_again` was told.
        """
        if self._due:
            self._check_again(owners)
        return [
            self.prefixes(owners, lengths),
            [self.seed(owner) for owner in owners],
            [owner.serial for owner in owners],
        ]

    def expect_again(self, tokens: Iterable[tuple[TokenOwner, KnownTokens]]) -> None:
        """Compare the tokens of owners with these when they are announced again."""
        for owner, known in tokens:
            self._due[owner] = known
            # Nothing that was counted before is relied on.
            self._known.pop(owner, None)

    def _check_again(self, owners: Sequence[TokenOwner]) -> None:
        again = [owner for owner in owners if owner in self._due]
        due = [self._due.pop(owner) for owner in again]
        found = known_tokens(again, [known.length for known in due])
        for owner, then, now in zip(again, due, found, strict=True):
            if now != then:
                raise RuntimeError(
                    f"KV canary: the tokens of request number {owner.serial} have "
                    "changed since it was queued to be computed again"
                )

    def _missing(self, owner: TokenOwner, length: int) -> TokenRun:
        """The tokens between what is known of `owner` and its first `length` slots."""
        known, value = self._known.get(owner, (0, 0))
        if known == 0 or length < known:
            known, value = 0, self.seed(owner)
        values = _copied(owner.tokens[known + self._offset : length + self._offset])
        return TokenRun(value, values, start_position=known, salt=owner.salt)
