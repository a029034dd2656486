"""Tensors of the gated delta rule: what a forward brings, and what verification keeps
for the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """Inputs of T tokens. H_k key heads serve H_v value heads: value head h belongs to
    key head h // (H_v / H_k).

    Fields:
        q, k: [T, H_k, d_k]; v: [T, H_v, d_v]; float32, bfloat16 or float16, the heads
            of a token contiguous, so that all may be views of one tensor.
        g: [T, H_v] float32, contiguous, finite and at most 0: log of the decay.
        beta: [T, H_v], float32 or the dtype of `v`, contiguous: strength of the write.
        scale: factor of the outputs, usually d_k ** -0.5.
        normalise: whether q and k are first divided by their l2 norm,
            sqrt(sum(x ** 2) + 1e-6).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    normalise: bool

    def widen(self) -> DeltaInputs:
        """Return float32 inputs with normalised q and k, repeated for all value
        heads. No factor is left to apply but `scale`.
        """
        group = self.v.shape[1] // self.k.shape[1]

        def prepare(x: Tensor) -> Tensor:
            x = x.float()
            if self.normalise:
                x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
            return x.repeat_interleave(group, dim=1)

        return replace(
            self,
            q=prepare(self.q),
            k=prepare(self.k),
            v=self.v.float(),
            g=self.g.float(),
            beta=self.beta.float(),
            normalise=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNodes:
    """What B * D verified nodes would add to a state; written by `gated_delta_tree`,
    read by `gated_delta_commit`. Contiguous.

    Fields:
        k: [B * D, H_k, d_k], keys as used: normalised if the inputs asked for it.
        u: [B * D, H_v, d_v] of the dtype of `k`, corrections: the node adds k u^T.
        decay: [B * D, H_v] float32, sum of g over the node's path in the tree, itself
            included.
    """

    k: Tensor
    u: Tensor
    decay: Tensor

    @classmethod
    def allocate(
        cls,
        nodes: int,
        state: Tensor,
        *,
        key_heads: int,
        dtype: torch.dtype = torch.float32,
    ) -> DeltaNodes:
        """Return nodes for a state [slots, H_v, d_k, d_v]. A half `dtype` halves the
        memory and rounds what is committed.
        """
        _, heads, d_k, d_v = state.shape

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=state.device)

        return cls(
            k=zeros(nodes, key_heads, d_k, dtype=dtype),
            u=zeros(nodes, heads, d_v, dtype=dtype),
            decay=zeros(nodes, heads, dtype=torch.float32),
        )


def require_delta(inputs: DeltaInputs, state: Tensor) -> None:
    """Raise ValueError if inputs and state do not fit."""
    tokens, key_heads, d_k = inputs.k.shape
    heads, d_v = inputs.v.shape[1:]
    if heads % key_heads:
        raise ValueError(
            f"gated_delta: {key_heads} key heads do not divide {heads} value heads"
        )
    expected = {
        "q": (inputs.q, (tokens, key_heads, d_k)),
        "v": (inputs.v, (tokens, heads, d_v)),
        "g": (inputs.g, (tokens, heads)),
        "beta": (inputs.beta, (tokens, heads)),
        "state": (state, (state.shape[0], heads, d_k, d_v)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"gated_delta: {name} is {list(tensor.shape)}, expected {list(shape)}"
            )
