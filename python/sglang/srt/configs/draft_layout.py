"""The shape of a draft tree, the columns of a request's draft branches in its row of
`req_to_token`, and the number of columns that one iteration may touch. Host arithmetic
only; knows no tensors.

A row is a request's tokens, one column per position, and, where there is a *draft
region*, columns after them whose slots belong to the row for good:

    | L tokens | reserve ... end of the context | branch 0 | branch 1 | ... |
                                                ^ region.begin

With a region, branch t has `span` columns from region.begin + t * span on. Its own
elements begin at `base`, the multiple of the region's unit at or below the KV length
L: the page boundary where attention reads whole pages, L itself where the unit is 1.

Without one, branches follow the prefix, in whole pages: with `base` the page boundary
at or below L and `n = ceil((tail + num_steps) / page_size)`, branch t owns the columns
[base + t n P, base + (t + 1) n P). With page size 1 and with top-k 1 that is the
contiguous layout L + t num_steps + step.

A branch's columns in either, `tail` being L - base:

    first column         + tail               + tail + num_steps     + n P
    | copy of the tail   | draft slots         | padding             |
    |                    | of steps 0, 1, ...  |                     |

Branch 0 without a region has the prefix's tail itself. Element e of a branch's own is
in column e + `branch_shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

MAX_TOP_K = 32
"""Branches that the kernels are laid out for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The shape of a draft tree.

    Fields:
        topk: branches that a draft step keeps, and candidates that each of them
            proposes.
        num_steps: levels of drafted tokens.
        num_draft_tokens: nodes to verify, with the root.

    Raises:
        ValueError: numbers that no tree has.
    """

    topk: int
    num_steps: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= MAX_TOP_K or self.num_steps < 1:
            raise ValueError(
                f"topk={self.topk} and num_steps={self.num_steps}: topk must be "
                f"1 .. {MAX_TOP_K} and num_steps at least 1"
            )
        least, most = self.num_steps + 1, self.num_candidates + 1
        if not least <= self.num_draft_tokens <= most:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} does not fit "
                f"topk={self.topk} and num_steps={self.num_steps}; "
                f"use {least} .. {most}"
            )

    @property
    def num_candidates(self) -> int:
        """Candidates of all levels: K of the first, K * K of each other."""
        return self.topk + self.topk**2 * (self.num_steps - 1)

    @property
    def num_groups(self) -> int:
        """Groups of K candidates that have one parent; the root's is group 0."""
        return 1 + self.topk * (self.num_steps - 1)

    @property
    def accept_width(self) -> int:
        """Most tokens that one iteration can yield, the bonus included."""
        return self.num_steps + 1


def alloc_len_per_decode(
    *,
    page_size: int,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    draft_lead: int = 0,
    has_region: bool = False,
) -> int:
    """Columns from a request's KV length on that one iteration may write: by drafting
    (branches side by side, unless they have a region), by verification (one slot per
    tree node) or by the draft extend (one slot per token gained).

    Branches that own whole pages are charged for the longest tail a prefix can have.

    Args:
        draft_lead: tokens that have KV in the draft's pool and not yet in the target's.

    Raises:
        ValueError: an argument below 1.
    """
    layout = BranchLayout(page_size=page_size, topk=topk, num_steps=num_steps)
    if num_draft_tokens < 1:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}; it must be at least 1"
        )
    branches = 0 if has_region else num_steps * topk
    if page_size > 1 and topk > 1 and not has_region:
        branches = layout.branch_pages(page_size - 1) * page_size * topk
    extend = num_steps + 1
    return max(draft_lead + branches, num_draft_tokens, draft_lead + extend)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRegion:
    """Columns of a row that its branches have for themselves.

    Fields:
        begin: the first one.
        unit: elements whose multiples a branch's columns begin at: the page size, or 1.

    Raises:
        ValueError: a unit below 1, or a region that begins before the row.
    """

    begin: int
    unit: int

    def __post_init__(self) -> None:
        if self.begin < 0 or self.unit < 1:
            raise ValueError(f"a region from column {self.begin}, unit {self.unit}")

    def span(self, num_steps: int) -> int:
        """Columns of a branch, enough for the longest tail."""
        return (2 * self.unit + num_steps - 2) // self.unit * self.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLayout:
    """The layout of draft branches in a request's row.

    Fields:
        page_size: KV slots of a page.
        topk: branches.
        num_steps: draft slots of a branch.
        region: where branches lie; None: after the prefix.

    Raises:
        ValueError: a field below 1, or a region's unit that is neither 1 nor the page
            size.
    """

    page_size: int
    topk: int
    num_steps: int
    region: BranchRegion | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "topk", "num_steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.region is not None and self.region.unit not in (1, self.page_size):
            raise ValueError(
                f"a region's unit is {self.region.unit}; it must be 1 or the page size "
                f"{self.page_size}"
            )

    @property
    def unit(self) -> int:
        """Elements whose multiples a branch's own columns begin at."""
        return self.page_size if self.region is None else self.region.unit

    @property
    def num_copies(self) -> int:
        """Branches, the last ones, that get a copy of the prefix's tail."""
        return self.topk - (self.region is None)

    @property
    def max_tail(self) -> int:
        """Elements of the longest tail to copy."""
        return self.unit - 1

    @property
    def tail_moves(self) -> int:
        """Moves that copy a request's tail to its branches, at most."""
        return self.num_copies * self.max_tail

    def base(self, seq_len: int) -> int:
        """The first element that a branch has a column of its own for."""
        return seq_len - seq_len % self.unit

    def branch_pages(self, seq_len: int) -> int:
        """Whole pages that a branch reads from its page boundary on."""
        tail = seq_len % self.page_size
        return -(-(tail + self.num_steps) // self.page_size)

    def branch_shift(self, seq_len: int, branch: int) -> int:
        """Distance of a branch's own elements from their columns."""
        if self.region is None:
            return branch * self.branch_pages(seq_len) * self.page_size
        first = self.region.begin + branch * self.region.span(self.num_steps)
        return first - self.base(seq_len)

    def draft_column(self, seq_len: int, branch: int, step: int) -> int:
        """Column of the slot that draft step `step` of a branch writes."""
        return seq_len + step + self.branch_shift(seq_len, branch)

    def end_column(self, seq_len: int) -> int:
        """The first column after all branches."""
        return self.base(seq_len) + self.branch_shift(seq_len, self.topk)
