"""One prompt as passed on by the interfaces, and the checks before it is sent.

Every rejection is a `BadRequest` that names the field, the value and the limit.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.managers.front.caller import client_tag
from sglang.srt.managers.messages.errors import BadRequest, ContextOverflow
from sglang.srt.managers.messages.io_struct import (
    Bootstrap,
    GenerateReq,
    LoraRef,
    SchedulerReady,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hashing import digest
from sglang.srt.utils.quoting import quoted

MAX_RID_CHARS = 256
MAX_PRIORITY = (1 << 31) - 1
_SECRET = uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A prompt and the options of its `sampling_params.n` outputs.

    Fields:
        prompt: text, or token ids.
        sampling_params: already validated (`SamplingParams.from_wire`).
        is_length_exact: False if `max_new_tokens` is a default; with
            --strict-max-tokens a client's own number is rejected if it does not fit.
        add_special_tokens: False if the text already contains them (chat templates).
        rid: the request id, or None to generate one.
        list_rid: shared name of a list of prompts, each of which has its own `rid`.
        input_embeds: float32 [tokens, hidden_size] in place of the prompt; the prompt's
            ids are then the `content_ids` of the rows.
        token_ids_logprob: token ids whose log probabilities are shown at every
            position.
        extra_key: a `tenant_of`.
        lora: name of an adapter, or None for the base model.
        priority: priority with --enable-priority-scheduling, or None for the lowest.
        keeps_prompt_ids: whether updates contain the prompt's token ids.
        bootstraps: where the outputs meet themselves on another engine: none, one for
            each, or one for all.
        leaves_prompt_to_prefill: whether the prompt's log probabilities come from the
            prefill engine, if there is one.
    """

    prompt: str | list[int]
    sampling_params: SamplingParams
    is_length_exact: bool = True
    add_special_tokens: bool = True
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] = ()
    rid: str | None = None
    list_rid: str | None = None
    extra_key: str | None = None
    lora: str | None = None
    return_hidden_states: bool = False
    only_last_hidden_state: bool = False
    input_embeds: bytes | None = None
    priority: int | None = None
    keeps_prompt_ids: bool = False
    bootstraps: tuple[Bootstrap, ...] = ()
    leaves_prompt_to_prefill: bool = False

    @property
    def field(self) -> str:
        """The field of `/generate` that holds the prompt."""
        if self.input_embeds is not None:
            return "input_embeds"
        return "text" if isinstance(self.prompt, str) else "input_ids"

    @property
    def has_input_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are shown."""
        return self.return_logprob and self.logprob_start_len >= 0

    @property
    def logprobs_per_token(self) -> int:
        """Number of log probabilities shown per token."""
        return 1 + self.top_logprobs_num + len(self.token_ids_logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Capacities of the running engine, in tokens.

    `max_running_requests` counts requests; `hidden_size` is the size of a token's
    hidden state.
    """

    context_len: int
    max_req_input_len: int
    max_total_num_tokens: int
    vocab_size: int
    max_running_requests: int = 0
    hidden_size: int = 0

    @classmethod
    def of(cls, ready: SchedulerReady) -> Limits:
        return cls(
            context_len=ready.context_len,
            max_req_input_len=ready.max_req_input_len,
            max_total_num_tokens=ready.max_total_num_tokens,
            vocab_size=ready.vocab_size,
            max_running_requests=ready.max_running_requests,
            hidden_size=ready.hidden_size,
        )

    def check_prompt(
        self, ids: Sequence[int], *, field: str, are_tokens: bool = True
    ) -> None:
        """Reject a prompt that is empty, too long, or contains unknown tokens."""
        if not ids:
            raise BadRequest(
                "the prompt is empty: it must hold at least one token", param=field
            )
        if len(ids) > self.max_req_input_len:
            raise self.too_long(len(ids), field=field)
        if are_tokens:
            self.check_vocab(ids, field="input_ids")

    def check_vocab(self, ids: Sequence[int], *, field: str) -> None:
        """Reject ids outside the model's vocabulary."""
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.vocab_size:
            raise BadRequest(
                f"{field} holds {low if low < 0 else high}, outside the vocabulary of "
                f"{self.vocab_size} tokens",
                param=field,
            )

    def too_long(
        self, tokens: int, *, field: str, size: str | None = None
    ) -> ContextOverflow:
        """Return the error of a prompt that does not fit.

        Args:
            tokens: lower bound of the prompt's tokens. size: its length in other units.
        """
        # litellm searches for "is longer than the model's context length". OpenAI's
        # client shows langchain only the text, in which it searches for the code.
        return ContextOverflow(
            f"the input ({size or f'{tokens} tokens'}) is longer than the model's "
            f"context length ({self.max_req_input_len + 1} tokens): at most "
            f"{self.max_req_input_len} tokens fit ({self._capacity}; one token of "
            f"output must also fit; {ContextOverflow.code})",
            param=field,
            tokens=tokens,
            limit=self.max_req_input_len,
        )

    def check_length(
        self, request: PromptRequest, prompt_len: int, *, is_strict: bool
    ) -> None:
        """Reject a minimum output length that does not fit after the prompt and, if
        `is_strict`, also a maximum length chosen by the client.

        The engine ends any other output when it runs out of room.
        """
        params = request.sampling_params
        room = self.room_after(prompt_len)
        too_long = (
            f"{{}} is {{}}, but a prompt of {prompt_len} tokens leaves room for at "
            f"most {room} ({self._capacity})"
        )
        if params.min_new_tokens > room:
            raise BadRequest(
                too_long.format("min_new_tokens", params.min_new_tokens),
                param="min_new_tokens",
            )
        if is_strict and request.is_length_exact and params.max_new_tokens > room:
            raise ContextOverflow(
                too_long.format("max_new_tokens", params.max_new_tokens)
                + "; the requested token count exceeds the model's maximum context "
                f"length of {self.max_req_input_len + 1} ({ContextOverflow.code})",
                param="max_new_tokens",
                tokens=prompt_len,
                limit=self.max_req_input_len,
            )

    @property
    def _capacity(self) -> str:
        return (
            f"context length of {self.context_len} tokens, KV pool of "
            f"{self.max_total_num_tokens}"
        )

    def room_after(self, prompt_len: int) -> int:
        """Number of output tokens that fit; the longest prompt leaves room for one."""
        return self.max_req_input_len + 1 - prompt_len


