"""Speed of the gated delta rule of one layer, compared with the floor of its bytes.

python benchmark/kernels/bench_gated_delta.py [--shape qwen3.5-9b] [--batch 1,64]
Decode, prefill of one request, and a verified tree with its commit. Runs on a CUDA
device if there is one, otherwise on the CPU. Prints a table, and as the last line one
JSON object with every measurement.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from bench_moe import best_us
from cuda_timing import bandwidths, copies_for, graph_us
from torch import Tensor

from kv_canary.state_sums import StateCells
from sglang.bench_utils.floor import measure_bandwidth
from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs, DeltaNodes
from sglang.srt.layers.ops.state.gated_delta.op import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_tree,
)
from sglang.srt.mem_cache.state_sums import StateSums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATH = 5
"""Nodes of an accepted path."""
Row = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    heads: int
    key_heads: int
    d_k: int
    d_v: int

    @property
    def state_elements(self) -> int:
        return self.heads * self.d_k * self.d_v

    @property
    def token_elements(self) -> int:
        """Elements of q, k, v and the output of a token."""
        return 2 * (self.key_heads * self.d_k + self.heads * self.d_v)

    def flops(self, tokens: int, chunk: int = 64) -> float:
        """Operations of the chunk form, in which a token meets S three times and its
        chunk four times.
        """
        by_state = 3 * self.d_k * self.d_v
        by_chunk = chunk * 2 * (self.d_k + self.d_v)
        return 2.0 * tokens * self.heads * (by_state + by_chunk)


SHAPES = {
    "qwen3.5-9b": Shape(heads=32, key_heads=16, d_k=128, d_v=128),
    "tiny": Shape(heads=4, key_heads=2, d_k=32, d_v=32),
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Layers:
    """Calls on the states of several layers in turn, so that no cache holds them."""

    def __init__(
        self, shape: Shape, state_dtype: torch.dtype, *, has_sums: bool
    ) -> None:
        self.shape = shape
        self.has_sums = has_sums
        self.state_dtype = state_dtype
        self.dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def states(self, rows: int) -> Sequence[Tensor]:
        shape = self.shape
        nbytes = rows * shape.state_elements * self.state_dtype.itemsize
        layers = copies_for(nbytes) if DEVICE == "cuda" else 2
        size = (layers, rows + 1, shape.heads, shape.d_k, shape.d_v)
        states = torch.zeros(size, dtype=self.state_dtype, device=DEVICE)
        return states.unbind()

    def sums(self, state: Tensor) -> StateSums | None:
        """Return checksums of a layer's states, which are zeros."""
        if not self.has_sums:
            return None
        size = (len(state), StateCells.of(state).number)
        return StateSums(
            kept=torch.zeros(size, dtype=torch.int64, device=DEVICE),
            marks=torch.zeros(len(state), dtype=torch.int32, device=DEVICE),
        )

    def inputs(self, tokens: int) -> DeltaInputs:
        shape = self.shape
        draw = partial(torch.randn, dtype=self.dtype, device=DEVICE)
        gates = torch.rand(2, tokens, shape.heads, device=DEVICE)
        return DeltaInputs(
            q=draw(tokens, shape.key_heads, shape.d_k),
            k=draw(tokens, shape.key_heads, shape.d_k),
            v=draw(tokens, shape.heads, shape.d_v),
            g=-gates[0],
            beta=gates[1],
            scale=shape.d_k**-0.5,
            normalise=True,
        )

    def input_bytes(self, tokens: int) -> int:
        gates = 2 * self.shape.heads * 4
        return tokens * (self.shape.token_elements * self.dtype.itemsize + gates)

    def state_bytes(self, rows: int) -> int:
        return rows * self.shape.state_elements * self.state_dtype.itemsize

    def node_bytes(self, tokens: int) -> int:
        """Bytes of k, u and decay of nodes."""
        shape = self.shape
        per_node = shape.key_heads * shape.d_k + shape.heads * (shape.d_v + 1)
        return tokens * per_node * 4


def slots_of(rows: int) -> Tensor:
    return torch.arange(1, rows + 1, device=DEVICE)


def time_us(calls: Sequence[Call]) -> float:
    return graph_us(calls) if DEVICE == "cuda" else best_us(calls)


def decode_row(layers: Layers, batch: int, copy_gb_s: float) -> Row:
    inputs, slots = layers.inputs(batch), slots_of(batch)
    calls = [
        partial(gated_delta_decode, inputs, state, slots=slots, sums=layers.sums(state))
        for state in layers.states(batch)
    ]
    nbytes = 2 * layers.state_bytes(batch) + layers.input_bytes(batch)
    return one_row("decode", batch, 1, time_us(calls), nbytes, copy_gb_s)


