"""Launches of the gated delta rule. `reference.py` describes the functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from kv_canary.state_sums import MATRIX_COLUMNS
from sglang.srt.layers.ops.state.gated_delta.cells import DeltaSizes
from sglang.srt.layers.ops.state.gated_delta.inputs import (
    DeltaInputs,
    DeltaNodes,
    require_delta,
)
from sglang.srt.layers.ops.state.gated_delta.prepare_kernel import prepare_kernel
from sglang.srt.layers.ops.state.gated_delta.scan_kernel import scan_kernel
from sglang.srt.layers.ops.state.gated_delta.step_kernels import (
    commit_kernel,
    decode_kernel,
)
from sglang.srt.layers.ops.state.gated_delta.tree_kernel import (
    PARTS,
    TreeForm,
    tree_kernel,
)
from sglang.srt.layers.ops.state.shared.counts import count_arguments
from sglang.srt.layers.ops.state.shared.rows import search_steps
from sglang.srt.layers.ops.state.shared.sums import sum_arguments
from sglang.srt.layers.ops.state.shared.track_launch import track_arguments
from sglang.srt.layers.ops.state.shared.tracks import CHUNK, StateTracks
from sglang.srt.utils.triton_launch import block_of, launch_options, require

if TYPE_CHECKING:
    from sglang.srt.mem_cache.state_sums import StateSums

LEAST = 16
"""Smallest side of a matrix product."""
MOST_NODES = CHUNK
V_TILE = MATRIX_COLUMNS
"""Channels of v of a program: a cell of checksums. Kernels that multiply matrices spill
registers with more.
"""
SCAN_OPTIONS = {
    "tf32": {"num_warps": 8, "num_stages": 1},
    "tf32x3": {"num_warps": 4, "num_stages": 1},
}
"""Launch options by precision. Stages would take the shared memory of a second program,
and spill. Three products with 8 warps spill 1,400 bytes, and what they fold into a
state is wrong on an H100 (Triton 3.6, chunks after the first).
"""


def delta_sizes(state: Tensor, *, key_heads: int, normalise: bool) -> DeltaSizes:
    _, heads, d_k, d_v = state.shape
    return DeltaSizes(
        heads=heads,
        group=heads // key_heads,
        d_k=d_k,
        k_block=block_of(d_k, least=LEAST),
        d_v=d_v,
        v_tile=min(V_TILE, block_of(d_v, least=LEAST)),
        normalise=normalise,
    )


def gated_delta_decode(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slots: Tensor,
    folded: Tensor | None = None,
    sums: StateSums | None = None,
) -> Tensor:
    _require_memory(inputs, state)
    rows, heads, d_v = inputs.v.shape
    require("gated_delta", rows, torch.int64, slots=slots)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    if not rows:
        return out
    sizes = _input_sizes(inputs, state)
    decode_kernel[(triton.cdiv(d_v, sizes.v_tile), heads, rows)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        state,
        slots,
        out,
        inputs.scale,
        inputs.q.stride(0),
        inputs.k.stride(0),
        inputs.v.stride(0),
        state.stride(0),
        **count_arguments(folded, state),
        **sum_arguments(sums, state),
        SIZES=sizes,
        num_warps=4,
        **launch_options(state.device),
    )
    return out


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
    _require_memory(inputs, state)
    rows = len(slots)
    require("gated_delta", rows, torch.int64, slots=slots)
    require("gated_delta", rows + 1, torch.int64, qo_indptr=qo_indptr)
    require("gated_delta", rows, torch.bool, has_state=has_state)
    out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    if rows:
        _chunks(
            inputs,
            state,
            out,
            slots=slots,
            qo_indptr=qo_indptr,
            has_state=has_state,
            tracks=tracks,
            folded=folded,
            sums=sums,
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
    _require_memory(inputs, state)
    rows, width, _ = mask.shape
    if width > MOST_NODES:
        raise ValueError(
            f"gated_delta: trees of {width} nodes; at most {MOST_NODES} are supported: "
            "use a smaller --speculative-num-draft-tokens"
        )
    require("gated_delta", rows, torch.int64, slots=slots)
    require("gated_delta", rows * width * width, torch.bool, mask=mask)
    require("gated_delta", inputs.g.numel(), torch.float32, decay=nodes.decay)
    require("gated_delta", inputs.k.numel(), nodes.k.dtype, k=nodes.k)
    require("gated_delta", inputs.v.numel(), nodes.k.dtype, u=nodes.u)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    if rows:
        sizes = _input_sizes(inputs, state)
        form = tree_form(inputs, nodes=width)
        tree_kernel[(triton.cdiv(sizes.d_v, sizes.v_tile), sizes.heads, rows)](
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            mask,
            state,
            slots,
            out,
            nodes.k,
            nodes.u,
            nodes.decay,
            inputs.scale,
            inputs.q.stride(0),
            inputs.k.stride(0),
            inputs.v.stride(0),
            state.stride(0),
            **sum_arguments(sums, state),
            FORM=form,
            SIZES=sizes,
            num_warps=tree_warps(form),
            num_stages=3,
            **launch_options(state.device),
        )
    return out


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
    rows, width = path.shape
    count, heads, d_v = nodes.u.shape
    _require_slots(state)
    require("gated_delta", rows, torch.int64, slots=slots, path_lens=path_lens)
    require("gated_delta", rows * width, torch.int64, path=path)
    require("gated_delta", count * heads, torch.float32, decay=nodes.decay)
    require("gated_delta", nodes.k.numel(), nodes.k.dtype, k=nodes.k)
    require("gated_delta", nodes.u.numel(), nodes.k.dtype, u=nodes.u)
    if not rows:
        return
    sizes = delta_sizes(state, key_heads=nodes.k.shape[1], normalise=False)
    commit_kernel[(triton.cdiv(d_v, sizes.v_tile), heads, rows)](
        nodes.k,
        nodes.u,
        nodes.decay,
        state,
        slots,
        path,
        path_lens,
        count,
        width,
        state.stride(0),
        **count_arguments(folded, state),
        **sum_arguments(sums, state),
        PATH=block_of(width, least=LEAST),
        SIZES=sizes,
        num_warps=4,
        **launch_options(state.device),
    )


def tree_form(inputs: DeltaInputs, *, nodes: int) -> TreeForm:
    """Return the form of trees of `nodes` nodes.

    Splitting more channels at a time into parts spills registers. Blocks of 64 with
    three products of tf32 spill in any case, which products of whole warp groups do not
    always survive (`SCAN_OPTIONS`), so they do without the matrix unit.
    """
    block = block_of(nodes, least=LEAST)
    precision = "ieee" if block == MOST_NODES else "tf32x3"
    if inputs.q.dtype is inputs.k.dtype is torch.bfloat16:
        precision = PARTS
    return TreeForm(
        nodes=nodes,
        block=block,
        precision=precision,
        channels=2 * LEAST if precision == PARTS else LEAST,
    )


def tree_warps(form: TreeForm) -> int:
    """Return the warps of a program. With four, those of small trees wait for each
    other: 124 us instead of 88 for 64 trees of 16 nodes on an H200.
    """
    if form.precision == "ieee":
        return 8
    return 2 if form.block == LEAST else 4


def scan_precision(dtype: torch.dtype) -> str:
    """Return how a prefill of inputs of `dtype` multiplies: half precision does not
    need more than tf32 keeps.
    """
    return "tf32" if dtype.itemsize == 2 else "tf32x3"


def _chunks(
    inputs: DeltaInputs,
    state: Tensor,
    out: Tensor,
    *,
    slots: Tensor,
    qo_indptr: Tensor,
    has_state: Tensor,
    tracks: StateTracks | None,
    folded: Tensor | None,
    sums: StateSums | None,
) -> None:
    """Launch both kernels of a prefill."""
    tokens, heads, d_v = inputs.v.shape
    rows = len(slots)
    places = tokens // CHUNK + rows
    sizes = _input_sizes(inputs, state)
    precision = scan_precision(inputs.k.dtype)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=state.device)

    matrices = scratch(places, heads, 2, CHUNK, CHUNK)
    decays = scratch(tokens, heads)
    shared = {"PRECISION": precision, "SIZES": sizes, **launch_options(state.device)}
    prepare_kernel[(places, heads)](
        inputs.q,
        inputs.k,
        inputs.g,
        inputs.beta,
        qo_indptr,
        matrices,
        decays,
        rows,
        inputs.scale,
        inputs.q.stride(0),
        inputs.k.stride(0),
        STEPS=search_steps(rows),
        num_warps=4,
        **shared,
    )
    scan_kernel[(triton.cdiv(d_v, sizes.v_tile), heads, rows)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.beta,
        matrices,
        decays,
        state,
        slots,
        has_state,
        qo_indptr,
        out,
        inputs.scale,
        inputs.q.stride(0),
        inputs.k.stride(0),
        inputs.v.stride(0),
        state.stride(0),
        **count_arguments(folded, state),
        **sum_arguments(sums, state),
        **track_arguments("gated_delta", tracks, rows=rows),
        **SCAN_OPTIONS[precision],
        **shared,
    )


def _input_sizes(inputs: DeltaInputs, state: Tensor) -> DeltaSizes:
    return delta_sizes(state, key_heads=inputs.k.shape[1], normalise=inputs.normalise)


def _require_memory(inputs: DeltaInputs, state: Tensor) -> None:
    """Check what the kernels index as raw memory."""
    require_delta(inputs, state)
    _require_slots(state)
    require("gated_delta", inputs.g.numel(), torch.float32, g=inputs.g)
    require("gated_delta", inputs.g.numel(), inputs.beta.dtype, beta=inputs.beta)
    for name in ("q", "k", "v"):
        tensor: Tensor = getattr(inputs, name)
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"gated_delta: the heads of a token of {name} have gaps")


def _require_slots(state: Tensor) -> None:
    if len(state) and not state[0].is_contiguous():
        raise ValueError("gated_delta: the state of a slot is not contiguous")
