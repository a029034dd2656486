"""Turns messages into requests, or rejects them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from kv_canary.hashing import mix64_int
from sglang.srt.arg_groups.draft_slots import decode_reserve
from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.batch.req_parts import PromptEmbeds
from sglang.srt.managers.messages.output_digest import TOKEN_TYPE
from sglang.srt.sampling.sampling_params import (
    GRAMMAR_FIELDS,
    MAX_SEED,
    SamplingParams,
)
from sglang.srt.utils.detokenizer import IncrementalDetokenizer
from sglang.srt.utils.stop_matcher import StopMatcher

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import GenerateReq
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import Tokenizer


MIN_SHARED_CHARS = 1024
# A source has at most 256 Ki characters.
MAX_SHARED_TEXTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds that a request is checked against.

    Fields:
        max_total_len: maximum of prompt plus output tokens.
        vocab_size: token ids are below it.
        eos_token_ids: end tokens of the model and its tokenizer.
        allow_hidden_states: whether requests may ask for hidden states.
        hidden_size: size of an embedding.
        embeds_refusal: why requests may not supply embeddings, or None if they may.
        max_new_tokens: maximum a request may ask for, or None for as many as fit.
    """

    max_total_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    allow_hidden_states: bool
    hidden_size: int = 0
    embeds_refusal: str | None = None
    max_new_tokens: int | None = None

    @property
    def max_req_input_len(self) -> int:
        """Length of the longest prompt: one token of output must fit."""
        return self.max_total_len - 1


def request_limits(
    server_args: ServerArgs, *, runner: ModelRunner, tokenizer: Tokenizer | None
) -> RequestLimits:
    """Return the limits set by the model, the flags and the size of the KV pool.

    Raises:
        ValueError: the pool does not hold one request.
    """
    config = runner.model_config
    eos = set(config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    slots = runner.max_total_num_tokens
    reserve = decode_reserve(server_args)
    if reserve + runner.allocator.page_size > slots:
        raise ValueError(
            f"{slots} KV slots do not hold one request: its drafts reserve "
            f"{reserve} beside its tokens; raise --max-total-tokens or "
            "--mem-fraction-static, or lower --speculative-num-draft-tokens, "
            "--speculative-eagle-topk or --page-size"
        )
    is_prefill_only = server_args.disaggregation_mode == "prefill"
    return RequestLimits(
        # The last sampled token needs no slot.
        max_total_len=min(config.context_len, slots - reserve + 1),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted(eos)),
        allow_hidden_states=server_args.enable_return_hidden_states,
        hidden_size=config.hidden_size,
        embeds_refusal=_embeds_refusal(runner),
        max_new_tokens=1 if is_prefill_only else None,
    )


def _embeds_refusal(runner: ModelRunner) -> str | None:
    """Return why requests may not supply embeddings, or None if they may."""
    if runner.model.takes_input_embeds:
        return None
    return f"{runner.model_config.architecture} takes tokens only"


def _shortened(request: GenerateReq, most: int) -> GenerateReq:
    """Return a request for at most `most` tokens."""
    params = request.sampling_params
    params = structs.replace(
        params,
        max_new_tokens=min(params.max_new_tokens, most),
        min_new_tokens=min(params.min_new_tokens, most),
    )
    return structs.replace(request, sampling_params=params)


