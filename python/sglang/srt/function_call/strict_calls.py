"""Optional calls whose arguments are constrained by the tools' schemas.

Output that is free until a call begins and constrained from there is a structural tag;
this module defines how calls of each format begin and end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.function_call.call_schema import parameters_schema

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

_NAME = "{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCall:
    """The text of a format's call around its JSON arguments.

    Fields:
        begin: text that begins a call, starting with `trigger`; `{name}` is the tool's
            name.
    """

    trigger: str
    begin: str
    end: str


_TAGGED = BoundCall(
    trigger="<tool_call>",
    begin='<tool_call>\n{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
)
# By names of --tool-call-parser. Mistral's calls are a list, which a fixed end would
# cut after the first call; other formats' arguments are not JSON.
BOUND_CALLS: dict[str, BoundCall] = {
    "hermes": _TAGGED,
    "qwen": _TAGGED,
    "qwen25": _TAGGED,
    "llama3": BoundCall(
        trigger="<|python_tag|>",
        begin='<|python_tag|>{"name": "{name}", "parameters": ',
        end="}",
    ),
}


def strict_tag(
    tools: Sequence[Tool],
    *,
    strict: Collection[str],
    parser: str | None,
    answer: str | None = None,
) -> str | None:
    """Return the structural tag that constrains the arguments of `strict` tools.

    Other tools accept any object. Returns None if nothing is constrained, because no
    tool is strict or the format has no such form.

    Args:
        answer: JSON schema of an output without calls, or None for free text.
    """
    form = BOUND_CALLS.get(parser or "")
    if form is None or not (strict or answer):
        return None
    structures: list[dict[str, Any]] = [
        {
            "begin": form.begin.replace(_NAME, tool.name),
            "schema": parameters_schema(tool)
            if tool.name in strict
            else {"type": "object"},
            "end": form.end,
            "name": tool.name,
        }
        for tool in tools
    ]
    tag: dict[str, Any] = {"structures": structures, "triggers": [form.trigger]}
    if answer is not None:
        tag["answer_schema"] = json.loads(answer)
    return json.dumps(tag, ensure_ascii=False)
