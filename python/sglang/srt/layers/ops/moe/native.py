"""Native form of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.ops.moe.op import ExpertWeights, SwiGLUClamp, moe_experts_ref
from sglang_kernels import ops

if TYPE_CHECKING:
    pass


SCRATCH_BYTES = 256 << 20
"""Rows sorted by expert, with their activations and products. If more tokens arrive
than fit, they take several turns, each of which reads all weights."""


_NO_CLAMP = SwiGLUClamp()


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertWeights
) -> Tensor:
    if not experts.is_packed:
        return moe_experts_ref(x, weights, ids, experts)
    tokens, hidden = x.shape
    wide = x.float()
    out = torch.empty_like(wide)
    floats = ids.shape[1] * (2 * hidden + experts.inner)
    turn = max(1, min(tokens, SCRATCH_BYTES // (4 * floats)))
    clamp = experts.clamp or _NO_CLAMP
    for first in range(0, tokens, turn):
        part = slice(first, first + turn)
        ops.moe_experts(
            wide[part],
            ids[part],
            weights[part],
            experts.gate_up,
            experts.gate_up_bias,
            experts.down,
            experts.down_bias,
            experts.inner,
            experts.clamp is not None,
            clamp.alpha,
            clamp.limit,
            wide.new_empty(len(ids[part]) * floats),
            out[part],
        )
    return out.to(x.dtype)
