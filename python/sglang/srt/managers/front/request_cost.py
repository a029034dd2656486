"""Cost of a call, computed before anything is built for it.

A call is what one client sends at once: some prompts, each answered `n` times. Every
limit is a flag, and every rejection names the flag, the value and the limit.
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
"""Maximum numbers in the hidden states of a call's answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimits:
    """Bounds of one call, set by the flags of the same names.

    Fields:
        max_n: maximum outputs per prompt.
        max_logprobs: maximum alternatives per token.
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
        """Reject options that cost too much for any prompt.

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
        """Shorten a default output length of "all that fits" to the number of log
        probabilities allowed; other lengths stay unchanged.
        """
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
        """Reject a call whose answers would be too large.

        Args:
            lens: number of tokens of each prompt.
            room: room in the engine, which bounds a default output length.

        Raises:
            BadRequest: names what the call asks for too much of.
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
    """Maximum cost of one prompt of a call.

    Fields:
        tokens: number of tokens in the prompt and all its outputs.
        logprobs: number of log probability entries in its answers.
        hidden_numbers: number of values in the hidden states of its answers.
    """

    tokens: int
    logprobs: int
    hidden_numbers: int

    @classmethod
    def of(cls, prompt: PromptRequest, prompt_len: int, room: Limits) -> CallCost:
        n, start = prompt.sampling_params.n, prompt.logprob_start_len
        out = min(prompt.sampling_params.max_new_tokens, room.room_after(prompt_len))
        # Even without output there is one entry, for the token that would have come
        # next.
        scored = max(out, 1) + (prompt_len - start if start >= 0 else 0)
        width = prompt.logprobs_per_token
        # Each output repeats the entries of the prompt.
        copies = n if prompt.keeps_prompt_ids else 1
        return cls(
            tokens=copies * prompt_len + n * out,
            logprobs=n * scored * width if prompt.return_logprob else 0,
            hidden_numbers=n
            * room.hidden_size
            * _hidden_states(prompt, prompt_len, out),
        )


def _hidden_states(prompt: PromptRequest, prompt_len: int, output_len: int) -> int:
    """Maximum number of hidden states in one output."""
    if not prompt.return_hidden_states:
        return 0
    return 1 if prompt.only_last_hidden_state else prompt_len + output_len
