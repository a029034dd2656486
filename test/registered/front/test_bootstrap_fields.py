"""The fields with which a router pairs two engines."""

from __future__ import annotations

import pytest

from sglang.srt.entrypoints.bootstrap_fields import read_bootstraps
from sglang.srt.entrypoints.generate_api import GenerateRequest, parse_generate
from sglang.srt.managers.front.lora_registry import LoraRegistry
from sglang.srt.managers.front.prompt_request import check_role
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import Bootstrap
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

HERE = {"bootstrap_host": "h", "bootstrap_port": 9000}


def read(prompts: int = 1, copies: int = 1, **fields):
    request = GenerateRequest(text="x", **fields)
    return read_bootstraps(request, prompts=prompts, copies=copies)


def one(room: int) -> Bootstrap:
    return Bootstrap(host="h", port=9000, room=room)


@pytest.mark.parametrize(
    ("shape", "room", "expected"),
    [
        ((1, 1), 5, [(one(5),)]),
        ((1, 1), [5], [(one(5),)]),
        ((1, 2), 5, [(one(5), one(5))]),
        ((1, 2), [5, 6], [(one(5), one(6))]),
        ((2, 1), [5, 6], [(one(5),), (one(6),)]),
        ((2, 1), [5, None], [(one(5),), ()]),
        ((2, 2), [5, 6], [(one(5), one(5)), (one(6), one(6))]),
        ((2, 2), [1, 2, 3, 4], [(one(1), one(2)), (one(3), one(4))]),
        ((2, 1), None, [(), ()]),
    ],
)
def test_single_values_and_lists(shape, room, expected):
    prompts, copies = shape
    assert read(prompts, copies, **HERE, bootstrap_room=room) == expected


def test_the_port_has_sglangs_default():
    ((found,),) = read(bootstrap_host="h", bootstrap_room=1)
    assert found.port == 8998


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bootstrap_room": -1}, "bootstrap_room is -1"),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room is"),
        ({"bootstrap_room": 1, "bootstrap_port": 70000}, "bootstrap_port is 70000"),
        ({"bootstrap_room": [1, 2, 3]}, "bootstrap_room has 3 entries for 1 prompt"),
        ({"bootstrap_room": 1, "bootstrap_host": "h" * 256}, "256 characters"),
    ],
)
def test_bad_values_are_named(fields, words):
    with pytest.raises(BadRequest, match=words):
        read(**fields)


def only_prompt(**fields):
    loras = LoraRegistry(is_on=False, model_name="demo")
    body = GenerateRequest(text="x", **fields)
    (prompt,) = parse_generate(body, sampling_defaults={}, loras=loras).prompts
    return prompt


def test_roles():
    prompt = only_prompt(logprob_start_len=0, **HERE, bootstrap_room=1)
    with pytest.raises(BadRequest, match="--disaggregation-mode"):
        check_role(prompt, "null")
    assert check_role(prompt, "prefill").logprob_start_len == 0
    assert check_role(prompt, "decode").logprob_start_len == -1
    prompt = only_prompt(bootstrap_room=1)
    assert check_role(prompt, "prefill") is prompt
    with pytest.raises(BadRequest, match="bootstrap_host"):
        check_role(prompt, "decode")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
