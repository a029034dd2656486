"""Tokens that were drawn, and everything that they were drawn from: logits rows, what
the head read, masks and the parameters that the host announced.

Holds tensors and declares their words; launches nothing and knows no sampler.

```
tokens  | row 0: 0 .. W - 1 | row 1: 0 .. W - 1 | ...     token i is of row i // W
logits, inputs, kept, masks: row logits_rows[i];  hidden: row hidden_ends[i] - 1
edited: row edited_rows[i];  sampling: row req_rows[i // W]

mask row  | bit v % 32 of word v // 32 allows id v | ... | MaskWord |
```
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from operator import attrgetter

import torch
from torch import Tensor

from kv_canary.hashing import mix64, mix64_int, to_signed64

NOISE_STEP = to_signed64(0x9E3779B97F4A7C15)
NOISE_BITS = 53
"""Random bits of a uniform number."""

SLACK_BITS = 15
"""A draw may miss its interval by this power of 1/2 of the total weight, because
implementations add up in different orders."""

TINY_BITS = 100
"""Probabilities below this power of 1/2 are not compared: a device may flush them."""

SERIAL_WORD_MASK = (1 << 31) - 1
"""The bits of a serial that fit a mask word."""


class Sampling(IntEnum):
    """Words of a request's row in `DrawnTokens.sampling`."""

    SERIAL = 0
    """The request that announced the row, or `UNKNOWN`."""
    KEY = 1
    """Key of its noise: its mixed seed."""
    TEMPERATURE = 2
    """Bits of a float32, sign-extended; not read if GREEDY."""
    TOP_K = 3
    """At least 1; the vocabulary size or more if there is no top-k."""
    TOP_P = 4
    """Bits of a float32; 1 if there is no top-p."""
    MIN_P = 5
    """Bits of a float32; 0 if there is no min-p."""
    FLAGS = 6
    """`SamplingFlag`."""
    PROMPT_LEN = 7
    """Tokens before the first output token."""
    REPETITION = 8
    """Bits of a float32; 1 if there is no such penalty."""
    FREQUENCY = 9
    """Bits of a float32; 0 if there is no such penalty."""
    PRESENCE = 10
    """Bits of a float32; 0 if there is no such penalty."""
    MIN_NEW_TOKENS = 11
    """Output tokens before a stop id may follow; 0 if any may."""


SAMPLING_WORDS = len(Sampling)


class SamplingFlag(IntFlag):
    """Bits of `Sampling.FLAGS`."""

    GREEDY = 1
    EDITED = 2
    """Bias, penalties or a minimum length change its logits: `edited` has them."""
    GRAMMAR = 4
    """A mask must allow its tokens."""


class MaskWord(IntEnum):
    """The last words of a mask row, after its bits."""

    SERIAL = 0
    """Low bits of the request's serial; 0 if the request has no grammar."""
    ACCEPTED = 1
    """Tokens that the grammar had accepted when it made the mask; -1 if it failed, so
    that the result will be discarded."""


MASK_WORDS = len(MaskWord)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return the float64 in [0, 1) that belongs to each key and position, int64."""
    words = mix64(keys + (positions + 1) * NOISE_STEP)
    bits = (words >> (64 - NOISE_BITS)) & ((1 << NOISE_BITS) - 1)
    return bits.to(torch.float64) * 2.0**-NOISE_BITS


def noise_key(seed: int) -> int:
    """Return the key of the noise of a request's seed, a signed int64."""
    return mix64_int(seed + NOISE_STEP)


