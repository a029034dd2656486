"""Packs the masks of draft trees into the bits that FlashInfer's prefill kernels read.

Knows trees and lengths, but no batches and no FlashInfer.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def pack_tree_mask_kernel(
    tree_mask,
    prefix_lens,
    indptr,
    out,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    length = prefix + NODES
    tree = tree_mask + row.to(tl.int64) * NODES * NODES
    packed = tl.zeros([BLOCK], tl.int32)
    for bit in tl.static_range(8):
        cell = byte * 8 + bit
        query = cell // length
        new = cell - query * length - prefix
        inside = query < NODES
        is_new = inside & (new >= 0)
        allowed = tl.load(tree + query * NODES + new, mask=is_new, other=0)
        allowed = tl.where(new < 0, 1, (allowed != 0).to(tl.int32))
        packed |= tl.where(inside, allowed, 0) << bit
    tl.store(out + begin + byte, packed.to(tl.uint8), mask=byte < count)


def pack_tree_mask(
    tree_mask: Tensor,
    *,
    prefix_lens: Tensor,
    indptr: Tensor,
    out: Tensor,
    max_bytes: int,
) -> None:
    """Bit e % 8 of byte e // 8 of row r, with e = node * (prefix_lens[r] + N) +
    element, says whether the node may attend the element. Nodes attend the whole
    prefix, and other nodes as `tree_mask` says.

    Args:
        tree_mask: [R, N, N] bool, contiguous.
        prefix_lens: [R] int64.
        indptr: [R + 1] int32; row r has the bytes indptr[r] .. indptr[r + 1], at least
            N * (prefix_lens[r] + N) / 8, rounded up.
        out: [at least indptr[R]] uint8; bytes after that are left alone.
        max_bytes: at least the bytes of the longest row. It sizes the grid, so that the
            host need not read `indptr`.

    Raises:
        ValueError: a mask that would be misread.
    """
    rows, nodes, _ = tree_mask.shape
    if tree_mask.dtype is not torch.bool or not tree_mask.is_contiguous():
        raise ValueError(
            f"pack_tree_mask: tree_mask is {tree_mask.dtype} with strides "
            f"{list(tree_mask.stride())}; expected contiguous bool"
        )
    pack_tree_mask_kernel[(rows, triton.cdiv(max_bytes, _BLOCK))](
        tree_mask.view(torch.uint8),
        prefix_lens,
        indptr,
        out,
        NODES=nodes,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def pack_tree_mask_ref(
    tree_mask: Tensor,
    *,
    prefix_lens: Tensor,
    indptr: Tensor,
    out: Tensor,
    max_bytes: int,
) -> None:
    """Torch oracle of `pack_tree_mask`; reads the lengths on the host."""
    weights = 1 << torch.arange(8, device=out.device)
    bounds = indptr.tolist()
    for row, prefix in enumerate(prefix_lens.tolist()):
        own = tree_mask[row]
        seen = torch.cat((own.new_ones(len(own), prefix), own), dim=1).flatten()
        bits = torch.nn.functional.pad(seen.long(), (0, -len(seen) % 8))
        packed = (bits.view(-1, 8) * weights).sum(1)
        out[bounds[row] : bounds[row + 1]] = packed.to(torch.uint8)
