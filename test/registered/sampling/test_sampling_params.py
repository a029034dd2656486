"""Fields that a client may set under `sampling_params`; refusals of wrong values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.sampling import sampling_params
from sglang.srt.sampling.sampling_params import (
    MAX_SEED,
    MAX_STOPS,
    MAX_TOKEN_ENTRIES,
    SamplingParams,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")


def test_defaults() -> None:
    params = SamplingParams.from_wire(None)
    assert params == SamplingParams.from_wire({}) == SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_p) == (128, 1.0, 1.0)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (-1, 0.0, 1.0)
    assert not params.is_greedy and not params.has_penalty
    assert params.grammar_key is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", "x"),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", 40.5),
        ("top_k", "x"),
        ("top_k", -2),
        ("top_k", 2**63),
        ("max_new_tokens", 2**64),
        ("temperature", 1e300),
        ("temperature", 10**400),
        ("repetition_penalty", 1e-300),
        ("logit_bias", {"5": 1e300}),
        ("logit_bias", {"5": -(10**400)}),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.5),
        ("n", 0),
        ("n", 2**16 + 1),
        ("sampling_seed", -2),
        ("sampling_seed", MAX_SEED + 1),
        ("stop", ["a", 3]),
        ("stop", 5),
        ("stop_regex", "("),
        ("stop_regex", "(" * 3000),
        ("stop_regex", "a{99999999999999999999}"),
        ("stop_regex", r"(a)\1"),
        ("stop_regex", "(?=a)"),
        ("stop_regex", "\ud800"),
        ("stop_regex", {"a": 1}),
        ("stop_regex", r"\pL{100}"),
        ("stop_regex", [r"\pL+" + "a" * i for i in range(8)]),
        ("stop_token_ids", ["x"]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {float("inf"): 1.0}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"5": float("-inf")}),
        ("logit_bias", [1]),
        ("json_schema", 3),
        ("regex", 3),
        ("ignore_eos", "yes"),
        ("no_such_field", 1),
    ],
)
def test_wrong_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams.from_wire({field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", ["x" * 5000], "stop has an entry of 5000 characters"),
        ("stop", ["x" * 4000] * 5, "together have 20000 characters, but at most 16384"),
        ("stop", ["x"] * (MAX_STOPS + 1), "stop has 129 entries, but at most 128"),
        ("stop_regex", "(" * 5000, "stop_regex has an entry of 5000 characters"),
        ("stop_regex", ["("] * (MAX_STOPS + 1), "stop_regex has 129 entries"),
        ("stop_token_ids", ["x"] * (MAX_TOKEN_ENTRIES + 1), "has 65537 entries"),
        (
            "logit_bias",
            dict.fromkeys(map(str, range(MAX_TOKEN_ENTRIES + 1)), "x"),
            "logit_bias has 65537 entries, but at most 65536",
        ),
    ],
)
def test_sizes_are_checked_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, message: str
) -> None:
    """The entries are wrong too: the message shows that only their number was looked
    at."""
    monkeypatch.setattr(sampling_params, "_int_keys", None)
    monkeypatch.setattr(sampling_params, "compile_stop_patterns", None)
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_wire({field: value})


def test_none_stands_for_the_default() -> None:
    names = SamplingParams.__struct_fields__
    assert SamplingParams.from_wire(dict.fromkeys(names)) == SamplingParams()


@pytest.mark.parametrize("top_k", [2**31, 2**63 - 1])
def test_what_is_accepted_travels(top_k: int) -> None:
    params = SamplingParams.from_wire({"top_k": top_k})
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("stop", "end", ["end"]),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop", None, []),
        ("stop_regex", "a+", ["a+"]),
        ("stop_token_ids", None, []),
        ("temperature", 1, 1.0),
        ("logit_bias", {"17": 2, 18: -1.5}, {17: 2.0, 18: -1.5}),
        ("json_schema", {"type": "object"}, '{"type":"object"}'),
        ("sampling_seed", MAX_SEED, MAX_SEED),
        ("max_new_tokens", 0, 0),
        ("max_new_tokens", "9", 9),
        ("max_new_tokens", 16.0, 16),
        ("temperature", "0.5", 0.5),
        ("top_k", 40.0, 40),
        ("top_k", 0, -1),
        ("top_k", 0.0, -1),
        ("n", 200, 200),
        ("sampling_seed", -1, None),
        ("sampling_seed", -1.0, None),
        ("stop", "", []),
        ("stop", ["", "a", ""], ["a"]),
        ("stop_regex", [""], []),
        ("stop_token_ids", [2.0], [2]),
        ("logit_bias", {}, {}),
        ("logit_bias", {"5": "1"}, {5: 1.0}),
        ("ignore_eos", 0, False),
        ("ignore_eos", "true", True),
        ("json_schema", "", None),
        ("regex", "", None),
        ("ebnf", "", None),
    ],
)
def test_accepted_spellings(field: str, value: Any, stored: Any) -> None:
    assert getattr(SamplingParams.from_wire({field: value}), field) == stored


def test_greedy_and_grammar() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert SamplingParams(regex="a").grammar_key == ("regex", "a")
    with pytest.raises(ValueError, match="only one of.*regex and ebnf"):
        SamplingParams.from_wire({"regex": "a", "ebnf": "b"})


def test_vocabulary_bounds() -> None:
    SamplingParams(stop_token_ids=[0, 9], logit_bias={9: 1.0}).verify_vocab(10)
    with pytest.raises(ValueError, match="stop_token_ids holds token id 10"):
        SamplingParams(stop_token_ids=[10]).verify_vocab(10)
    all_known = SamplingParams(stop_token_ids=[0, 9])
    assert all_known.within_vocab(10) is all_known
    assert all_known.within_vocab(9).stop_token_ids == [0]
    with pytest.raises(ValueError, match="logit_bias holds token id -1"):
        SamplingParams(logit_bias={-1: 1.0}).verify_vocab(10)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
