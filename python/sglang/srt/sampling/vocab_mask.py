"""Token masks of grammars as bit masks: bit i % 32 of word i // 32 is set if id i is
allowed.

The only module that knows the bit layout on the tensor side. Knows nothing of grammars.
"""

from __future__ import annotations

from functools import lru_cache

import torch


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 words of one row's mask."""
    return (vocab_size + 31) // 32


def allocate_vocab_mask(
    n_rows: int, vocab_size: int, *, pin_memory: bool = False
) -> torch.Tensor:
    """Return a host mask [n_rows, ceil(vocab_size / 32)] int32 that allows all ids."""
    shape = (n_rows, mask_words(vocab_size))
    return torch.full(shape, -1, dtype=torch.int32, pin_memory=pin_memory)


def apply_vocab_mask(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `logits` [R, V] float32 with -inf where the bit of `mask` [R, W] is clear.

    Returns a new tensor. 32 W must be at least V. NaN stays NaN.
    """
    # A table of a byte's 256 masks is several times faster on the CPU than shifting
    # bits and filling where they are clear. Byte b of a little-endian word holds ids
    # 8b .. 8b + 7, lowest bit first, so the bytes lie in id order.
    as_bytes = mask.contiguous().view(torch.uint8).flatten().int()
    bias = _byte_biases(logits.device).index_select(0, as_bytes)
    return logits + bias.view(mask.shape[0], -1)[:, : logits.shape[1]]


@lru_cache(maxsize=16)
def _byte_biases(device: torch.device) -> torch.Tensor:
    """Return [256, 8] float32: 0 where the bit of the byte is set, -inf where it is
    clear."""
    biases = [
        [0.0 if byte >> bit & 1 else float("-inf") for bit in range(8)]
        for byte in range(256)
    ]
    return torch.tensor(biases, device=device)
