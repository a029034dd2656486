"""Triton kernel that divides rows. torch's own reads a number per row for each element
and reaches a third of the bandwidth (256 x 128,256 on an H200: 161 us)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.utils.triton_launch import (
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

_BLOCK = 4096


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def divide_kernel(
    logits,
    temperatures,
    out,
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    inside = index < vocab
    value = tl.load(logits + row * row_stride + index, mask=inside, other=0.0)
    # Rounds like torch's division.
    temperature = tl.full((BLOCK,), 0.0, tl.float32) + tl.load(temperatures + row)
    divided = tl.div_rn(value.to(tl.float32), temperature)
    tl.store(out + row * vocab + index, divided, mask=inside)


def divide_rows(logits: Tensor, temperatures: Tensor) -> Tensor:
    """`sampling.ops.divide_rows` in one launch.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, vocab = logits.shape
    require("divide_rows", rows, torch.float32, temperatures=temperatures)
    if logits.stride(1) != 1:
        raise ValueError(f"divide_rows: logits have strides {list(logits.stride())}")
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    divide_kernel[(triton.cdiv(vocab, block), rows)](
        logits,
        temperatures,
        out,
        vocab,
        logits.stride(0),
        BLOCK=block,
        **launch_options(logits.device),
    )
    return out
