"""Renders a chat, checks its limits and submits it to the engine.

Every chat API converts its requests to the form of `/v1/chat/completions` and continues
here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from sglang.srt.entrypoints.bootstrap_fields import read_bootstraps
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import aside
from sglang.srt.entrypoints.openai.common import ClientNames, sampling_params
from sglang.srt.entrypoints.openai.guided import read_guide
from sglang.srt.entrypoints.openai.logprobs import need_tokenizer
from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.entrypoints.openai.response_format import response_constraint
from sglang.srt.entrypoints.openai.thinking import thinking_variables
from sglang.srt.entrypoints.openai.tools import ToolUse, read_tool_use
from sglang.srt.entrypoints.unknown_fields import UNKNOWN_FIELDS
from sglang.srt.function_call.base_detector import CallFormat
from sglang.srt.function_call.call_formats import JSON_ARRAY
from sglang.srt.function_call.function_call_parser import DETECTORS as CALL_DETECTORS
from sglang.srt.function_call.strict_calls import BOUND_CALLS
from sglang.srt.managers.front.chat_messages import KNOWN_FIELDS
from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.request_state import RequestGroup
from sglang.srt.managers.front.template_manager import continued_text
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.parser.output_parser import OutputFormat
from sglang.srt.parser.reasoning_parser import DETECTORS as REASONING_DETECTORS
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer

# Larger than any context: a chat without a limit may use all the room left by the
# prompt.
WHOLE_CONTEXT = 1 << 40
MAX_TEMPLATE_VARIABLES = 64
# Types of response_format that allow calls.
_FREE_FORMATS = (None, "text", "structural_tag")
_SCHEMA_FORMATS = ("json_object", "json_schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A chat rendered to a prompt.

    Fields:
        form: how its outputs are parsed.
        names: the client's names of its fields, for errors.
    """

    prompt: PromptRequest
    form: OutputFormat
    names: ClientNames
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedChat(RenderedChat):
    """A chat that was submitted to the engine."""

    group: RequestGroup


async def render_chat(
    front: Front, request: Request, body: ChatRequest, names: ClientNames
) -> RenderedChat:
    """Check a chat and apply the template.

    Raises:
        ApiError: the chat is rejected.
    """
    tokenizer = need_tokenizer(front.manager.tokenizer)
    with names.in_errors():
        use, params = await aside(request, front.manager, _options, body, front.manager)
        text = await _render(front.manager, body, use)
        prompt, form = _prompt_request(
            body, front.manager, text=text, use=use, params=params
        )
    return RenderedChat(prompt=prompt, form=form, names=names, tokenizer=tokenizer)


async def submit_chat(front: Front, chat: RenderedChat) -> SubmittedChat:
    """Send a chat to the engine.

    Raises:
        ApiError: the chat is rejected.
    """
    with chat.names.in_errors():
        group = await front.manager.submit([chat.prompt])
    return SubmittedChat(
        group=group,
        prompt=chat.prompt,
        form=chat.form,
        names=chat.names,
        tokenizer=chat.tokenizer,
    )


def max_tokens(body: ChatRequest) -> tuple[str, int | None]:
    """Return the name and value of the output limit; the newer name takes
    precedence.
    """
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _options(
    body: ChatRequest, manager: TokenizerManager
) -> tuple[ToolUse, SamplingParams]:
    """Check everything but the messages."""
    _refuse_contradictions(body)
    _check_message_fields(body.messages)
    use = read_tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    parser = manager.server_args.tool_call_parser
    bound = response_constraint(body.response_format)
    _refuse_constraint(body, use, parser)
    answer = bound[1] if bound is not None and bound[0] == "json_schema" else None
    _, limit = max_tokens(body)
    params = sampling_params(
        body,
        max_tokens=limit,
        default_max_tokens=WHOLE_CONTEXT,
        defaults=manager.sampling_defaults,
        calls=use.constraint(parser, answer),
    )
    return use, params


