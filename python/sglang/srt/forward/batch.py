"""The batch that one model forward works on.

`ForwardBatch` does not change during its forward, and carries the same canonical fields
in every mode. Owns no memory and knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.forward.adapter_tiles import AdapterTiles
    from sglang.srt.forward.spec_input import SpecInput
    from sglang.srt.forward.state_plan import StatePlan
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class ForwardMode(IntEnum):
    EXTEND = 1
    DECODE = 2
    IDLE = 3
    TARGET_VERIFY = 4
    DRAFT_EXTEND_V2 = 5

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


class CaptureHiddenMode(IntEnum):
    """Hidden states that a forward returns: none, the rows with logits, or all rows."""

    NULL = 0
    LAST = 1
    FULL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLens:
    """Host copies of the lengths. Prefills always have them; other modes only if the
    backend declares `needs_cpu_seq_lens`."""

    prefix_lens: list[int]
    extend_lens: list[int]

    def padded(self, bs: int, *, prefix_len: int, extend_len: int) -> HostLens:
        """Return the lengths of `bs` rows: the live ones, then padding of these
        lengths."""
        missing = bs - len(self.extend_lens)
        return HostLens(
            prefix_lens=self.prefix_lens + [prefix_len] * missing,
            extend_lens=self.extend_lens + [extend_len] * missing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLogprobSpan:
    """Prompt logprobs of one row: new tokens `[start, stop)` of the row's extension.

    The logits of new token j score `next_tokens[j - start]`, with `top_k` alternatives
    and the token ids `named`.
    """

    row: int
    start: int
    stop: int
    next_tokens: list[int]
    top_k: int
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEmbeds:
    """Embeddings that requests passed instead of tokens.

    Fields:
        rows: int64 [N]; which of the T new tokens they replace, ascending.
        values: floating point [N, H].
    """

    rows: torch.Tensor
    values: torch.Tensor

    def embed(
        self, look_up: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the embeddings of `input_ids` [T, H], with `values` in their rows.

        A draft of another width than the target's has no use for them, and reads token
        0 there: it drafts worse.
        """
        embedded = look_up(input_ids.index_fill(0, self.rows, 0))
        if embedded.shape[1] == self.values.shape[1]:
            embedded.index_copy_(0, self.rows, self.values.to(embedded.dtype))
        return embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """A batch of R rows (requests, or requests x top-k in draft decode) with T new
    tokens. `batch_size` is R.

    Fields:
        input_ids, positions, out_cache_loc: int64 [T]; row after row. Where
            `input_embeds` are given, the ids stand for their content.
        req_pool_indices: int64 [R]; row of `req_to_token`, or 0 for padding.
        prefix_lens, extend_lens: int64 [R]; tokens already in KV, tokens written now;
            `seq_lens` is their sum in every mode.
        qo_indptr: int64 [R + 1]; offsets of the rows in [T]; None in DECODE (one each).
        lens_cpu: host copies of the lengths; outside prefills only if the backend needs
            them.
        parent_index: int64 [T] or None (trees); parent of a new token among the new
            tokens, or -1 for the last prefix token.
        tree_mask: bool [R, D, D] or None (trees); which new tokens a new token sees.
        req_serial, salt, rids_int: int64 [R]; request identity.
        logits_rows: int64 [R]; token rows that need logits, or None for all.
        input_logprobs: prompt spans that need logprobs.
        input_embeds: embeddings that replace some tokens' own, or None.
        state_plan: copies and checkpoints of recurrent state, or None.
        adapters: tokens with an adapter, or None if no row has one.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    seq_lens: torch.Tensor
    req_serial: torch.Tensor
    salt: torch.Tensor
    rids_int: torch.Tensor
    qo_indptr: torch.Tensor | None = None
    lens_cpu: HostLens | None = None
    parent_index: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    logits_rows: torch.Tensor | None = None
    input_logprobs: tuple[InputLogprobSpan, ...] = ()
    input_embeds: InputEmbeds | None = None
    state_plan: StatePlan | None = None
    adapters: AdapterTiles | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    spec_info: SpecInput | None = None
    sampling_info: SamplingBatchInfo | None = None

    @property
    def batch_size(self) -> int:
        return self.req_pool_indices.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]
