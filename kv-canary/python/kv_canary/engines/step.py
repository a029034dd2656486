"""One step, as an engine's scheduler describes it to a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

BlockIds = Sequence[Sequence[int]]
"""Block numbers by slot group, in order of position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that begins, or begins again, in this step.

    Fields:
        tokens: all known tokens; the KV of the first `computed` is in its blocks.
        salt: salt of its cache namespace.
        goes_on: whether it is the same request with more tokens.
    """

    rid: str
    tokens: Sequence[int]
    blocks: BlockIds
    computed: int
    salt: int = 0
    goes_on: bool = False


class RowStep(NamedTuple):
    """A request's share of the forward. A tuple, because each step makes one per row.

    Fields:
        computed: tokens before the step; scheduled: new tokens.
        proposed: the last new tokens, if they are only proposed; negative if unknown.
    """

    rid: str
    computed: int
    scheduled: int
    proposed: Sequence[int] = ()

    @property
    def drafts(self) -> int:
        """New tokens that are only proposed."""
        return len(self.proposed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Fields:
        released: requests that gave up their blocks since the last step.
        grown: additional blocks of known requests.
        copies: (source, destination) blocks that are copied before the forward.
        rows: rows of the forward, in any order; empty without a forward.
    """

    released: Sequence[str] = ()
    admitted: Sequence[Admission] = ()
    grown: Sequence[tuple[str, BlockIds]] = ()
    copies: Sequence[tuple[int, int]] = ()
    rows: Sequence[RowStep] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReads:
    """The tables that attention of one layer group reads and writes through.

    Fields:
        block_table: int32 [R, columns], block numbers.
        slot_mapping: int64 [>= T], slots that the new tokens are written to.
    """

    block_table: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReads:
    """The inputs of one forward's attention and model.

    Fields:
        rids: ids of its R rows, in order.
        num_tokens: T.
        input_ids, positions: [>= T].
        query_start_loc: [>= R + 1].
        seq_lens: [>= R], tokens of each row that attention reads.
        groups: tables by slot group. states: by group of recurrent states, the blocks
            [>= R] that its layers get.
    """

    rids: Sequence[str]
    num_tokens: int
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    groups: Sequence[GroupReads]
    states: Sequence[Tensor] = ()
