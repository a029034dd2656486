"""The shape of a draft tree, the columns of a request's draft branches in its row of
`req_to_token`, and the number of columns that one iteration may touch. Host arithmetic
only; knows no tensors.

One rule serves every page size and top-k. With `base` the page boundary at or below the
KV length L, `tail = L - base`, and `n = ceil((tail + num_steps) / page_size)`, branch t
owns the columns [base + t n P, base + (t + 1) n P):

    base + t n P         + tail               + tail + num_steps     + n P
    | copy of the tail   | draft slots         | padding             |
    | (t = 0: the tail)  | of steps 0, 1, ...  |                     |

With page size 1 the copy and the padding are empty, and with top-k 1 nothing but branch
0 exists: both are the contiguous layout L + t num_steps + step.
"""

from __future__ import annotations

from dataclasses import dataclass

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
) -> int:
    """Columns from a request's KV length on that one iteration may write: by drafting
    (branches side by side), by verification (one slot per tree node) or by the draft
    extend (one slot per token gained).

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
    branches = num_steps * topk
    if page_size > 1 and topk > 1:
        branches = layout.branch_pages(page_size - 1) * page_size * topk
    extend = num_steps + 1
    return max(draft_lead + branches, num_draft_tokens, draft_lead + extend)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLayout:
    """The layout of draft branches in a request's row.

    Fields:
        page_size: KV slots of a page.
        topk: branches.
        num_steps: draft slots of a branch.

    Raises:
        ValueError: a field below 1.
    """

    page_size: int
    topk: int
    num_steps: int

    def __post_init__(self) -> None:
        for name in ("page_size", "topk", "num_steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    @property
    def has_tails_to_copy(self) -> bool:
        """Whether branches other than the first need a copy of the prefix's tail."""
        return self.page_size > 1 and self.topk > 1

    @property
    def max_tail(self) -> int:
        return self.page_size - 1

    def base(self, seq_len: int) -> int:
        return seq_len - seq_len % self.page_size

    def branch_pages(self, seq_len: int) -> int:
        """Whole pages that each branch owns at KV length `seq_len`."""
        tail = seq_len % self.page_size
        return -(-(tail + self.num_steps) // self.page_size)

    def branch_shift(self, seq_len: int, branch: int) -> int:
        """Distance of a branch's columns from those of branch 0."""
        return branch * self.branch_pages(seq_len) * self.page_size

    def draft_column(self, seq_len: int, branch: int, step: int) -> int:
        """Column of the slot that draft step `step` of a branch writes."""
        return seq_len + step + self.branch_shift(seq_len, branch)

    def end_column(self, seq_len: int) -> int:
        """The first column after all branches."""
        return self.base(seq_len) + self.branch_shift(seq_len, self.topk)
