"""SGLang's `ForwardBatch` as a `ForwardView`.

Works on the tensors that the model gets; inside a CUDA graph those are the runner's
static ones. Nothing here waits for the device, and no shape depends on a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kv_canary.engines.hooks import Refusal
from kv_canary.records import WriterKind
from kv_canary.runtime.uploads import upload_rows
from kv_canary.view import ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.engines.sglang.tree import Trees

IDLE = "IDLE"
PREFILL = "EXTEND"
VERIFY = "TARGET_VERIFY"
DRAFT_EXTEND = "DRAFT_EXTEND_V2"
"""The mode of a draft model's forward after a verification; `draft.py` makes the
batch."""
_TREES = {VERIFY: WriterKind.VERIFY, DRAFT_EXTEND: WriterKind.DRAFT_EXTEND}


class BatchRows:
    """The host's facts about the rows of a forward, at fixed addresses.

    Attributes:
        serials, salts: int64 [capacity].
        live: int64 [1], rows of the forward; rows after them are padding. 0 outside
            forwards, so a graph's capture and warm-up record nothing.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._numbers = torch.zeros(2, capacity, dtype=torch.int64, device=device)
        self.serials, self.salts = self._numbers.unbind()
        self.live = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        return self._numbers.shape[1]

    def begin(self, serials: Sequence[int], salts: Sequence[int]) -> None:
        """Set the rows of the forward that is about to run."""
        values = upload_rows([serials, salts], self.live.device)
        self._numbers[:, : len(serials)].copy_(values)
        self.live.fill_(len(serials))

    def end(self) -> None:
        self.live.zero_()


class Lengths(NamedTuple):
    """Tokens of rows before a forward, and in it: int64 [R] each."""

    prefix: Tensor
    extend: Tensor


def forward_mode_name(batch: Any) -> str:
    return str(batch.forward_mode.name)


def has_trees(mode: str) -> bool:
    """Whether rows of such a forward are trees that keep only one path."""
    return mode in _TREES


def read_lengths(batch: Any) -> Lengths:
    """Return the lengths of a batch's rows.

    Raises:
        Refusal: an unsupported mode.
    """
    mode = forward_mode_name(batch)
    if mode == "DECODE":
        lens = batch.seq_lens.long()
        return Lengths(lens - 1, torch.ones_like(lens))
    if mode in (PREFILL, "MIXED"):
        return Lengths(batch.extend_prefix_lens.long(), batch.extend_seq_lens.long())
    if mode in _TREES:
        lens = batch.seq_lens.long()
        return Lengths(
            lens, torch.full_like(lens, int(batch.spec_info.draft_token_num))
        )
    raise Refusal(
        f"looked for a forward that is DECODE, EXTEND, MIXED, {VERIFY} or {IDLE}, "
        f"found {mode}"
    )


def make_view(
    batch: Any,
    rows: BatchRows,
    trees: Trees,
    req_to_token: Tensor,
    seeds: Tensor | None = None,
) -> ForwardView:
    """View a `ForwardBatch` as a `ForwardView`.

    Args:
        trees: trees of the verification, if it is one.
        req_to_token: int32 [rows, columns], slots by row and position.
        seeds: int64 [rows], lineages before position 0, for a draft model's pool.

    Raises:
        Refusal: an unsupported mode, or too many rows.
    """
    indices = batch.req_pool_indices.long()
    n, device = len(indices), indices.device
    if n > rows.capacity:
        raise Refusal(f"looked for {rows.capacity} rows at most, found {n}")
    prefix, extend = read_lengths(batch)
    mode = forward_mode_name(batch)
    # Some versions leave rows of earlier, larger batches after the last one.
    is_live = torch.arange(n, device=device) < rows.live
    req_rows = torch.where(is_live, indices, 0)
    indptr = parents = mask = None
    depth, kind = 0, WriterKind.DECODE
    if mode in _TREES:
        nodes, kind = int(batch.spec_info.draft_token_num), _TREES[mode]
        depth = max(nodes - 1, 1)
        indptr = torch.arange(n + 1, device=device) * nodes
        parents, mask = trees.of(n, nodes)
    elif mode != "DECODE":
        kind, starts = WriterKind.EXTEND, batch.extend_start_loc.long()
        indptr = torch.cat((starts, starts[-1:] + extend[-1:]))
    return ForwardView(
        req_rows=req_rows,
        prefix_lens=prefix,
        extend_lens=extend,
        input_ids=batch.input_ids.long(),
        positions=batch.positions.long(),
        out_cache_loc=batch.out_cache_loc.long(),
        serials=rows.serials[:n],
        salts=rows.salts[:n],
        seed_table=seeds,
        qo_indptr=indptr,
        parent_index=parents,
        tree_mask=mask,
        max_depth=depth,
        reads=[
            KVReadView(
                read_lens=prefix + extend, page_table=req_to_token, row_index=req_rows
            )
        ],
        writer_kind=kind,
    )
