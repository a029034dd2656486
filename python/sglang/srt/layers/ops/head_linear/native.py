"""Native form of the product with per-head matrices."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.layers.ops.head_linear.op import PackedHeads, head_linear_ref
from sglang_kernels import ops


def head_linear(
    x: Tensor, weight: Tensor | PackedHeads, *, out: Tensor | None = None
) -> Tensor:
    if not isinstance(weight, PackedHeads):
        return head_linear_ref(x, weight, out=out)
    if out is None:
        out = x.new_empty(*x.shape[:2], weight.n)
    ops.packed_head_linear(x, weight.data, weight.n, out)
    return out
