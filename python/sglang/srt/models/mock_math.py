"""Arithmetic of the mock model, shared by the model and its oracle.

Hashing is wrap-around int64. `sig(x)` is a vector of sparse signs: per KV head, 4 of 64
channels hold +1 or -1, one in each block of 16. Its sums over a context stay near
sqrt(n / 16), so that a mean times n rounds to the exact integer even in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.hashing import mix64

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

NUM_LAYERS = 2
NUM_HEADS = 8
NUM_KV_HEADS = 2
HEAD_DIM = 64
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM
GROUP = NUM_HEADS // NUM_KV_HEADS
TOKEN_BITS = 12
MAX_VOCAB = 1 << TOKEN_BITS
SIGNS_PER_HEAD = 4
BLOCK = HEAD_DIM // SIGNS_PER_HEAD
HEAD_STEP = 1000003
# A written slot of layer l scores QUERY * -(1 + l) * SM_SCALE = -30 (1 + l). This is
# the same for all of them, so the softmax is uniform, while a slot never written
# (zeros) scores 0 and wins.
QUERY = 240.0
SM_SCALE = 0.125
MAX_SUM = 128
FOLD_BITS = 64
# Channels of the hidden state that hold the bits of X_0 and X_1.
FOLD_CHANNELS = (64, 128)
# Each captured hidden state is rotated by this many channels more than the one before.
AUX_TURN = 192


def check_shape(config: ModelConfig) -> None:
    """Raise ValueError if config.json does not describe the mock model."""
    expected = {
        "num_hidden_layers": (config.num_layers, NUM_LAYERS),
        "num_attention_heads": (config.num_heads, NUM_HEADS),
        "num_key_value_heads": (config.num_kv_heads, NUM_KV_HEADS),
        "head_dim": (config.head_dim, HEAD_DIM),
        "hidden_size": (config.hidden_size, HIDDEN_SIZE),
    }
    for name, (value, needed) in expected.items():
        if value != needed:
            raise ValueError(f"the mock model needs {name} {needed}, got {value}")
    if not 2 <= config.vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"the mock model needs a vocab_size of 2 to {MAX_VOCAB}, got "
            f"{config.vocab_size}"
        )


def _kept_on_a_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a table only once on a CPU, where the number of operations is what costs. A
    table on a GPU may lie in the memory of the graph that is being captured."""
    kept = cache(make)

    @wraps(make)
    def table(device: torch.device, *numbers: int) -> Tensor:
        return (kept if device.type == "cpu" else make)(device, *numbers)

    return table


@_kept_on_a_host
def multiples(device: torch.device, count: int, step: int = 1) -> Tensor:
    """Return 0, `step`, 2 `step`, ..., int64 [count]."""
    return torch.arange(count, device=device) * step


@_kept_on_a_host
def _powers(device: torch.device, count: int) -> Tensor:
    """Return 1, 2, 4, ..., int64 [count]."""
    return torch.ones_like(multiples(device, count)) << multiples(device, count)


@_kept_on_a_host
def _sign_bits(device: torch.device) -> Tensor:
    """Return the bits that hold the signs of a signature, int64 [4]."""
    return _powers(device, 8 * SIGNS_PER_HEAD)[7::8].contiguous()


@_kept_on_a_host
def _code_weights(device: torch.device) -> Tensor:
    """Return the size of each bit of a token in a hidden state, float32 [12]."""
    return 1.0 + multiples(device, TOKEN_BITS) / 16.0


def signs(values: Tensor, bits: int) -> Tensor:
    """Return the low bits of int64 [T] as +1 / -1, lowest first: float32 [T, bits]."""
    is_set = (values[:, None] & _powers(values.device, bits)) != 0
    return torch.where(is_set, 1.0, -1.0)


def from_signs(code: Tensor) -> Tensor:
    """Return the numbers, int64 [T], whose bits are codes [T, bits] of +1 / -1."""
    return ((code > 0) * _powers(code.device, code.shape[-1])).sum(-1)


def token_codes(vocab_size: int) -> Tensor:
    """Return the bits of each token id as +1 / -1, float32 [vocab, 12]."""
    return signs(torch.arange(vocab_size), TOKEN_BITS)


def decode_token(embedded: Tensor) -> Tensor:
    """Return the token ids, int64 [T], of embeddings [T, 512], codes of +1 / -1."""
    return from_signs(embedded[:, :TOKEN_BITS])


