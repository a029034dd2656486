"""Calls of the model's own accord whose arguments are bound by the tools' schemas.

What is free until a call begins, and bound from there on, is a structural tag; here is
how calls of a format begin and end.
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
    """A call as a model of a format writes it, around its JSON arguments.

    Fields:
        begin: begins with `trigger`; `{name}` is the name of the tool.
    """

    trigger: str
    begin: str
    end: str


_TAGGED = BoundCall(
    trigger="<tool_call>",
    begin='<tool_call>\n{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
)
# By the names of --tool-call-parser. Calls of Mistral are a list, which a fixed end
# would cut after the first; arguments of other formats are not JSON.
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
    """Return the structural tag that binds the arguments of `strict` tools.

    Calls of others have any object. None: nothing is bound, as no tool is strict or the
    format has no such form.

    Args:
        answer: schema of an output without calls, as JSON; None: free text.
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