def prompt_rids(
    rid: str | list[str] | None, count: int, *, is_list: bool
) -> list[tuple[str | None, str | None]]:
    """Return the `rid` and the `list_rid` of each prompt of a call. A single string for
    a list of prompts names them `<rid>_0` and so on.

    Raises:
        BadRequest: the list's length differs from the number of prompts.
    """
    if isinstance(rid, list):
        if len(rid) != count or not is_list:
            raise BadRequest(
                f"rid has {len(rid)} entries for {count} prompt(s)", param="rid"
            )
        return [(each or None, None) for each in rid]
    if not rid or not is_list:
        return [(rid or None, None)] * count
    return [(f"{rid}_{i}", rid) for i in range(count)]


def sampling_error(error: ValueError) -> BadRequest:
    """Return the error for an invalid value in `sampling_params`.

    The first word of the message is the field's name.
    """
    named = str(error).split(maxsplit=1)[0]
    is_field = named in SamplingParams.__struct_fields__
    return BadRequest(str(error), param=named if is_field else "sampling_params")


def check_role(request: PromptRequest, mode: str) -> PromptRequest:
    """Return a request as an engine of --disaggregation-mode `mode` serves it.

    Raises:
        BadRequest: it needs another engine.
    """
    if not request.bootstraps:
        return request
    if mode == "null":
        raise BadRequest(
            "bootstrap_room needs a server started with --disaggregation-mode; leave "
            "it out",
            param="bootstrap_room",
        )
    if mode == "decode" and not all(one.host for one in request.bootstraps):
        raise BadRequest(
            "bootstrap_room needs bootstrap_host, the host of the prefill engine",
            param="bootstrap_host",
        )
    if mode == "decode" and request.leaves_prompt_to_prefill:
        return dataclasses.replace(request, logprob_start_len=-1)
    return request


