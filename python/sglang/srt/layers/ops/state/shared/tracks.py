"""Places inside a prefill whose state is stored in other slots on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CHUNK = 64
"""Tokens after which every operation can store a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTracks:
    """Up to K checkpoints of each of R rows. Triton kernels are compiled for each K.

    Fields:
        lens: [R, K] int64, contiguous; how many of the row's tokens in this forward are
            folded into the checkpoint: a multiple of `CHUNK`, or all of them. 0 where
            there is none.
        slots: [R, K] int64, contiguous; the slot that gets it. Distinct from each other
            and from the rows' own slots, except where `lens` is 0. Slot 0 may repeat.
    """

    lens: Tensor
    slots: Tensor

    def require(self, qo_indptr: Tensor) -> None:
        """Check the checkpoints of ragged rows, on the host.

        Raises:
            ValueError: a checkpoint that no operation can store.
        """
        rows = len(qo_indptr) - 1
        if self.lens.shape[:1] != (rows,) or self.slots.shape != self.lens.shape:
            raise ValueError(
                f"tracks: lens {list(self.lens.shape)} and slots "
                f"{list(self.slots.shape)} of {rows} rows"
            )
        whole = qo_indptr.diff()[:, None]
        is_stored = (self.lens % CHUNK == 0) | (self.lens == whole)
        is_stored &= (self.lens >= 0) & (self.lens <= whole)
        if not is_stored.all():
            row, track = (~is_stored).nonzero()[0].tolist()
            raise ValueError(
                f"tracks: row {row} asks for its state after "
                f"{int(self.lens[row, track])} of {int(whole[row])} tokens; "
                f"only multiples of {CHUNK} and the whole row are stored"
            )


def targets_by_len(
    tracks: StateTracks | None, qo_indptr: Tensor
) -> list[dict[int, list[int]]]:
    """Return, for each row, the slots that get its state after a number of tokens.

    Raises:
        ValueError: a checkpoint that no operation can store.
    """
    found: list[dict[int, list[int]]] = [{} for _ in range(len(qo_indptr) - 1)]
    if tracks is None:
        return found
    tracks.require(qo_indptr)
    for row, track in tracks.lens.nonzero().tolist():
        slots = found[row].setdefault(int(tracks.lens[row, track]), [])
        slots.append(int(tracks.slots[row, track]))
    return found
