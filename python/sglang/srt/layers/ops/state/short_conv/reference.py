"""Causal depthwise convolution over the last W inputs of a sequence, token by token.

Knows slots of state and tokens; knows no requests, layers or models. A slot keeps the
last W - 1 inputs of its prefix, oldest first; zeros stand before the first token. Slot
0 is scratch: padded rows name it, and it may hold anything. Other slots are distinct
within a batch. All sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.shared.counts import counts_or_scratch
from sglang.srt.layers.ops.state.shared.paths import accepted
from sglang.srt.layers.ops.state.shared.sums import compare_sums, keep_sums
from sglang.srt.layers.ops.state.shared.tracks import (
    StateTracks,
    targets_by_len,
)
from sglang.srt.layers.ops.state.short_conv.conv_filter import (
    ConvFilter,
    require_conv,
    require_state,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.state_sums import StateSums


def short_conv_decode_ref(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    """Return f(sum_i weight[i] * input[t - W + 1 + i]) of one token per row.

    Args:
        x: [B, C], float32, bfloat16 or float16; channels contiguous.
        conv: the filter, with f.
        state: [slots, C, W - 1] of the dtype of `x`, each slot contiguous; the rows'
            slots are updated.
        slots: [B] int64.
        folded: int32 [slots] of any stride, or None; how many tokens each slot's state
            holds. Written beside the state.
        sums: checksums of `state`, or None. Those of what is loaded are compared, and
            a slot that differs is marked; those of what is stored are kept. All forms
            have them; trees store nothing.

    Returns:
        [B, C] of the dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    require_conv(x, conv, state)
    compare_sums(sums, state, slots)
    counts = counts_or_scratch(folded, state)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for row, slot in enumerate(slots.tolist()):
        out[row], state[slot] = _step(x[row], conv, state[slot])
        counts[slot] += 1
    keep_sums(sums, state, slots)
    return out


def short_conv_prefill_ref(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    qo_indptr: Tensor,
    has_state: Tensor,
    tracks: StateTracks | None = None,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    """Like `short_conv_decode`, for the tokens of ragged rows.

    Args:
        x: [T, C]. conv, state, slots, folded: as in `short_conv_decode`, for R rows.
        qo_indptr: [R + 1] int64, ascending; the tokens of row r are qo_indptr[r] ..
            qo_indptr[r + 1].
        has_state: [R] bool; a row without state starts at zeros, and its slot is not
            read. Its count starts at 0.
        tracks: other slots that get the state after some of a row's tokens; none of
            them is read.

    Returns:
        [T, C]; zeros for tokens outside all rows.

    Raises:
        ValueError: also for tracks that cannot be stored, which kernels ignore.
    """
    require_conv(x, conv, state)
    compare_sums(sums, state, slots, has_state=has_state)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    counts = counts_or_scratch(folded, state)
    bounds = qo_indptr.tolist()
    targets = targets_by_len(tracks, qo_indptr)
    for row, slot in enumerate(slots.tolist()):
        window, count = state[slot].clone(), int(counts[slot])
        if not has_state[row]:
            window.zero_()
            count = 0
        for token in range(bounds[row], bounds[row + 1]):
            out[token], window = _step(x[token], conv, window)
            count += 1
            for target in targets[row].get(token + 1 - bounds[row], ()):
                state[target], counts[target] = window, count
        state[slot], counts[slot] = window, count
    keep_sums(sums, state, slots, tracks=tracks)
    return out


def short_conv_tree_ref(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    parent_index: Tensor,
    sums: StateSums | None = None,
) -> Tensor:
    """Like `short_conv_decode`, for each node of B trees as the token after its
    parent. Writes no state.

    Args:
        x: [B * D, C]. conv, slots: as in `short_conv_decode`. state: read only.
        parent_index: [B, D] int64, the parent's index among all B * D nodes. A node
            that does not name an earlier node of its own tree follows the prefix.

    Returns:
        [B * D, C].
    """
    require_conv(x, conv, state)
    compare_sums(sums, state, slots)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    nodes = parent_index.shape[1]
    parents = parent_index.flatten().tolist()
    windows: list[Tensor] = []
    for node, parent in enumerate(parents):
        tree = node // nodes
        is_child = tree * nodes <= parent < node
        window = windows[parent] if is_child else state[slots[tree]]
        out[node], after = _step(x[node], conv, window)
        windows.append(after)
    return out


def short_conv_commit_ref(
    x: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    path: Tensor,
    path_lens: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> None:
    """Fold the inputs of accepted nodes into the state, as if decoded in order.

    Args:
        x: [B * D, C], the inputs of `short_conv_tree`.
        state: [slots, C, W - 1] of the dtype of `x`; the rows' slots are updated.
        slots: [B] int64.
        path: [B, P] int64, the accepted nodes from the root on, as indices among all
            nodes; padded at the end.
        path_lens: [B] int64, 0 .. P; a row with 0 keeps its state.
        folded: as in `short_conv_decode`.
    """
    require_state(x, state)
    compare_sums(sums, state, slots)
    counts = counts_or_scratch(folded, state)
    rows = zip(slots.tolist(), accepted(path, path_lens), strict=True)
    for slot, nodes in rows:
        taps = torch.cat([state[slot], x[nodes].t()], dim=1)
        state[slot] = taps[:, taps.shape[1] - state.shape[2] :]
        counts[slot] += len(nodes)
    keep_sums(sums, state, slots)


def _step(x: Tensor, conv: ConvFilter, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of one token, and the window [C, W - 1] after it."""
    taps = torch.cat([window, x[:, None]], dim=1)
    sums = (taps.float() * conv.weight.float()).sum(dim=1)
    return conv.activate(sums).to(x.dtype), taps[:, 1:]
