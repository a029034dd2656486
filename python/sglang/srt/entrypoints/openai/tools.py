"""The tools of a request in OpenAI's form, and how the model may use them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.function_call.call_schema import calls_schema
from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.strict_calls import strict_tag
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import quoted

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20
MAX_SCHEMA_DEPTH = 64
CHOICES = ("none", "auto", "required")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The calls that a request allows.

    Fields:
        tools: tools that may be called; if empty, outputs are not parsed for calls.
        for_template: all tools of the request, as the chat template sees them.
        is_forced: whether the output consists of calls only.
        max_calls: maximum number of calls, or None for no limit.
        strict: names of tools whose arguments must follow their schemas.
    """

    tools: tuple[Tool, ...] = ()
    for_template: tuple[dict[str, Any], ...] = ()
    is_forced: bool = False
    max_calls: int | None = None
    strict: frozenset[str] = frozenset()

    def constraint(
        self, parser: str | None, answer: str | None = None
    ) -> tuple[str, str] | None:
        """Return the sampling parameter that constrains the calls, and its value.

        Args:
            parser: name of the --tool-call-parser.
            answer: schema of an output without calls; unused if calls are forced.
        """
        if not self.tools:
            return None
        if self.is_forced:
            return "json_schema", calls_schema(self.tools, max_calls=self.max_calls)
        tag = strict_tag(self.tools, strict=self.strict, parser=parser, answer=answer)
        return None if tag is None else ("structural_tag", tag)


def read_tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    *,
    parallel: bool | None = None,
) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        BadRequest: names the field, the value and the legal values.
    """
    known = read_tools(tools or ())
    mode, names = _read_choice(choice, is_default_auto=bool(known))
    if mode == "required" and not known:
        raise BadRequest(
            "tool_choice asks for a call, but there are no tools: send "
            "tools, or tool_choice none",
            param="tool_choice",
        )
    by_name = {tool.name: tool for tool in known}
    for name in names or ():
        if name not in by_name:
            raise BadRequest(
                f"tool_choice names {quoted(name)}, which is none of the tools",
                param="tool_choice",
            )
    if mode == "none" or not known:
        return ToolUse()
    is_one = isinstance(choice, dict) and choice.get("type") == "function"
    return ToolUse(
        tools=known if names is None else tuple(by_name[name] for name in names),
        for_template=tuple(map(_template_tool, tools or ())),
        is_forced=mode == "required",
        max_calls=1 if is_one or parallel is False else None,
        strict=frozenset(
            tool["function"]["name"]
            for tool in tools or ()
            if tool["function"].get("strict")
        ),
    )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check and read the field `tools`.

    Raises:
        BadRequest: names the entry and the problem.
    """
    if len(tools) > MAX_TOOLS:
        raise BadRequest(
            f"tools has {len(tools)} entries, but at most {MAX_TOOLS} are accepted",
            param="tools",
        )
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise BadRequest(
            f"tools has {size} bytes, but at most {MAX_TOOLS_BYTES} are accepted",
            param="tools",
        )
    read = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    names: set[str] = set()
    for i, tool in enumerate(read):
        if tool.name in names:
            raise BadRequest(
                f"tools[{i}].function.name is {tool.name!r}, which another tool has; "
                "names must be unique",
                param=f"tools[{i}].function.name",
            )
        names.add(tool.name)
    return tuple(read)


def _read_tool(where: str, tool: Mapping[str, Any]) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise BadRequest(
            f"{where}.type is {quoted(kind)}; this server has function only",
            param=f"{where}.type",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(
            f"{where}.function must be an object", param=f"{where}.function"
        )
    where += ".function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(
            f"{where}.name is {quoted(name)}; it must have 1 to 64 letters, digits, _ "
            "and -",
            param=f"{where}.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise BadRequest(
            f"{where}.description must be a string", param=f"{where}.description"
        )
    if not isinstance(function.get("strict"), bool | None):
        raise BadRequest(f"{where}.strict must be a boolean", param=f"{where}.strict")
    return Tool(name=name, parameters=_read_parameters(where, function))


def _read_parameters(where: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
    where += ".parameters"
    parameters = function.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not _is_of_object(parameters):
        raise BadRequest(f"{where} must be the JSON schema of an object", param=where)
    if parameters.get("type") is not None:
        parameters = parameters | {"type": "object"}
    if _depth(parameters) > MAX_SCHEMA_DEPTH:
        raise BadRequest(
            f"{where} is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=where
        )
    return parameters


def _is_of_object(schema: Mapping[str, Any]) -> bool:
    """Whether an object may satisfy `schema`; some generators write OBJECT, or also
    allow null.
    """
    kinds = schema.get("type")
    if kinds is None:
        return True
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(isinstance(kind, str) and kind.lower() == "object" for kind in kinds)


def _depth(value: Any) -> int:
    """Return the levels of nesting, counted no further than the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        level = [
            entry
            for holder in level
            for entry in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(entry, dict | list)
        ]
    return depth


def _read_choice(choice: Any, *, is_default_auto: bool) -> tuple[str, list[str] | None]:
    """Return one of `CHOICES` and the names it is limited to."""
    if choice is None:
        return ("auto" if is_default_auto else "none"), None
    if isinstance(choice, str) and choice in CHOICES:
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return "required", [_function_name(choice)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"))
    raise BadRequest(
        f"tool_choice is {quoted(choice)}; supported: {', '.join(CHOICES)}, "
        '{"type": "function", "function": {"name": ...}} and {"type": "allowed_tools", '
        '"allowed_tools": {"mode": ..., "tools": [...]}}',
        param="tool_choice",
    )


def _read_allowed(allowed: Any) -> tuple[str, list[str]]:
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(entries, list) or not entries:
        raise BadRequest(
            "tool_choice.allowed_tools must be an object with mode and a list of tools",
            param="tool_choice.allowed_tools",
        )
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise BadRequest(
            f"tool_choice.allowed_tools.mode is {quoted(mode)}; supported: auto, "
            "required",
            param="tool_choice.allowed_tools.mode",
        )
    return mode, list(dict.fromkeys(map(_function_name, entries)))


def _function_name(holder: Any) -> str:
    """Return the name in `{"function": {"name": ...}}`."""
    function = holder.get("function") if isinstance(holder, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequest(
            "tool_choice must name a function: "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name


def _template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form models were trained on, without fields that only
    servers read.
    """
    function = {
        name: value
        for name, value in tool["function"].items()
        if name != "strict" and value is not None
    }
    return {"type": "function", "function": function}
