"""One step, as an engine's scheduler describes it to a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BlockIds = Sequence[Sequence[int]]
"""Block numbers by group of slots, in the order of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that begins, or begins again, in this step.

    Fields:
        tokens: all that are known; of the first `computed` the KV is in its blocks.
        salt: of its cache namespace.
        goes_on: whether it is the same request with more tokens.
    """

    rid: str
    tokens: Sequence[int]
    blocks: BlockIds
    computed: int
    salt: int = 0
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """A request's share of the forward.

    Fields:
        computed: tokens before it; scheduled: new tokens.
        drafts: new tokens that are only proposed.
    """

    rid: str
    computed: int
    scheduled: int
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Fields:
        released: requests that gave up their blocks since the last step.
        grown: further blocks of requests that are known.
        copies: (source, destination) blocks that are copied before the forward.
        rows: of the forward, in any order; empty: there is none.
    """

    released: Sequence[str] = ()
    admitted: Sequence[Admission] = ()
    grown: Sequence[tuple[str, BlockIds]] = ()
    copies: Sequence[tuple[int, int]] = ()
    rows: Sequence[RowStep] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReads:
    """The tables with which attention of one group of layers reads and writes.

    Fields:
        block_table: int32 [R, columns], block numbers.
        slot_mapping: int64 [>= T], slots that the new tokens are written to.
    """

    block_table: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReads:
    """One forward, from what attention and model are given.

    Fields:
        rids: of its R rows, in their order.
        num_tokens: T.
        input_ids, positions: [>= T].
        query_start_loc: [>= R + 1].
        seq_lens: [>= R], tokens of each row that attention reads.
        groups: by group of slots.
    """

    rids: Sequence[str]
    num_tokens: int
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    groups: Sequence[GroupReads]
