"""Speed of the Triton attention kernels, next to the GPU's copy and matrix rates.

python benchmark/kernels/bench_triton_attention.py [--only decode,checked,extend]
    [--kv-cache-dtype bf16,fp8_e4m3] [--sweep]

Prints tables, and as the last line one JSON object with every measurement. `checked` is
decode that compares the bytes it loads, beside decode that does not. `--sweep` times
other tile sizes too: the tables in the launchers come from it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from cuda_timing import graph_us
from torch import Tensor

from kv_canary.head_sums import head_sums
from kv_canary.kernels.triton.args import state_args
from kv_canary.state import create_state
from sglang.srt.layers.ops.attention.decode import launch as decode
from sglang.srt.layers.ops.attention.extend import launch as extend
from sglang.srt.layers.ops.attention.extend import table as extend_tables
from sglang.srt.layers.ops.attention.extend_dense import launch as dense
from sglang.srt.layers.ops.attention.extend_split.launch import extend_workspace
from sglang.srt.layers.ops.attention.shared.args import ByteCheck, Compares
from sglang.srt.mem_cache.kv_dtype import KV_DTYPES, to_stored

Row = dict[str, Any]

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B
DECODE_SHAPES = ((1, 1088), (16, 1088), (64, 1088), (256, 1088), (64, 4096), (32, 8192))
# name, rows, new tokens of a row, prefix of a row
EXTEND_SHAPES = (
    ("8k x 8k causal", 1, 8192, 0),
    ("8 x 1024 causal", 8, 1024, 0),
    ("64 x 1024 causal", 64, 1024, 0),
    ("8k chunk after 8k", 1, 8192, 8192),
    ("8 x 1024 after 1000", 8, 1024, 1000),
    ("16 x 8 verify on 4k", 16, 8, 4088),
)
# Of `--sweep`: KV elements per tile, warps, stages, programs in flight.
DECODE_CANDIDATES = [
    (block_n, warps, stages, 1024)
    for block_n, warps, stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4))
    if block_n * stages <= 256 and block_n * 4 >= 32 * warps // 2
] + [(64, 2, 3, programs) for programs in (512, 2048, 4096)]
# Of `--sweep`: queries and KV elements per tile, warps, stages, with V late or not.
EXTEND_CANDIDATES = [
    (128, 128, 8, 3, False),
    (128, 128, 8, 2, True),
    (128, 64, 8, 3, False),
    (128, 64, 8, 3, True),
    (128, 64, 8, 2, True),
    (128, 32, 8, 3, True),
    (64, 128, 4, 3, False),
    (64, 128, 4, 2, True),
    (64, 64, 4, 3, False),
    (64, 64, 4, 3, True),
    (64, 64, 4, 2, True),
    (64, 32, 4, 3, True),
]
# The same if new K and V come from the inputs: queries, KV elements and prefix elements
# per tile, warps, stages.
DENSE_CANDIDATES = [
    (64, 64, 64, 4, 3),
    (64, 64, 64, 4, 2),
    (64, 64, 32, 4, 3),
    (64, 32, 64, 4, 3),
    (128, 64, 128, 8, 3),
    (128, 64, 64, 8, 3),
    (128, 128, 128, 8, 3),
    (128, 128, 64, 8, 3),
]
# KV bytes that consecutive launches cycle through, so that none has its own in L2.
COLD_BYTES = 400 << 20
# Slots whose sums are made at once, in torch.
SUMMED_AT_ONCE = 1 << 14


def ceilings() -> Row:
    """Measure copy bandwidth (read + write) and bf16 matrix rate of this GPU."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_us = graph_us([lambda: torch.neg(source, out=target)] * 2)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    matrix_us = graph_us([lambda: torch.mm(a, b, out=c)] * 4)
    return {
        "copy_gb_s": 2 * 2 * (1 << 30) / copy_us / 1e3,
        "matrix_tflop_s": 2 * 8192**3 / matrix_us / 1e6,
    }


def make_tables(rows: int, length: int, page_size: int) -> Tensor:
    """Make int32 [rows, length / page_size] of shuffled pages, each of one row."""
    pages = rows * length // page_size
    table = torch.randperm(pages, device="cuda", dtype=torch.int32) * page_size
    return table.view(rows, -1)


def make_cache(slots: int, kv: str = "bf16") -> Tensor:
    shape = (slots, KV_HEADS, HEAD_DIM)
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return values if kv == "bf16" else to_stored(values, KV_DTYPES[kv], 1.0)


