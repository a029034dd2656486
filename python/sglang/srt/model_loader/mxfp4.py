"""MXFP4 weights (OCP Microscaling Formats 1.0), dequantised on load.

gpt-oss checkpoints use them for the experts: `X_blocks` has two e2m1 numbers per byte,
`X_scales` an e8m0 exponent per 32 numbers. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))
"""Values of codes 0 to 15."""
BLOCK_BYTES = 16
"""Bytes that share a scale."""
_PAIRS = [(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)]
_POWERS = [*(2.0 ** (scale - 127) for scale in range(255)), math.nan]
_SUFFIXES = ("_blocks", "_scales")


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """value = e2m1(code) * 2 ** (scale - 127), exact in float32 and bfloat16.

    Args:
        blocks: [..., G, 16] uint8; the low half of a byte is the first of its two
            codes.
        scales: [..., G] uint8; 255 is NaN.

    Returns:
        [..., G * 32] of `dtype`.
    """
    out = torch.empty(
        *scales.shape[:-1], 32 * scales.shape[-1], dtype=dtype, device=blocks.device
    )
    # Tables, because a power function may be off by the last bit.
    pairs = torch.tensor(_PAIRS, device=blocks.device)
    powers = torch.tensor(_POWERS, device=blocks.device)
    # Slice by slice, because in float32 and as indices everything would be too large.
    for target, some_blocks, some_scales in zip(out, blocks, scales, strict=True):
        values = functional.embedding(some_blocks.int(), pairs).flatten(-2)
        target.copy_((values * powers[some_scales.int(), None]).flatten(-2))
    return out


def dequantized(
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    device: str,
    source: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` with X in `dtype` instead of `X_blocks` and `X_scales`.

    A stack of matrices [E, outputs, inputs] is yielded as [E, inputs, outputs], as in
    checkpoints that are not quantised. Computed on `device`.

    Raises:
        ValueError: one of the two is missing, or they do not match. The message names
            it.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        suffix = next((s for s in _SUFFIXES if name.endswith(s)), None)
        if suffix is None:
            yield name, tensor
            continue
        whole = name.removesuffix(suffix)
        found = waiting.setdefault(whole, {})
        found[suffix] = tensor
        if len(found) < len(_SUFFIXES):
            continue
        blocks, scales = (waiting[whole][s] for s in _SUFFIXES)
        del waiting[whole], found
        _check(whole, blocks, scales, source)
        values = dequantize_mxfp4(blocks.to(device), scales.to(device), dtype)
        yield whole, values.transpose(1, 2) if values.dim() == 3 else values
    for whole, found in waiting.items():
        (suffix,) = found
        (other,) = set(_SUFFIXES) - {suffix}
        raise ValueError(f"{source}: there is a tensor {whole}{suffix}, but no {other}")


def _check(name: str, blocks: Tensor, scales: Tensor, source: str) -> None:
    is_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not is_bytes or blocks.shape != (*scales.shape, BLOCK_BYTES) or scales.dim() < 2:
        raise ValueError(
            f"{source}: {name}_blocks is {blocks.dtype} {tuple(blocks.shape)} and "
            f"{name}_scales {scales.dtype} {tuple(scales.shape)}; expected uint8 "
            f"[..., G, {BLOCK_BYTES}] and [..., G]"
        )
