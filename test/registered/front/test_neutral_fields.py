"""Fields that are not served: neutral values, and what bulky ones cost."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.generate_api import GenerateRequest
from sglang.srt.entrypoints.neutral_fields import (
    CHAT,
    COMPLETION,
    GENERATE,
    Neutral,
    refuse_others,
    without_neutral,
)
from sglang.srt.entrypoints.openai.protocol import ChatRequest, CompletionRequest
from sglang.srt.managers.messages.errors import BadRequest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

BODIES: list[tuple[type[msgspec.Struct], dict[str, Neutral], dict[str, Any]]] = [
    (GenerateRequest, GENERATE, {"text": "x"}),
    (CompletionRequest, COMPLETION, {"prompt": "x"}),
    (ChatRequest, CHAT, {"messages": []}),
]


@pytest.mark.parametrize(("kind", "table", "body"), BODIES)
def test_every_neutral_value_is_accepted_and_no_other(
    kind: type[msgspec.Struct], table: dict[str, Neutral], body: dict[str, Any]
) -> None:
    for name, neutral in table.items():
        for value in neutral.values:
            text = msgspec.json.encode(body | {name: value})
            refuse_others(msgspec.json.decode(text, type=kind), table)
        for value in (True, 1, "x", ["x"], {"x": 1}, "y" * 1000):
            text = msgspec.json.encode(body | {name: value})
            parsed = msgspec.json.decode(text, type=kind)
            if neutral.accepts(value):
                refuse_others(parsed, table)
                continue
            with pytest.raises(BadRequest, match=f"{name} is not supported") as at:
                refuse_others(parsed, table)
            assert at.value.param == name and len(at.value.message) < 200


@pytest.mark.parametrize(
    "value", [b"1e999", b"-1e999", b"1" + b"0" * 60, b'"\xff\xfe"']
)
def test_what_cannot_be_read_is_no_neutral_value(value: bytes) -> None:
    body = b'{"text": "x", "data_parallel_rank": %s}' % value
    with pytest.raises(BadRequest, match="data_parallel_rank is not supported"):
        refuse_others(msgspec.json.decode(body, type=GenerateRequest), GENERATE)


def test_keyword_arguments() -> None:
    options = {"stream": True, "image_data": None, "log_metrics": True}
    assert without_neutral(options, GENERATE) == {"stream": True}
    assert without_neutral({"data_parallel_rank": 0.0, "no_logs": 0}, GENERATE) == {}
    with pytest.raises(BadRequest, match="data_parallel_rank is not supported"):
        without_neutral({"data_parallel_rank": 0.5}, GENERATE)


@pytest.mark.parametrize("field", ["metadata", "user", "session_params"])
def test_a_bulky_value_builds_no_objects(field: str) -> None:
    """Millions of empty lists cost the bytes of the body, which is there already."""
    bulk = b"[" + b"[]," * 1_000_000 + b"[]]"
    body = b'{"messages": [], "' + field.encode() + b'": ' + bulk + b"}"
    tracemalloc.start()
    try:
        msgspec.json.decode(body, type=ChatRequest)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