def float_bits(words: Tensor) -> Tensor:
    """Return the float32 whose bits int64 words hold."""
    return words.to(torch.int32).view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """W tokens for each of R rows, and what they were drawn from.

    Fields:
        req_rows, serials, prefix_lens, extend_lens: int64 [R], as in `ForwardView`. Row
            0 is padding. Token j of row r is at position prefix_lens[r] +
            extend_lens[r] + j.
        tokens: int64 [R * W]; negative if nothing was drawn.
        logits_rows: int64 [R * W], the row of `logits`, `inputs`, `kept` and `masks`
            for each token; negative to leave it out. None for row i.
        logits: [N, V], any float dtype, the output of the head.
        inputs: [N, H], what the head read, or None.
        hidden: [T, H], the output of the layer stack, or None.
        hidden_ends: int64 [R * W]: each token must come from the row before. None for
            row i.
        edited: float32 [E, V], logits after bias, penalties and bans of stops, computed
            from what was announced. The sampler's own would hide its mistakes.
        edited_rows: int64 [R * W], the row of `edited` for each token of an EDITED row;
            others are not read. A row that is not there lets no token pass.
        kept: float32 [N, V], probabilities that need not sum to 1, 0 for ids that
            top-k, top-p or min-p removed; for rows with one of them.
        masks: int32 [N, >= ceil(V / 32) + MASK_WORDS], bits and `MaskWord`, or None.
        sampling: int64 [req_rows, SAMPLING_WORDS], announced by the host when each
            request was admitted.
        draws: whether tokens are drawn with the noise of their positions. Otherwise a
            token only has to be an id that its row's mask allows.

    The last dimension of every tensor is contiguous.
    """

    req_rows: Tensor
    serials: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor
    tokens: Tensor
    logits_rows: Tensor | None
    logits: Tensor
    inputs: Tensor | None
    hidden: Tensor | None
    hidden_ends: Tensor | None
    edited: Tensor | None
    edited_rows: Tensor | None
    kept: Tensor | None
    masks: Tensor | None
    sampling: Tensor
    draws: bool = True

    @property
    def tensors(self) -> list[Tensor | None]:
        """All tensors, in order."""
        return list(_tensors_of(self))

    @property
    def num_rows(self) -> int:
        return self.req_rows.shape[0]

    @property
    def width(self) -> int:
        """W, the tokens of a row."""
        return self.tokens.shape[0] // max(self.num_rows, 1)

    @property
    def words(self) -> tuple[Tensor, Tensor] | None:
        """int32: the memory of `inputs` and `hidden`, or None unless both are there."""
        if self.inputs is None or self.hidden is None:
            return None
        return self.inputs.view(torch.int32), self.hidden.view(torch.int32)

    def check_layout(self) -> None:
        """Check for kernels that index raw memory and would misread another layout.

        Raises:
            ValueError: a tensor has another shape, dtype or layout.
        """
        tokens = self.num_rows * self.width
        per_token = ("tokens", "logits_rows", "hidden_ends", "edited_rows")
        sizes = dict.fromkeys(per_token, tokens)
        for f in fields(self):
            t = getattr(self, f.name)
            if not isinstance(t, Tensor):
                continue
            if f.name in _MATRICES:
                self._check_matrix(f.name, t)
                continue
            due = sizes.get(f.name, self.num_rows)
            if t.dtype is not torch.int64 or t.shape != (due,) or not _is_dense(t):
                _refuse(f.name, t, f"contiguous int64 [{due}]")
        if (self.edited is None) is not (self.edited_rows is None):
            raise ValueError("DrawnTokens: edited and edited_rows belong together")
        hidden, inputs = self.hidden, self.inputs
        if hidden is None or inputs is None:
            return
        if hidden.dtype is not inputs.dtype or hidden.shape[1] != inputs.shape[1]:
            _refuse("hidden", hidden, f"{inputs.dtype} [*, {inputs.shape[1]}]")

    def _check_matrix(self, name: str, t: Tensor) -> None:
        rows, vocab = self.logits.shape
        width = {
            "logits": vocab,
            "edited": vocab,
            "kept": vocab,
            "masks": -(-vocab // 32) + MASK_WORDS,
            "sampling": SAMPLING_WORDS,
        }.get(name, t.shape[-1])
        count = None if name in ("hidden", "edited", "sampling") else rows
        is_wide = t.shape[-1] >= width if name == "masks" else t.shape[-1] == width
        is_whole = t.is_contiguous() if name == "sampling" else _is_dense(t)
        dtypes, due = _MATRICES[name]
        fits = t.dim() == 2 and count in (None, t.shape[0]) and is_wide and is_whole
        if not fits or t.dtype not in dtypes:
            shape = f"[{'*' if count is None else count}, {width}]"
            _refuse(name, t, f"{due} {shape} with contiguous rows")
        if name in ("inputs", "hidden"):
            bytes_each = t.element_size()
            starts = t.stride(0) if t.shape[0] > 1 else 0
            if any(n * bytes_each % 4 for n in (width, starts, t.storage_offset())):
                _refuse(name, t, "rows that are whole 32-bit words")


_tensors_of = attrgetter(*(f.name for f in fields(DrawnTokens) if f.name != "draws"))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MATRICES = {
    "logits": (_FLOATS, "float"),
    "inputs": (_FLOATS, "float"),
    "hidden": (_FLOATS, "float"),
    "edited": ((torch.float32,), "float32"),
    "kept": ((torch.float32,), "float32"),
    "masks": ((torch.int32,), "int32"),
    "sampling": ((torch.int64,), "int64"),
}


def _is_dense(t: Tensor) -> bool:
    return t.shape[-1] <= 1 or t.stride(-1) == 1


def _refuse(name: str, t: Tensor, due: str) -> None:
    raise ValueError(
        f"DrawnTokens: {name} is {t.dtype} of shape {list(t.shape)} and strides "
        f"{list(t.stride())}; expected {due}"
    )
