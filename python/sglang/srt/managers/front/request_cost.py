"""Cost of a call, computed before anything is built for it.

A call is what one client sends at once: some prompts, each answered `n` times. Every
limit is a flag, and every refusal names the flag, the value and the limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.managers.messages.errors import BadRequest

if TYPE_CHECKING:
    from sglang.srt.managers.front.prompt_request import Limits, PromptRequest
    from sglang.srt.server_args import ServerArgs


MAX_HIDDEN_NUMBERS = 1 << 24
"""Most numbers of hidden states in the answers of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimits:
    """Bounds of one call, of the flags of the same names.

    Fields:
        max_n: outputs of one prompt.
        max_logprobs: alternatives per token.
        max_logprob_entries: log probabilities of all tokens together, each with its
            alternatives.
        max_call_tokens: prompt tokens and output tokens of all outputs together.
        max_token_entries: entries of `stop_token_ids`, `logit_bias` and
            `token_ids_logprob`.
        max_queued_tokens: prompt tokens of all requests in flight.
    """

    max_n: int
    max_logprobs: int
    max_logprob_entries: int
    max_call_tokens: int
    max_token_entries: int
    max_queued_tokens: int

    @classmethod
    def of(cls, server_args: ServerArgs) -> CostLimits:
        return cls(
            max_n=server_args.max_n,
            max_logprobs=server_args.max_logprobs,
            max_logprob_entries=server_args.max_logprob_entries,
            max_call_tokens=server_args.max_call_tokens,
            max_token_entries=server_args.max_token_entries,
            max_queued_tokens=server_args.max_queued_tokens,
        )

    def check_options(self, prompt: PromptRequest) -> None:
        """Refuse options that cost too much for any prompt.

        Raises:
            BadRequest: names the first.
        """
        params = prompt.sampling_params
        if params.n > self.max_n:
            raise BadRequest(
                f"n is {params.n}, but at most {self.max_n} are served (--max-n)",
                param="n",
            )
        if prompt.top_logprobs_num > self.max_logprobs:
            raise BadRequest(
                f"top_logprobs_num is {prompt.top_logprobs_num}, but at most "
                f"{self.max_logprobs} are served (--max-logprobs)",
                param="top_logprobs_num",
            )
        for name, entries in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or {}),
            ("token_ids_logprob", prompt.token_ids_logprob),
        ):
            if len(entries) > self.max_token_entries:
                raise BadRequest(
                    f"{name} has {len(entries)} entries, but at most "
                    f"{self.max_token_entries} are accepted (--max-token-entries)",
                    param=name,
                )

    def fit_default(
        self, prompt: PromptRequest, prompt_len: int, room: Limits
    ) -> PromptRequest:
        """Shorten a default output length of "all that fits" to the log probabilities
        that may be asked for; others stay as they are."""
        params = prompt.sampling_params
        if not prompt.return_logprob or prompt.is_length_exact:
            return prompt
        if params.max_new_tokens <= room.room_after(prompt_len):
            return prompt
        tokens = self.max_logprob_entries // (params.n * prompt.logprobs_per_token)
        if prompt.logprob_start_len >= 0:
            tokens -= prompt_len - prompt.logprob_start_len
        if not 1 <= tokens < room.room_after(prompt_len):
            return prompt
        shorter = msgspec.structs.replace(params, max_new_tokens=tokens)
        return dataclasses.replace(prompt, sampling_params=shorter)

    def check_call(
        self, prompts: Sequence[PromptRequest], lens: Sequence[int], room: Limits
    ) -> None:
        """Refuse a call whose answers would be too large.

        Args:
            lens: tokens of each prompt.
            room: of the engine: a default output length ends there.

        Raises:
            BadRequest: names what it asks for.
        """
        costs = [
            CallCost.of(prompt, prompt_len, room)
            for prompt, prompt_len in zip(prompts, lens, strict=True)
        ]
        for what, count, limit, flag, param in (
            (
                "log probabilities (prompts x n x tokens x (1 + top_logprobs + ids))",
                sum(cost.logprobs for cost in costs),
                self.max_logprob_entries,
                "--max-logprob-entries",
                "top_logprobs_num",
            ),
            (
                "tokens (prompts, and prompts x n x max_new_tokens)",
                sum(cost.tokens for cost in costs),
                self.max_call_tokens,
                "--max-call-tokens",
                "max_new_tokens",
            ),
            (
                "numbers of hidden states (prompts x n x tokens x hidden_size)",
                sum(cost.hidden_numbers for cost in costs),
                MAX_HIDDEN_NUMBERS,
                "a fixed limit",
                "return_hidden_states",
            ),
        ):
            if count > limit:
                raise BadRequest(
                    f"the request asks for up to {count} {what}, but at most {limit} "
                    f"are served at once ({flag}); ask for fewer, or split it",
                    param=param,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """Most that one prompt of a call may cost.

    Fields:
        tokens: of the prompt and of all its outputs.
        logprobs: entries of its answers.
        hidden_numbers: of the hidden states in its answers.
    """

    tokens: int
    logprobs: int
    hidden_numbers: int

    @classmethod
    def of(cls, prompt: PromptRequest, prompt_len: int, room: Limits) -> CallCost:
        n, start = prompt.sampling_params.n, prompt.logprob_start_len
        out = min(prompt.sampling_params.max_new_tokens, room.room_after(prompt_len))
        # Of no output there is the entry of the token that would have come.
        scored = max(out, 1) + (prompt_len - start if start >= 0 else 0)
        width = prompt.logprobs_per_token
        # Each output shows the ids of the prompt again.
        copies = n if prompt.keeps_prompt_ids else 1
        return cls(
            tokens=copies * prompt_len + n * out,
            logprobs=n * scored * width if prompt.return_logprob else 0,
            hidden_numbers=n
            * room.hidden_size
            * _hidden_states(prompt, prompt_len, out),
        )


def _hidden_states(prompt: PromptRequest, prompt_len: int, output_len: int) -> int:
    """Most hidden states that one output shows."""
    if not prompt.return_hidden_states:
        return 0
    return 1 if prompt.only_last_hidden_state else prompt_len + output_len
