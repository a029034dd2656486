"""Native forms of paged attention."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.layers.ops.attention.op import tree_positions
from sglang_kernels import ops


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> None:
    if sinks is None and logit_cap == 0.0:
        # Every decode step does this in each layer; packing arguments would cost time.
        ops.decode_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            row_index,
            read_lens,
            page_size,
            sm_scale,
            window,
            out,
        )
        return
    common = (q, k_cache, v_cache, page_table, row_index, read_lens)
    numbers = (page_size, sm_scale, window)
    ops.decode_attention_full(*common, *numbers, logit_cap, sinks, out)


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    positions: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor,
) -> None:
    positions = tree_positions(window, tree_mask, positions)
    common = (q, k_cache, v_cache, page_table, row_index, qo_indptr, prefix_lens)
    numbers = (page_size, sm_scale, window)
    if sinks is None and logit_cap == 0.0 and positions is None:
        ops.extend_attention(*common, *numbers, tree_mask, out)
    else:
        rest = (logit_cap, sinks, tree_mask, positions, out)
        ops.extend_attention_full(*common, *numbers, *rest)
