"""Replaces tokens by others that share prefixes in the same way and reveal nothing
else.

A token is replaced according to the whole sequence up to it, with a key that is
discarded: equal prefixes stay equal, different ones stay different, and a word gets a
different number at each occurrence.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kv_canary.hashing import mix64_array
from sglang.srt.utils.salt_chain import lineage_salt

if TYPE_CHECKING:
    from sglang.srt.mem_cache.page_ledger import IntArray

_Words = npt.NDArray[np.uint64]


class Pseudonyms:
    """Collects sequences with `add`; `replace` then returns new tokens for all of them.

    Args:
        vocab_size: vocabulary size of the new tokens.
        key: 64-bit key, drawn at random unless a test sets it.
    """

    def __init__(self, vocab_size: int, *, key: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._key = np.uint64(secrets.randbits(64) if key is None else key)
        self._parents: list[_Words] = []
        self._own: list[_Words] = []

    def root(self, namespace: str | None) -> np.uint64:
        """Return the state before the first token of a sequence in a cache
        namespace.
        """
        salt = np.uint64(lineage_salt(namespace) & ((1 << 64) - 1))
        mixed: np.uint64 = mix64_array(np.array([salt ^ self._key]))[0]
        return mixed

    def add(self, tokens: IntArray, *, after: np.uint64, start: int) -> np.uint64:
        """Add a piece of a sequence; returns the state after it.

        Args:
            after: state before the piece. start: position of its first token.
        """
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        terms = mix64_array(
            mix64_array(tokens.astype(np.uint64) ^ self._key)
            + mix64_array(positions + self._key)
        )
        # A sum of terms that depend on token and position: all tokens in one pass.
        own = after + np.cumsum(terms, dtype=np.uint64)
        parents = np.empty_like(own)
        if len(own):
            parents[0] = after
            parents[1:] = own[:-1]
        self._parents.append(parents)
        self._own.append(own)
        return np.uint64(own[-1]) if len(own) else after

    def replace(self) -> Sequence[IntArray]:
        """Return the new tokens of every piece, in the order of `add`.

        Raises:
            ValueError: a prefix is followed by more different tokens than the
                vocabulary has.
        """
        lengths = [len(piece) for piece in self._own]
        if not sum(lengths):
            return [np.empty(0, dtype=np.int64) for _ in lengths]
        own, where = np.unique(np.concatenate(self._own), return_inverse=True)
        parents = np.empty_like(own)
        parents[where] = np.concatenate(self._parents)
        order = np.lexsort((own, parents))
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = parents[order][1:] != parents[order][:-1]
        firsts = np.flatnonzero(is_first)
        rank = np.arange(len(order)) - np.repeat(
            firsts, np.diff(np.append(firsts, len(order)))
        )
        if int(rank.max()) >= self._vocab_size:
            raise ValueError("more different tokens than the vocabulary has")
        shift = mix64_array(parents[order] ^ self._key) % np.uint64(self._vocab_size)
        tokens = np.empty(len(order), dtype=np.int64)
        tokens[order] = (shift.astype(np.int64) + rank) % self._vocab_size
        pieces = np.split(tokens[where], np.cumsum(lengths)[:-1])
        return list(pieces)
