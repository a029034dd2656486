"""Triton kernels that divide rows by temperatures and take their softmax, with the bits
of torch's.

torch takes a row with one block of 1,024 threads, in three passes over float32. Here
programs share the rows, and read the logits as they are. For the same sum the same
terms are added in the same order: a program does the work of some of torch's threads,
and the last one of a row adds up what the threads have, as torch's warps do.

```
torch's thread   0        1        ..  1023     0        ..   ids of a row
adds up          0 .. 3   4 .. 7       .. 4095  4096 .. 4099
```
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from sglang.srt.sampling.ops.row_ops import require_together
from sglang.srt.sampling.ops.softmax_rows.op import EACH, softmax_rows_ref, splits_vocab
from sglang.srt.sampling.ops.triton_draw import MAX_ROWS, row_of, split_rows
from sglang.srt.utils.triton_launch import (
    Scratch,
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

_THREADS = tl.constexpr(1024)
_EACH = tl.constexpr(EACH)
"""Neighbours that a thread of torch takes at a time."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_SHARE = 128
"""Threads of torch that a program does the work of."""
_SCRATCH = Scratch(partial_bytes=0, counters=MAX_ROWS)


@triton.jit
def _divided(value, temperature):
    # Rounds like torch's division.
    value = value.to(tl.float32)
    return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """CUDA's expf, as torch's; the interpreter has none."""
    if EXACT:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _largest(
    maxima, program, temperature, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr
):
    """Return what torch takes for the largest divided logit of the row."""
    split = tl.arange(0, SPLITS_BLOCK)
    found = tl.load(
        maxima + program * SPLITS + split, mask=split < SPLITS, other=float("-inf")
    )
    # Division by a positive number keeps the order.
    divided = tl.div_rn(tl.max(found, axis=0), temperature)
    return tl.maximum(divided, _LOWEST)


