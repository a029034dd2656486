"""Bodies as clients of other servers write them: neutral values, unknown fields, and
vLLM's names for a constraint."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from app_world import App
from chat_world import ChatWorld

from sglang.srt.entrypoints.unknown_fields import MAX_NAMES
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

LARGE = {"max_token_entries": 50_000}
TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 5},
    "/generate": {"text": "x"},
}
CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = BODIES


def sent(path: str, change: dict[str, Any], **flags: Any) -> GenerateReq:
    """The request that reaches the engine; the answer is a success."""
    world = ChatWorld("Yes.", **flags)
    response = world.ask(BODIES[path] | change, path)
    assert response.status_code == 200, response.text
    (request,) = world.wire.generated()
    return request


def refused(path: str, change: dict[str, Any], **flags: Any) -> dict[str, Any]:
    response = ChatWorld(**flags).ask(BODIES[path] | change, path)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# -- neutral values ------------------------------------------------------------------

ALL_SAMPLED: dict[str, Any] = {
    "temperature": None,
    "top_k": 0,
    "min_tokens": 0,
    "presence_penalty": None,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "seed": -1,
    "stop": [""],
    "stop_token_ids": [10**9, -1],
    "user": 5,
    "n": 1.0,
    "best_of": 1,
    "stream": 0,
    "stream_options": {"include_usage": None},
    "response_format": None,
    "regex": "",
    "guided_json": None,
    "structured_outputs": None,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "data_parallel_rank": 0,
    "priority": 0.0,
    "cache_salt": "",
}
CHATS: dict[str, Any] = ALL_SAMPLED | {
    "logprobs": 0,
    "top_logprobs": 0,
    "max_completion_tokens": 16.0,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "tools": [],
    "include_reasoning": True,
    "chat_template_kwargs": {},
    "reasoning_effort": None,
}
del CHATS["best_of"]
NEUTRAL: dict[str, dict[str, Any]] = {
    CHAT: CHATS,
    COMPLETIONS: ALL_SAMPLED
    | {"logprobs": False, "echo": False, "suffix": "", "max_tokens": "7"},
    RESPONSES: {
        "top_k": 40.0,
        "stop": [],
        "truncation": "auto",
        "include": [],
        "previous_response_id": "",
        "reasoning": {"effort": None},
        "text": {},
        "background": False,
        "max_output_tokens": 9.0,
    },
    MESSAGES: {
        "top_k": 0,
        "system": "",
        "stop_sequences": [""],
        "tools": [],
        "mcp_servers": [],
        "metadata": {},
        "max_tokens": 5.0,
        "context_management": {
            "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
        },
    },
    GENERATE: {
        "sampling_params": {"top_k": 40.0, "stop": [], "sampling_seed": -1, "n": 1.0},
        "stream": 0,
        "top_logprobs_num": 0.0,
        "logprob_start_len": None,
        "lora_path": "",
        "image_data": None,
        "guided_regex": "",
    },
}


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path, fields in NEUTRAL.items() for field in fields],
)
def test_a_value_that_asks_for_nothing_is_accepted(path: str, field: str) -> None:
    request = sent(path, {field: NEUTRAL[path][field]}, strict_fields=True)
    assert request.sampling_params.stop == []
    assert request.sampling_params.grammar_key is None
    assert request.sampling_params.stop_token_ids == []
    assert not request.return_logprob


def test_numbers_keep_their_values() -> None:
    change = {"top_k": 40.0, "max_tokens": "7", "seed": 3.0, "temperature": "0.5"}
    params = sent(COMPLETIONS, change).sampling_params
    assert (params.top_k, params.max_new_tokens, params.sampling_seed) == (40, 7, 3)
    assert params.temperature == 0.5
    assert (
        sent(COMPLETIONS, {"prompt": ["5"]}).input_ids
        == sent(COMPLETIONS, {"prompt": "5"}).input_ids
    ), "texts stay texts"
    for value in (40.5, "many", [1], True):
        assert refused(COMPLETIONS, {"top_k": value})["param"] == "top_k"


def test_a_boolean_asks_for_log_probabilities_of_completions() -> None:
    request = sent(COMPLETIONS, {"logprobs": True})
    assert request.return_logprob and request.top_logprobs_num == 1


def test_the_number_of_outputs_has_a_limit_of_the_operators() -> None:
    error = refused(CHAT, {"n": 5}, max_n=4)
    assert error["param"] == "n" and "--max-n" in error["message"]
    world = ChatWorld(*["x"] * 200)
    assert len(world.ask(BODIES[CHAT] | {"n": 200}).json()["choices"]) == 200


# -- unknown fields ------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_and_logged_once(
    path: str, log: pytest.LogCaptureFixture
) -> None:
    world = ChatWorld("Yes.")
    body = BODIES[path] | {"mirostat": {"tau": [5]}, "mirostat_eta": 1}
    assert world.ask(body, path).status_code == 200
    world.wire.sent.clear()
    assert world.ask(body, path).status_code == 200
    assert re.findall(r"unknown field '(\w+)'", log.text) == [
        "mirostat",
        "mirostat_eta",
    ]
    error = refused(path, {"mirostat": 1}, strict_fields=True)
    assert "unknown field 'mirostat'; known fields: " in json.dumps(error)


NESTED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"stream_options": {"no": 1}}, "stream_options.no"),
    (RESPONSES, {"reasoning": {"depth": 1}}, "reasoning.depth"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": "x", "a": 1}] * 3},
        "input[].a",
    ),
    (MESSAGES, {"output_config": {"task": 1}}, "output_config.task"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [], "a": 1}]},
        "messages[].a",
    ),
    (MESSAGES, {"thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "timestamp": 1}] * 3},
        "messages[].timestamp",
    ),
    (CHAT, {"structured_outputs": {"regex": "a", "b": 1}}, "structured_outputs.b"),
]


@pytest.mark.parametrize(("path", "change", "name"), NESTED)
def test_unknown_fields_of_inner_levels(
    path: str, change: dict[str, Any], name: str, log: pytest.LogCaptureFixture
) -> None:
    sent(path, change)
    assert log.text.count("unknown field") == 1 and repr(name) in log.text
    error = refused(path, change, strict_fields=True)
    assert "unknown field" in error["message"]


def test_unknown_names_fill_neither_log_nor_memory(
    log: pytest.LogCaptureFixture,
) -> None:
    names = {f"{i}{'x' * 10_000}\n": 1 for i in range(MAX_NAMES * 2)}
    sent(COMPLETIONS, names)
    told = [r for r in log.records if "unknown field" in r.getMessage()]
    assert len(told) == MAX_NAMES + 1
    assert max(len(record.getMessage()) for record in told) < 300
    assert "\n" not in told[0].getMessage()


def test_a_large_body_is_not_searched_for_all_of_them(
    log: pytest.LogCaptureFixture,
) -> None:
    sent(COMPLETIONS, {"stop_token_ids": [7] * 20_000, "a": 1, "b": 1}, **LARGE)
    assert log.text.count("unknown field") == 1 and "'a'" in log.text


def test_a_wrong_type_beside_an_unknown_field_is_refused() -> None:
    error = refused(CHAT, {"mirostat": 1, "max_tokens": "many"})
    assert error["param"] == "max_tokens"


MEANT: dict[str, Any] = {
    "use_beam_search": True,
    "prompt_embeds": "AAAA",
    "logits_processors": ["x"],
    "custom_logit_processor": "x",
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "return_tokens_as_token_ids": True,
    "thinking_token_budget": 10,
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", MEANT)
def test_what_changes_the_answer_is_refused_by_name(path: str, field: str) -> None:
    error = refused(path, {field: MEANT[field]})
    assert f"{field} is not supported" in error["message"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, GENERATE])
@pytest.mark.parametrize(
    "change",
    [
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"structured_outputs": {"regex": "a"}},
        {"include_reasoning": False},
    ],
)
def test_constraints_are_refused_where_they_have_another_name(
    path: str, change: dict[str, Any]
) -> None:
    (name,) = change
    assert f"{name} is not supported" in refused(path, change)["message"]


# -- vLLM's constraints --------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GUIDES: list[tuple[dict[str, Any], tuple[str, Any]]] = [
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"guided_regex": "a|b"}, ("regex", "a|b")),
    ({"guided_choice": ["yes", "n.o"]}, ("regex", r"(?:yes)|(?:n\.o)")),
    ({"guided_grammar": 'root ::= "a"'}, ("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"structured_outputs": {"regex": "a"}}, ("regex", "a")),
    ({"structured_outputs": {"choice": ["a"]}}, ("regex", "(?:a)")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("ebnf", 'root ::= "a"')),
    (
        {"structured_outputs": {"json_object": True, "regex": None}},
        ("json_schema", {"type": "object"}),
    ),
    (
        {"guided_regex": "a", "guided_decoding_backend": "xgrammar"},
        ("regex", "a"),
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": False}},
        ("regex", "a"),
    ),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("change", "constraint"), GUIDES)
def test_vllms_constraints_bind(
    path: str, change: dict[str, Any], constraint: tuple[str, Any]
) -> None:
    key = sent(path, change).sampling_params.grammar_key
    assert key is not None
    kind, source = key
    assert (kind, json.loads(source) if kind == "json_schema" else source) == constraint


REFUSED_GUIDES: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one"),
    ({"guided_regex": "a", "regex": "b"}, "guided_regex", "another constraint"),
    (
        {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        "guided_json",
        "another constraint",
    ),
    ({"guided_choice": []}, "guided_choice", "non-empty strings"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "non-empty strings"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "a string"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "a list"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "not supported",
    ),
    ({"structured_outputs": [1]}, "structured_outputs", "expected `object"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("change", "param", "message"), REFUSED_GUIDES)
def test_wrong_constraints_name_the_field(
    path: str, change: dict[str, Any], param: str, message: str
) -> None:
    error = refused(path, change)
    assert error["param"] == param and message in error["message"], error


def test_constraints_leave_no_room_for_calls() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    error = refused(CHAT, {"guided_choice": ["a"], "tools": [tool]})
    assert error["param"] == "guided_choice"
    assert "cannot be combined with tools" in error["message"]


@pytest.mark.parametrize(
    "change", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}]
)
def test_reasoning_is_left_out_on_demand(change: dict[str, Any]) -> None:
    text = "<think>Hm.</think>Yes."
    world = ChatWorld(text, reasoning_parser="qwen3")
    answer = world.ask(BODIES[CHAT] | change).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", None)
    world = ChatWorld(text, reasoning_parser="qwen3")
    shown = world.ask(BODIES[CHAT] | change | {"stream": True}).text
    assert re.findall('"reasoning_content":"', shown) == []
    assert "".join(re.findall('"content":"([^"]*)"', shown)) == "Yes."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"text": ["a", "b"], "rid": "x"}),
        (COMPLETIONS, {"prompt": ["a", "b"], "rid": "x"}),
        (COMPLETIONS, {"prompt": [[5], [6]], "rid": ["x_0", "x_1"]}),
    ],
)
def test_one_rid_names_every_prompt_of_a_list(path: str, body: dict[str, Any]) -> None:
    world = ChatWorld("a", "b")
    answer = world.ask(body, path)
    assert answer.status_code == 200, answer.text
    assert [request.rid for request in world.wire.generated()] == ["x_0", "x_1"]
    if path == GENERATE:
        assert [one["meta_info"]["id"] for one in answer.json()] == ["x_0", "x_1"]


def test_a_single_prompt_keeps_its_rid() -> None:
    assert sent(COMPLETIONS, {"rid": "x"}).rid == "x"
    assert sent(CHAT, {"rid": "x"}).rid == "x"
    assert len(sent(CHAT, {"rid": ""}).rid) == 32


@pytest.mark.parametrize("stop", [{"stop": "a"}, {"stop_regex": ["a+"]}])
def test_stop_texts_need_a_tokenizer(stop: dict[str, Any]) -> None:
    for params in (stop, stop | {"n": 2}):
        body = {"input_ids": [1], "sampling_params": params}
        error = App(tokenizer=None, skip_tokenizer_init=True).refused(GENERATE, body)
        assert "--skip-tokenizer-init; use stop_token_ids" in error["message"]
        assert error["param"] == "stop"


def test_the_marks_of_a_completion_on_demand() -> None:
    assert sent(COMPLETIONS, {"include_stop_str_in_output": True}).sampling_params
    with_marks = sent(COMPLETIONS, {"add_special_tokens": True}).input_ids
    without = sent(COMPLETIONS, {"add_special_tokens": False}).input_ids
    assert with_marks[-len(without) :] == without


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
