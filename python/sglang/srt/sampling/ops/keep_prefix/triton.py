"""Triton kernels that find where top-k, top-p and min-p cut, without a sort.

A sample of the row says between which two keys the cut should lie. One pass over the
row counts what is above them and collects what is between them, and a search among
these few finds the cut:

```
 key  | 0 .............. low | candidates | high ............. 1.0 |
      | below the cut        | searched   | count and mass, summed |
```

```
guess (a program per row) --> collect (rows over programs) --> search (per row)
```
Sums are integers, so they depend neither on their order nor on the sample nor on the
programs (ADR 37). Knows nothing of logits and draws.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.sampling.ops.keep_prefix.triton_collect import COLUMNS, collect_kernel
from sglang.srt.sampling.ops.keep_prefix.triton_guess import guess_kernel
from sglang.srt.sampling.ops.keep_prefix.triton_keys import keys_of, load_block
from sglang.srt.sampling.ops.keep_prefix.triton_search import search_kernel
from sglang.srt.sampling.ops.triton_draw import MAX_ROWS, split_rows
from sglang.srt.utils.triton_launch import (
    launch_options,
    let_next_start,
    require,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from sglang.srt.sampling.ops.keep_prefix.op import Filters

_BLOCK = 4096
"""Ids that a program counts at once if it has the row alone."""
_CANDIDATES = 8192
"""Ids between the two keys at most."""
_FEW = 1024
"""Candidates that most rows have at most."""
_SAMPLE = 4096
"""Ids that are looked at first."""
_GUESS_WARPS = 4
_SEARCH_WARPS = 16


@triton.jit
def is_removed(value, index, cuts, program):
    """Whether ids with these probabilities are removed by the `cuts` of a row's
    program."""
    cut = tl.load(cuts + program * 4)
    last = tl.load(cuts + program * 4 + 1)
    floor = tl.load(cuts + program * 4 + 2).to(tl.float32, bitcast=True)
    keys = keys_of(value)
    return (keys < cut) | ((keys == cut) & (index > last)) | (value < floor)


@triton.jit
def zero_kernel(probs, cuts, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    start = tl.program_id(0) * BLOCK
    row_probs = probs + row.to(tl.int64) * vocab
    value = load_block(row_probs, start, vocab, BLOCK)
    index = start + tl.arange(0, BLOCK)
    goes = is_removed(value, index, cuts, row) & (value > 0.0)
    tl.store(row_probs + index, tl.zeros_like(value), mask=goes)


def keep_prefix(probs: Tensor, filters: Filters) -> Tensor:
    """`sampling.ops.keep_prefix` in place.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or there are more ids
            than the draw can split.
    """
    n_rows, vocab = probs.shape
    if n_rows > MAX_ROWS:  # nodes of many large trees
        for first in range(0, n_rows, MAX_ROWS):
            end = first + MAX_ROWS
            keep_prefix(probs[first:end], filters.narrow(first, end))
        return probs
    cuts = find_cuts(probs, filters)
    if cuts is not None:
        block, splits = split_rows("keep_prefix", n_rows, vocab)
        options = launch_options(probs.device)
        zero_kernel[(splits, n_rows)](probs, cuts, vocab, BLOCK=block, **options)
    return probs


def find_cuts(
    probs: Tensor, filters: Filters, rows: Tensor | None = None
) -> Tensor | None:
    """Return int32 [P, 4] for `is_removed`, or None if nothing is filtered.

    Args:
        filters: of P programs.
        rows: [P] int64, the row of `probs` for each, negative for none; None for all.

    Raises:
        ValueError: as `keep_prefix`.
    """
    vocab, n_rows = probs.shape[1], len(probs if rows is None else rows)
    top_ks, top_ps, min_ps = filters.top_ks, filters.top_ps, filters.min_ps
    require("keep_prefix", probs.numel(), torch.float32, probs=probs)
    require("keep_prefix", n_rows, torch.int64, top_ks=top_ks)
    require("keep_prefix", n_rows, torch.float32, top_ps=top_ps)
    if min_ps is not None:
        require("keep_prefix", n_rows, torch.float32, min_ps=min_ps)
    if n_rows == 0 or filters.are_none:
        return None
    block, splits = split_rows("keep_prefix", min(len(probs), MAX_ROWS), vocab)
    whole = triton.next_power_of_2(vocab)
    room = min(_CANDIDATES, whole)
    options = launch_options(probs.device)
    bounds = probs.new_empty(n_rows, 4, dtype=torch.int32)
    cuts = torch.empty_like(bounds)
    candidates = probs.new_empty(n_rows, 2, room, dtype=torch.int32)
    counted = probs.new_empty(n_rows, splits, COLUMNS.value, dtype=torch.int64)
    guess_kernel[(n_rows,)](
        probs,
        rows,
        top_ks,
        top_ps,
        bounds,
        vocab,
        SAMPLE=_SAMPLE,
        CANDIDATES=room,
        num_warps=_GUESS_WARPS,
        **options,
    )
    collect_kernel[(splits, n_rows)](
        probs,
        rows,
        bounds,
        counted,
        candidates,
        vocab,
        SPLITS=splits,
        BLOCK=block,
        CANDIDATES=room,
        HAS_MIN_P=min_ps is not None,
        num_warps=8 if block >= 4096 else 4,
        **options,
    )
    search_kernel[(n_rows,)](
        probs,
        rows,
        top_ks,
        top_ps,
        top_ps if min_ps is None else min_ps,
        bounds,
        counted,
        candidates,
        cuts,
        vocab,
        SPLITS=splits,
        SPLITS_BLOCK=triton.next_power_of_2(splits),
        BLOCK=min(_BLOCK, whole),
        SAMPLE=_SAMPLE,
        FEW=min(_FEW, room),
        CANDIDATES=room,
        HAS_MIN_P=min_ps is not None,
        num_warps=_SEARCH_WARPS,
        **options,
    )
    return cuts
