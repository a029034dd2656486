"""What adapters add to the products of a layer, in graphs, on the 8B shape.

python benchmark/kernels/bench_lora_products.py --rows 32 --adapters 8 --rank 16
python benchmark/kernels/bench_lora_products.py --sweep

Microseconds of each linear layer alone and with adapters, and the two halves of the
adapters' products. With --sweep the sizes of launches are searched; kernels are
compiled by one process per core first.
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
SHRINKS = tuple(itertools.product((512, 1024, 2048), (128, 256, 512), (2, 4)))
EXPANDS = tuple(itertools.product((64, 128, 256, 512), (2, 4, 8)))


class Layer(NamedTuple):
    """A linear layer, in copies that L2 does not hold together."""

    name: str
    x: Tensor
    weights: list[Tensor]
    stacks: list[AdapterStack]
    tiles: AdapterTiles

    @property
    def is_gated(self) -> bool:
        return self.name == "gate_up"

    def plain(self, i: int) -> Tensor:
        if self.is_gated:
            return linear_gated(self.x, self.weights[i], "silu")
        return linear(self.x, self.weights[i])

    def adapted(self, i: int) -> Tensor:
        inner = kernels.lora_shrink(self.x, self.stacks[i], self.tiles)
        return self.expand(i, linear(self.x, self.weights[i]), inner)

    def shrink(self, i: int) -> Tensor:
        return kernels.lora_shrink(self.x, self.stacks[i], self.tiles)

    def expand(self, i: int, y: Tensor, inner: Tensor) -> Tensor:
        stack, tiles = self.stacks[i], self.tiles
        if self.is_gated:
            return kernels.lora_expand_gated(y, inner, stack, tiles, "silu")
        return kernels.lora_expand(y, inner, stack, tiles)

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
    return Layer(name, x, weights(n, k, copies), stacks, tiles)


def report(args: argparse.Namespace) -> None:
    print(f"{'':>8} {'plain':>8} {'adapted':>8} {'shrink':>8} {'expand':>8} us")
    total = np.zeros(2)
    for name in LINEARS:
        layer = layer_of(name, args)
        inner = layer.shrink(0)
        y = torch.zeros(args.rows, sum(LINEARS[name][1]), device="cuda").bfloat16()
        found = [
            layer.us(layer.plain),
            layer.us(layer.adapted),
            layer.us(layer.shrink),
            layer.us(partial(_expand, layer, y, inner)),
        ]
        total += found[:2]
        print(f"{name:>8}", *(f"{us:>8.2f}" for us in found))
    added = (total[1] - total[0]) * LAYERS / 1e3
    print(f"sum of {LAYERS} layers: {added:.3f} ms more")


def _expand(layer: Layer, y: Tensor, inner: Tensor, i: int) -> Tensor:
    return layer.expand(i, y, inner)


def shapes(halves: str) -> Iterator[Shape]:
    base = SHAPES[0]
    if halves == "shrink":
        for slice_k, block_k, warps in SHRINKS:
            if block_k <= slice_k:
                yield dataclasses.replace(
                    base, slice_k=slice_k, block_k=block_k, shrink_warps=warps
                )
    else:
        for slice_k, (block_n, warps) in itertools.product((512, 1024), EXPANDS):
            yield dataclasses.replace(
                base, slice_k=slice_k, block_n=block_n, expand_warps=warps
            )


def use(shape: Shape) -> None:
    kernels.shape_of = lambda _: shape


def compile_all(args: argparse.Namespace, job: tuple[str, int, int]) -> None:
    name, share, of = job
    layer = layer_of(name, args)
    both = [*shapes("shrink"), *shapes("expand")]
    for shape in both[share::of]:
        use(shape)
        layer.adapted(0)
    torch.cuda.synchronize()


def sweep(args: argparse.Namespace) -> None:
    jobs = [(name, share, 3) for name in LINEARS for share in range(3)]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        pool.map(partial(compile_all, args), jobs, chunksize=1)
    for name in LINEARS:
        layer = layer_of(name, args)
        for half in ("shrink", "expand"):
            found = []
            for shape in shapes(half):
                use(shape)
                found.append((layer.us(layer.adapted), shape))
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
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    report(args)
    if args.sweep:
        sweep(args)


if __name__ == "__main__":
    main()
