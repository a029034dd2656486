"""Computes the intervals of a model's dimensions that a rank holds. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import TensorParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The interval [start, start + size) of a dimension of `full` entries."""

    full: int
    start: int
    size: int

    @classmethod
    def whole(cls, full: int) -> Part:
        return cls(full=full, start=0, size=full)

    def scaled(self, factor: int) -> Part:
        """Return the same part in entries `factor` times smaller: heads -> channels."""
        return Part(
            full=self.full * factor, start=self.start * factor, size=self.size * factor
        )

    def divided(self, size: int) -> Part:
        """Return the same part in entries that each hold `size` of these: channels ->
        groups.

        Raises:
            ValueError: the part does not begin and end at whole entries.
        """
        stop = self.start + self.size
        if self.start % size or (stop % size and stop != self.full):
            raise ValueError(
                f"a rank's part, {self.start} to {stop} of {self.full}, cuts groups of "
                f"{size} that share a quantisation scale; use a smaller --tp-size"
            )
        start = self.start // size
        return Part(
            full=-(-self.full // size), start=start, size=-(-stop // size) - start
        )


def divide(full: int, group: TensorParallelGroup, *, what: str) -> Part:
    """Return this rank's part of an even division.

    Args:
        what: the field of config.json that gives `full`.

    Raises:
        ValueError: `full` does not divide; names both numbers.
    """
    if full % group.size:
        raise ValueError(
            f"--tp-size {group.size} does not divide {what} {full} of config.json; "
            f"use a --tp-size that divides {full}"
        )
    size = full // group.size
    return Part(full=full, start=group.rank * size, size=size)


def divide_kv_heads(full: int, group: TensorParallelGroup) -> Part:
    """Return this rank's KV heads: an equal part, or one head shared by several ranks.

    Raises:
        ValueError: neither divides evenly; names both numbers.
    """
    if full % group.size == 0:
        return divide(full, group, what="num_key_value_heads")
    if group.size % full == 0:
        return Part(full=full, start=group.rank * full // group.size, size=1)
    raise ValueError(
        f"--tp-size {group.size} can neither split nor replicate num_key_value_heads "
        f"{full} of config.json evenly; use a --tp-size that divides {full} or is a "
        "multiple of it"
    )


def padded_size(full: int, group: TensorParallelGroup) -> int:
    """Return the entries that each rank has room for, `full` / size rounded up."""
    return -(-full // group.size)


def divide_padded(full: int, group: TensorParallelGroup) -> Part:
    """Return this rank's part of up to `padded_size` entries; the last has fewer."""
    room = padded_size(full, group)
    start = min(group.rank * room, full)
    return Part(full=full, start=start, size=min(room, full - start))
