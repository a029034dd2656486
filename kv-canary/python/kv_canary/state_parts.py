"""Recurrent states in the memory of another engine, and sums of their bytes.

That engine's kernels load and store them, so nothing adds up their words on the way, as
in `state_sums.py`. They are read once more instead: after the forward that wrote a
state, and before the one that reads it. A state has megabytes, so a sum covers a *run*
of words of each part, and the next forward's another run:

```
sum over the run's words w at place i of bits(w) * (mix32(i) | 1)   modulo 2^64
```

Factors are odd and below 2^32, so the change of one word always changes the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from kv_canary.layout import FingerprintMode

SAMPLED_WORDS = 256
"""Words of a run with `partial`, and the fewest with `rotate`."""
RUNS = 64
"""Runs of a large part with `rotate`."""
_WORD_BYTES = 4
# Words in which all of these bits are set hold an infinity or a NaN.
_EXPONENTS = {
    torch.float32: (0x7F800000,),
    torch.bfloat16: (0x7F80, 0x7F800000),
    torch.float16: (0x7C00, 0x7C000000),
}


class Turn(IntEnum):
    """Runs besides those by number, which count modulo the runs of a part."""

    WHOLE = -1
    NOTHING = -2


class Part(IntEnum):
    """Words of a part's line in the table: address of slot 0, words from slot to slot,
    words of a slot, words of a run, and the exponents of the low and the high value of
    a word (0: none)."""

    ADDRESS = 0
    STRIDE = 1
    COUNT = 2
    RUN = 3
    LOW = 4
    HIGH = 5


class StateParts:
    """The parts of all layers' states by slot, in groups of layers. A slot belongs to
    one group at a time.

    Args:
        groups: tensors of each group, [slots, ...], contiguous in a slot. Kept alive.
        mode: of each part, PARTIAL sums up a run of `SAMPLED_WORDS`, ROTATE one of
            about a 64th, ALL all words.

    Raises:
        ValueError: a tensor has no whole words of 32 bits, or gaps in a slot.

    Attributes:
        words: int32 [slots, words] by group and part.
        table: int64 [groups, parts, len(Part)]. A group with fewer parts than another
            has parts of 0 words.
        runs: words of a run by group and part.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], mode: FingerprintMode
    ) -> None:
        self.words = [[_as_words(tensor) for tensor in group] for group in groups]
        self.runs = [
            [_run(words.shape[1], mode) for words in group] for group in self.words
        ]
        self.num_parts = max(map(len, self.words))
        lines = [
            [
                _line(words, run, tensor.dtype)
                for words, run, tensor in zip(*of_group, strict=True)
            ]
            for of_group in zip(self.words, self.runs, groups, strict=True)
        ]
        nothing = [0, 0, 0, 1, 0, 0]
        for of_group in lines:
            of_group += [nothing] * (self.num_parts - len(of_group))
        device = self.words[0][0].device
        self.table = torch.tensor(lines, dtype=torch.int64, device=device)
        self.exponents = [
            [tuple(line[Part.LOW :]) for line in of_group] for of_group in lines
        ]

    @property
    def num_slots(self) -> int:
        return self.words[0][0].shape[0]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in the largest group."""
        return max(
            _WORD_BYTES * sum(words.shape[1] for words in group) for group in self.words
        )

    @property
    def run_bytes(self) -> int:
        """Bytes of a slot that a sum by number covers, in the largest group."""
        return max(_WORD_BYTES * sum(runs) for runs in self.runs)


def _as_words(tensor: Tensor) -> Tensor:
    found = f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
    if not tensor[0].is_contiguous():
        raise ValueError(f"a state with gaps in a slot: {found}")
    try:
        return tensor.flatten(1).view(torch.int32)
    except RuntimeError:
        raise ValueError(f"a state that is no whole 32-bit words: {found}") from None


def _run(count: int, mode: FingerprintMode) -> int:
    """Return the words of a run of a part of `count` words."""
    if mode is FingerprintMode.ALL:
        return count
    of_part = -(-count // RUNS) if mode is FingerprintMode.ROTATE else 0
    return min(max(of_part, SAMPLED_WORDS), count)


def _line(words: Tensor, run: int, dtype: torch.dtype) -> list[int]:
    low, high = (0, *_EXPONENTS.get(dtype, (0,)))[-2:]
    return [words.data_ptr(), words.stride(0), words.shape[1], run, low, high]
