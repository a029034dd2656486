"""What adapters add to the products of a layer, in graphs, on the 8B shape.

python benchmark/kernels/bench_lora_products.py --rows 32 --adapters 8 --rank 16
python benchmark/kernels/bench_lora_products.py --sweep shrink expand

Microseconds of each linear layer alone and with adapters, whose A are behind the rows
of its weight or apart; and of the product and the rest of the former. With --sweep the
sizes of launches are searched; kernels are compiled by one process per core first.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from cuda_timing import copies_for, graph_us, weights
from torch import Tensor

from sglang.srt.forward.adapter_tiles import AdapterTiles, plan_tiles
from sglang.srt.layers.adapters import JoinedWeight, StackedAdapters
from sglang.srt.layers.ops.linear.op import linear, linear_gated
from sglang.srt.layers.ops.lora import triton as kernels
from sglang.srt.layers.ops.lora.op import AdapterStack
from sglang.srt.layers.ops.lora.table import SHAPES, Shape
from sglang.srt.model_executor.adapter_inputs import StaticTiles

LAYERS = 32
# name -> inputs, outputs of the shards
LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
HALVES = ("shrink", "expand")
SHRINKS = tuple(itertools.product((512, 1024, 2048), (128, 256, 512), (2, 4)))
EXPANDS = tuple(itertools.product((64, 128, 256, 512), (2, 4, 8)))


class Layer(NamedTuple):
    """A linear layer, in copies that L2 does not hold together."""

    name: str
    x: Tensor
    weights: list[Tensor]
    joined: list[JoinedWeight]
    stacks: list[AdapterStack]
    tiles: AdapterTiles

    @property
    def is_gated(self) -> bool:
        return self.name == "gate_up"

    def plain(self, i: int) -> Tensor:
        if self.is_gated:
            return linear_gated(self.x, self.weights[i], "silu")
        return linear(self.x, self.weights[i])

    def apart(self, i: int) -> Tensor:
        return self._run(i, None)

    def adapted(self, i: int) -> Tensor:
        """With A behind the rows of the weight."""
        return self._run(i, self.joined[i])

    def _run(self, i: int, joined: JoinedWeight | None) -> Tensor:
        adapters = StackedAdapters(self.stacks[i], joined)
        if self.is_gated:
            return adapters.linear_gated(
                self.x, self.weights[i], None, self.tiles, "silu"
            )
        return adapters.linear(self.x, self.weights[i], None, self.tiles)

    def product(self, i: int) -> Tensor:
        return linear(self.x, self.joined[i].weight)

    def expand(self, y: Tensor, i: int) -> Tensor:
        stack, tiles = self.stacks[i], self.tiles
        if self.is_gated:
            return kernels.lora_expand_gated(y, None, stack, tiles, "silu")
        return kernels.lora_expand(y, None, stack, tiles)

    def us(self, run: Callable[[int], object]) -> float:
        calls = [partial(run, i % len(self.stacks)) for i in range(32)]
        return graph_us(calls)


def layer_of(name: str, args: argparse.Namespace) -> Layer:
    k, sizes = LINEARS[name]
    n, slots, rank = sum(sizes), args.adapters, args.rank
    copies = copies_for(2 * n * k)
    stacks = [
        AdapterStack(
            a=torch.randn(slots, len(sizes) * rank, k, device="cuda").bfloat16(),
            b=torch.randn(slots, n, rank, device="cuda").bfloat16(),
            ranks=torch.tensor([0] + [rank] * slots, dtype=torch.int32, device="cuda"),
            sizes=sizes,
        )
        for _ in range(copies)
    ]
    words = plan_tiles(1 + np.arange(args.rows) % slots, 1)
    assert words is not None
    # As many tiles as a graph of this many rows has.
    static = StaticTiles(max_tokens=args.rows, num_slots=slots, device="cuda")
    static.populate(AdapterTiles(words=torch.from_numpy(words).cuda()), args.rows)
    tiles = static.of(args.rows)
    x = torch.randn(args.rows, k, device="cuda").bfloat16()
    behind = slots * len(sizes) * rank
    joined = [JoinedWeight(w, None) for w in weights(n + behind, k, copies)]
    plain = [each.weight[:n] for each in joined]
    return Layer(name, x, plain, joined, stacks, tiles)


def report(args: argparse.Namespace) -> None:
    names = ("plain", "joined", "apart", "product", "expand")
    print(f"{'us':>8}", *(f"{name:>8}" for name in names))
    total = np.zeros(3)
    for name in LINEARS:
        layer = layer_of(name, args)
        found = [
            layer.us(layer.plain),
            layer.us(layer.adapted),
            layer.us(layer.apart),
            layer.us(layer.product),
            layer.us(partial(layer.expand, layer.product(0))),
        ]
        total += found[:3]
        print(f"{name:>8}", *(f"{us:>8.2f}" for us in found))
    joined, apart = (total[1:] - total[0]) * LAYERS / 1e3
    print(f"{LAYERS} layers: {joined:.3f} ms more joined, {apart:.3f} apart")


def shapes(halves: str) -> Iterator[Shape]:
    base = SHAPES[0]
    if halves == "shrink":
        for slice_k, block_k, warps in SHRINKS:
            if block_k <= slice_k:
                yield dataclasses.replace(
                    base, slice_k=slice_k, block_k=block_k, shrink_warps=warps
                )
    else:
        for block_n, warps in EXPANDS:
            yield dataclasses.replace(base, block_n=block_n, expand_warps=warps)


def use(shape: Shape) -> None:
    kernels.shape_of = lambda _: shape


def compile_all(args: argparse.Namespace, job: tuple[str, int, int]) -> None:
    name, share, of = job
    layer = layer_of(name, args)
    found = [shape for half in args.sweep for shape in shapes(half)]
    for shape in found[share::of]:
        use(shape)
        layer.adapted(0)
        layer.apart(0)
    torch.cuda.synchronize()


def sweep(args: argparse.Namespace) -> None:
    jobs = [(name, share, 3) for name in LINEARS for share in range(3)]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        pool.map(partial(compile_all, args), jobs, chunksize=1)
    for name in LINEARS:
        layer = layer_of(name, args)
        for half in args.sweep:
            found = []
            run = layer.apart if half == "shrink" else layer.adapted
            for shape in shapes(half):
                use(shape)
                found.append((layer.us(run), shape))
            found.sort(key=lambda pair: pair[0])
            for us, shape in found[:6] + found[-1:]:
                print(
                    f"{name} {half} {us:.2f} us: slice {shape.slice_k}, "
                    f"k {shape.block_k} x {shape.shrink_warps}, n {shape.block_n} x "
                    f"{shape.expand_warps}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sweep", choices=HALVES, nargs="+", default=[])
    args = parser.parse_args()
    report(args)
    if args.sweep:
        sweep(args)


if __name__ == "__main__":
    main()
