"""The gated delta rule, token by token (Yang et al. 2024, arXiv 2412.06464).

S' = exp(g) S + k u^T with u = beta (v - exp(g) S^T k), and out = scale S'^T q.

Knows slots of state and tokens; knows no requests, layers or models. A slot holds S of
each value head for the tokens folded into it. Slot 0 is scratch: padded rows name it,
and it may hold anything. Other slots are distinct within a batch. All arithmetic is
float32; a state of another dtype is rounded when it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.gated_delta.inputs import (
    DeltaInputs,
    DeltaNodes,
    require_delta,
)
from sglang.srt.layers.ops.state.shared.counts import counts_or_scratch
from sglang.srt.layers.ops.state.shared.paths import accepted
from sglang.srt.layers.ops.state.shared.sums import compare_sums, keep_sums
from sglang.srt.layers.ops.state.shared.tracks import (
    StateTracks,
    targets_by_len,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.state_sums import StateSums


def gated_delta_decode_ref(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slots: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    """Fold one token per row into its state and return the outputs.

    Args:
        inputs: B tokens.
        state: [slots, H_v, d_k, d_v], float32, bfloat16 or float16, each slot
            contiguous; the rows' slots are updated.
        slots: [B] int64.
        folded: int32 [slots] of any stride, or None; how many tokens each slot's state
            holds. Written beside the state.
        sums: checksums of `state`, or None. Those of what is loaded are compared, and
            a slot that differs is marked; those of what is stored are kept. All forms
            have them; trees store nothing.

    Returns:
        [B, H_v, d_v] of the dtype of `v`, contiguous.

    Raises:
        ValueError: shapes do not fit, or H_k does not divide H_v.
    """
    require_delta(inputs, state)
    compare_sums(sums, state, slots)
    wide = inputs.widen()
    counts = counts_or_scratch(folded, state)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    for row, slot in enumerate(slots.tolist()):
        out[row], _, after = _step(wide, row, state[slot].float())
        state[slot] = after
        counts[slot] += 1
    keep_sums(sums, state, slots)
    return out


def gated_delta_prefill_ref(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slots: Tensor,
    qo_indptr: Tensor,
    has_state: Tensor,
    tracks: StateTracks | None = None,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    """Like `gated_delta_decode`, for the tokens of ragged rows.

    Args:
        inputs: T tokens. state, slots, folded: as in `gated_delta_decode`, for R rows.
        qo_indptr: [R + 1] int64, ascending; the tokens of row r are qo_indptr[r] ..
            qo_indptr[r + 1].
        has_state: [R] bool; a row without state starts at zeros, and its slot is not
            read. Its count starts at 0.
        tracks: other slots that get the state after some of a row's tokens; none of
            them is read.

    Returns:
        [T, H_v, d_v]; zeros for tokens outside all rows.

    Raises:
        ValueError: also for tracks that cannot be stored, which kernels ignore.
    """
    require_delta(inputs, state)
    compare_sums(sums, state, slots, has_state=has_state)
    wide = inputs.widen()
    out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    counts = counts_or_scratch(folded, state)
    bounds = qo_indptr.tolist()
    targets = targets_by_len(tracks, qo_indptr)
    for row, slot in enumerate(slots.tolist()):
        here, count = state[slot].float(), int(counts[slot])
        if not has_state[row]:
            here, count = torch.zeros_like(here), 0
        for token in range(bounds[row], bounds[row + 1]):
            out[token], _, here = _step(wide, token, here)
            count += 1
            for target in targets[row].get(token + 1 - bounds[row], ()):
                state[target], counts[target] = here, count
        state[slot], counts[slot] = here, count
    keep_sums(sums, state, slots, tracks=tracks)
    return out


def gated_delta_tree_ref(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slots: Tensor,
    mask: Tensor,
    nodes: DeltaNodes,
    sums: StateSums | None = None,
) -> Tensor:
    """Like `gated_delta_decode`, for each node of B trees as the token after its
    ancestors. Writes no state.

    Args:
        inputs: B * D tokens. slots: as in `gated_delta_decode`. state: read only.
        mask: [B, D, D] bool, contiguous; mask[r, i, j]: j is an ancestor of i, or i.
            Ancestors come first: what it says of j > i is ignored.
        nodes: B * D nodes, written.

    Returns:
        [B * D, H_v, d_v].
    """
    require_delta(inputs, state)
    compare_sums(sums, state, slots)
    wide = inputs.widen()
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    group = inputs.v.shape[1] // inputs.k.shape[1]
    width = mask.shape[1]
    nodes.k.copy_(wide.k[:, ::group])
    for row, slot in enumerate(slots.tolist()):
        states: list[Tensor] = []
        for node, ancestors in enumerate(mask[row].tolist()):
            token = row * width + node
            # The nearest of the earlier nodes on the path.
            parent = max((j for j in range(node) if ancestors[j]), default=None)
            before = state[slot].float() if parent is None else states[parent]
            out[token], nodes.u[token], after = _step(wide, token, before)
            states.append(after)
            nodes.decay[token] = wide.g[token]
            if parent is not None:
                nodes.decay[token] += nodes.decay[row * width + parent]
    return out


def gated_delta_commit_ref(
    nodes: DeltaNodes,
    state: Tensor,
    *,
    slots: Tensor,
    path: Tensor,
    path_lens: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> None:
    """Fold accepted nodes into the state, as if they had been decoded in order.

    S' = exp(G_n) S + sum_j exp(G_n - G_j) k_j u_j^T over the path, n its last node.

    Args:
        nodes: from `gated_delta_tree`, for B trees.
        state: as in `gated_delta_decode`, unchanged since the verification; the rows'
            slots are updated.
        slots: [B] int64.
        path: [B, P] int64, the accepted nodes from the root on, as indices among all
            nodes; padded at the end.
        path_lens: [B] int64, 0 .. P; a row with 0 keeps its state.
        folded: as in `gated_delta_decode`.
    """
    compare_sums(sums, state, slots, has_state=path_lens > 0)
    counts = counts_or_scratch(folded, state)
    group = nodes.u.shape[1] // nodes.k.shape[1]
    rows = zip(slots.tolist(), accepted(path, path_lens), strict=True)
    for slot, on_path in rows:
        here, before = state[slot].float(), torch.zeros_like(nodes.decay[0])
        for node in on_path:
            k = nodes.k[node].float().repeat_interleave(group, dim=0)
            decay = torch.exp(nodes.decay[node] - before)
            here = decay[:, None, None] * here + _outer(k, nodes.u[node].float())
            before = nodes.decay[node]
        state[slot] = here
        counts[slot] += len(on_path)
    keep_sums(sums, state, slots[path_lens > 0])


def _step(
    wide: DeltaInputs, token: int, before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out [H_v, d_v], u [H_v, d_v], state after it) of one token."""
    k, q = wide.k[token], wide.q[token]
    decayed = torch.exp(wide.g[token])[:, None, None] * before
    u = wide.beta[token][:, None] * (wide.v[token] - _read(decayed, k))
    after = decayed + _outer(k, u)
    return wide.scale * _read(after, q), u, after


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Return S^T k of each head."""
    return torch.einsum("hkv,hk->hv", state, key)


def _outer(k: Tensor, u: Tensor) -> Tensor:
    return torch.einsum("hk,hv->hkv", k, u)
