"""Static inputs of captured graphs: the canonical fields of `ForwardBatch` at fixed
addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang.srt.forward.batch import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
)

# Decode fields and their values in a padding row, which reads and writes the scratch
# page as row 0 does.
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
}

# Prefill fields with a value per token; padding is 0 in all of them.
_TOKEN_FIELDS = ("input_ids", "positions", "out_cache_loc")
# Prefill fields that captured attention reads for its one row, and their words.
# Offsets, prefix and row begin at even words, as in other forwards, so that the same
# compiled kernels can be used.
_ROW_FIELDS = {
    "qo_indptr": 2,
    "prefix_lens": 1,
    "extend_lens": 1,
    "req_pool_indices": 1,
    "seq_lens": 1,
}
_ROW_WORDS = sum(_ROW_FIELDS.values())


class GraphInputs(Protocol):
    """Static inputs of all graphs of a runner. Each graph reads the first rows.

    Attributes:
        forward_mode: mode of the forwards.
        tokens_per_row: new tokens per row.
    """

    forward_mode: ForwardMode
    tokens_per_row: int

    def static_batch(
        self,
        bs: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        """Return the static batch of `bs` rows. `lens_cpu` of the live rows is padded
        to that size."""

    def populate(self, forward_batch: ForwardBatch) -> None:
        """Copy a live batch in; other rows become padding. The host does not wait."""


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
        bs: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        views: dict[str, Any] = {
            name: self._block[i, :bs] for i, name in enumerate(_DECODE_FIELDS)
        }
        if lens_cpu is not None:
            lens_cpu = lens_cpu.padded(bs, prefix_len=0, extend_len=1)
        return ForwardBatch(
            forward_mode=self.forward_mode,
            capture_hidden_mode=capture_hidden_mode,
            lens_cpu=lens_cpu,
            **views,
        )

    def populate(self, forward_batch: ForwardBatch) -> None:
        # Only rows that an earlier batch filled must become padding.
        bs = forward_batch.batch_size
        if bs < self._filled:
            self._block[:, bs : self._filled] = self._padding
        self._filled = bs
        live = [getattr(forward_batch, name) for name in _DECODE_FIELDS]
        torch.stack(live, out=self._block[:, :bs])  # one launch


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSpecInput:
    """The `SpecInput` of a captured draft model."""

    hidden_states: Tensor | None


class PrefillInputs:
    """Inputs of prefill forwards: one int64 block, read by every graph from its start.

    ```
    n tokens:  | input_ids [n] | positions [n] | out_cache_loc [n] | row fields |
    ```
    The row fields describe the one request of a graph with captured attention; segments
    do not read them.

    Attributes:
        block: int64 [3 * max_tokens + row words].
        hidden_states: [max_tokens, width], read by a draft model, or None.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        hidden_states: Tensor | None,
        device: torch.device | str,
    ) -> None:
        words = len(_TOKEN_FIELDS) * max_tokens + _ROW_WORDS
        self.block = torch.zeros(words, dtype=torch.int64, device=device)
        self.hidden_states = hidden_states
        self._padding = torch.zeros_like(self.block[:max_tokens])

    def populate(
        self, forward_batch: ForwardBatch, *, padded: int, has_row: bool
    ) -> None:
        """Copy a live batch in; the host does not wait. Tokens up to `padded` read
        position 0 and write the scratch page.

        Args:
            has_row: also copy the row fields of the one request.
        """
        tokens, words = forward_batch.num_tokens, len(_TOKEN_FIELDS) * padded
        # One launch, because the device is idle until the graph is launched.
        parts = []
        for name in _TOKEN_FIELDS:
            parts.append(getattr(forward_batch, name))
            if tokens < padded:
                parts.append(self._padding[: padded - tokens])
        if has_row:
            words += _ROW_WORDS
            parts += [getattr(forward_batch, name) for name in _ROW_FIELDS]
        torch.cat(parts, out=self.block[:words])
        if self.hidden_states is not None:
            assert forward_batch.spec_info is not None
            states = forward_batch.spec_info.hidden_states
            assert states is not None
            self.hidden_states[:tokens].copy_(states)
            self.hidden_states[tokens:padded].zero_()

    def static_batch(
        self, tokens: int, capture_hidden_mode: CaptureHiddenMode
    ) -> ForwardBatch:
        """Return the static batch of the graph of `tokens` tokens; one row."""
        words = dict.fromkeys(_TOKEN_FIELDS, tokens) | _ROW_FIELDS
        parts = self.block[: sum(words.values())].split_with_sizes(list(words.values()))
        views: dict[str, Any] = dict(zip(words, parts, strict=True))
        if self.hidden_states is not None:
            states = self.hidden_states[:tokens]
            views["spec_info"] = StaticSpecInput(hidden_states=states)
        # No captured code reads the identity fields.
        unused = views["seq_lens"]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            req_serial=unused,
            salt=unused,
            rids_int=unused,
            capture_hidden_mode=capture_hidden_mode,
            **views,
        )
