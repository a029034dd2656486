"""The short convolution with all tokens at once, in torch; the form for the CPU.

The forms differ only in where a token's predecessor is: a table [T, W] names, for each
token and distance, a token, or -m for the m-th newest input of the row's prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.shared.counts import count_tokens
from sglang.srt.layers.ops.state.shared.sums import compare_sums, keep_sums
from sglang.srt.layers.ops.state.short_conv.conv_filter import (
    ConvFilter,
    require_conv,
    require_state,
)

if TYPE_CHECKING:
    from sglang.srt.layers.ops.state.shared.tracks import StateTracks
    from sglang.srt.mem_cache.state_sums import StateSums


def short_conv_decode(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    require_conv(x, conv, state)
    compare_sums(sums, state, slots)
    taps = torch.cat([state[slots], x[:, :, None]], dim=2)
    state[slots] = taps[:, :, 1:]
    keep_sums(sums, state, slots)
    count_tokens(folded, state, slots=slots, lens=1)
    total = (taps.float() * conv.weight.float()).sum(dim=2)
    return conv.activate(total).to(x.dtype)


def short_conv_prefill(
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
    require_conv(x, conv, state)
    compare_sums(sums, state, slots, has_state=has_state)
    if tracks is not None:
        tracks.require(qo_indptr)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if not len(slots):
        return out
    history = torch.where(has_state[:, None, None], state[slots], 0)
    token = torch.arange(int(qo_indptr[0]), int(qo_indptr[-1]), device=x.device)
    row = torch.searchsorted(qo_indptr[1:], token, right=True)
    begin = qo_indptr[row]
    before = token[:, None] - torch.arange(conv.width, device=x.device)
    sources = torch.where(before >= begin[:, None], before, before - begin[:, None])
    out[token] = _convolve(x, conv, history, row=row, sources=sources)
    begin, lens = qo_indptr[:-1], qo_indptr.diff()
    if tracks is not None:
        row, track = tracks.lens.nonzero(as_tuple=True)
        last = _newest(begin[row], tracks.lens[row, track], conv.width - 1)
        state[tracks.slots[row, track]] = _gather(x, history[row], sources=last)
    last = _newest(begin, lens, conv.width - 1)
    state[slots] = _gather(x, history, sources=last)
    keep_sums(sums, state, slots, tracks=tracks)
    count_tokens(
        folded, state, slots=slots, lens=lens, has_state=has_state, tracks=tracks
    )
    return out


def short_conv_tree(
    x: Tensor,
    conv: ConvFilter,
    state: Tensor,
    *,
    slots: Tensor,
    parent_index: Tensor,
    sums: StateSums | None = None,
) -> Tensor:
    require_conv(x, conv, state)
    compare_sums(sums, state, slots)
    rows, nodes = parent_index.shape
    node = torch.arange(rows * nodes, device=x.device)
    row = node // nodes
    parents = parent_index.flatten()
    parents = torch.where((parents >= row * nodes) & (parents < node), parents, -1)
    sources = [node]
    for _ in range(conv.width - 1):
        here = sources[-1]
        above = parents[here.clamp(min=0)] if len(parents) else here
        sources.append(torch.where(here >= 0, above, here - 1))
    return _convolve(
        x, conv, state[slots], row=row, sources=torch.stack(sources, dim=1)
    )


def short_conv_commit(
    x: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    path: Tensor,
    path_lens: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> None:
    require_state(x, state)
    compare_sums(sums, state, slots)
    width = state.shape[2]
    column = torch.arange(width, device=x.device)
    place = path_lens[:, None] - width + column
    nodes = path.gather(1, place.clamp(min=0)) if path.shape[1] else place
    sources = torch.where(place >= 0, nodes, place)
    state[slots] = _gather(x, state[slots], sources=sources)
    keep_sums(sums, state, slots)
    count_tokens(folded, state, slots=slots, lens=path_lens)


def _convolve(
    x: Tensor, conv: ConvFilter, history: Tensor, *, row: Tensor, sources: Tensor
) -> Tensor:
    """Return the outputs [N, C] of tokens whose inputs `sources` [N, W] names, newest
    first. history: [R, C, W - 1]; row: [N].
    """
    sums = torch.zeros(len(row), x.shape[1], device=x.device)
    for distance in range(conv.width):
        source = sources[:, distance]
        is_token = (source >= 0)[:, None]
        column = (conv.width - 1 + source).clamp(0, conv.width - 2)
        tap = torch.where(is_token, x[source.clamp(min=0)], history[row, :, column])
        sums += tap.float() * conv.weight[:, conv.width - 1 - distance].float()
    return conv.activate(sums).to(x.dtype)


def _newest(begin: Tensor, lens: Tensor, count: int) -> Tensor:
    """Return the sources [N, count] of the newest inputs after the first `lens` [N]
    tokens from `begin` [N] on. The newest input of the prefix is -1.
    """
    place = lens[:, None] - count + torch.arange(count, device=lens.device)
    return torch.where(place >= 0, begin[:, None] + place, place)


def _gather(x: Tensor, history: Tensor, *, sources: Tensor) -> Tensor:
    """Return [R, C, W - 1]: the inputs that `sources` [R, W - 1] names."""
    width = history.shape[2]
    column = (width + sources).clamp(0, width - 1)
    old = history.gather(2, column[:, None, :].expand_as(history))
    if not len(x):
        return old
    new = x[sources.clamp(min=0)].transpose(1, 2)
    return torch.where((sources >= 0)[:, None, :], new, old)