class DecodeProblem:
    """Queries and pages of rows that decode; pools of K and V, `pools` at most, that
    together do not fit the L2 cache."""

    def __init__(
        self, rows: int, context: int, page_size: int, kv: str, *, pools: int
    ) -> None:
        itemsize = 2 if kv == "bf16" else 1
        self.kv_bytes = 2 * rows * context * KV_HEADS * HEAD_DIM * itemsize
        self.pools = min(max(-(-COLD_BYTES // self.kv_bytes), 2), pools)
        self.read_lens = torch.full((rows,), context, device="cuda")
        q = torch.randn(rows, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self._attend = partial(
            decode.decode_attention,
            q,
            page_table=make_tables(rows, context, page_size),
            row_index=None,
            read_lens=self.read_lens,
            page_size=page_size,
            sm_scale=HEAD_DIM**-0.5,
            out=torch.empty_like(q),
            workspace=decode.decode_workspace(
                rows=rows,
                q_heads=Q_HEADS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                max_context=16384,
                device="cuda",
            ),
        )

    def launch(
        self, k: Tensor, v: Tensor, compared: decode.ComparedLayer | None = None
    ) -> Callable[[], None]:
        return partial(self._attend, k_cache=k, v_cache=v, compared=compared)


def decode_row(
    rows: int, context: int, page_size: int, copy_gb_s: float, kv: str = "bf16"
) -> Row:
    """Measure one shape: time, bytes of K and V over time, share of the copy rate."""
    problem = DecodeProblem(rows, context, page_size, kv, pools=64)
    caches = [
        (make_cache(rows * context, kv), make_cache(rows * context, kv))
        for _ in range(problem.pools)
    ]
    us = graph_us([problem.launch(k, v) for k, v in caches])
    rate = problem.kv_bytes / us / 1e3
    return {
        "op": "decode",
        "kv": kv,
        "rows": rows,
        "context": context,
        "page_size": page_size,
        "us": us,
        "floor_us": problem.kv_bytes / copy_gb_s / 1e3,
        "gb_s": rate,
        "of_copy": rate / copy_gb_s,
    }


class CheckedCache(NamedTuple):
    """K and V of one layer, and the sums kept of them."""

    k: Tensor
    v: Tensor
    sums: Tensor


def make_checked_cache(slots: int, kv: str) -> CheckedCache:
    k, v = make_cache(slots, kv), make_cache(slots, kv)
    sums = torch.empty(slots, 1, KV_HEADS, dtype=torch.int32, device="cuda")
    for begin in range(0, slots, SUMMED_AT_ONCE):
        run = slice(begin, begin + SUMMED_AT_ONCE)
        sums[run, 0] = head_sums(k[run].view(torch.int64), v[run].view(torch.int64))
    return CheckedCache(k, v, sums)


def checked_row(
    rows: int, context: int, page_size: int, copy_gb_s: float, kv: str
) -> Row:
    """Measure decode alone, with all bytes compared, and where layers take turns: in
    the layer whose turn it is, and in another."""
    problem = DecodeProblem(rows, context, page_size, kv, pools=32)
    state = create_state(
        num_slots=rows * context,
        req_rows=rows + 1,
        ring_capacity=64,
        num_managers=1,
        device="cuda",
    )
    req_rows = torch.arange(1, rows + 1, device="cuda")

    def launch(cache: CheckedCache, layers: int | None) -> Callable[[], None]:
        """With `layers` None no bytes are compared; otherwise it decides whether this
        layer has its turn.
        """
        compared = None
        if layers is not None:
            check = ByteCheck(
                state=state_args(state),
                sums=cache.sums,
                slot_stride=cache.sums.stride(0),
                layers=max(layers, 1),
                req_rows=req_rows,
                serials=req_rows,
                prefix_lens=problem.read_lens - 1,
                first_position=None,
                tag=0,
            )
            compares = Compares.IN_TURN if layers else Compares.ALWAYS
            compared = decode.ComparedLayer(check=check, layer=0, compares=compares)
        return problem.launch(cache.k, cache.v, compared)

    caches = [make_checked_cache(rows * context, kv) for _ in range(problem.pools)]
    state.clock.fill_(8)
    kinds = {"alone": None, "all": 0, "in_turn": 4, "out_of_turn": 3, "again": None}
    us = {
        name: graph_us([launch(cache, layers) for cache in caches])
        for name, layers in kinds.items()
    }
    assert int(state.ring_count) == 0, "bytes that did not change were reported"
    return {
        "op": "checked",
        "kv": kv,
        "rows": rows,
        "context": context,
        "page_size": page_size,
        "floor_us": problem.kv_bytes / copy_gb_s / 1e3,
        **{f"{name}_us": value for name, value in us.items()},
        **{f"{name}_over": us[name] / us["alone"] - 1 for name in list(us)[1:]},
    }


def extend_row(
    name: str,
    rows: int,
    new: int,
    prefix: int,
    page_size: int,
    matrix_tflop_s: float,
    *,
    has_inputs: bool = True,
) -> Row:
    """Measure one shape: time, attention flops over time, share of the matrix rate.

    New K and V are views into one tensor, as models leave them; without `has_inputs`
    they come from the pool.
    """
    total = prefix + new
    tokens = rows * new
    shape = (tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    packed = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q, k_new, v_new = packed.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    out = torch.empty(tokens, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    columns = -(-total // page_size)
    slots = rows * columns * page_size
    k, v = make_cache(slots), make_cache(slots)
    table = make_tables(rows, columns * page_size, page_size)
    qo_indptr = torch.arange(rows + 1, device="cuda") * new
    prefix_lens = torch.full((rows,), prefix, device="cuda")
    workspace = extend_workspace(head_dim=HEAD_DIM, max_context=16384, device="cuda")

    def launch() -> None:
        extend.extend_attention(
            q,
            k,
            v,
            page_table=table,
            row_index=None,
            qo_indptr=qo_indptr,
            prefix_lens=prefix_lens,
            page_size=page_size,
            sm_scale=HEAD_DIM**-0.5,
            k_new=k_new if has_inputs else None,
            v_new=v_new if has_inputs else None,
            out=out,
            workspace=workspace,
        )

    us = graph_us([launch] * 2, replays=7)
    pairs = rows * (new * prefix + new * (new + 1) // 2)
    rate = 4 * HEAD_DIM * Q_HEADS * pairs / us / 1e6
    return {
        "op": "extend",
        "shape": name,
        "page_size": page_size,
        "us": us,
        "floor_us": 4 * HEAD_DIM * Q_HEADS * pairs / matrix_tflop_s / 1e6,
        "tflop_s": rate,
        "of_matrix": rate / matrix_tflop_s,
    }


def show(row: Row) -> Row:
    cells = (
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.items()
    )
    print("  ".join(cells), flush=True)
    return row


def sweep_decode(copy_gb_s: float) -> list[Row]:
    """Time tiles of the Triton kernel, which serves where `serves_decode` does not."""
    rows: list[Row] = []
    tiles, programs = decode.TILES, decode.TARGET_PROGRAMS
    serves, decode.serves_decode = decode.serves_decode, lambda **_heads: False
    for block_n, warps, stages, target in DECODE_CANDIDATES:
        decode.TILES = ((1 << 20, (block_n, warps, stages)),)
        decode.TARGET_PROGRAMS = target
        for shape in ((1, 1088), (16, 1088), (64, 4096)):
            row = {"tile": (block_n, warps, stages, target)}
            rows.append(show(row | decode_row(*shape, 1, copy_gb_s)))
    decode.TILES, decode.TARGET_PROGRAMS = tiles, programs
    decode.serves_decode = serves
    return rows


def sweep_extend(matrix_tflop_s: float) -> list[Row]:
    rows: list[Row] = []
    half_tiles = extend_tables.HALF_TILES
    for tile in EXTEND_CANDIDATES:
        choice = extend_tables.ExtendChoice(
            math.inf, math.inf, extend_tables.ExtendTile(*tile)
        )
        extend_tables.HALF_TILES = {HEAD_DIM: (choice,)}
        for shape in EXTEND_SHAPES:
            row = {"tile": tile}
            result = extend_row(*shape, 1, matrix_tflop_s, has_inputs=False)
            rows.append(show(row | result))
    extend_tables.HALF_TILES = half_tiles
    dense_tiles = dense.TILES
    for candidate in DENSE_CANDIDATES:
        dense.TILES = {HEAD_DIM: dense.TileChoice(*candidate)}
        for shape in EXTEND_SHAPES:
            row = {"dense_tile": candidate}
            rows.append(show(row | extend_row(*shape, 1, matrix_tflop_s)))
    dense.TILES = dense_tiles
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="decode,extend")
    parser.add_argument("--kv-cache-dtype", default="bf16")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = args.only.split(",")
    ceiling = ceilings()
    print(torch.cuda.get_device_name(), {k: round(v) for k, v in ceiling.items()})
    copy_gb_s, matrix_tflop_s = ceiling["copy_gb_s"], ceiling["matrix_tflop_s"]
    rows: list[Row] = []
    stored = args.kv_cache_dtype.split(",")
    for page_size in (1, 16):
        for kv, shape in product(stored, DECODE_SHAPES):
            if "decode" in ops:
                rows.append(show(decode_row(*shape, page_size, copy_gb_s, kv)))
            if "checked" in ops:
                rows.append(show(checked_row(*shape, page_size, copy_gb_s, kv)))
        if "extend" in ops:
            for case in EXTEND_SHAPES:
                rows.append(show(extend_row(*case, page_size, matrix_tflop_s)))
    if args.sweep:
        rows += sweep_extend(matrix_tflop_s) if "extend" in ops else []
        rows += sweep_decode(copy_gb_s) if "decode" in ops else []
    report = {"gpu": torch.cuda.get_device_name(), **ceiling, "rows": rows}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
