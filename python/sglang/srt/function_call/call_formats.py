"""The tool call formats of published models, as data.

Each is one row: marks and tags from the model's chat template or its card.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sglang.srt.function_call.json_calls import JsonFormat
from sglang.srt.function_call.pythonic_detector import PythonicFormat
from sglang.srt.function_call.tag_detector import TagFormat
from sglang.srt.utils.text_stops import Pattern

if TYPE_CHECKING:
    from sglang.srt.function_call.base_detector import CallFormat

_DEEPSEEK_OPENERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_CLOSERS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_BEGIN = rf"(?:{_DEEPSEEK_OPENERS[1]})?\s*"
# No pattern below has two adjacent places that match the same text, so a header takes
# as many steps as it has characters.
_NAME = r"(?P<name>[^\s<>\[\]{}`|]+)"

# An output that must consist of calls, as constrained by `call_schema`.
JSON_ARRAY = JsonFormat(bare_openers="[", is_whole=True)

HERMES = JsonFormat(openers=("<tool_call>",), closers=("</tool_call>",))

LLAMA3 = JsonFormat(openers=("<|python_tag|>",), bare_openers="{[")

MISTRAL = JsonFormat(
    openers=("[TOOL_CALLS]",),
    header=re.compile(rf"{_NAME}\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\]\s*)?"),
    has_short_ids=True,
    other_marks=("[ARGS]", "[CALL_ID]"),
)

DEEPSEEK_V3 = JsonFormat(
    openers=_DEEPSEEK_OPENERS,
    closers=("```", *_DEEPSEEK_CLOSERS),
    header=re.compile(
        rf"{_DEEPSEEK_BEGIN}function{_DEEPSEEK_SEPARATOR}\s*{_NAME}\s*(?:```(?:json)?\s*)?"
    ),
    has_objects=False,
    other_marks=(_DEEPSEEK_SEPARATOR,),
)

DEEPSEEK_V31 = JsonFormat(
    openers=_DEEPSEEK_OPENERS,
    closers=_DEEPSEEK_CLOSERS,
    header=re.compile(rf"{_DEEPSEEK_BEGIN}{_NAME}\s*{_DEEPSEEK_SEPARATOR}\s*"),
    has_objects=False,
    other_marks=(_DEEPSEEK_SEPARATOR,),
)

# The reasoning parser of the same name must already have separated messages without a
# recipient.
GPT_OSS = JsonFormat(
    openers=("<|start|>", "<|channel|>"),
    closers=("<|call|>",),
    header=re.compile(
        r"(?:(?!to=functions\.)[^{])*to=functions\.(?P<name>[\w-]+)(?![\w-])"
        r"[^{]*<\|message\|>\s*"
    ),
    has_objects=False,
    other_marks=("<|message|>", "<|constrain|>", "<|end|>"),
)

KIMI_K2 = JsonFormat(
    openers=(
        *("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        "<|tool_call_begin|>",
    ),
    closers=(
        "<|tool_call_end|>",
        *("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    header=re.compile(
        r"(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?"
        r"(?P<name>[^\s<>:{}]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
    ),
    has_objects=False,
    other_marks=("<|tool_call_argument_begin|>",),
)

FUNCTION_GEMMA = JsonFormat(
    openers=("<start_function_call>",),
    closers=("<end_function_call>",),
    header=re.compile(rf"call:\s*{_NAME}\s*"),
    has_objects=False,
    quote="<escape>",
    other_marks=("<escape>",),
)

GEMMA4 = JsonFormat(
    openers=("<|tool_call>",),
    closers=("<tool_call|>",),
    header=re.compile(rf"call:\s*{_NAME}\s*"),
    has_objects=False,
    quote='<|"|>',
    other_marks=('<|"|>',),
)

# A bracket alone does not start an attempt: texts are full of them.
_PYTHON_LIST = Pattern(
    whole=re.compile(
        r"\[(?=\s{0,64}(?:\{\s{0,64}[\"'\w]|[\w.-]{1,64}\())|<\|python_start\|>"
    ),
    begun=re.compile(r"\[\s{0,64}(?:\{\s{0,64}|[\w.-]{1,64})?\Z"),
    max_chars=130,
)

PYTHONIC = PythonicFormat(
    openers=("[", "<|python_start|>"),
    opener_pattern=_PYTHON_LIST,
    bare_openers="{",
    closers=("<|python_end|>",),
)

LFM2 = PythonicFormat(openers=("<|tool_call_start|>",), closers=("<|tool_call_end|>",))

QWEN3_CODER = TagFormat(
    openers=("<tool_call>", "<function="),
    closers=("</function>", "</tool_call>"),
    call="<function=",
    parameter="<parameter=",
    value_end="</parameter>",
    has_line_breaks=True,
)

SEED_OSS = TagFormat(
    openers=("<seed:tool_call>", "<function="),
    closers=("</function>", "</seed:tool_call>"),
    call="<function=",
    parameter="<parameter=",
    value_end="</parameter>",
    has_line_breaks=True,
)

GLM = TagFormat(
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    call="",
    parameter="<arg_key>",
    parameter_head_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)

MINIMAX_M2 = TagFormat(
    openers=("<minimax:tool_call>", "<invoke name="),
    closers=("</invoke>", "</minimax:tool_call>"),
    call="<invoke name=",
    parameter="<parameter name=",
    value_end="</parameter>",
)

STEP3 = TagFormat(
    openers=(
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<steptml:invoke name=",
    ),
    prelude=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    closers=("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    call="<steptml:invoke name=",
    parameter="<steptml:parameter name=",
    value_end="</steptml:parameter>",
    other_marks=("<｜tool_sep｜>",),
)

DEEPSEEK_V32 = TagFormat(
    openers=(
        *("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        "<｜DSML｜invoke name=",
    ),
    closers=(
        *("</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
        "</｜DSML｜tool_calls>",
    ),
    call="<｜DSML｜invoke name=",
    parameter="<｜DSML｜parameter name=",
    value_end="</｜DSML｜parameter>",
    other_marks=("｜DSML｜",),
)

FORMATS: dict[str, CallFormat] = {
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "deepseekv32": DEEPSEEK_V32,
    "deepseekv4": DEEPSEEK_V32,
    "function_gemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM,
    "gpt-oss": GPT_OSS,
    "hermes": HERMES,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "llama3": LLAMA3,
    "llama4": PYTHONIC,
    "mimo": QWEN3_CODER,
    "minimax-m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "step3": STEP3,
}
