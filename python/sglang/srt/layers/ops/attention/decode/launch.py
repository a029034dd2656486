"""Paged decode attention on CUDA: split-KV, grouped query heads, a fixed launch grid.

Takes the arguments of `layers.ops.attention.op.decode_attention`, plus a workspace, and
gives the same results. Knows nothing of requests or layers; never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from sglang.srt.layers.ops.attention.decode.kernels import (
    decode_combine_kernel,
    decode_split_kernel,
)
from sglang.srt.layers.ops.attention.decode_hopper.kernels import decode_hopper_kernel
from sglang.srt.layers.ops.attention.decode_hopper.launch import (
    StoredHead,
    decode_hopper_launch,
    places_of,
    serves_decode,
    splits_that_fit,
)
from sglang.srt.layers.ops.attention.shared.args import (
    MIN_ELEMENTS_PER_SPLIT,
    ByteCheck,
    Compares,
    Partials,
    decode_tile,
    pages_args,
    pool_args,
    scale_args,
    shape_args,
    tokens_args,
)
from sglang.srt.layers.ops.attention.shared.checks import check_inputs
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch

_MAX_SPLITS = 64
# Programs wanted at least; more splits would cost more partial results than they gain.
TARGET_PROGRAMS = 512

# Bytes of a padded head -> KV elements per tile, warps, pipeline stages; measured with
# benchmark/kernels/bench_triton_attention.py --sweep.
TILES: tuple[tuple[int, tuple[int, int, int]], ...] = (
    (128, (64, 2, 2)),
    (256, (64, 4, 2)),
    (1024, (32, 4, 2)),
)


def decode_splits(
    *,
    rows: int,
    programs_per_row: int,
    max_context: int,
) -> int:
    """Return the splits of a row's KV elements, a power of two, from shapes alone.

    Args:
        rows: rows of the launch.
        programs_per_row: programs that each split of a row takes (its KV heads).
        max_context: most KV elements that a row of any later launch may have.
    """
    wanted = -(-TARGET_PROGRAMS // max(rows * programs_per_row, 1))
    useful = max(max_context // MIN_ELEMENTS_PER_SPLIT, 1)
    most = 1 << (min(useful, _MAX_SPLITS).bit_length() - 1)
    return min(int(triton.next_power_of_2(wanted)), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkspace:
    """Scratch of decode launches. Launches on one stream share it.

    Fields:
        partial: [cells * head_dim] float32, partial results. Cells are (row, query
            head, split) of the launch; only the kernels read or write them.
        lse: [cells] float32, log2 of the partial softmax sums.
        counters: [rows * programs of a row and split] int32, zero before and after
            every launch.
        max_context: most KV elements of a row; it fixes the splits of a launch.
    """

    partial: Tensor
    lse: Tensor
    counters: Tensor
    max_context: int

    def check(self, q: Tensor, *, splits: int, programs: int) -> None:
        """
        Raises:
            ValueError: the workspace is too small for queries [rows, heads, head_dim]
                in `splits` splits, or for `programs` programs per split.
        """
        rows, heads, head_dim = q.shape
        cells = rows * heads * splits
        if (
            self.lse.numel() < cells
            or self.partial.numel() < cells * head_dim
            or self.counters.numel() < programs
        ):
            raise ValueError(
                f"decode_attention: the workspace holds {self.lse.numel()} cells, "
                f"{rows} rows x {heads} heads x {splits} splits need {cells}; "
                "allocate it with decode_workspace for these rows and heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLayer:
    """How a launch compares the bytes it loads.

    Fields:
        check: check of the forward. layer: the layer's number in its group of slots.
        compares: whether it always compares, or only when it is the layer's turn.
    """

    check: ByteCheck
    layer: int
    compares: Compares


def decode_workspace(
    *,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    max_context: int,
    device: str | torch.device,
) -> DecodeWorkspace:
    """Allocate scratch for launches of up to `rows` rows with these heads.

    A row with more than `max_context` elements is still computed, but slower.

    Raises:
        RuntimeError: inside a graph capture, where zeroing would only run on replay.
    """
    if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a decode workspace would be allocated inside a graph capture; "
            "run the captured function once before the capture"
        )
    blocks = _head_blocks(q_heads // kv_heads)
    cells = max(
        count
        * q_heads
        * decode_splits(
            rows=count, programs_per_row=kv_heads * blocks, max_context=max_context
        )
        for count in range(1, max(rows, 1) + 1)
    )
    return DecodeWorkspace(
        partial=torch.empty(cells * head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(cells, dtype=torch.float32, device=device),
        counters=torch.zeros(
            max(rows, 1) * kv_heads * blocks, dtype=torch.int32, device=device
        ),
        max_context=max_context,
    )


def _block_h(group: int) -> int:
    return min(max(int(triton.next_power_of_2(group)), 16), 64)


def _head_blocks(group: int) -> int:
    return -(-group // _block_h(group))


def decode_launch(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    page_size: int,
    splits: int,
    compares: Compares = Compares.NEVER,
) -> KernelLaunch:
    """Compile-time parameters of the split kernel, chosen from shapes alone."""
    shape = shape_args(q_heads, kv_heads, head_dim, page_size)
    block_n, warps, stages = next(
        tile for limit, tile in TILES if shape.block_d * itemsize <= limit
    )
    return KernelLaunch(
        constants={
            "SHAPE": shape,
            "TILE": decode_tile(_block_h(shape.group), block_n, splits),
            "COMPARES": int(compares),
        },
        num_warps=warps,
        num_stages=stages,
    )


def combine_launch(split_launch: KernelLaunch) -> KernelLaunch:
    """Compile-time parameters of the combine kernel after a split kernel."""
    constants = {name: split_launch.constants[name] for name in ("SHAPE", "TILE")}
    return KernelLaunch(constants=constants, num_warps=4, num_stages=1)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
    workspace: DecodeWorkspace,
    compared: ComparedLayer | None = None,
) -> None:
    """out[r] = softmax(sm_scale * q[r] . K) V over KV elements 0 .. read_lens[r] - 1.

    The launch depends on shapes and on `workspace.max_context` only, so that it can be
    captured in a CUDA graph. A row that reads nothing yields zeros.

    Args:
        q, k_cache, v_cache, page_table, row_index, read_lens, page_size, sm_scale,
            window, logit_cap, sinks, out: as in
            `sglang.srt.layers.ops.attention.op.decode_attention`; page_size a power of
            two.
        workspace: from `decode_workspace` for at least these rows and heads.
        compared: how the elements before this forward are compared with their recorded
            checksums, or None to skip the comparison.

    Raises:
        ValueError: shapes, page_size or workspace do not fit.
    """
    check_inputs(q, k_cache, v_cache, out, page_size=page_size, sinks=sinks)
    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    if rows == 0:
        return
    group = q_heads // kv_heads
    programs_per_row = kv_heads * _head_blocks(group)
    compares = Compares.NEVER if compared is None else compared.compares
    on_hopper = serves_decode(
        group=group, head_dim=head_dim, dtype=q.dtype, device=q.device
    )
    splits = decode_splits(
        rows=rows,
        programs_per_row=programs_per_row,
        max_context=workspace.max_context,
    )
    if on_hopper:
        head = StoredHead(head_dim, k_cache.element_size())
        splits = splits_that_fit(
            splits, programs=rows * programs_per_row, places=places_of(head, compares)
        )
    if splits > 1:
        workspace.check(q, splits=splits, programs=rows * programs_per_row)
    wanted: dict[str, Any] = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "splits": splits,
        "compares": compares,
    }
    kernel: Any = decode_split_kernel
    counters: tuple[Tensor, ...] = ()
    if on_hopper:
        kernel = decode_hopper_kernel
        launch = decode_hopper_launch(
            **wanted, rows=rows, itemsize=k_cache.element_size()
        )
        counters = (workspace.counters,)
    else:
        launch = decode_launch(**wanted, itemsize=q.element_size())
    outputs = tokens_args(out)
    partials = Partials(workspace.partial, workspace.lse)
    attended = window if window > 0 else None
    kernel[(programs_per_row, splits, rows)](
        tokens_args(q),
        outputs,
        partials,
        *counters,
        pool_args(k_cache, v_cache),
        pages_args(page_table, row_index),
        read_lens,
        sinks,
        scale_args(sm_scale, logit_cap),
        attended,
        None if compared is None else compared.check,
        None if compared is None else compared.layer,
        **launch.options(),
    )
    if splits == 1 or launch.constants.get("ADDED"):
        return
    decode_combine_kernel[(q_heads, rows)](
        partials,
        read_lens,
        sinks,
        outputs,
        attended,
        **combine_launch(launch).options(),
    )
