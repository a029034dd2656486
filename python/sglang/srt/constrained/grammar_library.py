"""Compiled grammars that new requests start from, within a budget of memory.

Every rank has one and makes the same changes in the same order, so that the ranks'
compiled state is the same at every step. Knows nothing of requests or threads.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar import Grammar

GrammarKey = tuple[str, str]


class GrammarLibrary:
    """The most recently used grammars, by (kind, source).

    Compiled state grows with every output that follows it. One that has grown to
    `renew_bytes` is to be compiled again, and serves until then.

    Args:
        max_bytes: estimated memory of all; the least recently used goes first. The
            newest one stays whatever its size. Requests that run keep what they use.
        renew_bytes: size at which a grammar is worn.
    """

    def __init__(self, *, max_bytes: int, renew_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._renew_bytes = renew_bytes
        self._templates: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._bytes: dict[GrammarKey, int] = {}
        # Used since they were measured: measuring one takes far longer than a fork.
        self._unmeasured: dict[GrammarKey, None] = {}

    def __len__(self) -> int:
        return len(self._templates)

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the grammars, each as of its last use."""
        self._measure_used()
        return sum(self._bytes.values())

    def has(self, key: GrammarKey) -> bool:
        """Whether `fork` returns one."""
        template = self._templates.get(key)
        return template is not None and template.is_usable()

    def is_worn(self, key: GrammarKey) -> bool:
        """Whether a grammar that is here should be compiled again."""
        self._measure_used()
        return self._bytes[key] >= self._renew_bytes

    def fork(self, key: GrammarKey) -> Grammar:
        """A grammar in its first state; its key is then the most recently used.

        Raises:
            KeyError: it is not here.
        """
        template = self._templates[key]
        self._templates.move_to_end(key)
        self._unmeasured[key] = None
        return template.fork()

    def install(self, key: GrammarKey, template: Grammar) -> None:
        """Add a grammar in its first state, or replace the one that was here."""
        self._templates[key] = template
        self._templates.move_to_end(key)
        self._unmeasured[key] = None

    def drop_dead(self, key: GrammarKey) -> None:
        """Forget a grammar whose state has met a limit, and which holds its memory."""
        if key in self._templates and not self.has(key):
            self._forget(key)

    def trim(self) -> None:
        """Evict what exceeds the budget. Not while anybody has been promised a key."""
        if self._templates:
            # Requests that still run may have worn the one that goes next.
            self._unmeasured[next(iter(self._templates))] = None
        while len(self._templates) > 1 and self.used_bytes > self._max_bytes:
            self._forget(next(iter(self._templates)))

    def _forget(self, key: GrammarKey) -> None:
        del self._templates[key]
        self._bytes.pop(key, None)
        self._unmeasured.pop(key, None)

    def _measure_used(self) -> None:
        for key in self._unmeasured:
            self._bytes[key] = self._templates[key].shared_bytes()
        self._unmeasured.clear()
