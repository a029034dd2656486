"""Random problems for the ops of recurrent state: tokens, slots, trees and paths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs
from sglang.srt.layers.ops.state.shared.tracks import CHUNK, StateTracks
from sglang.srt.layers.ops.state.short_conv.conv_filter import ConvFilter

FLOAT32 = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """B trees of D nodes.

    Fields:
        parent_index: [B, D] int64, as in `DraftTree`. mask: [B, D, D] bool.
        path: [B, P] int64, path_lens: [B] int64: a path from each root; padded with -1.
    """

    parent_index: Tensor
    mask: Tensor
    path: Tensor
    path_lens: Tensor

    @property
    def width(self) -> int:
        return self.parent_index.shape[1]

    def ancestors(self, node: int) -> list[int]:
        """Return the path that ends at a node, root first."""
        found = [node]
        flat = self.parent_index.flatten().tolist()
        while flat[found[0]] >= 0:
            found.insert(0, flat[found[0]])
        return found


class Draws:
    """Random tensors of one seed on one device."""

    def __init__(self, seed: int, *, device: str = "cpu") -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device = device

    def integer(self, low: int, high: int) -> int:
        """Return low .. high, both included."""
        drawn = torch.randint(low, high + 1, (), generator=self._generator)
        return int(drawn)

    def choice(self, *values: int) -> int:
        return values[self.integer(0, len(values) - 1)]

    def flag(self) -> bool:
        return bool(self.integer(0, 1))

    def normal(self, *shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self.device, dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator).to(self.device)

    def longs(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def slots(self, rows: int, count: int) -> Tensor:
        """Return distinct slots, none of them scratch."""
        order = torch.randperm(count - 1, generator=self._generator)[:rows] + 1
        return order.to(self.device)

    def indptr(self, lens: list[int]) -> Tensor:
        bounds = [0]
        for length in lens:
            bounds.append(bounds[-1] + length)
        return self.longs(bounds)

    def tracks(self, lens: list[int], *, taken: Tensor, count: int) -> StateTracks:
        """Return one to three checkpoints per row, some of them absent, in slots of
        `count` that are not taken. When there are no more, scratch gets the rest.
        """
        order = torch.randperm(count - 1, generator=self._generator) + 1
        free = [slot for slot in order.tolist() if slot not in taken.tolist()]
        per_row = self.integer(1, 3)
        folded, slots = [], []
        for length in lens:
            places = [0, *range(CHUNK, length, CHUNK), length]
            folded.append([self.choice(*places) for _ in range(per_row)])
            # Where nothing is stored, any slot may stand.
            slots.append([free.pop() if n and free else 0 for n in folded[-1]])
        return StateTracks(lens=self.longs(folded), slots=self.longs(slots))

    def bools(self, rows: int) -> Tensor:
        drawn = torch.randint(0, 2, (rows,), generator=self._generator)
        return drawn.bool().to(self.device)

    def counts(self, slots: int) -> Tensor:
        """Return [slots, 3], counts of folded tokens of three layers, as a pool has
        them."""
        drawn = torch.randint(0, 5000, (slots, 3), generator=self._generator)
        return drawn.to(self.device, torch.int32)

    def conv(
        self, channels: int, width: int, *, dtype: torch.dtype = FLOAT32
    ) -> ConvFilter:
        return ConvFilter(
            weight=self.normal(channels, width, dtype=dtype),
            bias=self.normal(channels, dtype=dtype) if self.flag() else None,
            silu=self.flag(),
        )

    def delta(
        self,
        tokens: int,
        *,
        key_heads: int,
        heads: int,
        d_k: int,
        d_v: int,
        normalise: bool = True,
        dtype: torch.dtype = FLOAT32,
    ) -> DeltaInputs:
        """Return inputs that are views of one packed tensor, as a layer has them.
        Decays reach from almost none to almost all, and keys repeat.
        """
        sizes = [key_heads * d_k, key_heads * d_k, heads * d_v]
        packed = self.normal(tokens, sum(sizes), dtype=dtype)
        if not normalise:
            packed[:, : 2 * key_heads * d_k] *= d_k**-0.5
        q, k, v = packed.split(sizes, dim=1)
        if tokens > 2 and self.flag():
            k[1 : tokens // 2] = k[:1]
        strength = 4 * self.uniform(tokens, heads) ** 4
        return DeltaInputs(
            q=q.unflatten(1, (key_heads, d_k)),
            k=k.unflatten(1, (key_heads, d_k)),
            v=v.unflatten(1, (heads, d_v)),
            g=-strength,
            beta=self.uniform(tokens, heads),
            scale=d_k**-0.5,
            normalise=normalise,
        )

    def trees(self, rows: int, width: int, *, chains: bool = False) -> Trees:
        parents = torch.full((rows, width), -1, dtype=torch.int64)
        mask = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1)
        paths = []
        for row in range(rows):
            first = row * width
            for node in range(1, width):
                # Some nodes follow the prefix, as the root does.
                parent = node - 1 if chains else self.integer(-(node < 4), node - 1)
                if parent >= 0:
                    parents[row, node] = first + parent
                    mask[row, node] |= mask[row, parent]
            path = mask[row, self.integer(0, width - 1)].nonzero().flatten().tolist()
            kept = path[: self.integer(0, len(path))]
            paths.append([first + node for node in kept])
        most = width
        padded = [path + [-1] * (most - len(path)) for path in paths]
        return Trees(
            parent_index=parents.to(self.device),
            mask=mask.to(self.device),
            path=self.longs(padded),
            path_lens=self.longs([len(path) for path in paths]),
        )


def take(inputs: DeltaInputs, tokens: list[int] | Tensor) -> DeltaInputs:
    """Return the inputs of some tokens, in this order."""
    return DeltaInputs(
        q=inputs.q[tokens],
        k=inputs.k[tokens],
        v=inputs.v[tokens],
        g=inputs.g[tokens],
        beta=inputs.beta[tokens],
        scale=inputs.scale,
        normalise=inputs.normalise,
    )
