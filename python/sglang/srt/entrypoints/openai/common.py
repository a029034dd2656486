"""Shared code of both OpenAI endpoints: sampling fields, usage, finish."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from sglang.srt.entrypoints.generate_api import parse_sampling_params
from sglang.srt.entrypoints.openai.guided import read_guide
from sglang.srt.entrypoints.openai.protocol import SAMPLING_FIELDS, Sampled
from sglang.srt.entrypoints.openai.response_format import response_constraint
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.sampling.sampling_params import (
    GRAMMAR_FIELDS,
    MAX_SEED,
    SamplingParams,
)

# A name on its own, not part of a path such as response_format.json_schema.
_WORD = re.compile(r"(?<![\w.])\w+")
# Parameters that come from fields with other names.
_BOUND = ("json_schema", "structural_tag")


def make_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class ClientNames:
    """Translates field names of `/generate` in errors to the client's field names.

    Args:
        prompt: field of the body that holds the prompt.
        max_tokens: field that holds the output limit.
        top_logprobs: field that holds the number of alternatives.
        paths: parts of paths -> the client's, if its body was converted to the form of
            `body`; the first match wins.
    """

    def __init__(
        self,
        body: Sampled,
        *,
        prompt: str,
        max_tokens: str,
        top_logprobs: str,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self._paths = paths or {}
        self._definitions = "$defs."
        self._names = {ours: theirs for theirs, ours in SAMPLING_FIELDS.items()}
        self._names |= {
            "max_new_tokens": max_tokens,
            "input_ids": prompt,
            "top_logprobs_num": top_logprobs,
            "top_logprobs": top_logprobs,
        }
        if (body.response_format or {}).get("type") not in (None, "text"):
            self._names |= dict.fromkeys(_BOUND, "response_format")
        elif body.json_schema is None:
            # Only the tools' schemas can have made this constraint; each is a
            # definition with the tool's name.
            self._names |= dict.fromkeys(_BOUND, "tools")
            self._definitions = "tools."
        if (guide := read_guide(body)) is not None:
            self._names[guide.kind] = guide.path
        self._fields = {**self._names, "text": prompt}

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the field in a passing `BadRequest` to the client's, also in
        `param`.
        """
        try:
            yield
        except BadRequest as error:
            given = error.param
            param = given or self._first_field(error.message)
            if param is not None:
                param = self._fields.get(param, param)
                error.param = self._with_paths(param)
            message = error.message
            if not (given or "").startswith("response_format"):
                # Otherwise it is about its own fields and types, which have such names.
                message = _WORD.sub(
                    lambda word: self._names.get(word[0], word[0]), message
                )
            message = message.replace("$defs.", self._definitions, 1)
            error.message = self._with_paths(message)
            raise

    def _with_paths(self, text: str) -> str:
        for ours, theirs in self._paths.items():
            text = text.replace(ours, theirs)
        return text

    def _first_field(self, message: str) -> str | None:
        """Find the field in the first two words ("invalid regex ...", "regex has")."""
        words = _WORD.findall(message)[:2]
        return next((word for word in words if word in self._names), None)


def sampling_params(
    body: Sampled,
    *,
    max_tokens: int | None,
    default_max_tokens: int,
    defaults: Mapping[str, Any],
    calls: tuple[str, str] | None = None,
) -> SamplingParams:
    """Build the sampling parameters from the body's fields.

    Args:
        defaults: values for fields that the body leaves out.
        calls: parameter that constrains calls, and its value. It already contains the
            schema of `response_format`; the body's other constraints take precedence.

    Raises:
        BadRequest: a value is out of range, or two fields contradict each other.
    """
    values = msgspec.structs.asdict(body)
    raw: dict[str, Any] = {
        name: values[field]
        for field, name in SAMPLING_FIELDS.items()
        if values[field] is not None
    }
    if body.seed is not None:
        raw["sampling_seed"] = _seed(body.seed)
    raw["max_new_tokens"] = default_max_tokens if max_tokens is None else max_tokens
    constraint = response_constraint(body.response_format)
    if constraint is not None and (calls is None or constraint[0] != "json_schema"):
        if "json_schema" in raw:
            raise BadRequest(
                "set response_format or json_schema, not both", param="response_format"
            )
        raw[constraint[0]] = constraint[1]
    if (guide := read_guide(body)) is not None:
        if any(map(raw.get, GRAMMAR_FIELDS)):
            raise BadRequest(
                f"{guide.path} cannot be combined with another constraint",
                param=guide.path,
            )
        raw[guide.kind] = guide.source
    if calls is not None and not any(map(raw.get, GRAMMAR_FIELDS)):
        raw[calls[0]] = calls[1]
    return parse_sampling_params(raw, defaults)


def _seed(seed: int) -> int | None:
    """Map OpenAI's signed seed to an unsigned one; -1 means no seed."""
    if seed == -1:
        return None
    if not -MAX_SEED - 1 <= seed <= MAX_SEED:
        raise BadRequest(
            f"seed must be between {-MAX_SEED - 1} and {MAX_SEED}, got {seed}",
            param="seed",
        )
    return seed & MAX_SEED


class StreamUsage(NamedTuple):
    """Where a stream reports usage: in a separate last chunk, in every chunk."""

    at_end: bool
    is_continuous: bool


def stream_usage(body: Sampled) -> StreamUsage:
    """Return the usage reports that `stream_options` asks for."""
    options = body.stream_options
    if options is None:
        return StreamUsage(at_end=False, is_continuous=False)
    # A whole answer always has its usage.
    return StreamUsage(
        at_end=bool(options.include_usage),
        is_continuous=bool(options.include_usage and options.continuous_usage_stats),
    )


def last_hidden_state(update: Update) -> dict[str, Any]:
    """Return the field of a choice with the hidden state of its last token, if
    requested.
    """
    if not update.hidden_states:
        return {}
    return {"hidden_states": update.hidden_states[-1]}


def finish_name(reason: FinishReason | None) -> str | None:
    """Return "stop", "length" or "abort", or None while the request runs."""
    return None if reason is None else reason.type


def matched_stop(reason: FinishReason | None) -> int | str | None:
    """Return the stop token or string that ended the choice (SGLang's addition)."""
    return None if reason is None else reason.matched


class UsageCounter:
    """Counts the tokens of all choices; the prompt of `n` choices counts once."""

    def __init__(self, *, n: int, report_cached: bool) -> None:
        self._n = n
        self._report_cached = report_cached
        self._latest: dict[int, Update] = {}

    def add(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self._latest[update.index] = update

    def as_dict(self) -> dict[str, Any]:
        firsts = [u for u in self._latest.values() if u.index % self._n == 0]
        prompt = sum(update.prompt_tokens for update in firsts)
        completion = sum(u.completion_tokens for u in self._latest.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._report_cached:
            cached = sum(update.cached_tokens for update in firsts)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage
