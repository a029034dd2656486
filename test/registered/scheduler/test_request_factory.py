"""What requests of different calls share in the scheduler."""

from __future__ import annotations

import pytest

from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.request_factory import (
    MAX_SHARED_TEXTS,
    RequestFactory,
    RequestLimits,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")


def test_a_large_grammar_is_held_once() -> None:
    """An agent sends the schemas of its tools with every call: 4,000 calls with
    250 kB held a gigabyte."""
    limits = RequestLimits(
        max_total_len=100, vocab_size=50, eos_token_ids=(0,), allow_hidden_states=False
    )
    factory = RequestFactory(
        limits, tokenizer=None, random_seed=0, check_lora=lambda request: None
    )

    def held(source: str) -> str | None:
        params = SamplingParams(max_new_tokens=1, json_schema=source)
        request = GenerateReq(rid="r", input_ids=[1], sampling_params=params)
        return factory.create(request).params.json_schema

    def large(letter: str) -> str:
        return "".join([letter] * 5000)

    first = held(large("a"))
    assert first == large("a") and held(large("a")) is first
    assert held(large("b")) == large("b") and held(large("a")) is first
    for i in range(MAX_SHARED_TEXTS):
        held(large(chr(1000 + i)))
    assert held(large("a")) is not first, "what is long past is not kept"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
