"""Copies of whole slots with one launch and no temporary. Each thread moves 16 bytes at
a time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.utils.triton_launch import (
    block_of,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

LINE_BYTES = 16
MOST_LINES = 1024
"""Lines of a program: 8 for each thread, so that enough loads are on their way."""


@triton.jit(
    do_not_specialize=["lines", "slot_lines"],
    do_not_specialize_on_alignment=["dst", "src"],
)
def copy_kernel(
    tensor,
    dst,
    src,
    lines,
    slot_lines,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`lines` of a slot, and `slot_lines` from one slot to the next, are counted in
    lines of LINE elements, which shows the compiler that every line is aligned.
    """
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(1)
    place = line.to(tl.int64)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    is_line = (line < lines)[:, None]
    let_next_start(PDL)
    wait_for_inputs(PDL)
    source = tl.load(src + copy) * slot_lines * LINE
    target = tl.load(dst + copy) * slot_lines * LINE
    is_line &= source != target
    value = tl.load(tensor + source + place, mask=is_line)
    tl.store(tensor + target + place, value, mask=is_line)


def copy_slots(tensor: Tensor, *, dst: Tensor, src: Tensor) -> None:
    """`copy_slots` of `op.py`.

    Raises:
        ValueError: a slot has gaps, or the indices are not int64 [n].
    """
    copies = len(dst)
    require("copy_slots", copies, torch.int64, dst=dst, src=src)
    if not copies or not tensor.numel():
        return
    if not tensor[0].is_contiguous():
        raise ValueError("copy_slots: the elements of a slot are not contiguous")
    line = line_size(tensor)
    lines = tensor[0].numel() // line
    block = min(block_of(lines), MOST_LINES)
    # The number of copies is in the grid alone, so it compiles nothing.
    copy_kernel[(triton.cdiv(lines, block), copies)](
        tensor,
        dst,
        src,
        lines,
        tensor.stride(0) // line,
        LINE=line,
        BLOCK=block,
        num_warps=4,
        **launch_options(tensor.device),
    )


def line_size(tensor: Tensor) -> int:
    """Return the elements that a thread moves at once: 16 bytes, or fewer if lines of
    16 bytes would not be aligned in every slot.
    """
    size = tensor.itemsize
    return math.gcd(
        LINE_BYTES // size,
        tensor[0].numel(),
        tensor.stride(0),
        tensor.data_ptr() // size,
    )