class RecentTexts:
    """Large texts of recent requests, so that equal ones are stored once."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()

    def shared(self, text: str) -> str:
        """Return an equal text, from an earlier request if possible."""
        if len(text) < MIN_SHARED_CHARS:
            return text
        kept = self._texts.setdefault(text, text)
        self._texts.move_to_end(text)
        while len(self._texts) > MAX_SHARED_TEXTS:
            self._texts.popitem(last=False)
        return kept


class RequestFactory:
    """Builds the requests of one scheduler, each with its own seed.

    Args:
        tokenizer: for stop strings; None with --skip-tokenizer-init.
        random_seed: source of seeds for requests without one.
        check_lora: raises a ValueError if the adapter of a request is not loaded.
    """

    def __init__(
        self,
        limits: RequestLimits,
        *,
        tokenizer: Tokenizer | None,
        random_seed: int,
        check_lora: Callable[[GenerateReq], None],
    ) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._random_seed = random_seed
        self._check_lora = check_lora
        self.num_created = 0
        # Copies and prompts of one call are consecutive and share their parameters.
        self._shared: tuple[SamplingParams, frozenset[int]] | None = None
        self._sources = RecentTexts()

    def create(self, request: GenerateReq) -> Req:
        """Return the request, ready to be queued.

        Raises:
            ValueError: the request cannot be served; names the field, value and limit.
        """
        limits, params = self.limits, request.sampling_params
        if not request.input_ids:
            raise ValueError("the prompt is empty: it must hold at least one token")
        if len(request.input_ids) > limits.max_req_input_len:
            raise ValueError(
                f"the prompt has {len(request.input_ids)} tokens, but at most "
                f"{limits.max_req_input_len} fit"
            )
        if request.bootstrap is not None and limits.max_new_tokens is not None:
            # The other engine samples the output; the router asks both for all of it.
            request = _shortened(request, limits.max_new_tokens)
            params = request.sampling_params
        embeds = self._embeds(request)
        tokens = self._checked_tokens(request.input_ids, are_known=embeds is not None)
        if request.return_hidden_states and not limits.allow_hidden_states:
            raise ValueError(
                "return_hidden_states needs a server started with "
                "--enable-return-hidden-states"
            )
        self._check_lora(request)
        stop_ids = self._checked_stop_ids(params)
        if (
            limits.max_new_tokens is not None
            and params.max_new_tokens > limits.max_new_tokens
        ):
            raise ValueError(
                f"max_new_tokens is {params.max_new_tokens}, but a server started with "
                f"--disaggregation-mode prefill serves at most {limits.max_new_tokens}"
            )
        self.num_created += 1
        drawn = mix64_int(self._random_seed + self.num_created) & MAX_SEED
        return Req(
            request,
            tokens=tokens,
            stop_ids=stop_ids,
            seed=drawn if request.seed is None else request.seed,
            max_total_len=limits.max_total_len,
            stop_matcher=self._stop_matcher(request),
            input_embeds=embeds,
        )

    def _checked_tokens(self, input_ids: list[int], *, are_known: bool) -> array[int]:
        """Return the tokens of a prompt, packed once; `are_known` if the model does not
        look them up.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        vocab_size = 1 << 63 if are_known else self.limits.vocab_size
        try:
            tokens = array(TOKEN_TYPE, input_ids)
            values = np.frombuffer(tokens, dtype=np.int64)
            is_known = int(values.min()) >= 0 and int(values.max()) < vocab_size
        except OverflowError:
            is_known = False
        if not is_known:
            raise ValueError(
                f"input_ids must lie in [0, {vocab_size}), got "
                f"{min(input_ids)} .. {max(input_ids)}"
            )
        return tokens

    def _checked_stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end an output, once for all requests that share
        `params`. Also shares the source of their grammar with other calls.

        Raises:
            ValueError: `params` contain a token outside the vocabulary.
        """
        if self._shared is None or self._shared[0] is not params:
            for kind in GRAMMAR_FIELDS:
                if (source := getattr(params, kind)) is not None:
                    setattr(params, kind, self._sources.shared(source))
            params.verify_vocab(self.limits.vocab_size)
            eos = () if params.ignore_eos else self.limits.eos_token_ids
            self._shared = params, frozenset((*eos, *params.stop_token_ids))
        return self._shared[1]

    def _embeds(self, request: GenerateReq) -> PromptEmbeds | None:
        """Return the embeddings of a request that supplies them."""
        if request.input_embeds is None:
            return None
        limits, params = self.limits, request.sampling_params
        if limits.embeds_refusal is not None:
            raise ValueError(f"input_embeds: {limits.embeds_refusal}")
        # Options that need a prompt of tokens.
        needs: dict[str, Any] = {
            "logprob_start_len": request.return_logprob
            and request.logprob_start_len >= 0,
            "repetition_penalty": params.repetition_penalty != 1.0,
        }
        for name, is_asked in needs.items():
            if is_asked:
                raise ValueError(
                    f"{name} needs the tokens of the prompt, which input_embeds does "
                    "not have; leave it at its default"
                )
        values = np.frombuffer(request.input_embeds, dtype=np.float32)
        num_tokens = len(request.input_ids)
        if values.size != num_tokens * limits.hidden_size:
            raise ValueError(
                f"input_embeds has rows of {values.size // num_tokens} numbers, but "
                f"the model's hidden_size is {limits.hidden_size}"
            )
        if not np.isfinite(values).all():
            raise ValueError("input_embeds holds a number beyond float32")
        rows = values.reshape(num_tokens, limits.hidden_size)
        return PromptEmbeds.of(request.input_ids, rows)

    def _stop_matcher(self, request: GenerateReq) -> StopMatcher | None:
        params = request.sampling_params
        if not params.stop and not params.stop_regex:
            return None
        if self._tokenizer is None:
            raise ValueError(
                "stop and stop_regex need a tokenizer, but the server runs with "
                "--skip-tokenizer-init; use stop_token_ids"
            )
        create_detokenizer = partial(
            IncrementalDetokenizer,
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
        )
        return StopMatcher(
            create_detokenizer, stops=params.stop, patterns=params.stop_regex
        )