def prefill_row(layers: Layers, tokens: int, copy_gb_s: float) -> Row:
    inputs = layers.inputs(tokens)
    calls = [
        partial(
            gated_delta_prefill,
            inputs,
            state,
            slots=slots_of(1),
            qo_indptr=torch.tensor([0, tokens], device=DEVICE),
            has_state=torch.ones(1, dtype=torch.bool, device=DEVICE),
            sums=layers.sums(state),
        )
        for state in layers.states(1)[:4]
    ]
    nbytes = 2 * layers.state_bytes(1) + layers.input_bytes(tokens)
    row = one_row("prefill", 1, tokens, time_us(calls), nbytes, copy_gb_s)
    return row | {"tflop_s": layers.shape.flops(tokens) / row["us"] / 1e6}


def tree_rows(
    layers: Layers, batch: int, nodes: int, rates: dict[str, float]
) -> Iterator[Row]:
    """Yield a verification and a commit."""
    inputs, slots = layers.inputs(batch * nodes), slots_of(batch)
    states = layers.states(batch)
    kept = DeltaNodes.allocate(
        batch * nodes, states[0], key_heads=layers.shape.key_heads
    )
    # A tree of two children per node.
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[(node - 1) // 2]
    masks = mask.to(DEVICE).repeat(batch, 1, 1)
    calls: list[Call] = [
        partial(
            gated_delta_tree,
            inputs,
            state,
            slots=slots,
            mask=masks,
            nodes=kept,
            sums=layers.sums(state),
        )
        for state in states
    ]
    nbytes = layers.state_bytes(batch) + layers.input_bytes(batch * nodes)
    nbytes += layers.node_bytes(batch * nodes)
    yield one_row("tree", batch, nodes, time_us(calls), nbytes, rates["read"])
    length = min(PATH, nodes.bit_length())
    path = torch.tensor([2**depth - 1 for depth in range(length)], device=DEVICE)
    path = path + nodes * torch.arange(batch, device=DEVICE)[:, None]
    lens = torch.full((batch,), length, device=DEVICE)
    calls = [
        partial(
            gated_delta_commit,
            kept,
            state,
            slots=slots,
            path=path,
            path_lens=lens,
            sums=layers.sums(state),
        )
        for state in states
    ]
    nbytes = 2 * layers.state_bytes(batch) + layers.node_bytes(batch * length)
    yield one_row("commit", batch, length, time_us(calls), nbytes, rates["copy"])


def one_row(
    form: str, batch: int, tokens: int, us: float, nbytes: int, gb_s: float
) -> Row:
    floor = nbytes / gb_s / 1e3
    return {
        "form": form,
        "batch": batch,
        "tokens": tokens,
        "us": us,
        "floor_us": floor,
        "of_floor": floor / us,
    }


def measure(
    layers: Layers, args: argparse.Namespace, rates: dict[str, float]
) -> list[Row]:
    rows = []
    for batch in args.batch:
        plain = decode_row(layers, batch, rates["copy"])
        rows.append(plain)
        for nodes in args.nodes:
            made = list(tree_rows(layers, batch, nodes, rates))
            # Limits are set for a verification in plain steps' state time.
            rows += [row | {"of_decode": row["us"] / plain["us"]} for row in made]
    rows += [prefill_row(layers, tokens, rates["copy"]) for tokens in args.prefill]
    return rows


def print_table(rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("  ".join(f"{name:>9}" for name in names))
    for row in rows:
        values = [row.get(name, "") for name in names]
        print(
            "  ".join(
                f"{v:9.4g}" if isinstance(v, float) else f"{v:>9}" for v in values
            )
        )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    is_cuda = DEVICE == "cuda"
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-9b")
    parser.add_argument("--state-dtype", choices=DTYPES, default="float32")
    batch, prefill = ("1,4,16,64", "512,2048,8192") if is_cuda else ("1,4", "64,512")
    parser.add_argument("--batch", type=numbers, default=numbers(batch))
    parser.add_argument("--nodes", type=numbers, default=[4, 16, 64])
    parser.add_argument("--prefill", type=numbers, default=numbers(prefill))
    parser.add_argument(
        "--sums", action="store_true", help="keep and compare checksums of all bytes"
    )
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    report = {"shape": args.shape, "state_dtype": args.state_dtype, **asdict(shape)}
    report["sums"] = args.sums
    if is_cuda:
        rates = bandwidths()
        report["device"] = torch.cuda.get_device_name()
    else:
        measured = measure_bandwidth(4 * shape.state_elements)
        rates = {"read": measured.read_gb_s, "copy": measured.copy_gb_s}
        report["device"] = platform.processor() or platform.machine()
        report["threads"] = torch.get_num_threads()
    layers = Layers(shape, DTYPES[args.state_dtype], has_sums=args.sums)
    rows = measure(layers, args, rates)
    print(f"{args.shape} on {report['device']}, copying {rates['copy']:.1f} GB/s")
    print_table(rows)
    print(json.dumps(report | {"gb_s": rates, "rows": rows}))


if __name__ == "__main__":
    main()
