"""Static inputs of captured graphs, derived from the canonical fields of
ForwardBatch."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
)

# Decode fields and what a padded row holds: it reads and writes the scratch page as row
# 0.
_DECODE_FIELDS: dict[str, int] = {
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": 0,
    "req_pool_indices": 0,
    "prefix_lens": 0,
    "extend_lens": 1,
    "seq_lens": 1,
    "req_serial": 0,
    "salt": 0,
    "rids_int": 0,
    "bootstrap_room_ids_int": -1,
}


class GraphInputs(Protocol):
    """Static inputs that all graphs of a runner read, each its first rows.

    Attributes:
        forward_mode: of the forwards.
        tokens_per_row: new tokens of each row.
    """

    forward_mode: ForwardMode
    tokens_per_row: int

    def static_batch(
        self,
        rows: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        """The static batch of the first `rows` rows; `lens_cpu` of the live ones is
        padded with those of the others."""

    def populate(self, forward_batch: ForwardBatch) -> None:
        """Copy a live batch in; the other rows are padding. The host does not wait."""


class GraphInputBuffers:
    """Inputs of decode forwards: one int64 block [fields, rows]."""

    forward_mode = ForwardMode.DECODE
    tokens_per_row = 1

    def __init__(self, *, max_rows: int, device: torch.device | str) -> None:
        padding = torch.tensor(list(_DECODE_FIELDS.values()), dtype=torch.int64)
        self._padding = padding[:, None].to(device)
        self._block = self._padding.repeat(1, max_rows)
        self._filled = 0

    def static_batch(
        self,
        rows: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        views: dict[str, Any] = {
            name: self._block[i, :rows] for i, name in enumerate(_DECODE_FIELDS)
        }
        return ForwardBatch(
            forward_mode=self.forward_mode,
            capture_hidden_mode=capture_hidden_mode,
            lens_cpu=None
            if lens_cpu is None
            else lens_cpu.padded(
                rows,
                prefix_len=_DECODE_FIELDS["prefix_lens"],
                extend_len=_DECODE_FIELDS["extend_lens"],
            ),
            **views,
        )

    def populate(self, forward_batch: ForwardBatch) -> None:
        # Only rows that an earlier batch filled must become padding.
        rows = forward_batch.num_rows
        if rows < self._filled:
            self._block[:, rows : self._filled] = self._padding
        self._filled = rows
        live = [getattr(forward_batch, name) for name in _DECODE_FIELDS]
        self._block[:, :rows].copy_(torch.stack(live))
