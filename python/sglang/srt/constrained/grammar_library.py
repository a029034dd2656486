"""Compiled grammars that new requests start from, within a memory budget.

Every rank has a library and makes the same changes in the same order, so the ranks'
compiled state is the same at every step. Knows nothing about requests or threads.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar import Grammar

GrammarKey = tuple[str, str]


class GrammarLibrary:
    """The most recently used grammars, by (kind, source).

    Compiled state grows with every output that follows it. A grammar that has grown to
    `renew_bytes` should be compiled again, and serves until then.

    Args:
        max_bytes: maximum estimated memory of all grammars; the least recently used
            goes first. The newest one stays whatever its size. Running requests keep
            the grammars they use.
        renew_bytes: size at which a grammar is worn and should be renewed.
    """

    def __init__(self, *, max_bytes: int, renew_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._renew_bytes = renew_bytes
        self._templates: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._bytes: dict[GrammarKey, int] = {}
        # Used since they were measured: measuring takes much longer than a fork.
        self._unmeasured: dict[GrammarKey, None] = {}

    def __len__(self) -> int:
        return len(self._templates)

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the grammars, each at its last use."""
        self._measure_used()
        return sum(self._bytes.values())

    def has(self, key: GrammarKey) -> bool:
        """Whether the library has the grammar."""
        template = self._templates.get(key)
        return template is not None and template.is_usable()

    def is_worn(self, key: GrammarKey) -> bool:
        """Whether the library's grammar should be compiled again."""
        self._measure_used()
        return self._bytes[key] >= self._renew_bytes

    def fork(self, key: GrammarKey) -> Grammar:
        """Return a grammar in its initial state and mark it as most recently used.

        Raises:
            KeyError: the library does not have it.
        """
        template = self._templates[key]
        self._templates.move_to_end(key)
        self._unmeasured[key] = None
        return template.fork()

    def install(self, key: GrammarKey, template: Grammar) -> None:
        """Add or replace a grammar in its initial state."""
        self._templates[key] = template
        self._templates.move_to_end(key)
        self._unmeasured[key] = None

    def drop_dead(self, key: GrammarKey) -> None:
        """Drop a grammar whose state has reached a limit and still holds memory."""
        if key in self._templates and not self.has(key):
            self._forget(key)

    def trim(self) -> None:
        """Evict what exceeds the budget. Do not call while a key has been promised."""
        if self._templates:
            # Running requests may have worn the grammar that goes next.
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
