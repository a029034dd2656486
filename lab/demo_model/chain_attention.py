"""Attention of a draft chain: each query reads a causal prefix and the keys that its
own chain added after it.

Knows the mathematics of one attention call; refuses to know heads, data and training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Flash = tuple[Tensor, Tensor, tuple[Any, ...]]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> Flash:
    """Run causal attention; return output, fp32 log-sum-exp [B, H, N], context."""
    ops = torch.ops.aten
    if q.is_cuda:
        out, lse, *rest = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out, lse, tuple(rest[:6])
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out, lse, ()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ops = torch.ops.aten
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        grads = ops._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            cum_q,
            cum_k,
            max_q,
            max_k,
            0.0,
            True,
            seed,
            offset,
        )
    else:
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, True
        )
    return grads[0], grads[1], grads[2]


class _ChainAttention(torch.autograd.Function):
    """The flash kernels' backward is exact for the prefix part when it is given the
    output and the log-sum-exp of the whole softmax: it recomputes exp(score - lse).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor:  # own: k_1, v_1, k_2, v_2, ...
        prefix, lse, rest = _flash_forward(q, k, v)
        scale = q.shape[-1] ** -0.5
        scores = torch.stack(
            [(q * key).sum(-1, dtype=torch.float32) * scale for key in own[::2]], -1
        )
        total = torch.logaddexp(lse, torch.logsumexp(scores, -1))
        out = prefix * (lse - total).exp().unsqueeze(-1)
        for i, value in enumerate(own[1::2]):
            out = out + (scores[..., i] - total).exp().unsqueeze(-1) * value
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total, scores, *own)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, total, scores, *own = ctx.saved_tensors
        grad = grad.contiguous().to(q.dtype)
        dq, dk, dv = _flash_backward(grad, q, k, v, out, total, ctx.rest)
        scale = q.shape[-1] ** -0.5
        delta = (grad * out).sum(-1, dtype=torch.float32)
        grads: list[Tensor] = []
        for i, (key, value) in enumerate(zip(own[::2], own[1::2], strict=True)):
            share = (scores[..., i] - total).exp()
            pull = (grad * value).sum(-1, dtype=torch.float32)
            slope = (share * (pull - delta) * scale).unsqueeze(-1).to(q.dtype)
            dq = dq + slope * key
            grads += [slope * q, share.unsqueeze(-1).to(q.dtype) * grad]
        return (dq, dk, dv, *grads)


def chain_attention(
    q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attend over (k[0 .. n] and own_1[n], own_2[n], ...) for the query of anchor n.

    Args:
        q, k, v: [B, H, N, D], of one dtype; k and v are the true prefix by anchor.
        own: keys and values [B, H, N, D] that the chains added, one pair per step.

    Returns:
        [B, H, N, D].
    """
    flat = [tensor for pair in own for tensor in pair]
    result: Tensor = _ChainAttention.apply(q, k, v, *flat)  # type: ignore[no-untyped-call]
    return result


def chain_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Oracle of `chain_attention`, by matrix products over all keys."""
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)).float() * scale
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    parts = [scores.masked_fill(hidden, float("-inf"))]
    parts += [(q * key).float().sum(-1, keepdim=True) * scale for key, _ in own]
    shares = torch.cat(parts, -1).softmax(-1).to(q.dtype)
    out = shares[..., :n] @ v
    for i, (_, value) in enumerate(own):
        out = out + shares[..., n + i, None] * value
    return out