async def _render(manager: TokenizerManager, body: ChatRequest, use: ToolUse) -> str:
    return await manager.prompts.render(
        body.messages,
        variables=template_variables(
            body.chat_template_kwargs, defaults=thinking_variables(body)
        ),
        tools=use.for_template or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def _prompt_request(
    body: ChatRequest,
    manager: TokenizerManager,
    *,
    text: str,
    use: ToolUse,
    params: SamplingParams,
) -> tuple[PromptRequest, OutputFormat]:
    """Return the prompt of a request, and how its outputs are parsed."""
    form = _output_format(
        body,
        manager.server_args,
        use,
        text,
        is_constrained=params.is_bound_from_the_start or _has_schema(body),
    )
    tokenizer = need_tokenizer(manager.tokenizer)
    if form.marks & tokenizer.special_texts:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    prompt = PromptRequest(
        prompt=text,
        # The template already contains them.
        add_special_tokens=False,
        sampling_params=params,
        is_length_exact=max_tokens(body)[1] is not None,
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
        rid=body.rid or None,
        extra_key=body.tenant(),
        lora=manager.loras.asked(body.model, body.lora_path),
        priority=body.priority,
        bootstraps=read_bootstraps(body, prompts=1, copies=params.n)[0],
        keeps_prompt_ids=bool(body.return_token_ids),
        return_hidden_states=bool(body.return_hidden_states),
        only_last_hidden_state=bool(body.return_hidden_states),
    )
    return prompt, form


def _output_format(
    body: ChatRequest,
    server_args: ServerArgs,
    use: ToolUse,
    prompt: str,
    *,
    is_constrained: bool,
) -> OutputFormat:
    """Return how the outputs are parsed.

    A constraint applies from the first token, so there is no reasoning before it.
    """
    calls: CallFormat | None = None
    if use.is_forced:
        calls = JSON_ARRAY
    elif use.tools and server_args.tool_call_parser is not None:
        calls = CALL_DETECTORS[server_args.tool_call_parser]
    form = OutputFormat(calls=calls, tools=use.tools, max_calls=use.max_calls)
    if server_args.reasoning_parser is None or is_constrained:
        return form
    reasoning = REASONING_DETECTORS[server_args.reasoning_parser]
    is_open = reasoning.opened_by(prompt)
    if body.continue_final_message and (begun := continued_text(body.messages)):
        is_open = reasoning.opened_by_message(begun)
    return dataclasses.replace(
        form,
        reasoning=reasoning,
        is_open=is_open,
        separate_reasoning=body.separate_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
    )


def _has_schema(body: ChatRequest) -> bool:
    """Whether the text of the answer must follow a schema."""
    return (body.response_format or {}).get("type") in _SCHEMA_FORMATS


def _refuse_constraint(body: ChatRequest, use: ToolUse, parser: str | None) -> None:
    """Reject output constraints if the output may or must contain calls.

    A `response_format` applies to the text: forced calls leave no text, and in a format
    whose calls can be constrained the output is either calls or follows it.
    """
    if not use.tools:
        return
    free = _FREE_FORMATS[:2] if use.is_forced else _FREE_FORMATS
    if use.is_forced or parser in BOUND_CALLS:
        free = (*free, *_SCHEMA_FORMATS)
    given = {
        "response_format": (body.response_format or {}).get("type") not in free,
        "json_schema": body.json_schema not in (None, ""),
        "regex": bool(body.regex),
        "ebnf": bool(body.ebnf),
    }
    if (guide := read_guide(body)) is not None:
        given[guide.path] = True
    for name, is_given in given.items():
        if is_given:
            raise BadRequest(
                f"{name} cannot be combined with tools that may be called: the "
                "constraint would leave no room for a call; send tool_choice none",
                param=name,
            )


def template_variables(
    given: dict[str, Any] | None, *, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return extra variables for the chat template: `chat_template_kwargs`, which take
    precedence over other fields.

    Raises:
        BadRequest: there are too many.
    """
    given = given or {}
    if len(given) > MAX_TEMPLATE_VARIABLES:
        raise BadRequest(
            f"chat_template_kwargs has {len(given)} entries, but at most "
            f"{MAX_TEMPLATE_VARIABLES} are accepted",
            param="chat_template_kwargs",
        )
    return {**(defaults or {}), **given}


def _check_message_fields(messages: Sequence[Mapping[str, Any]]) -> None:
    """Ignore or reject unknown fields of messages."""
    for index, message in enumerate(messages):
        for name in message.keys() - KNOWN_FIELDS:
            path = f"messages[{index}].{name}"
            UNKNOWN_FIELDS.get().check(path, sorted(KNOWN_FIELDS))


def _refuse_contradictions(body: ChatRequest) -> None:
    """Reject fields that contradict each other."""
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message cannot be combined with add_generation_prompt: "
            "one goes on with the last message, the other begins a new one",
            param="continue_final_message",
        )
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