def check_options(request: PromptRequest, *, allow_hidden_states: bool) -> None:
    """Reject options that are invalid for any prompt."""
    if request.return_hidden_states and not allow_hidden_states:
        raise BadRequest(
            "return_hidden_states needs a server started with "
            "--enable-return-hidden-states",
            param="return_hidden_states",
        )
    if request.rid is not None and not 0 < len(request.rid) <= MAX_RID_CHARS:
        raise BadRequest(
            f"rid must have 1 to {MAX_RID_CHARS} characters, got {len(request.rid)}",
            param="rid",
        )
    if request.rid is not None and not request.rid.isprintable():
        raise BadRequest("rid must hold printable characters only", param="rid")
    if request.top_logprobs_num < 0:
        raise BadRequest(
            f"top_logprobs_num must be at least 0, got {request.top_logprobs_num}",
            param="top_logprobs_num",
        )
    if request.priority is not None and abs(request.priority) > MAX_PRIORITY:
        raise BadRequest(
            f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got "
            f"{quoted(request.priority)}",
            param="priority",
        )
    if request.token_ids_logprob and not request.return_logprob:
        raise BadRequest(
            "token_ids_logprob needs return_logprob: true", param="token_ids_logprob"
        )


def within_vocab(params: SamplingParams, limits: Limits) -> SamplingParams:
    """Return `params` without stop tokens outside the vocabulary; reject a bias for
    one.
    """
    known = params.within_vocab(limits.vocab_size)
    try:
        known.verify_vocab(limits.vocab_size)
    except ValueError as error:
        raise sampling_error(error) from error
    return known


def to_wire(
    request: PromptRequest,
    ids: list[int],
    limits: Limits,
    *,
    is_strict: bool,
    owner: str = "",
    lora: LoraRef | None = None,
) -> list[GenerateReq]:
    """Return the `n` messages to the scheduler, checked against the engine's limits.

    They share `ids` and the sampling parameters, whose token ids are already checked
    (`within_vocab`). Only the first asks for the prompt's log probabilities, which all
    of them show.

    Args:
        is_strict: reject an output length that does not fit after the prompt.
        owner: owner of the request; two owners may use the same rid.
        lora: the adapter of `request.lora`.
    """
    limits.check_prompt(
        ids, field=request.field, are_tokens=request.input_embeds is None
    )
    limits.check_vocab(request.token_ids_logprob, field="token_ids_logprob")
    limits.check_length(request, len(ids), is_strict=is_strict)
    if not -1 <= request.logprob_start_len < len(ids):
        raise BadRequest(
            f"logprob_start_len is {request.logprob_start_len}; it must be -1 (output "
            f"tokens only) or below the {len(ids)} tokens of the prompt",
            param="logprob_start_len",
        )
    return [
        GenerateReq(
            rid=_rid(request, copy, owner),
            input_ids=ids,
            sampling_params=request.sampling_params,
            copy=copy,
            stream=request.stream,
            return_logprob=request.return_logprob,
            logprob_start_len=-1 if copy else request.logprob_start_len,
            top_logprobs_num=request.top_logprobs_num,
            token_ids_logprob=list(request.token_ids_logprob),
            extra_key=request.extra_key,
            lora=lora,
            return_hidden_states=request.return_hidden_states,
            only_last_hidden_state=request.only_last_hidden_state,
            input_embeds=request.input_embeds,
            priority=request.priority,
            client=client_tag(),
            bootstrap=_bootstrap(request, copy),
        )
        for copy in range(request.sampling_params.n)
    ]


def _bootstrap(request: PromptRequest, copy: int) -> Bootstrap | None:
    own = request.bootstraps[copy : copy + 1] or request.bootstraps[:1]
    return own[0] if own else None


def _rid(request: PromptRequest, copy: int, owner: str) -> str:
    if request.rid is None:
        return uuid.uuid4().hex
    own = rid_scope(owner) + request.rid
    return own if request.sampling_params.n == 1 else f"{own}-{copy}"


@functools.lru_cache(maxsize=1024)
def rid_scope(owner: str) -> str:
    """Return the prefix that separates an owner's rids from other owners' rids.

    Reports and pages show it to others, so it reveals nothing about the owner's key.
    """
    return f"{digest(_SECRET + owner)[:12]}:" if owner else ""
