"""Extend attention over latents on CUDA in its expanded form: keys and values per head.

The latents are multiplied by each head's projections, which is cheaper than attending
latents if many queries attend each one (`configs.latent_form` decides). Prefixes are
expanded block by block, each attended by all tokens of its row, so that memory is
bounded; the new tokens come last. Knows nothing of requests or layers; never waits for
the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.ops.attention.latent.launch import check_softmax
from sglang.srt.layers.ops.attention.latent_expanded.kernels import (
    latent_expanded_kernel,
)
from sglang.srt.layers.ops.attention.latent_expanded.table import (
    HALF_TILES,
    ExpandedShape,
    TileChoice,
    choose_expanded_tile,
    expanded_launch,
    expanded_shape,
    serves,
)
from sglang.srt.layers.ops.attention.shared.args import (
    Lens,
    Partials,
    scale_args,
    tokens_args,
)
from sglang.srt.utils.triton_launch import supports_dependent_launch

# Bytes that the copy engine aligns rows to.
_ALIGNMENT = 16


class PrefixBlock(NamedTuple):
    """A part of the prefixes, row after row.

    Fields:
        slots: int64 [elements].
        indptr: int64 [R + 1]; elements of row r are indptr[r] .. indptr[r + 1].
    """

    slots: Tensor
    indptr: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """How latents become the keys and values of heads.

    Fields:
        weight: [heads * (nope + value), rank], each head's projection to keys, then its
            projection to values.
        new_slots: int64 [T], slots of the new tokens.
        prefix: blocks of the prefixes; empty if no row has a prefix.
    """

    weight: Tensor
    new_slots: Tensor
    prefix: tuple[PrefixBlock, ...]


def prefix_blocks(
    page_table: Tensor,
    *,
    row_index: Tensor | None,
    prefix_lens: Tensor,
    lens: list[int],
    page_size: int,
    most: int,
) -> tuple[PrefixBlock, ...]:
    """Cut the prefixes into blocks of at most `most` elements.

    Args:
        page_table, row_index, prefix_lens: as in `extend_attention`.
        lens: `prefix_lens` on the host.
    """
    total = sum(lens)
    if total == 0:
        return ()
    indptr = functional.pad(prefix_lens.cumsum(0), (1, 0))
    row = torch.arange(len(lens), device=prefix_lens.device)
    row = row.repeat_interleave(prefix_lens, output_size=total)
    element = torch.arange(total, device=row.device) - indptr[row]
    table_row = row if row_index is None else row_index[row]
    slots = page_table[table_row, element // page_size] + element % page_size
    return tuple(
        PrefixBlock(part, (indptr - i * most).clamp(0, len(part)))
        for i, part in enumerate(slots.split(most))
    )


class _Call(NamedTuple):
    """Arguments that all launches of a call share."""

    q: Tensor
    latents: Tensor
    weight: Tensor
    lens: Lens
    sm_scale: float
    out: Tensor
    shape: ExpandedShape
    tile: TileChoice


def expanded_extend_attention(
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
    out: Tensor,
    expansion: Expansion,
) -> None:
    """Causal extend attention over latents of the pool with queries and results of
    heads.

    This is `latent_extend_attention`, but its queries are not yet multiplied by the
    projections to keys, and its results already are by the projections to values.

    Args:
        q: [T, Hq, nope + rope], rotated, contiguous heads and channels.
        k_cache: [slots, 1, rank + rope]. v_cache: its first channels.
        page_table, row_index, prefix_lens, page_size, positions: ignored; `expansion`
            has the slots.
        out: [T, Hq, value], contiguous heads and channels.
        others: as in `extend_attention`.

    Raises:
        ValueError: a tree mask, a window, a cap or sinks, or shapes that do not fit.
    """
    check_softmax(window, logit_cap, sinks)
    if tree_mask is not None:
        raise ValueError("tree_mask: expanded latents are attended causally")
    rank = v_cache.shape[2]
    rope = k_cache.shape[2] - rank
    _check(q, out, expansion.weight, rank=rank, rope=rope)
    shape = expanded_shape(
        q_heads=q.shape[1],
        rank=rank,
        nope=q.shape[2] - rope,
        rope=rope,
        value=out.shape[2],
    )
    call = _Call(
        q=q,
        latents=k_cache[:, 0],
        weight=expansion.weight,
        lens=Lens(qo_indptr, prefix_lens),
        sm_scale=sm_scale,
        out=out,
        shape=shape,
        tile=choose_expanded_tile(shape, q.element_size()),
    )
    running = None
    for block in expansion.prefix:
        has_past = running is not None
        if running is None:
            running = _empty_running(out)
        _attend(call, block.slots, block.indptr, running, has_past=has_past)
    _attend(call, expansion.new_slots, None, running, has_past=running is not None)


def _empty_running(out: Tensor) -> Partials:
    """Allocate room for the results of prefixes, float32."""
    return Partials(
        out.new_empty(out.numel(), dtype=torch.float32),
        out.new_empty(out.shape[0] * out.shape[1], dtype=torch.float32),
    )


def _attend(
    call: _Call,
    slots: Tensor,
    indptr: Tensor | None,
    running: Partials | None,
    *,
    has_past: bool,
) -> None:
    """Expand the latents of `slots` and attend them.

    Args:
        indptr: from `PrefixBlock`, or None if `slots` belong to the new tokens.
        running: results of the prefixes, or None if there are none.
    """
    shape, tile = call.shape, call.tile
    latents = call.latents.index_select(0, slots)
    kv = _expand(latents[:, : shape.rank], call.weight)
    rows = call.lens.prefix_lens.shape[0]
    launch = expanded_launch(
        shape,
        tile,
        rows=rows,
        is_causal=indptr is None,
        has_past=has_past,
        pdl=supports_dependent_launch(call.q.device),
    )
    tiles = call.q.shape[0] // tile.block_m + rows
    latent_expanded_kernel[(tiles * shape.q_heads,)](
        tokens_args(call.q),
        tokens_args(call.out),
        running,
        call.lens,
        indptr,
        _tiles(kv, tile.block_n, shape.block_nope),
        _tiles(latents, tile.block_n, shape.block_rope),
        _tiles(kv, tile.block_n, shape.block_value),
        rows,
        tiles,
        scale_args(call.sm_scale, 0.0),
        **launch.options(),
    )


def _expand(latents: Tensor, weight: Tensor) -> Tensor:
    """Map latents [N, rank] to keys and values [N, heads * (nope + value)], with rows
    aligned for the copy engine."""
    count, width = len(latents), len(weight)
    step = _ALIGNMENT // weight.element_size()
    kv = weight.new_empty(count, -(-width // step) * step)[:, :width]
    return torch.mm(latents, weight.t(), out=kv)


def _tiles(rows: Tensor, block_n: int, channels: int) -> TensorDescriptor:
    return TensorDescriptor(
        rows, list(rows.shape), [rows.stride(0), 1], [block_n, channels]
    )


def _check(q: Tensor, out: Tensor, weight: Tensor, *, rank: int, rope: int) -> None:
    """Reject what the kernel cannot address.

    Raises:
        ValueError: naming the argument, its value and what is expected.
    """
    tokens, q_heads, width = q.shape
    value = out.shape[2]
    if not serves(nope=width - rope, rope=rope, value=value):
        raise ValueError(
            f"q has {width} channels, {rope} of them rotated, and out {value}: too "
            f"many for a tile of {max(HALF_TILES)}"
        )
    for name, tensor, size in (("q", q, width), ("out", out, value)):
        is_whole = tensor.stride(2) == 1 and (q_heads == 1 or tensor.stride(1) == size)
        if tensor.shape != (tokens, q_heads, size) or not is_whole:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}: pass [{tokens}, {q_heads}, {size}] with "
                "contiguous heads and channels"
            )
    expected = (q_heads * (width - rope + value), rank)
    if weight.shape != expected or not q.dtype == out.dtype == weight.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} of {weight.dtype}, q of {q.dtype}, out "
            f"of {out.dtype}: pass {expected} and one dtype"
        )