def key_layer0(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return x_0 [T]. It ignores the token at position 0, which drafts do not know."""
    known = torch.where(positions == 0, 0, tokens + 1)
    return mix64(known + (positions << 32))


def key_layer1(fold0: Tensor, positions: Tensor) -> Tensor:
    """Return x_1 [T], which carries the history through X_0."""
    return mix64(fold0 ^ (positions << 40) ^ 12345)


def sig(x: Tensor) -> Tensor:
    """Return sparse signs: int64 [T] -> float32 [T, KV heads, 64]."""
    channel, sign = _places(x)
    out = torch.zeros(*channel.shape[:2], HEAD_DIM, device=x.device)
    return out.scatter_(-1, channel, sign.float())


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return channels and signs of a signature, int64 [T, KV heads, 4] each."""
    device = x.device
    y = mix64(x[:, None] + multiples(device, NUM_KV_HEADS, HEAD_STEP))[..., None]
    inside = (y >> multiples(device, SIGNS_PER_HEAD, 8)) & 0xF
    sign = torch.where((y & _sign_bits(device)) != 0, -1, 1)
    return inside + multiples(device, SIGNS_PER_HEAD, BLOCK), sign


def qkv(x: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    """Return query, key and value of one layer, [T, (8 + 2 + 2) * 64]."""
    rows = x.shape[0]
    out = torch.zeros(
        rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=x.device
    )
    out[:, :NUM_HEADS, -1] = QUERY
    # One signature for both, because on a CPU the number of operations is what costs.
    out[:, NUM_HEADS:] = sig(torch.stack((mix64(x + 99), x), dim=1).view(-1)).view(
        rows, 2 * NUM_KV_HEADS, HEAD_DIM
    )
    out[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS, -1] = -(1.0 + layer)
    return out.flatten(1)


@_kept_on_a_host
def fold_weights(device: torch.device, layer: int) -> Tensor:
    """Return the odd constants c_l [8 * 64]."""
    return mix64(multiples(device, HIDDEN_SIZE) + (layer + 1) * 7919) | 1


def fold(mean: Tensor, count: Tensor, layer: int) -> Tensor:
    """Return X_l [T] int64 of attention means [T, 8 * 64] over `count` [T] elements.

    NaN or infinity gives an X that no oracle predicts, so that damage is visible.
    """
    sums = torch.round(mean.float() * count[:, None])
    integers = torch.nan_to_num(sums, nan=3e6, posinf=5e6, neginf=-5e6).long()
    return (integers * fold_weights(mean.device, layer)).sum(-1)


def fold_signs(signs: Tensor, layer: int) -> Tensor:
    """Return the fold of one signature [T, KV heads, 64]: one element's term in X_l."""
    heads = signs.repeat_interleave(GROUP, dim=1)
    flat = heads.reshape(signs.shape[0], -1)
    return fold(flat, torch.ones_like(flat[:, 0], dtype=torch.int64), layer)


def term(x: Tensor, layer: int) -> Tensor:
    """Return `fold_signs(sig(x), layer)`, computed from its non-zeros: int64 [T]."""
    channel, sign = _places(x)
    heads = multiples(x.device, NUM_KV_HEADS)[:, None]
    return (sign * _shared_weights(x.device, layer)[heads, channel]).sum((1, 2))


@_kept_on_a_host
def _shared_weights(device: torch.device, layer: int) -> Tensor:
    """Return the sums of c_l over the heads that share a KV head, [KV heads, 64]."""
    return fold_weights(device, layer).view(NUM_KV_HEADS, GROUP, HEAD_DIM).sum(1)


def next_token(fold0: Tensor, fold1: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return t [T] = (mix64(X_0 + 3 X_1 + pos) mod 2^63) % vocab."""
    return (mix64(fold0 + 3 * fold1 + positions) & 0x7FFFFFFFFFFFFFFF) % vocab


def hidden_state(tokens: Tensor, fold0: Tensor, fold1: Tensor) -> Tensor:
    """Return the hidden state: weighted code of t and bits of the folds, [T, 512].

    The weights 1 + i/16 avoid ties: rank j + 1 is t with bit j flipped.
    """
    out = torch.zeros(tokens.shape[0], HIDDEN_SIZE, device=tokens.device)
    out[:, :TOKEN_BITS] = signs(tokens, TOKEN_BITS) * _code_weights(tokens.device)
    for channel, fold_of_layer in zip(FOLD_CHANNELS, (fold0, fold1), strict=True):
        out[:, channel : channel + FOLD_BITS] = signs(fold_of_layer, FOLD_BITS)
    return out


def aux_states(hidden: Tensor) -> list[Tensor]:
    """Return the captured states of layers 0, 1 and the last output, [T, 512] each.

    The first is the hidden state; the others differ from it in position and sign of
    each channel.
    """
    turned = (hidden.roll(AUX_TURN * i, -1) for i in range(NUM_LAYERS + 1))
    return [
        state * _aux_signs(state.device, i).to(state.dtype)
        for i, state in enumerate(turned)
    ]


def aux_origin(state: Tensor, index: int) -> Tensor:
    """Return the hidden state [T, 512] of entry `index` of `aux_states`."""
    unsigned = state * _aux_signs(state.device, index).to(state.dtype)
    return unsigned.roll(-AUX_TURN * index, -1)


@_kept_on_a_host
def _aux_signs(device: torch.device, index: int) -> Tensor:
    """Return the signs of captured state `index`, [512]: all +, all -, alternating."""
    return 1 - 2 * ((index + multiples(device, HIDDEN_SIZE, index // 2)) % 2)


def read_folds(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return X_0 and X_1 [T] of a hidden state [T, 512], and whether it is valid.

    Validity is bool [T], false where a bit is neither +1 nor -1.
    """
    parts = [hidden[:, start : start + FOLD_BITS] for start in FOLD_CHANNELS]
    fold0, fold1 = map(from_signs, parts)
    is_whole = torch.stack([(part.abs() == 1).all(-1) for part in parts]).all(0)
    return fold0, fold1, is_whole