@triton.jit
def max_kernel(
    logits,
    rows,
    maxima,
    vocab,
    row_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    program = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = row_of(rows, program)
    if row >= 0:
        index = split * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(
            logits + row * row_stride + index, mask=index < vocab, other=float("-inf")
        )
        largest = tl.max(value.to(tl.float32), axis=0)
        tl.store(maxima + program * SPLITS + split, largest)


@triton.jit
def _load(row_logits, first, end, COUNT: tl.constexpr):
    index = first + tl.arange(0, COUNT)
    return tl.load(row_logits + index, mask=index < end, other=float("-inf"))


@triton.jit
def _add_four(
    total, value, largest, temperature, SHARE: tl.constexpr, EXACT: tl.constexpr
):
    """Add to each thread's total the exponentials of its four neighbours, in their
    order."""
    weight = _exp(_divided(value, temperature) - largest, EXACT)
    even, odd = tl.split(tl.reshape(weight, (SHARE, 2, 2)))
    weight0, weight2 = tl.split(even)
    weight1, weight3 = tl.split(odd)
    return (((total + weight0) + weight1) + weight2) + weight3


@triton.jit
def _sum_of_threads(sums):
    """Add up [1024] as torch's block does: each warp its lanes, halving them, and one
    warp the warps."""
    lanes = tl.reshape(sums, (32, 2, 16))
    lanes = tl.reshape(tl.sum(lanes, axis=1), (32, 2, 8))
    lanes = tl.reshape(tl.sum(lanes, axis=1), (32, 2, 4))
    lanes = tl.reshape(tl.sum(lanes, axis=1), (32, 2, 2))
    lanes = tl.reshape(tl.sum(lanes, axis=1), (32, 2, 1))
    warps = tl.reshape(tl.sum(lanes, axis=1), (2, 16))
    warps = tl.reshape(tl.sum(warps, axis=0), (2, 8))
    warps = tl.reshape(tl.sum(warps, axis=0), (2, 4))
    warps = tl.reshape(tl.sum(warps, axis=0), (2, 2))
    return tl.sum(tl.sum(warps, axis=0), axis=0)


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def sum_kernel(
    logits,
    rows,
    temperatures,
    maxima,
    sums,
    totals,
    counters,
    vocab,
    row_stride,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    share = tl.program_id(0)
    program = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = row_of(rows, program)
    if row >= 0:
        row_logits = logits + row * row_stride
        temperature = tl.load(temperatures + program)
        largest = _largest(maxima, program, temperature, SPLITS, SPLITS_BLOCK)
        total = _add_share(row_logits, share, vocab, largest, temperature, SHARE, EXACT)
        own = sums + program * _THREADS
        tl.store(own + share * SHARE + tl.arange(0, SHARE), total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + program, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(0) - 1:
            tl.store(counters + program, 0)
            of_threads = tl.load(own + tl.arange(0, _THREADS), cache_modifier=".cg")
            tl.store(totals + program, _sum_of_threads(of_threads))


@triton.jit
def _add_share(
    row_logits,
    share,
    vocab,
    largest,
    temperature,
    SHARE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return what SHARE of torch's threads add up."""
    total = tl.zeros((SHARE,), tl.float32)
    width: tl.constexpr = _THREADS * _EACH
    whole = vocab // width * width
    first = share * SHARE * _EACH
    count: tl.constexpr = SHARE * _EACH
    # Four rounds at a time, so that loads overlap; what is not there adds 0.
    for start in range(first, first + whole, 4 * width):
        value0 = _load(row_logits, start, whole, count)
        value1 = _load(row_logits, start + width, whole, count)
        value2 = _load(row_logits, start + 2 * width, whole, count)
        value3 = _load(row_logits, start + 3 * width, whole, count)
        total = _add_four(total, value0, largest, temperature, SHARE, EXACT)
        total = _add_four(total, value1, largest, temperature, SHARE, EXACT)
        total = _add_four(total, value2, largest, temperature, SHARE, EXACT)
        total = _add_four(total, value3, largest, temperature, SHARE, EXACT)
    for start in range(whole, vocab, _THREADS):
        value = _load(row_logits, start + share * SHARE, vocab, SHARE)
        total += _exp(_divided(value, temperature) - largest, EXACT)
    return total


# Rows of a matrix with one column per request may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def softmax_kernel(
    logits,
    rows,
    temperatures,
    maxima,
    totals,
    probs,
    vocab,
    row_stride,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = row_of(rows, program)
    if row >= 0:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < vocab
        value = tl.load(logits + row * row_stride + index, mask=inside, other=0.0)
        temperature = tl.load(temperatures + program)
        largest = _largest(maxima, program, temperature, SPLITS, SPLITS_BLOCK)
        weight = _exp(_divided(value, temperature) - largest, EXACT)
        total = tl.zeros_like(weight) + tl.load(totals + program)
        tl.store(probs + row * vocab + index, tl.div_rn(weight, total), mask=inside)


def softmax_rows(
    logits: Tensor,
    temperatures: Tensor,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`sampling.ops.softmax_rows` in three launches. Rows of other lengths than
    `splits_vocab` are left to the reference.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or there are more ids
            than the kernel's scratch can hold.
    """
    n_rows, vocab = logits.shape
    require_together(rows, out)
    if not splits_vocab(vocab) or n_rows == 0:
        return softmax_rows_ref(logits, temperatures, rows=rows, out=out)
    programs = n_rows if rows is None else len(rows)
    require("softmax_rows", programs, torch.float32, temperatures=temperatures)
    if logits.stride(1) != 1:
        raise ValueError(f"softmax_rows: logits have strides {list(logits.stride())}")
    if out is None:
        out = torch.empty(n_rows, vocab, dtype=torch.float32, device=logits.device)
    require("softmax_rows", n_rows * vocab, torch.float32, out=out)
    if rows is not None:
        _launch(logits, temperatures, rows, out)
        return out
    for first in range(0, n_rows, MAX_ROWS):
        end = first + MAX_ROWS
        _launch(logits[first:end], temperatures[first:end], None, out[first:end])
    return out


def _launch(
    logits: Tensor, temperatures: Tensor, rows: Tensor | None, probs: Tensor
) -> None:
    vocab, programs = logits.shape[1], len(temperatures)
    block, splits = split_rows("softmax_rows", min(len(logits), MAX_ROWS), vocab)
    _, counters = _SCRATCH.get(logits.device, partial_bytes=0, counters=programs)
    maxima, totals = probs.new_empty(programs, splits), probs.new_empty(programs)
    sums = probs.new_empty(programs, _THREADS.value)
    shares = {"SPLITS": splits, "SPLITS_BLOCK": triton.next_power_of_2(splits)}
    options = launch_options(logits.device)
    exact = logits.is_cuda
    max_kernel[(splits, programs)](
        logits,
        rows,
        maxima,
        vocab,
        logits.stride(0),
        SPLITS=splits,
        BLOCK=block,
        **options,
    )
    sum_kernel[(_THREADS.value // _SHARE, programs)](
        logits,
        rows,
        temperatures,
        maxima,
        sums,
        totals,
        counters,
        vocab,
        logits.stride(0),
        **shares,
        SHARE=_SHARE,
        EXACT=exact,
        **options,
    )
    softmax_kernel[(splits, programs)](
        logits,
        rows,
        temperatures,
        maxima,
        totals,
        probs,
        vocab,
        logits.stride(0),
        **shares,
        BLOCK=block,
        EXACT=exact,
        num_warps=8 if block >= 4096 else 4,
        **options,
    )
