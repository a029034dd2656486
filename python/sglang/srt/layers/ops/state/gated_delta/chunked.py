"""The gated delta rule with many tokens at once, in torch; the form for the CPU.

In a chunk whose relation "j comes before i" is given, with G the sum of g along i's
path, the corrections u solve a unit triangular system, and S_0 is read once:

    u_i = beta_i (v_i - exp(G_i) S_0^T k_i - sum_{j < i} exp(G_i - G_j) (k_j . k_i) u_j)
    o_i = exp(G_i) S_0^T q_i + sum_{j <= i} exp(G_i - G_j) (k_j . q_i) u_j

The relation is the order in a chunk of a prefill, and ancestry in a tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.gated_delta.inputs import (
    DeltaInputs,
    DeltaNodes,
    require_delta,
)
from sglang.srt.layers.ops.state.shared.counts import count_tokens
from sglang.srt.layers.ops.state.shared.sums import compare_sums, keep_sums
from sglang.srt.layers.ops.state.shared.tracks import (
    CHUNK,
    StateTracks,
    targets_by_len,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.state_sums import StateSums


class _Solved(NamedTuple):
    """Results of a chunk: out and u [..., H, n, d_v], decay (G) [..., H, n]."""

    out: Tensor
    u: Tensor
    decay: Tensor


def gated_delta_decode(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slots: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    require_delta(inputs, state)
    compare_sums(sums, state, slots)
    wide = inputs.widen()
    here = state[slots].float() * torch.exp(wide.g)[..., None, None]
    read = (wide.k[:, :, None, :] @ here).squeeze(2)
    u = wide.beta[..., None] * (wide.v - read)
    here += wide.k[..., None] * u[:, :, None, :]
    state[slots] = here.to(state.dtype)
    keep_sums(sums, state, slots)
    count_tokens(folded, state, slots=slots, lens=1)
    out = (wide.q[:, :, None, :] @ here).squeeze(2) * wide.scale
    return out.to(inputs.v.dtype)


def gated_delta_prefill(
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
    require_delta(inputs, state)
    compare_sums(sums, state, slots, has_state=has_state)
    wide = inputs.widen()
    out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    upto = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=state.device).tril()
    bounds = qo_indptr.tolist()
    known = has_state.tolist()
    targets = targets_by_len(tracks, qo_indptr)
    for row, slot in enumerate(slots.tolist()):
        shape = state.shape[1:]
        here = state[slot].float() if known[row] else state.new_zeros(shape).float()
        for begin in range(bounds[row], bounds[row + 1], CHUNK):
            end = min(begin + CHUNK, bounds[row + 1])
            part = _tokens(wide, begin, end)
            solved = _solve(part, here, upto[: end - begin, : end - begin])
            out[begin:end] = solved.out.transpose(0, 1)
            here = _fold(here, part.k, solved.u, solved.decay)
            for target in targets[row].get(end - bounds[row], ()):
                state[target] = here
        state[slot] = here
    keep_sums(sums, state, slots, tracks=tracks)
    count_tokens(
        folded,
        state,
        slots=slots,
        lens=qo_indptr.diff(),
        has_state=has_state,
        tracks=tracks,
    )
    return out


def gated_delta_tree(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slots: Tensor,
    mask: Tensor,
    nodes: DeltaNodes,
    sums: StateSums | None = None,
) -> Tensor:
    require_delta(inputs, state)
    compare_sums(sums, state, slots)
    rows, width, _ = mask.shape
    wide = inputs.widen()
    group = inputs.v.shape[1] // inputs.k.shape[1]
    nodes.k.copy_(wide.k[:, ::group])
    upto = mask.tril() | torch.eye(width, dtype=torch.bool, device=mask.device)
    trees = DeltaInputs(
        **{
            name: getattr(wide, name).unflatten(0, (rows, width)).transpose(1, 2)
            for name in ("q", "k", "v", "g", "beta")
        },
        scale=wide.scale,
        normalise=False,
    )
    solved = _solve(trees, state[slots].float(), upto[:, None])
    nodes.u.copy_(solved.u.transpose(1, 2).flatten(0, 1))
    nodes.decay.copy_(solved.decay.transpose(1, 2).flatten(0, 1))
    return solved.out.transpose(1, 2).flatten(0, 1).to(inputs.v.dtype)


def gated_delta_commit(
    nodes: DeltaNodes,
    state: Tensor,
    *,
    slots: Tensor,
    path: Tensor,
    path_lens: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> None:
    compare_sums(sums, state, slots, has_state=path_lens > 0)
    group = nodes.u.shape[1] // nodes.k.shape[1]
    for row, length in enumerate(path_lens.tolist()):
        if not length:
            continue
        slot, on_path = slots[row], path[row, :length]
        k = nodes.k[on_path].float().repeat_interleave(group, dim=1)
        state[slot] = _fold(
            state[slot].float(),
            k.transpose(0, 1),
            nodes.u[on_path].float().transpose(0, 1),
            nodes.decay[on_path].t(),
        ).to(state.dtype)
    keep_sums(sums, state, slots[path_lens > 0])
    count_tokens(folded, state, slots=slots, lens=path_lens)


def _tokens(wide: DeltaInputs, begin: int, end: int) -> DeltaInputs:
    """Return tokens begin .. end with heads first."""
    return DeltaInputs(
        **{
            name: getattr(wide, name)[begin:end].transpose(0, 1)
            for name in ("q", "k", "v", "g", "beta")
        },
        scale=wide.scale,
        normalise=False,
    )


def _solve(chunk: DeltaInputs, before: Tensor, upto: Tensor) -> _Solved:
    """Solve a chunk of n tokens, with heads first.

    Args:
        before: [..., H, d_k, d_v], the state that every path starts from.
        upto: [..., n, n] bool, lower triangular with a full diagonal: j is on the path
            that ends at i.
    """
    decay = (upto.float() @ chunk.g[..., None]).squeeze(-1)
    # Masked before exp, which would overflow.
    gap = decay[..., :, None] - decay[..., None, :]
    gap = gap.masked_fill(~upto, float("-inf")).exp()
    beta, kept = chunk.beta[..., None], decay.exp()[..., None]
    keys = chunk.k.transpose(-1, -2)
    rhs = beta * (chunk.v - kept * (chunk.k @ before))
    lower = beta * gap * (chunk.k @ keys)
    u = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    out = kept * (chunk.q @ before) + (gap * (chunk.q @ keys)) @ u
    return _Solved(chunk.scale * out, u, decay)


def _fold(before: Tensor, k: Tensor, u: Tensor, decay: Tensor) -> Tensor:
    """Return the state [H, d_k, d_v] after a path. k: [H, n, d_k], u: [H, n, d_v],
    decay: [H, n].
    """
    last = decay[:, -1]
    weighted = k * torch.exp(last[:, None] - decay)[..., None]
    return torch.exp(last)[:, None, None] * before + weighted.transpose(1, 2) @ u
