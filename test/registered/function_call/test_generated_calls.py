"""Generated outputs of every format: whole, cut off, malformed, in fragments."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from call_writers import WRITERS, WrittenCall

from sglang.srt.function_call.base_detector import CallFormat
from sglang.srt.function_call.call_formats import JSON_ARRAY
from sglang.srt.function_call.core_types import CallDelta, Tool
from sglang.srt.function_call.function_call_parser import DETECTORS, Call, collect_calls
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu", full_time=120)

ALL = DETECTORS | {"array": JSON_ARRAY}
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "flag": {"$ref": "#/$defs/flag"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "options": {"allOf": [{"type": "object"}, {"description": "any"}]},
    "level": {"enum": [1, 2, 3]},
}
TOOLS = [
    Tool(
        name=name,
        parameters={
            "type": "object",
            "properties": {key: SCHEMAS[key] for key in keys},
            "$defs": {"flag": {"type": "boolean"}},
        },
    )
    for name, keys in (
        ("get_weather", ("text", "count", "flag")),
        ("search-2", ("text", "ratio", "tags")),
        ("run", tuple(SCHEMAS)),
    )
]
PYTHON_TOOLS = [tool for tool in TOOLS if tool.name.isidentifier()]
LETTERS = [
    *"abz19 é😀\"'\\{}[]<>&,:;=()|`\t\n",
    "</b>",
    "null",
    "\\n",
    "\r\n",
    "''",
    "//",
]
PROSE = ["", "", "Let me see.\n\n", "a < b and [1] {x} 'y'"]


def random_value(rng: random.Random, key: str) -> Any:
    if key == "text":
        return "".join(rng.choices(LETTERS, k=rng.randrange(12)))
    if key == "tags":
        return [random_value(rng, "text") for _ in range(rng.randrange(4))]
    if key == "options":
        keys = rng.sample(("a", "b_c", "d"), k=rng.randrange(3))
        return {name: random_value(rng, rng.choice([*SCHEMAS])) for name in keys}
    return {
        "count": rng.randrange(-1000, 1000),
        "ratio": rng.choice([None, 0.5, -1.25e-7, 3, 1e21]),
        "flag": rng.random() < 0.5,
        "level": rng.randrange(1, 4),
    }[key]


def random_calls(rng: random.Random) -> list[WrittenCall]:
    calls = []
    for _ in range(rng.randrange(1, 4)):
        tool = rng.choice(PYTHON_TOOLS)
        keys = [*tool.parameters["properties"]]
        chosen = rng.sample(keys, k=rng.randrange(len(keys) + 1))
        values = {key: random_value(rng, key) for key in chosen}
        calls.append(WrittenCall(tool.name, values))
    return calls


def damaged(rng: random.Random, text: str) -> str:
    """Return `text` cut off, or with some of it lost, doubled or exchanged."""
    kind = rng.randrange(4)
    one, other = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    if kind == 0:
        return text[:one]
    if kind == 1:
        return text[:one] + text[min(other, one + 8) :]
    if kind == 2:
        return text[:other] + text[one:]
    return text[:one] + rng.choice(LETTERS) + text[one:]


def fragments(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    ends = [0, *cuts, len(text)]
    return [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def parse(form: CallFormat, pieces: Sequence[str]) -> tuple[str, list[Call]]:
    detector = form(TOOLS)
    out = [found for piece in pieces for found in detector.push(piece)]
    out += detector.finish()
    calls = collect_calls(piece for piece in out if isinstance(piece, CallDelta))
    return "".join(piece for piece in out if isinstance(piece, str)), calls


def without_ids(parsed: tuple[str, list[Call]]) -> tuple[str, list[tuple[str, str]]]:
    return parsed[0], [(call.name, call.arguments) for call in parsed[1]]


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == ALL.keys()


@pytest.mark.parametrize("parser", sorted(WRITERS))
def test_written_calls_come_back(parser: str) -> None:
    form, rng = ALL[parser], random.Random(f"written {parser}")
    has_prose = not form.bare_openers
    for trial in range(count(ci=24, full=400)):
        calls = random_calls(rng)
        writer = WRITERS[parser][trial % len(WRITERS[parser])]
        prose = rng.choice(PROSE) if has_prose else ""
        text = prose + writer(calls)
        shown, found = parse(form, [text])
        assert shown == prose.rstrip(), text
        assert [(c.name, json.loads(c.arguments)) for c in found] == calls, text
        assert without_ids(parse(form, text)) == without_ids((shown, found)), text


@pytest.mark.parametrize("parser", sorted(WRITERS))
def test_damaged_calls_are_the_same_in_every_fragmentation(parser: str) -> None:
    form, rng = ALL[parser], random.Random(f"damaged {parser}")
    for trial in range(count(ci=24, full=400)):
        writer = WRITERS[parser][trial % len(WRITERS[parser])]
        text = rng.choice(PROSE) + writer(random_calls(rng))
        for _ in range(rng.randrange(1, 3)):
            text = damaged(rng, text)
        whole = without_ids(parse(form, [text]))
        assert without_ids(parse(form, text)) == whole, text
        assert without_ids(parse(form, fragments(rng, text))) == whole, text
        if not whole[1] and not form.is_whole:
            assert whole[0] == text
        for name, arguments in whole[1]:
            assert name in {tool.name for tool in TOOLS}
            arguments.encode()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
