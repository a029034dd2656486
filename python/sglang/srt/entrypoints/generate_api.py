"""SGLang's own request and answer, shared by `/generate` and `Engine.generate`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sglang.srt.entrypoints.bootstrap_fields import read_bootstraps
from sglang.srt.entrypoints.neutral_fields import (
    GENERATE,
    refuse_others,
    with_neutral,
)
from sglang.srt.managers.front.lora_registry import LoraRegistry
from sglang.srt.managers.front.output_check import check_shown, output_fault
from sglang.srt.managers.front.prompt_request import (
    PromptRequest,
    prompt_rids,
    sampling_error,
)
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import FinishReason, TokenLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.srt.utils.salt_chain import content_ids, tenant_of

# (logprob, token id, text or None), as shown in the answer.
ShownLogprob = tuple[float | None, int, str | None]


if TYPE_CHECKING:
    _Generate = msgspec.Struct
else:
    _Generate = with_neutral(msgspec.Struct, GENERATE)


class GenerateRequest(_Generate, kw_only=True, forbid_unknown_fields=True):
    """The body of `/generate`. A list of prompts gives a list of answers.

    Options may also be lists with one entry per prompt.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: list[list[float | list[float]]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = False
    stream: bool | None = False
    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    return_hidden_states: bool | list[bool] | None = False
    lora_path: str | list[str | None] | None = None
    priority: int | None = None
    model: str | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None


class ParsedGenerate(msgspec.Struct, kw_only=True, frozen=True):
    """A checked `GenerateRequest`.

    If `is_list`, the answer is a list with one entry per output.
    """

    prompts: list[PromptRequest]
    is_list: bool
    stream: bool
    with_text: bool


def parse_generate(
    request: GenerateRequest,
    *,
    sampling_defaults: Mapping[str, Any],
    loras: LoraRegistry,
) -> ParsedGenerate:
    """Check a request and split it into one `PromptRequest` per prompt.

    Args:
        sampling_defaults: values for sampling parameters that are left out.
        loras: the adapters.

    Raises:
        ApiError: names the field and the problem.
    """
    refuse_others(request, GENERATE)
    prompts, is_batch = _any_prompts(request)
    count = len(prompts)

    def nth(name: str, i: int, default: Any) -> Any:
        value = _OPTIONS[name](request)
        if value is None:
            return default
        if not isinstance(value, list):
            return value
        if name == "token_ids_logprob" and _are_ids(value):
            return value
        if len(value) != count or not is_batch:
            raise BadRequest(
                f"{name} has {len(value)} entries for {count} prompt(s)", param=name
            )
        return default if value[i] is None else value[i]

    rids = prompt_rids(request.rid, count, is_list=is_batch)
    # Parse parameters shared by all prompts once, because they may be large.
    is_shared = not isinstance(request.sampling_params, list)
    shared = (
        parse_sampling_params(nth("sampling_params", 0, {}), sampling_defaults)
        if is_shared
        else None
    )
    # Large keys are hashed once where all prompts share them.
    salts = (request.extra_key, request.cache_salt)
    has_own_salts = any(isinstance(salt, list) for salt in salts)

    def tenant(i: int) -> str | None:
        return tenant_of(key=nth("extra_key", i, None), salt=nth("cache_salt", i, None))

    shared_tenant = None if has_own_salts else tenant(0)
    params = [
        shared or parse_sampling_params(raw, sampling_defaults)
        for raw in (nth("sampling_params", i, {}) for i in range(count))
    ]
    copies = {one.n for one in params}
    bootstraps = read_bootstraps(
        request, prompts=count, copies=copies.pop() if len(copies) == 1 else 1
    )
    parsed = []
    for i, prompt in enumerate(prompts):
        raw = nth("sampling_params", i, {})
        parsed.append(
            PromptRequest(
                prompt=prompt.ids,
                input_embeds=prompt.embeds,
                sampling_params=params[i],
                is_length_exact=raw.get("max_new_tokens") is not None,
                stream=bool(request.stream),
                return_logprob=nth("return_logprob", i, False),
                logprob_start_len=nth("logprob_start_len", i, -1),
                top_logprobs_num=nth("top_logprobs_num", i, 0),
                token_ids_logprob=nth("token_ids_logprob", i, ()),
                rid=rids[i][0],
                list_rid=rids[i][1],
                extra_key=tenant(i) if has_own_salts else shared_tenant,
                lora=loras.asked(request.model, nth("lora_path", i, None)),
                return_hidden_states=nth("return_hidden_states", i, False),
                priority=request.priority,
                bootstraps=bootstraps[i],
                # Then the router adds what the prefill engine has computed.
                leaves_prompt_to_prefill=not request.stream,
            )
        )
    return ParsedGenerate(
        prompts=parsed,
        is_list=is_batch or parsed[0].sampling_params.n > 1,
        stream=bool(request.stream),
        with_text=bool(request.return_text_in_logprobs),
    )


def parse_sampling_params(
    raw: dict[str, Any], defaults: Mapping[str, Any]
) -> SamplingParams:
    """Parse sampling parameters; raises the errors that a server returns.

    Args:
        defaults: values for parameters that are left out.

    Raises:
        BadRequest: names the field, the value and the range.
    """
    try:
        return SamplingParams.from_wire(raw, defaults)
    except ValueError as error:
        raise sampling_error(error) from error


_OPTIONS = {
    "sampling_params": lambda r: r.sampling_params,
    "return_logprob": lambda r: r.return_logprob,
    "logprob_start_len": lambda r: r.logprob_start_len,
    "top_logprobs_num": lambda r: r.top_logprobs_num,
    "token_ids_logprob": lambda r: r.token_ids_logprob,
    "extra_key": lambda r: r.extra_key,
    "cache_salt": lambda r: r.cache_salt,
    "return_hidden_states": lambda r: r.return_hidden_states,
    "lora_path": lambda r: r.lora_path,
}


def _are_ids(value: list[Any]) -> bool:
    """Whether token ids apply to all prompts, rather than one list per prompt.

    Raises:
        BadRequest: there are ids and lists.
    """
    kinds = {isinstance(entry, int) for entry in value}
    if len(kinds) > 1:
        raise BadRequest(
            "token_ids_logprob mixes token ids with lists; send ids for all prompts, "
            "or one list or null for each",
            param="token_ids_logprob",
        )
    return False not in kinds


class _Prompt(NamedTuple):
    """A prompt. With `embeds` (float32 rows), the ids are their `content_ids`."""

    ids: str | list[int]
    embeds: bytes | None = None


def _any_prompts(request: GenerateRequest) -> tuple[list[_Prompt], bool]:
    """Return the prompts of any kind, and whether the client sent a list of them."""
    if request.input_embeds is not None:
        return _embedded_prompts(request, request.input_embeds)
    prompts, is_batch = _prompts(request)
    return [_Prompt(prompt) for prompt in prompts], is_batch


def _embedded_prompts(
    request: GenerateRequest, embeds: Sequence[Sequence[Any]]
) -> tuple[list[_Prompt], bool]:
    """Return the prompts of [tokens, hidden_size] floats: one, or a list of them."""
    if request.text is not None or request.input_ids is not None:
        raise BadRequest(
            "exactly one of text, input_ids and input_embeds must be set",
            param="input_embeds",
        )
    kinds = {isinstance(entry, list) for row in embeds for entry in row}
    if len(kinds) != 1:
        raise BadRequest(
            "input_embeds must be a non-empty list of rows of numbers, or a list of "
            "such lists",
            param="input_embeds",
        )
    is_batch = kinds.pop()
    prompts = embeds if is_batch else [embeds]
    return [_embedded_prompt(rows) for rows in prompts], is_batch


def _embedded_prompt(rows: Sequence[Sequence[float]]) -> _Prompt:
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise BadRequest(
            "input_embeds: the rows of a prompt must have the same number of entries, "
            f"at least one; got {sorted(widths)}",
            param="input_embeds",
        )
    packed = array("f", chain.from_iterable(rows)).tobytes()
    return _Prompt(content_ids(packed, len(rows)), packed)


def _prompts(request: GenerateRequest) -> tuple[list[str | list[int]], bool]:
    """Return the texts or token ids, and whether the client sent a list of them."""
    if (request.text is None) == (request.input_ids is None):
        raise BadRequest(
            "exactly one of text, input_ids and input_embeds must be set", param="text"
        )
    if isinstance(request.text, str):
        return [request.text], False
    if request.text is not None:
        return _non_empty(list(request.text), "text"), True
    ids, is_batch = split_ids(request.input_ids or [], field="input_ids")
    return list(ids), is_batch


def split_ids(
    ids: list[int | list[int]], *, field: str
) -> tuple[list[list[int]], bool]:
    """Split token ids of one prompt (a flat list) or of several (a list of lists).

    Returns:
        The prompts, and whether they were sent as a list of lists.
    """
    kinds = set(map(type, ids))
    if kinds == {list}:
        return list(ids), True  # type: ignore[arg-type]
    if list in kinds:
        raise BadRequest(f"{field} mixes token ids and lists of them", param=field)
    return [ids], False  # type: ignore[list-item]


def _non_empty(prompts: list[str | list[int]], name: str) -> list[str | list[int]]:
    if not prompts:
        raise BadRequest(f"{name} is an empty list", param=name)
    return prompts


class GenerateAnswer:
    """Builds the answer for one output, update by update.

    Args:
        with_text: whether log probabilities include the text of their tokens.
        is_incremental: whether answers contain only the new text, tokens and log
            probabilities, instead of all so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        with_text: bool,
        is_incremental: bool = False,
    ) -> None:
        self._tokenizer = tokenizer if with_text else None
        self._is_incremental = is_incremental
        self._text = ""
        self._output_ids: list[int] = []
        # Of earlier answers, which this one does not repeat.
        self._earlier_chars = self._earlier_tokens = 0
        self._input: list[ShownLogprob] | None = None
        self._input_top: list[list[ShownLogprob] | None] | None = None
        self._output: list[ShownLogprob] = []
        self._input_named: list[list[ShownLogprob] | None] | None = None
        self._output_top: list[list[ShownLogprob]] = []
        self._output_named: list[list[ShownLogprob]] = []
        self._has_named = False
        self._has_logprobs = False
        self._hidden_states: list[list[float]] | None = None

    def add(self, update: Update) -> dict[str, Any]:
        """Apply an update; return the answer."""
        if self._is_incremental:
            self._forget()
        self._text += update.text
        self._output_ids += update.output_ids
        self._check(update)
        self._add_logprobs(update)
        if update.hidden_states is not None:
            self._hidden_states = (self._hidden_states or []) + update.hidden_states
        return {
            "text": self._text,
            "output_ids": list(self._output_ids),
            "meta_info": self._meta_info(update),
        }

    def _check(self, update: Update) -> None:
        check_shown(update, num_chars=self._earlier_chars + len(self._text))
        num_tokens = self._earlier_tokens + len(self._output_ids)
        if num_tokens != update.completion_tokens:
            what = f"{num_tokens} of {update.completion_tokens} tokens are shown"
            raise output_fault(update.rid, what)

    def _forget(self) -> None:
        """Drop what earlier answers already contained."""
        self._earlier_chars += len(self._text)
        self._earlier_tokens += len(self._output_ids)
        self._text, self._output_ids = "", []
        self._input = self._input_top = self._input_named = self._hidden_states = None
        self._output, self._output_top, self._output_named = [], [], []

    def _meta_info(self, update: Update) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": update.rid,
            "finish_reason": finish_dict(update.finish_reason),
            "prompt_tokens": update.prompt_tokens,
            "completion_tokens": update.completion_tokens,
            "cached_tokens": update.cached_tokens,
            "e2e_latency": update.e2e_latency,
        }
        if self._has_logprobs:
            meta["input_token_logprobs"] = self._input or []
            meta["output_token_logprobs"] = list(self._output)
            meta["input_top_logprobs"] = self._input_top or []
            meta["output_top_logprobs"] = list(self._output_top)
        if self._has_named:
            meta["input_token_ids_logprobs"] = self._input_named or []
            meta["output_token_ids_logprobs"] = list(self._output_named)
        if self._hidden_states is not None:
            meta["hidden_states"] = self._hidden_states
        if update.spec_verify_ct:
            meta["spec_verify_ct"] = update.spec_verify_ct
            meta["spec_accept_length"] = (
                update.spec_accept_tokens / update.spec_verify_ct
            )
        return meta

    def _add_logprobs(self, update: Update) -> None:
        delta = update.logprobs
        if delta is None:
            return
        self._has_logprobs = True
        if delta.input_token is not None:
            self._input = self._shown(delta.input_token)
            tops = delta.input_top or []
            self._input_top = self._shown_lists(tops)
        if delta.input_named is not None:
            self._input_named = self._shown_lists(delta.input_named)
        self._output += self._shown(delta.output_token)
        self._output_top += [self._shown(top) for top in delta.output_top]
        self._output_named += [self._shown(named) for named in delta.output_named]
        self._has_named |= bool(delta.output_named or delta.input_named)

    def _shown_lists(
        self, lists: Sequence[list[TokenLogprob] | None]
    ) -> list[list[ShownLogprob] | None]:
        return [None if one is None else self._shown(one) for one in lists]

    def _shown(self, entries: Sequence[TokenLogprob]) -> list[ShownLogprob]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [(logprob, token, None) for logprob, token in entries]
        return [(lp, token, tokenizer.token_text(token)) for lp, token in entries]


def finish_dict(reason: FinishReason | None) -> dict[str, Any] | None:
    """Return the JSON form of `finish_reason`, or None while the request runs."""
    if reason is None:
        return None
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    return {"type": reason.type, "message": reason.message}
