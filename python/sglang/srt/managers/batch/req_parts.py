"""The parts of a request that one owner each reads and writes.

```
part            | owner
ReqLogprobs     | result processor; the batch reads what is asked for
ReqHiddenStates | result processor
Sent            | output streamer
Heals           | healer
Verifications   | result processor; only shown
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.utils.salt_chain import TOKEN_MASK

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import GenerateReq
    from sglang.srt.sampling.logprobs import HostLogprob


class ReqLogprobs:
    """Log probabilities that a request asks for, and the ones computed so far.

    Attributes:
        is_wanted: whether the client gets any.
        top_num: number of most likely tokens per position.
        token_ids: tokens whose log probabilities are named at every position.
        start: first prompt position that is scored, or -1 for none.
        score_from: next position whose logits score a prompt token, or None when all
            are scored.
        input, output: entries of prompt and output positions.
    """

    __slots__ = (
        *("input", "is_wanted", "output", "score_from", "start", "token_ids"),
        "top_num",
    )

    def __init__(self, request: GenerateReq, *, prompt_len: int) -> None:
        self.is_wanted = request.return_logprob
        self.top_num = request.top_logprobs_num
        self.token_ids = tuple(request.token_ids_logprob)
        self.start = request.logprob_start_len
        self.score_from: int | None = None
        if self.is_wanted and 0 <= self.start < prompt_len:
            self.score_from = max(self.start - 1, 0)
        self.input: list[HostLogprob] = []
        self.output: list[HostLogprob] = []

    def on_scored(self, end: int, *, prompt_len: int) -> None:
        """Note that a prefill up to position `end` has stored its prompt logprobs; the
        first position asked for may come later."""
        if self.score_from is not None:
            due = max(self.score_from, end)
            self.score_from = due if due < prompt_len - 1 else None


class ReqHiddenStates:
    """Hidden states that a request asks for, and the ones computed so far.

    Attributes:
        are_wanted: whether the client gets any.
        only_last: whether it gets only the last one.
        states: states of the positions from `begin`.
        until: positions below it have been computed.
    """

    __slots__ = ("are_wanted", "begin", "only_last", "states", "until")

    def __init__(self, request: GenerateReq) -> None:
        self.are_wanted = request.return_hidden_states
        self.only_last = request.only_last_hidden_state
        self.states: list[list[float]] = []
        self.begin = 0
        self.until = 0

    @property
    def cacheable_until(self) -> int | None:
        """Positions that a prefix match may cover, or None for any: a hidden state that
        is still owed must be computed."""
        return self.until if self.are_wanted and not self.only_last else None

    def store(self, start: int, states: torch.Tensor, *, newest: int) -> None:
        """Keep the states of each position once; a retracted request recomputes some of
        them.

        A request for the last state only keeps the newest known token's state and the
        accepted drafts' states, because the output may end at any of them.

        Args:
            states: [n, H], states of the positions from `start`.
            newest: position of the newest known token.
        """
        end = start + len(states)
        if self.only_last:
            kept = states[max(newest - start, 0) :]
            self.states, self.until = kept.tolist(), end
            self.begin = end - len(kept)
            return
        new = states[max(self.until - start, 0) :]
        self.states += new.tolist()
        self.until = max(self.until, end)

    def drop(self, start: int) -> None:
        """Drop the states of positions from `start`."""
        del self.states[max(start - self.begin, 0) :]
        self.until = min(self.until, start)


@dataclass(slots=True, kw_only=True)
class Sent:
    """What the client has: output tokens, prompt logprobs, hidden states.

    Fields:
        digest: of the first `num_digested` output tokens (`output_digest`).
    """

    digest: int
    num_digested: int = 0
    tokens: int = 0
    input_logprobs: bool = False
    hidden_states: int = 0


class PromptEmbeds(NamedTuple):
    """Embeddings in place of the first tokens of a prompt.

    Fields:
        ids: int64 [n], the part of their `content_ids` that the device keeps.
        values: float32 [n, hidden_size].
    """

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls, content: Sequence[int], values: npt.NDArray[np.float32]
    ) -> PromptEmbeds:
        """Pair values with the `content_ids` that stand for them."""
        return cls(np.array(content, dtype=np.int64) & TOKEN_MASK, values)


@dataclass(slots=True, kw_only=True)
class Heals:
    """Healings since the request's last new token.

    Fields:
        count: number of healings.
        num_tokens: number of tokens that the request had at the last one.
    """

    count: int = 0
    num_tokens: int = 0

    def are_in_vain(self, num_tokens: int) -> bool:
        """Whether the request has gained no token since it was healed."""
        return self.count > 0 and num_tokens == self.num_tokens

    def add(self, num_tokens: int) -> None:
        """Count a healing of the request, which has `num_tokens` tokens."""
        self.count = self.count + 1 if self.are_in_vain(num_tokens) else 1
        self.num_tokens = num_tokens


@dataclass(slots=True, kw_only=True)
class Verifications:
    """Numbers of verified drafts and of the output tokens they yielded."""

    count: int = 0
    accepted_tokens: int = 0
