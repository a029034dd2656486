"""Switches for a model's reasoning, which are variables of its chat template.

Providers use several forms; templates read `enable_thinking` (Qwen, GLM),
`thinking` (DeepSeek, Kimi) or `reasoning_effort` (gpt-oss).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints.body_level import BodyLevel, read_kind
from sglang.srt.entrypoints.neutral_fields import ANY, Neutral

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatRequest

# Value of `thinking.type`, as in `/v1/messages` -> whether the model thinks.
THINKING_TYPES = {"enabled": True, "adaptive": True, "disabled": False}
# An effort that turns reasoning off.
NO_EFFORT = "none"
# The reasoning alone cannot be limited.
_THINKING_FIELDS: dict[str, Neutral] = {"budget_tokens": ANY, "clear_thinking": ANY}
_REASONING_FIELDS: dict[str, Neutral] = {
    "max_tokens": ANY,
    "summary": ANY,
}


def thinking_variables(body: ChatRequest) -> dict[str, Any]:
    """Return the variables that a chat's fields ask for; empty to keep the template's
    default.

    A switch is set under both names, because a template reads one of them.

    Raises:
        BadRequest: a value is not a valid switch; names the field.
    """
    effort, switch = body.reasoning_effort, body.enable_thinking
    if switch is None and body.thinking is not None:
        switch = _thinking_type(body.thinking)
    if body.reasoning is not None:
        level = BodyLevel(
            body.reasoning,
            "reasoning",
            read=("effort", "enabled", "exclude"),
            neutral=_REASONING_FIELDS,
        )
        level.flag("exclude")
        effort = effort or level.text("effort", default="") or None
        if switch is None and level.get("enabled") is not None:
            switch = level.flag("enabled")
    if switch is None and effort == NO_EFFORT:
        switch = False
    variables: dict[str, Any] = {}
    if switch is not None:
        variables |= dict.fromkeys(("enable_thinking", "thinking"), switch)
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables


def shows_reasoning(body: ChatRequest) -> bool:
    """Whether the answer includes the reasoning; `thinking_variables` has checked the
    fields.
    """
    return body.include_reasoning is not False and not (body.reasoning or {}).get(
        "exclude"
    )


def _thinking_type(thinking: bool | dict[str, Any]) -> bool:
    if isinstance(thinking, bool):
        return thinking
    kind = read_kind(thinking, "thinking", tuple(THINKING_TYPES))
    BodyLevel(thinking, "thinking", read=("type",), neutral=_THINKING_FIELDS)
    return THINKING_TYPES[kind]
