"""Request bodies and answer parsers of the serving benchmark's backends.

Knows the formats, not the network: bodies out, parsed events in.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.bench_utils.datasets import BenchRequest
from sglang.bench_utils.metrics import RequestRecord, StreamClock
from sglang.bench_utils.report import Json

EVENT_PREFIX = b"data:"
DONE = b"[DONE]"


class WireError(RuntimeError):
    """The server's answer does not have the expected format, or is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOptions:
    """Options of all requests of a run.

    `send_ids`: token ids instead of text, where the format admits them.
    """

    model: str
    stream: bool
    ignore_eos: bool
    send_ids: bool
    return_logprob: bool = False
    extra: Json = field(default_factory=dict)


EventReader = Callable[[Json, RequestRecord, StreamClock, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One request format. `read` records the new content of an event or an answer."""

    path: str
    body: Callable[[BenchRequest, BodyOptions], Json]
    read: EventReader


def _generate_body(request: BenchRequest, options: BodyOptions) -> Json:
    if request.body is not None:
        length = {"max_new_tokens": request.output_len}
        params = {**request.body["sampling_params"], **length}
        return {**request.body, "sampling_params": params, "stream": options.stream}
    prompt: Json = {"text": request.text}
    if options.send_ids or request.ids_only:
        prompt = {"input_ids": request.input_ids}
    params, extra = dict(options.extra), {}
    for key in GENERATE_FIELDS & params.keys():
        extra[key] = params.pop(key)
    return {
        **prompt,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": request.output_len,
            "ignore_eos": options.ignore_eos,
            **params,
        },
        "stream": options.stream,
        "return_logprob": options.return_logprob,
        **extra,
    }


# Keys of --extra-request-body that belong beside `sampling_params`, not into it.
GENERATE_FIELDS = frozenset(
    {"extra_key", "top_logprobs_num", "logprob_start_len", "return_hidden_states"}
)


def _completion_body(request: BenchRequest, options: BodyOptions) -> Json:
    as_ids = options.send_ids or request.ids_only
    prompt = request.input_ids if as_ids else request.text
    logprobs = {"logprobs": 1} if options.return_logprob else {}
    return _openai_body(request, options, {"prompt": prompt, **logprobs})


def _chat_body(request: BenchRequest, options: BodyOptions) -> Json:
    message = {"role": "user", "content": request.text}
    logprobs = {"logprobs": True} if options.return_logprob else {}
    return _openai_body(request, options, {"messages": [message], **logprobs})


def _openai_body(request: BenchRequest, options: BodyOptions, own: Json) -> Json:
    usage = {"stream_options": {"include_usage": True}} if options.stream else {}
    return {
        "model": options.model,
        **own,
        "temperature": 0.0,
        "max_tokens": request.output_len,
        "ignore_eos": options.ignore_eos,
        "stream": options.stream,
        **usage,
        **options.extra,
    }


def _read_generate(
    event: Json, record: RequestRecord, clock: StreamClock, now: float
) -> None:
    """Record an event of `/generate`, all of whose fields are cumulative."""
    meta = event["meta_info"]
    reason = meta["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        raise WireError(f"aborted: {reason.get('message')}")
    new = meta["completion_tokens"] - record.output_tokens
    record.output_tokens = meta["completion_tokens"]
    record.prompt_tokens = meta["prompt_tokens"]
    record.cached_tokens = meta["cached_tokens"]
    record.text = event["text"]
    record.verifications = meta.get("spec_verify_ct", 0)
    record.verified_tokens = record.verifications * meta.get("spec_accept_length", 0.0)
    clock.on_tokens(new, now)


def _read_openai(
    event: Json, record: RequestRecord, clock: StreamClock, now: float
) -> None:
    """Record a chunk; text counts as one token until `usage` gives the number."""
    for choice in event.get("choices", ()):
        holder = choice.get("delta") or choice.get("message") or choice
        text = holder.get("text") or holder.get("content")
        if text:
            record.text += text
            record.output_tokens += 1
            clock.on_tokens(1, now)
    usage = event.get("usage")
    if usage is not None:
        record.prompt_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")


BACKENDS: dict[str, Backend] = {
    "sglang": Backend(path="/generate", body=_generate_body, read=_read_generate),
    "sglang-oai": Backend(
        path="/v1/completions", body=_completion_body, read=_read_openai
    ),
    "sglang-oai-chat": Backend(
        path="/v1/chat/completions", body=_chat_body, read=_read_openai
    ),
}


async def sse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Json]:
    """Yield the events of a server-sent stream, up to `[DONE]`.

    Raises:
        WireError: an event is an error, or the stream ends before `[DONE]`.
    """
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if not line.startswith(EVENT_PREFIX):
                continue
            data = line[len(EVENT_PREFIX) :].strip()
            if data == DONE:
                return
            yield parse_event(data)
    raise WireError("the stream ended before [DONE]")


def parse_event(data: bytes) -> Json:
    """Parse the JSON object of one event or of a whole answer.

    Raises:
        WireError: not a JSON object, or an error object.
    """
    try:
        event: Any = json.loads(data)
    except ValueError as error:
        raise WireError(f"not JSON: {data[:200]!r}") from error
    if not isinstance(event, dict):
        raise WireError(f"not a JSON object: {data[:200]!r}")
    if "error" in event:
        raise WireError(error_message(event))
    return event


def error_message(event: Json) -> str:
    """Return the message of an error object."""
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
