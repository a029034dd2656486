"""The shape of a draft tree, the columns of a request's draft branches in its row of
`req_to_token`, and the number of columns that one iteration may touch. Host arithmetic
only, without tensors.

A row has one column per position for a request's tokens. If there is a *draft region*,
it has further columns, whose slots belong to the row permanently:

    | L tokens | reserve ... end of the context | branch 0 | branch 1 | ... |
                                                ^ region

With a region, branch t writes to num_steps columns from region + t * num_steps on. It
reads lists of slots: the prefix, its ancestors' slots, and its own.

Without one, branches follow the prefix, in whole pages: with `base` the page boundary
at or below the KV length L and `n = ceil((tail + num_steps) / page_size)`, branch t
owns the columns [base + t n P, base + (t + 1) n P) and reads them. With page size 1 and
with top-k 1 that is the contiguous layout L + t num_steps + step. A branch's columns
there, `tail` being L - base:

    first column         + tail               + tail + num_steps     + n P
    | copy of the tail   | draft slots         | padding             |
    |                    | of steps 0, 1, ...  |                     |

Branch 0 has the prefix's tail itself. Element e of a branch's own is in column e +
`branch_shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

MAX_TOP_K = 32
"""Maximum number of branches in the kernels' layout."""

CATCH_UP_TOKENS = 16
"""Tokens of a request that one draft extend catches up after plain steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The shape of a draft tree.

    Fields:
        topk: number of branches a draft step keeps, and of candidates each branch
            proposes.
        num_steps: levels of drafted tokens.
        num_draft_tokens: number of nodes to verify, including the root.

    Raises:
        ValueError: no tree has these numbers.
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

    @classmethod
    def chain(cls, num_steps: int) -> TreeShape:
        """Return the shape of a chain: one branch, all of whose tokens are verified."""
        return cls(topk=1, num_steps=num_steps, num_draft_tokens=num_steps + 1)

    @property
    def num_candidates(self) -> int:
        """Number of candidates on all levels: K on the first, K * K on each other
        level.
        """
        return self.topk + self.topk**2 * (self.num_steps - 1)

    @property
    def num_groups(self) -> int:
        """Number of groups of K candidates with the same parent; group 0 belongs to the
        root.
        """
        return 1 + self.topk * (self.num_steps - 1)

    @property
    def accept_width(self) -> int:
        """Maximum tokens that one iteration can yield, including the bonus token."""
        return self.num_steps + 1


def alloc_len_per_decode(
    *,
    page_size: int,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    draft_lead: int = 0,
    has_branches: bool = True,
) -> int:
    """Return the number of columns after a request's KV length that one iteration may
    write: by drafting (branches side by side, unless they have a region), by
    verification (one slot per tree node) or by the draft extend (one slot per token
    gained).

    Branches that own whole pages are charged for the longest tail a prefix can have.

    Args:
        draft_lead: tokens that have KV in the draft's pool but not yet in the target's.
        has_branches: whether drafting writes to these columns, and not to a region.

    Raises:
        ValueError: an argument is below 1.
    """
    layout = BranchLayout(page_size=page_size, topk=topk, num_steps=num_steps)
    if num_draft_tokens < 1:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}; it must be at least 1"
        )
    branches = num_steps * topk if has_branches else 0
    if page_size > 1 and topk > 1 and has_branches:
        branches = layout.branch_pages(page_size - 1) * page_size * topk
    extend = num_steps + 1
    return max(draft_lead + branches, num_draft_tokens, draft_lead + extend)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLayout:
    """The layout of draft branches in a request's row.

    Fields:
        page_size: KV slots per page.
        topk: number of branches.
        num_steps: draft slots per branch.
        region: first column of the draft region, or None: branches follow the prefix.

    Raises:
        ValueError: a field is below 1, or the region begins before the row.
    """

    page_size: int
    topk: int
    num_steps: int
    region: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "topk", "num_steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.region is not None and self.region < 0:
            raise ValueError(f"a region from column {self.region}")

    @property
    def is_exact(self) -> bool:
        """Whether a branch reads the slots of its ancestors, wherever they lie, and not
        those of its own columns."""
        return self.region is not None and self.topk > 1

    @property
    def max_tail(self) -> int:
        """Number of elements in the longest tail to copy."""
        return self.page_size - 1 if self.region is None else 0

    @property
    def tail_moves(self) -> int:
        """Maximum number of moves to copy a request's tail to its branches. The first
        branch has it."""
        return (self.topk - 1) * self.max_tail

    def base(self, seq_len: int) -> int:
        """Return the first element for which a branch has its own column."""
        return seq_len - (seq_len % self.page_size if self.region is None else 0)

    def branch_pages(self, seq_len: int) -> int:
        """Number of whole pages that a branch reads from its page boundary."""
        tail = seq_len % self.page_size
        return -(-(tail + self.num_steps) // self.page_size)

    def branch_shift(self, seq_len: int, branch: int) -> int:
        """Return the distance between a branch's own elements and their columns."""
        if self.region is None:
            return branch * self.branch_pages(seq_len) * self.page_size
        return self.region + branch * self.num_steps - seq_len

    def draft_column(self, seq_len: int, branch: int, step: int) -> int:
        """Return the column of the slot that draft step `step` of a branch writes."""
        return seq_len + step + self.branch_shift(seq_len, branch)

    def end_column(self, seq_len: int) -> int:
        """Return the first column after all branches."""
        return self.base(seq_len) + self.branch_shift(seq_len, self.topk)
