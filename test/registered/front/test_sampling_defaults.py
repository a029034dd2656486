"""Sampling parameters that a checkpoint recommends: read, checked, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_world import ChatWorld

import sglang
from sglang.srt.configs.sampling_defaults import describe, read_sampling_defaults
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=1, suite="cpu")

TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 5},
    "/generate": {"text": "x"},
}
DEFAULTS = {"temperature": 0.6, "top_k": 20, "min_p": 0.1}


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"eos_token_id": 2}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        (
            {"top_k": 40.0, "min_p": None, "temperature": 1},
            {"top_k": 40, "temperature": 1.0},
        ),
        (
            {"top_k": 0, "repetition_penalty": 1.05},
            {"top_k": -1, "repetition_penalty": 1.05},
        ),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"max_new_tokens": 5, "stop": "x", "n": 7}, {}),
    ],
)
def test_what_is_read(tmp_path: Path, content: Any, expected: dict[str, Any]) -> None:
    found = read_sampling_defaults(write(tmp_path, content))
    assert found == expected and list(map(type, found.values())) == list(
        map(type, (expected[name] for name in found))
    )


def test_no_file_means_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert read_sampling_defaults(tmp_path / "model.gguf") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"top_p": 3}, "top_p must be in"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": [1]}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ('{"temperature": NaN}', "temperature must be a finite number"),
        ('{"temperature": 1e999}', "temperature must be a finite number"),
        ({"repetition_penalty": -1}, "repetition_penalty must be in"),
        ({"min_p": {"a": 1}}, "min_p"),
        ("[1]", "must hold a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_wrong_values_name_the_file(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_sampling_defaults(write(tmp_path, content))
    assert "generation_config.json" in str(caught.value)
    assert len(str(caught.value)) < 2000


def sent(path: str, **change: Any) -> SamplingParams:
    world = ChatWorld("Yes.")
    world.wire.manager.sampling_defaults = DEFAULTS
    response = world.ask(BODIES[path] | change, path)
    assert response.status_code == 200, response.text
    (request,) = world.wire.generated()
    params: SamplingParams = request.sampling_params
    return params


@pytest.mark.parametrize("path", BODIES)
def test_requests_that_say_nothing_have_the_checkpoints_values(path: str) -> None:
    params = sent(path)
    assert (params.temperature, params.top_k, params.min_p) == (0.6, 20, 0.1)
    assert params.top_p == 1.0
    own: dict[str, Any] = {"temperature": 1, "top_k": 0, "min_p": None}
    params = sent(path, **({"sampling_params": own} if path == "/generate" else own))
    # 0 asks for the whole vocabulary; null asks for nothing.
    assert (params.temperature, params.top_k, params.min_p) == (1.0, -1, 0.1)


def test_lists_of_parameters_have_them_also() -> None:
    world = ChatWorld("a", "b")
    world.wire.manager.sampling_defaults = DEFAULTS
    body = {"text": ["x", "y"], "sampling_params": [{}, {"top_k": 3}]}
    assert world.ask(body, "/generate").status_code == 200
    assert [r.sampling_params.top_k for r in world.wire.generated()] == [20, 3]


def test_an_engine_reads_its_checkpoint(tmp_path: Path) -> None:
    folder = write_mock_model(tmp_path / "mock")
    write(folder, {"top_k": 1, "temperature": 0.7})

    def texts(**options: Any) -> int:
        with sglang.Engine(model_path=str(folder), device="cpu", **options) as engine:
            return len(
                {
                    engine.generate("x", {"max_new_tokens": 8, "sampling_seed": seed})[
                        "text"
                    ]
                    for seed in range(4)
                }
            )

    assert texts() == 1
    assert texts(sampling_defaults="openai") > 1
    write(folder, {"top_p": 7})
    with pytest.raises(ValueError, match="generation_config.json: top_p must be"):
        sglang.Engine(model_path=str(folder), device="cpu")


def test_the_start_message_names_them() -> None:
    assert describe(DEFAULTS) == "temperature 0.6, top_k 20, min_p 0.1"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
