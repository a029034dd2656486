"""Tool calls as models write them: a writer for each format, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class WrittenCall(NamedTuple):
    """A call, and the arguments that it has."""

    name: str
    arguments: dict[str, Any]


Writer = Callable[[Sequence[WrittenCall]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tag_text(value: Any) -> str:
    """A value between tags: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _object(call: WrittenCall, key: str = "arguments") -> str:
    return _json({"name": call.name, key: call.arguments})


def hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def hermes_list(calls: Sequence[WrittenCall]) -> str:
    return f"<tool_call>\n[{', '.join(map(_object, calls))}]\n</tool_call>"


def llama3(calls: Sequence[WrittenCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def llama3_python(calls: Sequence[WrittenCall]) -> str:
    return "; ".join(
        f'{{"name": "{call.name}", "parameters": {call.arguments!r}}}' for call in calls
    )


def json_array(calls: Sequence[WrittenCall]) -> str:
    return f"[{', '.join(_object(call, 'parameters') for call in calls)}]"


def mistral_list(calls: Sequence[WrittenCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"


def mistral_named(calls: Sequence[WrittenCall]) -> str:
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{_json(c.arguments)}" for c in calls)


def mistral_bare(calls: Sequence[WrittenCall]) -> str:
    return "".join(f"[TOOL_CALLS]{c.name}{_json(c.arguments)}" for c in calls)


def deepseek_v3(calls: Sequence[WrittenCall]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n"
        f"{_json(c.arguments)}\n```<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[WrittenCall]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{_json(c.arguments)}"
        "<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def gpt_oss(calls: Sequence[WrittenCall]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>"
        f"{_json(c.arguments)}<|call|>"
        for c in calls
    )


def kimi_k2(calls: Sequence[WrittenCall]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{c.name}:{i}<|tool_call_argument_begin|>"
        f"{_json(c.arguments)}<|tool_call_end|>"
        for i, c in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _python_list(calls: Sequence[WrittenCall]) -> str:
    entries = (
        f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})"
        for c in calls
    )
    return f"[{', '.join(entries)}]"


def lfm2(calls: Sequence[WrittenCall]) -> str:
    return f"<|tool_call_start|>{_python_list(calls)}<|tool_call_end|>"


def _gemma(begin: str, quote: str, end: str) -> Writer:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        if isinstance(given, list):
            return f"[{','.join(map(value, given))}]"
        if isinstance(given, dict):
            return f"{{{','.join(f'{k}:{value(v)}' for k, v in given.items())}}}"
        return _json(given)

    return lambda calls: "".join(
        f"{begin}call:{c.name}{value(c.arguments)}{end}" for c in calls
    )


def _qwen_tags(section: str, *, is_closed: bool = True) -> Writer:
    """Without their end tags the values still end at the next tag."""
    close = "</parameter>\n" if is_closed else ""

    def write(call: WrittenCall) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{_tag_text(value)}\n{close}"
            for key, value in call.arguments.items()
        )
        function = f"<function={call.name}>\n{parameters}</function>"
        return f"<{section}>\n{function}\n</{section}>"

    return lambda calls: "\n".join(map(write, calls))


def _glm(line_break: str) -> Writer:
    def write(call: WrittenCall) -> str:
        parameters = "".join(
            f"<arg_key>{key}</arg_key>{line_break}<arg_value>{_tag_text(value)}"
            f"</arg_value>{line_break}"
            for key, value in call.arguments.items()
        )
        return f"<tool_call>{call.name}{line_break}{parameters}</tool_call>"

    return lambda calls: "\n".join(map(write, calls))


def _invokes(
    calls: Sequence[WrittenCall], prefix: str, *, says_string: bool = False
) -> list[str]:
    def attribute(value: Any) -> str:
        return f' string="{json.dumps(isinstance(value, str))}"' if says_string else ""

    return [
        f'<{prefix}invoke name="{call.name}">\n'
        + "".join(
            f'<{prefix}parameter name="{key}"{attribute(value)}>{_tag_text(value)}'
            f"</{prefix}parameter>\n"
            for key, value in call.arguments.items()
        )
        + f"</{prefix}invoke>"
        for call in calls
    ]


def minimax_m2(calls: Sequence[WrittenCall]) -> str:
    inner = "\n".join(_invokes(calls, ""))
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def deepseek_v32(calls: Sequence[WrittenCall]) -> str:
    inner = "\n".join(_invokes(calls, "｜DSML｜", says_string=True))
    return f"<｜DSML｜function_calls>\n{inner}\n</｜DSML｜function_calls>"


def deepseek_v4(calls: Sequence[WrittenCall]) -> str:
    return deepseek_v32(calls).replace("DSML｜function_calls", "DSML｜tool_calls")


def step3(calls: Sequence[WrittenCall]) -> str:
    inner = "\n".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"
        for invoke in _invokes(calls, "steptml:")
    )
    return f"<｜tool_calls_begin｜>\n{inner}\n<｜tool_calls_end｜>"


function_gemma = _gemma("<start_function_call>", "<escape>", "<end_function_call>")
gemma4 = _gemma("<|tool_call>", '<|"|>', "<tool_call|>")

WRITERS: dict[str, tuple[Writer, ...]] = {
    "array": (json_array,),
    "deepseekv3": (deepseek_v3,),
    "deepseekv31": (deepseek_v31,),
    "deepseekv32": (deepseek_v32,),
    "deepseekv4": (deepseek_v4,),
    "function_gemma": (
        _gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    ),
    "gemma4": (_gemma("<|tool_call>", '<|"|>', "<tool_call|>"),),
    "glm": (_glm("\n"),),
    "glm45": (_glm("\n"),),
    "glm47": (_glm(""),),
    "gpt-oss": (gpt_oss,),
    "hermes": (hermes, hermes_list),
    "kimi_k2": (kimi_k2,),
    "lfm2": (lfm2,),
    "llama3": (llama3, llama3_python, json_array),
    "llama4": (_python_list, json_array),
    "mimo": (_qwen_tags("tool_call"),),
    "minimax-m2": (minimax_m2,),
    "mistral": (mistral_list, mistral_named, mistral_bare),
    "pythonic": (_python_list, json_array, llama3),
    "qwen": (hermes, hermes_list),
    "qwen25": (hermes,),
    "qwen3_coder": (
        _qwen_tags("tool_call"),
        _qwen_tags("tool_call", is_closed=False),
        hermes,
    ),
    "seed_oss": (_qwen_tags("seed:tool_call"),),
    "step3": (step3,),
}
