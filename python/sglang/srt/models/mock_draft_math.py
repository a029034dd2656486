"""Arithmetic of the mock model's draft heads, shared by the heads and their oracle.

Owns the settings and the proposal of a head for two given folds. Knows no attention and
no trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.hashing import mix64
from sglang.srt.models import mock_math

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

SOURCES = ("attention", "hidden")
ACCEPTANCE = (0.6, 0.3, 0.1)
# Draft ids map to the target's in steps of the first suitable number from here on.
DRAFT_ID_STEP = 617
MAX_FLIPS = 7
_DRAW_BITS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Settings of a mock draft head.

    Fields:
        vocab_size: vocabulary of the target.
        draft_vocab_size: number of draft ids, each meaning the target's id (i * odd)
            mod vocab_size, or None if draft ids are the target's.
        source: where the state of the history comes from: "attention" over the draft's
            own KV, or the "hidden" state passed to the head.
        acceptance: probabilities that the target's next token has rank 0, has a rank of
            1 to 7, or is missed.

    Raises:
        ValueError: impossible settings. The message names the field of config.json.
    """

    vocab_size: int
    draft_vocab_size: int | None = None
    source: str = SOURCES[0]
    acceptance: tuple[float, float, float] = ACCEPTANCE

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(
                f"mock_draft_source {self.source!r} must be one of {', '.join(SOURCES)}"
            )
        shares = self.acceptance
        is_distribution = math.isclose(sum(shares), 1.0) and min(shares) >= 0
        if len(shares) != 3 or not is_distribution:
            raise ValueError(
                f"mock_acceptance {list(shares)} must be three probabilities that sum "
                "to 1: of rank 0, of ranks 1 to 7, of a miss"
            )
        size = self.draft_vocab_size
        if size is not None and not 0 < size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {size} must be from 1 to vocab_size "
                f"{self.vocab_size}"
            )

    @classmethod
    def from_config(cls, config: ModelConfig) -> DraftSettings:
        """Read the settings from config.json.

        Raises:
            ValueError: as in the class, prefixed with the file.
        """
        raw = config.raw
        try:
            return cls(
                vocab_size=config.vocab_size,
                draft_vocab_size=raw.get("draft_vocab_size"),
                source=raw.get("mock_draft_source", SOURCES[0]),
                acceptance=tuple(raw.get("mock_acceptance", ACCEPTANCE)),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{config.file}: {error}") from error

    def draw_limits(self) -> tuple[int, int]:
        """Return two limits for draws of `_DRAW_BITS` bits. Below the first the
        proposed code is the target's token, below the second it has one bit flipped."""
        first, second, _ = self.acceptance
        scale = 1 << _DRAW_BITS
        return round(first * scale), round((first + second) * scale)

    def hot_token_ids(self) -> Tensor | None:
        """Return the target's id of each draft id, int64 [draft vocabulary], or None if
        both vocabularies are the same.
        """
        if self.draft_vocab_size is None:
            return None
        step = next(
            step
            for step in range(DRAFT_ID_STEP, DRAFT_ID_STEP + 2 * self.vocab_size, 2)
            if math.gcd(step, self.vocab_size) == 1
            and (step % self.vocab_size != 1 or self.vocab_size == 2)
        )
        return torch.arange(self.draft_vocab_size) * step % self.vocab_size

    def head_codes(self) -> Tensor:
        """Return the code of each draft id's token, float32 [draft vocabulary, 12]."""
        codes = mock_math.token_codes(self.vocab_size)
        hot = self.hot_token_ids()
        return codes if hot is None else codes[hot]


@cache
def first_terms() -> tuple[int, int]:
    """Return the terms of position 0 in X_0 and X_1, which do not depend on the
    token."""
    zero = torch.zeros(1, dtype=torch.int64)
    fold0 = mock_math.term(mock_math.key_layer0(zero, zero), 0)
    fold1 = mock_math.term(mock_math.key_layer1(fold0, zero), 1)
    return int(fold0), int(fold1)


def proposal(
    fold0: Tensor, fold1: Tensor, positions: Tensor, settings: DraftSettings
) -> tuple[Tensor, Tensor]:
    """Return a head's proposal after tokens with the target's folds [T].

    Args:
        positions: [T] int64, position of the newest of these tokens.

    Returns:
        The code that scores best, int64 [T] (it may lie outside the vocabulary), and
        the weight of each of its bits, float32 [T, 12]: multiples of 1/128 from 1 to 2
        that grow by at least 5/128 from bit to bit. They differ between rows, so that
        paths of a tree hardly ever tie.
    """
    vocab = settings.vocab_size
    truth = mock_math.next_token(fold0, fold1, positions, vocab)
    code = truth ^ _flips(mix64(fold0 ^ 77), settings)
    device, bits = fold0.device, mock_math.TOKEN_BITS
    drawn = mix64(fold0 ^ 78)[:, None] >> mock_math.multiples(device, bits, 2)
    units = (drawn & 3) + mock_math.multiples(device, bits, 8)
    return code, 1.0 + units.float() / 128.0


def _flips(draw: Tensor, settings: DraftSettings) -> Tensor:
    """Return the bits [T] in which the proposed code differs from the target's token.

    None (rank 0), bit r - 1 (rank r), or the two highest (a miss).
    """
    width = max((settings.vocab_size - 1).bit_length(), 1)
    first, near_limit = settings.draw_limits()
    share = draw & ((1 << _DRAW_BITS) - 1)
    flipped = ((draw >> _DRAW_BITS) & 0xFFFF) % min(MAX_FLIPS, width)
    near = torch.ones_like(draw) << flipped
    miss = 3 << width - 2 if width > 1 else 1
    ranked = torch.where(share < near_limit, near, miss)
    return torch.where(share < first, 0, ranked)


def hidden_state(code: Tensor, weights: Tensor, fold0: Tensor, fold1: Tensor) -> Tensor:
    """Return the target's hidden state with these bit weights, float32 [T, 512]."""
    out = mock_math.hidden_state(code, fold0, fold1)
    bits = mock_math.TOKEN_BITS
    out[:, :bits] = mock_math.signs(code, bits) * weights
    return out
