"""The shape of the drafts of each iteration.

Rank 0 chooses, because costs depend on time, and sends an index into the ladder with
the input of each step. A record keeps the indices, so that a replay repeats them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from sglang.srt.arg_groups.adaptive_hook import draft_ladder

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.server_args import ServerArgs

PLAIN = 0
"""Index of plain decoding in every ladder."""


class ShapePolicy(Protocol):
    """Chooses an index of the ladder for iterations of so many requests."""

    def choose(self, rows: int) -> int: ...


class FixedShape:
    """Always the same shape."""

    def __init__(self, index: int) -> None:
        self._index = index

    def choose(self, rows: int) -> int:
        return self._index


class ShapeTable:
    """Shapes by batch size.

    Args:
        rows: (from this batch size on, index), ascending, the first from 1.
    """

    def __init__(self, rows: list[tuple[int, int]]) -> None:
        self._rows = rows

    def choose(self, rows: int) -> int:
        return [index for size, index in self._rows if size <= max(rows, 1)][-1]


class ShapesInTurn:
    """Every shape in turn."""

    def __init__(self, count: int) -> None:
        self._indices = itertools.cycle(range(count))

    def choose(self, rows: int) -> int:
        return next(self._indices)


class DraftShapes:
    """The ladder of an engine, and the policy that chooses from it.

    Attributes:
        ladder: None, plain decoding, then the shapes by ascending number of nodes.
        policy: replaced by tests and replays.
        is_adaptive: whether iterations may differ.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        self.ladder: tuple[TreeShape | None, ...] = (None,)
        self.is_adaptive = server_args.speculative_adaptive
        self.policy: ShapePolicy = FixedShape(PLAIN)
        if server_args.speculative_algorithm is None:
            return
        found = draft_ladder(server_args)
        self.ladder = (None, *found.shapes)
        if found.table is not None:
            index = self.ladder.index
            self.policy = ShapeTable([(size, index(s)) for size, s in found.table])
        else:
            self.policy = FixedShape(len(found.shapes))

    def rehearsals(self) -> list[ShapePolicy]:
        """Return policies that an engine tries before it is ready, besides its own:
        every shape, and changes between them."""
        count = len(self.ladder)
        if not self.is_adaptive:
            return []
        return [*map(FixedShape, range(count)), ShapesInTurn(count)]

    def choose(self, rows: int) -> int:
        """Return the index for the next iteration, of about `rows` requests."""
        return self.policy.choose(rows)
