"""The result of a forward and the slots a decode iteration needs, shared by the
scheduler and the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.sampling.logprobs import LogprobResult


@dataclass(slots=True, kw_only=True)
class GenerationBatchResult:
    """The results of one forward on the host; valid once `copy_done` is reached.

    Fields:
        packed: int64 words: `stride` tokens per request, then accept lengths (if any),
            then the KV canary's findings for each pool (`kv_canary/findings.py`), then
            its marks. A list on the CPU.
        bs: number of requests.
        stride: tokens per request (1 without speculation).
        has_accept_lens: False if each request got exactly one token.
        num_pools: number of KV pools with findings: the target's, plus the draft's if
            it ran. has_marks: whether there are marks.
        logprobs: logprobs of the sampled tokens, for requests that asked for them.
        input_logprobs: logprobs of prompt tokens by batch index, for requests that
            asked for them.
        hidden: [T, H] hidden states if any request asked for them; with accept lengths,
            `stride` rows per request, laid out like the tokens.
        copy_done: event that marks the end of the copy to the host, or None if the data
            is already there.
    """

    packed: torch.Tensor | list[int]
    bs: int
    stride: int = 1
    has_accept_lens: bool = False
    num_pools: int = 1
    has_marks: bool = False
    logprobs: LogprobResult | None = None
    input_logprobs: dict[int, LogprobResult] = field(default_factory=dict)
    hidden: torch.Tensor | None = None
    copy_done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Block until the host copies are complete."""
        if self.copy_done is not None:
            self.copy_done.synchronize()

    @property
    def tokens(self) -> list[int]:
        """[b * stride]; request r owns `[r * stride, r * stride + accept_lens[r])`."""
        return self._unpacked()[: self.bs * self.stride]

    @property
    def accept_lens(self) -> list[int] | None:
        """[b], or None if each request got exactly one token."""
        if not self.has_accept_lens:
            return None
        begin = self.bs * self.stride
        return self._unpacked()[begin : begin + self.bs]

    def set_accept_lens(self, lens: Sequence[int]) -> None:
        """Replace the accept lengths."""
        begin = self.bs * self.stride
        self._unpacked()[begin : begin + self.bs] = lens

    @property
    def findings(self) -> list[list[int]]:
        """Words of the KV canary's findings by pool; empty while it is off."""
        words = self._unpacked()
        begin = self.bs * (self.stride + self.has_accept_lens)
        end = len(words) - 2 * self.bs * self.has_marks
        if begin == end:
            return []
        each = (end - begin) // self.num_pools
        return [words[i : i + each] for i in range(begin, end, each)]

    @property
    def marks(self) -> tuple[list[int], list[int]] | None:
        """(serials, words 0 of the last tokens), [b] each, as recorded on the device by
        the KV canary, or None while it is off.
        """
        if not self.has_marks:
            return None
        words, bs = self._unpacked(), self.bs
        begin = len(words) - 2 * bs
        return words[begin : begin + bs], words[begin + bs :]

    def _unpacked(self) -> list[int]:
        """`packed` on the host; waits for the copy."""
        if isinstance(self.packed, torch.Tensor):
            self.wait()
            # Convert once: slicing many small tensors would take longer.
            self.packed = self.packed.tolist()
        return self.packed
