"""The inputs of one model forward: the batch, and how attention reads the KV cache.

`ForwardBatch` is immutable for the forward that runs it, and carries the same canonical
fields in every mode. Owns no memory and knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpecInput


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
    """Host copies of the lengths, for backends that declare `needs_cpu_seq_lens`."""

    prefix_lens: list[int]
    extend_lens: list[int]

    def padded(self, rows: int, *, prefix_len: int, extend_len: int) -> HostLens:
        """With padding rows of these lengths up to `rows`."""
        missing = rows - len(self.extend_lens)
        return HostLens(
            prefix_lens=self.prefix_lens + [prefix_len] * missing,
            extend_lens=self.extend_lens + [extend_len] * missing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLogprobSpan:
    """Prompt logprobs of one row: new tokens `[start, stop)` of the row's extension.

    The logits of new token j score `next_tokens[j - start]`; `top_k` alternatives each.
    """

    row: int
    start: int
    stop: int
    next_tokens: list[int]
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEmbeds:
    """Embeddings that requests brought instead of tokens.

    Fields:
        rows: int64 [N]; the new tokens that they replace, of T, ascending.
        values: floating point [N, H].
    """

    rows: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """A batch of R rows (requests, or requests x top-k in draft decode) with T new
    tokens.

    Fields:
        input_ids, positions, out_cache_loc: int64 [T]; row after row.
        req_pool_indices: int64 [R]; row of `req_to_token`, 0 is padding.
        prefix_lens, extend_lens: int64 [R]; tokens already in KV, tokens written now;
            `seq_lens` is their sum in every mode.
        qo_indptr: int64 [R + 1]; offsets of the rows in [T]; None in DECODE (one each).
        lens_cpu: host copies, only if the backend needs them.
        parent_index: int64 [T] or None; parent of a new token among the new tokens, -1
            for the last prefix token (trees).
        tree_mask: bool [R, D, D] or None; the new tokens that a new token sees (trees).
        req_serial, salt, rids_int: int64 [R]; request identity.
        prefix_lineages: int64 [R] or None; lineage of each row's prefix, from the
            host's tokens (EXTEND while the KV canary is on).
        logits_rows: int64 [R] or None; token rows that need logits, None: all.
        input_logprobs: prompt spans that need logprobs.
        input_embeds: embeddings that replace those of some tokens, or None.
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
    prefix_lineages: torch.Tensor | None = None
    logits_rows: torch.Tensor | None = None
    input_logprobs: tuple[InputLogprobSpan, ...] = ()
    input_embeds: InputEmbeds | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    spec_info: SpecInput | None = None
    sampling_info: SamplingBatchInfo | None = None

    @property
    def num_rows(self) -> int:
        return self.req_pool_indices.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


# Not frozen: made for every forward, and frozen fields take twice as long to set.
# Nothing sets them later.
@dataclass(slots=True, kw_only=True)
class KVReadView:
    """The slots that an attention backend is about to read, one per metadata group.

    Element i of row r holds position `first_position[r] + i` (0 where None). Its slot
    is `page_table[row_index[r], i // page_size] + i % page_size` (the table's entries
    are first slots of pages; `row_index` None: r itself), or, without a table,
    `slot_indices[indptr[r] + i]`, or, where a backend reads page numbers,
    `page_indices[indptr[r] + i // page_size] * page_size + i % page_size`. Indices
    after those of the last row are not read, and a slot beyond the table is unreadable.

    Fields:
        read_lens: int64 [R], elements of a row.
        page_table: int32 [rows, columns], any strides; row_index: int64 [R] | None.
        indptr: int32 or int64 [R + 1]; slot_indices, page_indices: int32 or int64 [N].
        first_position: int64 [R] | None.
        prev_slots: int64 [R] | None, slot of the token before element 0, -1: none; for
            views of no forward (a sweep).
        entry_size: elements per entry of the table.
        tensors: read_lens, page_table, row_index, indptr, slot_indices or
            page_indices, first_position, prev_slots: for the native ops.
    """

    read_lens: torch.Tensor
    page_size: int = 1
    page_table: torch.Tensor | None = None
    row_index: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    slot_indices: torch.Tensor | None = None
    page_indices: torch.Tensor | None = None
    first_position: torch.Tensor | None = None
    prev_slots: torch.Tensor | None = None
    entry_size: int = field(init=False)
    tensors: list[torch.Tensor | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_paged = self.page_table is not None
        is_flat = (self.slot_indices is None) != (self.page_indices is None)
        has_indptr = self.indptr is not None
        if is_paged == has_indptr or is_flat != has_indptr:
            raise ValueError(
                "KVReadView: give either page_table, or indptr with slot_indices or "
                "page_indices"
            )
        if self.page_size < 1:
            raise ValueError(f"KVReadView: page_size={self.page_size} is not positive")
        slots = self.slot_indices
        self.entry_size = self.page_size if slots is None else 1
        self.tensors = [
            self.read_lens,
            self.page_table,
            self.row_index,
            self.indptr,
            self.page_indices if slots is None else slots,
            self.first_position,
            self.prev_slots,
        ]

    @property
    def entries(self) -> torch.Tensor:
        """The one table that is given."""
        for part in (self.page_table, self.slot_indices, self.page_indices):
            if part is not None:
                return part
        raise AssertionError("checked at construction")
