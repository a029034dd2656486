"""Fields of SGLang's protocol that this engine does not serve.

SGLang's own clients (router, benchmark, `sglang.lang`) send every field of a request,
most of them with a neutral value that asks for nothing. Neutral values are accepted;
other values are rejected by name. Bodies keep these fields as raw JSON, so that a large
one costs only its bytes and builds no objects.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast

import msgspec

from sglang.srt.managers.messages.errors import BadRequest

T = TypeVar("T", bound=msgspec.Struct)

UNSET = msgspec.Raw(b"null")
# A longer text is not a neutral value.
MAX_NEUTRAL_BYTES = 64


class Neutral:
    """The neutral values of a field, which ask for nothing.

    Args:
        values: neutral values besides None. is_any: whether every value is neutral.
        advice: what to do instead of sending another value.
        code: name by which clients recognize the error.
    """

    def __init__(
        self,
        *values: Any,
        is_any: bool = False,
        advice: str = "leave it out",
        code: str | None = None,
    ) -> None:
        self.values = (None, *values)
        self.is_any = is_any
        self.advice = advice
        self.code = code

    def accepts(self, value: Any) -> bool:
        """Whether `value` is neutral; 0, 0.0 and false are the same here."""
        return self.is_any or value in self.values

    def meta(self) -> msgspec.Meta:
        """The description of the field in a JSON schema."""
        if self.is_any:
            return msgspec.Meta(description="Has no effect.")
        # Uses text to distinguish false from 0, which are equal to `Annotated`.
        values = ", ".join(msgspec.json.encode(v).decode() for v in self.values)
        return msgspec.Meta(
            description=f"Not served; these ask for nothing: {values}.",
            extra_json_schema={"enum": list(self.values)},
        )


ANY = Neutral(is_any=True)
NOTHING = Neutral()
OFF = Neutral(False)
EMPTY = Neutral("", [], {})

# Fields of all requests.
_COMMON: dict[str, Neutral] = {
    "custom_logit_processor": EMPTY,
    "session_params": EMPTY,
    # There is only one.
    "data_parallel_rank": Neutral(0),
    "routed_dp_rank": Neutral(0),
    "return_routed_experts": OFF,
    "return_cached_tokens_details": OFF,
    # vLLM's fields, which would change the answer.
    "use_beam_search": OFF,
    "prompt_embeds": EMPTY,
    "logits_processors": EMPTY,
    "truncate_prompt_tokens": Neutral(-1),
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "prompt_logprobs": NOTHING,
    "return_tokens_as_token_ids": OFF,
    "thinking_token_budget": NOTHING,
    "kv_transfer_params": EMPTY,
    "mm_processor_kwargs": EMPTY,
    # The only one that exists keeps the constraint.
    "guided_decoding_backend": ANY,
    "guided_whitespace_pattern": EMPTY,
}
# Fields of APIs whose requests do not go to two engines.
_ONE_ENGINE: dict[str, Neutral] = {
    "bootstrap_host": NOTHING,
    "bootstrap_port": NOTHING,
    "bootstrap_room": NOTHING,
}
# Fields of APIs with a constraint under another name.
_GUIDED: dict[str, Neutral] = {
    **dict.fromkeys(
        (
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            "structured_outputs",
        ),
        EMPTY,
    ),
    "include_reasoning": Neutral(True),
}
GENERATE: dict[str, Neutral] = (
    _COMMON
    | _GUIDED
    | {
        "image_data": EMPTY,
        "video_data": EMPTY,
        "audio_data": EMPTY,
        "modalities": Neutral([], ["text"]),
        # The operator decides how much of a request is logged.
        "log_metrics": ANY,
        "no_logs": OFF,
        "background": OFF,
        "return_bytes": OFF,
        "return_entropy": OFF,
        "lora_id": EMPTY,
        "bootstrap_pair_key": NOTHING,
        "validation_time": ANY,
        "conversation_id": ANY,
        "custom_labels": EMPTY,
    }
)
SCORE: dict[str, Neutral] = _COMMON | _ONE_ENGINE | {"user": ANY, "rid": NOTHING}
COMPLETION: dict[str, Neutral] = _COMMON | {
    "custom_params": EMPTY,
    "structural_tag": NOTHING,
}
CHAT: dict[str, Neutral] = COMPLETION | {
    "functions": EMPTY,
    "function_call": Neutral("", "none", "auto"),
    "modalities": Neutral([], ["text"]),
    "audio": EMPTY,
    "prediction": EMPTY,
    "web_search_options": NOTHING,
    # The template already contains them.
    "add_special_tokens": OFF,
    "echo": OFF,
    "chat_template": EMPTY,
    "documents": EMPTY,
}
TOKENIZE: dict[str, Neutral] = {
    "chat_template": NOTHING,
    "mm_processor_kwargs": EMPTY,
    "media_io_kwargs": EMPTY,
}
PROFILE: dict[str, Neutral] = {
    "start_step": NOTHING,
    "profile_by_stage": OFF,
    "profile_stages": EMPTY,
    "merge_profiles": OFF,
    "profile_prefix": EMPTY,
    "profile_id": EMPTY,
}
LOGGING: dict[str, Neutral] = {
    "log_level": Neutral(advice="start with --log-level"),
    "log_requests_format": Neutral("text"),
    "dump_requests_folder": Neutral("", advice="requests are not written to files"),
    "dump_requests_threshold": ANY,
    "crash_dump_folder": Neutral("", advice="start with --crash-dump-folder"),
}
DETOKENIZE: dict[str, Neutral] = {"spaces_between_special_tokens": Neutral(True)}
_KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
# Clients that see this code send the whole conversation instead.
_THREAD = Neutral(
    advice="nothing is stored: send the whole conversation in messages",
    code="thread_unsupported_request",
)
_STATELESS = "nothing is stored: send the whole conversation in input"
RESPONSES: dict[str, Neutral] = (
    COMPLETION
    | _ONE_ENGINE
    | _GUIDED
    | {
        "return_hidden_states": OFF,
        "previous_response_id": Neutral("", advice=_STATELESS),
        "conversation": Neutral(advice=_STATELESS),
        "background": Neutral(False, advice="nothing is stored: wait for the answer"),
        "prompt": Neutral(advice="no prompts are stored: send instructions and input"),
        "moderation": NOTHING,
        "context_management": EMPTY,
        # Limits calls of built-in tools, which do not exist here.
        "max_tool_calls": ANY,
        "prompt_cache_options": ANY,
        "access_programs": ANY,
        "image": ANY,
    }
)
MESSAGES: dict[str, Neutral] = (
    COMPLETION
    | _ONE_ENGINE
    | _GUIDED
    | {
        "return_hidden_states": OFF,
        "cache_control": ANY,
        "container": NOTHING,
        "context_management": Neutral({}, {"edits": []}, {"edits": [_KEEP_ALL]}),
        "thread": _THREAD,
        "compaction": NOTHING,
        # A cache report that answers may omit.
        "diagnostics": ANY,
        # Fallback models and billing: there is one model and no billing.
        "fallbacks": ANY,
        "fallback_credit_token": ANY,
        "billing_policy": ANY,
        "inference_geo": ANY,
        "mcp_servers": EMPTY,
        "speed": ANY,
        "user_profile_id": ANY,
        "workspace_id": ANY,
    }
)


def is_raw(kind: Any) -> bool:
    """Whether a field of type `kind` keeps its JSON unparsed."""
    return msgspec.Raw in (kind, *typing.get_args(kind))


def with_neutral(base: type[T], table: Mapping[str, Neutral]) -> type[T]:
    """Return a struct with the fields of `base`, and the fields of `table` as raw
    JSON.
    """
    fields = [
        (name, Annotated[msgspec.Raw, neutral.meta()], UNSET)
        for name, neutral in table.items()
    ]
    made = msgspec.defstruct(
        f"Neutral{base.__name__}", fields, bases=(base,), kw_only=True
    )
    return cast("type[T]", made)


def refuse_others(values: Any, table: Mapping[str, Neutral]) -> None:
    """Reject fields of a body (of a type made by `with_neutral`) that are not neutral.

    Raises:
        BadRequest: names the first of them.
    """
    for name, neutral in table.items():
        raw: msgspec.Raw = getattr(values, name)
        if raw is not UNSET and not neutral.is_any:
            _check(name, neutral, _short_value(bytes(raw)))


def _short_value(text: bytes) -> Any:
    """Return the value of a short JSON text; for a long one the text, which is not
    neutral.
    """
    if len(text) > MAX_NEUTRAL_BYTES:
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Unparsed JSON may contain an unlimited number, or text that is not UTF-8.
        return text


def without_neutral(
    options: Mapping[str, Any], table: Mapping[str, Neutral]
) -> dict[str, Any]:
    """Return the keyword arguments outside `table`; the ones inside must be neutral.

    Raises:
        BadRequest: names the first one that is not.
    """
    for name in options.keys() & table.keys():
        _check(name, table[name], options[name])
    return {name: value for name, value in options.items() if name not in table}


def _check(name: str, neutral: Neutral, value: Any) -> None:
    if not neutral.accepts(value):
        raise BadRequest(
            f"{name} is not supported by this server; {neutral.advice}",
            param=name,
            code=neutral.code,
        )
