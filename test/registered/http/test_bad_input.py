"""Bad input against a running server: a clear answer each, and nothing else is harmed.

While the bad requests come in, good ones run; their outputs must not change, and at the
end no KV slot may be held.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import CONTEXT, Server, greedy

from sglang.bench_utils.memory import family_mib
from sglang.test.bystander import Bystander
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=22, suite="cpu")

POOL = 3000
MIB = 1024 * 1024


PROMPTS = ("good morning", "the same prefix, first", "the same prefix, second")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    running = start_server("--max-total-tokens", str(POOL)).wait_ready()

    def outputs(prompt: str) -> Any:
        return running.generate(prompt, max_new_tokens=30)["output_ids"]

    questions = {prompt: partial(outputs, prompt) for prompt in PROMPTS}
    with Bystander(questions, pause=0.25) as other:
        yield running
    assert other.rounds > 3
    running.wait_idle()
    assert running.post("/flush_cache", {}).status_code == 200
    assert "Traceback" not in running.log()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of `response`, whose shape is always the same."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (status, "context_length_exceeded")
    return error


def raw(server: Server, body: bytes, path: str = "/generate") -> httpx.Response:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        return client.post(path, content=body, headers=headers)


PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens must be at least 0 and below 2**63"),
    ({"max_new_tokens": "many"}, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ({"temperature": -0.5}, "temperature must be at least 0"),
    ({"top_p": 0}, "top_p must be in (0, 1]"),
    ({"top_k": -2}, "top_k must be -1"),
    ({"top_k": 2**63}, "top_k must be -1"),
    ({"min_p": 2}, "min_p must be in [0, 1]"),
    ({"n": 2000}, "n is 2000, but at most 1024 are served"),
    ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2]"),
    ({"stop_regex": "("}, "is not a regular expression"),
    ({"stop_regex": "(" * 3000}, "is not a regular expression"),
    ({"stop_regex": "a{99999999999999999999}"}, "repeats too often"),
    ({"stop_regex": "(?=a)"}, "neither look-around nor backreferences"),
    ({"logit_bias": {"257": 1}}, "outside the vocabulary of 257"),
    ({"logit_bias": {"x": 1}}, "keys must be token ids"),
    ({"sampling_seed": -2}, "sampling_seed must be between 0 and"),
    ({"tempreture": 1}, "unknown field(s) 'tempreture'"),
    ({"json_schema": "{", "regex": "a"}, "only one of json_schema, regex, ebnf"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens (9) must not exceed"),
]


@pytest.mark.parametrize(("params", "message"), PARAMS)
def test_sampling_params(server: Server, params: dict[str, Any], message: str) -> None:
    body = {"text": "x", "sampling_params": params}
    assert message in error_of(server.post("/generate", body))["message"]


BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of text, input_ids and input_embeds"),
    ({"text": "a", "input_ids": [1]}, "exactly one of text, input_ids"),
    ({"text": ""}, "the prompt is empty"),
    ({"text": []}, "text is an empty list"),
    ({"input_ids": []}, "the prompt is empty"),
    ({"input_ids": [[1], []]}, "the prompt is empty"),
    ({"input_ids": [1, [2]]}, "mixes token ids"),
    ({"input_ids": [257]}, "257, outside the vocabulary of 257"),
    ({"input_ids": [-1]}, "-1, outside the vocabulary"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [2**70]}, "input_ids"),
    ({"input_embeds": [[0.5]]}, "input_embeds: MockForCausalLM takes tokens only"),
    ({"input_embeds": [[0.5]], "text": "a"}, "exactly one of text, input_ids"),
    ({"input_embeds": []}, "input_embeds must be a non-empty list of rows"),
    ({"input_embeds": [[]]}, "input_embeds must be a non-empty list of rows"),
    ({"input_embeds": [[0.5], [[0.5]]]}, "input_embeds must be a non-empty list"),
    ({"input_embeds": [[0.5, 1], [0.5]]}, "must have the same number of entries"),
    ({"input_embeds": [["a"]]}, "input_embeds"),
    ({"text": 5}, "text"),
    ({"text": "x", "stream": "yes"}, "stream"),
    ({"text": "x", "return_hidden_states": True}, "--enable-return-hidden-states"),
    ({"text": "x", "top_logprobs_num": -1}, "top_logprobs_num must be at least 0"),
    ({"text": "x", "return_logprob": True, "logprob_start_len": 9}, "below the 1 tok"),
    ({"text": ["x", "y"], "token_ids_logprob": [5, [131]]}, "mixes token ids with"),
    ({"text": "x", "token_ids_logprob": [5, None]}, "mixes token ids with lists"),
    ({"text": ["x", "y"], "rid": ["one"]}, "rid has 1 entries for 2 prompt(s)"),
    ({"text": "x", "rid": "r" * 300}, "rid must have 1 to 256 characters"),
    ({"text": ["x"] * 5000}, "asks for 5000 outputs"),
]


@pytest.mark.parametrize(("body", "message"), BODIES)
def test_bodies(server: Server, body: dict[str, Any], message: str) -> None:
    assert message in error_of(server.post("/generate", body))["message"]


RAW: list[tuple[str, str]] = [
    ("", "not valid JSON"),
    ("{", "not valid JSON"),
    ('{"FIELD": "x"} trailing', "not valid JSON"),
    ('{"FIELD": "\udcff\udcfe"}', "not valid UTF-8"),
    ('{"FIELD": "\\ud800"}', "not valid JSON"),
    ('{"FIELD": NaN}', "not valid JSON"),
    ('{"NESTED": ' + '{"a":' * 50_000, "nested too deeply"),
    ("[]", "Expected `object`"),
    ("null", "Expected `object`"),
]
FIELDS = {
    "/generate": ("text", "sampling_params"),
    "/v1/completions": ("prompt", "metadata"),
}


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize(("body", "message"), RAW)
def test_broken_json(server: Server, path: str, body: str, message: str) -> None:
    field, nested = FIELDS[path]
    text = body.replace("FIELD", field).replace("NESTED", nested)
    error = error_of(raw(server, text.encode(errors="surrogateescape"), path))
    assert message in error["message"]


def test_a_prompt_longer_than_the_context(server: Server) -> None:
    error = error_of(server.post("/generate", {"input_ids": [1] * CONTEXT}))
    phrase = f"({CONTEXT} tokens) is longer than the model's context length ({CONTEXT}"
    assert phrase in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = error_of(server.post("/generate", {"text": "x" * 5 * MIB}))
    assert f"at most {CONTEXT - 1} tokens fit" in error["message"]


def test_a_prompt_longer_than_the_pool(start_server: Callable[..., Server]) -> None:
    """A pool of 64 slots holds less than the context; the longest prompt still runs."""
    small = start_server("--max-total-tokens", "64").wait_ready()
    error = error_of(small.post("/generate", {"input_ids": [1] * 65}))
    assert "65 tokens) is longer than the model's context length" in error["message"]
    assert "at most 64 tokens fit" in error["message"]
    assert "KV pool of 64" in error["message"]
    body = {"input_ids": [1] * 64, "sampling_params": {"max_new_tokens": 1}}
    answer = small.post("/generate", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == 1


def test_more_new_tokens_than_fit(server: Server) -> None:
    body = {"input_ids": [1] * 2000, "sampling_params": greedy(max_new_tokens=100)}
    answer = server.post("/generate", body).json()
    assert answer["meta_info"]["completion_tokens"] == 48
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    body["sampling_params"] = {"min_new_tokens": 100}
    error = error_of(server.post("/generate", body))
    assert "leaves room for at most 48 (context length" in error["message"]
    assert error["param"] == "min_new_tokens"


def test_invalid_grammars(server: Server) -> None:
    grammars: list[dict[str, Any]] = [
        {"json_schema": "{not json"},
        {"json_schema": {"type": "no-such-type"}},
        {"regex": "(["},
        {"ebnf": "root = = ="},
    ]
    for grammar in grammars:
        body = {"text": "x", "sampling_params": grammar}
        error = error_of(server.post("/generate", body))
        assert next(iter(grammar)) in error["message"], error
        # The status of a stream is decided before its first byte.
        streamed = server.post("/generate", {**body, "stream": True})
        assert error_of(streamed)["message"] == error["message"]
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": 5}},
        },
    }
    error_of(server.post("/v1/chat/completions", chat))


def test_a_rid_that_is_in_use(server: Server) -> None:
    body = {"text": ["a", "b"], "rid": ["twin", "twin"]}
    assert "'twin' is in use" in error_of(server.post("/generate", body))["message"]


def test_unknown_paths_and_methods(server: Server) -> None:
    assert "/v2/chat" in error_of(server.post("/v2/chat", {}), 404)["message"]
    assert "GET /generate" in error_of(server.get("/generate"), 405)["message"]
    error_of(server.get("/metrics"), 404)
    error_of(server.post("/abort_request", {}))
    assert server.post("/abort_request", {"rid": "nobody"}).status_code == 200
    error_of(server.post("/abort_request", {"rid": None}))


@pytest.mark.parametrize(
    ("path", "field", "entries", "message"),
    [
        ("/generate", "input_ids", ["1"] * 500_000, "500000 tokens) is longer"),
        ("/v1/completions", "prompt", ["1"] * 500_000, "500000 tokens) is longer"),
        ("/generate", "text", ['"a"'] * 500_000, "asks for 500000 outputs"),
        ("/generate", "input_ids", ["[1]"] * 250_000, "asks for 250000 outputs"),
        ("/v1/completions", "prompt", ["[1]"] * 250_000, "250000 outputs"),
        (
            "/generate",
            "sampling_params",
            [f'"{i}":1' for i in range(500_000)],
            "logit_bias has 500000 entries, but at most",
        ),
        ("/generate", "metadata", ["[]"] * 600_000, "may hold 1200001 values"),
    ],
)
def test_millions_of_entries_are_refused_by_their_number(
    server: Server, path: str, field: str, entries: list[str], message: str
) -> None:
    """The time that remains is that of reading the body."""
    joined = ",".join(entries)
    body = f'{{"{field}": [{joined}]}}'
    if field == "sampling_params":
        body = f'{{"text": "x", "{field}": {{"logit_bias": {{{joined}}}}}}}'
    response = raw(server, body.encode(), path)
    error = error_of(response, 413 if "may hold" in message else 400)
    assert message in error["message"]


BIG = 30 * MIB
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
# Bodies that kept the front from answering anybody for seconds.
STALLING: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "entries of chat_template_kwargs": (
        "/v1/chat/completions",
        lambda: entries_of("chat_template_kwargs", 2_500_000),
        413,
    ),
    "as many as are accepted": (
        "/v1/chat/completions",
        lambda: entries_of("chat_template_kwargs", 500_000),
        400,
    ),
    "name of a field": ("/generate", lambda: encoded({"u" * BIG: 1}), 400),
    "role": (
        "/v1/chat/completions",
        lambda: encoded({"messages": [{"role": "r" * BIG, "content": "x"}]}),
        400,
    ),
    "type of a format": (
        "/v1/chat/completions",
        lambda: encoded(CHAT | {"response_format": {"type": "t" * BIG}}),
        400,
    ),
    "text of a chat": (
        "/v1/chat/completions",
        lambda: encoded({"messages": [{"role": "user", "content": "x " * (BIG // 2)}]}),
        400,
    ),
    "messages of a chat": (
        "/v1/chat/completions",
        lambda: encoded({"messages": CHAT["messages"] * 100_000}),
        400,
    ),
}


def encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def entries_of(field: str, count: int) -> bytes:
    entries = ",".join(f'"k{i}":1' for i in range(count))
    return encoded(CHAT)[:-1] + f', "{field}": {{{entries}}}}}'.encode()


@pytest.mark.parametrize("name", STALLING)
def test_no_body_keeps_the_others_waiting(server: Server, name: str) -> None:
    """Reading a large body costs the event loop a fraction of a second of computing,
    and what is longer happens beside it."""
    path, make, status = STALLING[name]
    body = make()
    # What any body of 30 MB costs, on this machine as it is now.
    unread, _ = seconds_with_others(server, b"?" * BIG, path)
    spent, response = seconds_with_others(server, body, path)
    error_of(response, status)
    assert len(response.content) < 1500
    assert spent < 5 * unread


def seconds_with_others(
    server: Server, body: bytes, path: str
) -> tuple[float, httpx.Response]:
    """Computing time of the event loop for a body, while others are answered."""
    stop, answers = threading.Event(), list[int]()

    def probe() -> None:
        with server.client() as client:
            while not stop.wait(0.05):
                answers.append(client.get("/health").status_code)

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        begun = loop_seconds(server)
        try:
            response = raw(server, body, path)
        finally:
            spent = loop_seconds(server) - begun
            stop.set()
        probing.result()
    assert set(answers) <= {200}
    return spent, response


def loop_seconds(server: Server) -> float:
    """Seconds that the thread of the front's event loop has computed."""
    pid = server.process.pid
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_large_keys_leave_nothing_behind(server: Server) -> None:
    """Each cached prefix held its key: 120 of 16 MB left 1.95 GB."""
    before = family_mib(server.process.pid)
    for i in range(6):
        key = f"{i}" + "k" * (16 * MIB)
        body = {"text": "tenant", "extra_key": key, "sampling_params": greedy()}
        assert server.post("/generate", body).status_code == 200
    assert family_mib(server.process.pid) - before < 60


def test_what_prompts_share_is_held_once(server: Server) -> None:
    """4,000 prompts with 65,536 stop tokens, and a key of megabytes: out of memory."""
    before = family_mib(server.process.pid)
    body = {
        "text": ["x"] * 4000,
        "extra_key": "k" * (16 * MIB),
        "sampling_params": {
            "max_new_tokens": 1,
            "stop_token_ids": [i % 256 for i in range(65536)],
        },
    }
    with server.client() as client:
        response = client.post("/generate", json=body, timeout=120)
    assert response.status_code == 200 and len(response.json()) == 4000
    assert family_mib(server.process.pid) - before < 400


def test_100_mb_body_announced(server: Server) -> None:
    response = raw(server, b'{"text": "' + b"x" * (100 * MIB) + b'"}')
    assert "at most 33554432" in error_of(response, 413)["message"]


def test_100_mb_body_chunked(server: Server) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * MIB

    with server.client() as client:
        response = client.post("/generate", content=chunks())
    assert "at most 33554432" in error_of(response, 413)["message"]


def test_a_client_that_asks_before_it_sends(server: Server) -> None:
    """`Expect: 100-continue`: refused before the body is sent."""
    with connect(server) as connection:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        connection.sendall(f"{head}Content-Length: {100 * MIB}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_just_below_the_limit_is_read(server: Server) -> None:
    body = json.dumps({"text": "x" * (32 * MIB - 100)}).encode()
    assert "tokens fit" in error_of(raw(server, body))["message"]


def test_a_body_that_never_comes(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n")
        connection.sendall(b"Content-Length: 1000\r\n\r\n{")
    assert server.get("/health").status_code == 200


def test_garbage_instead_of_http(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects(server: Server, stream: bool) -> None:
    """The request is aborted and its slots are free again."""
    rid = f"leaver-{stream}"
    body = {
        "text": f"disconnect {stream}",
        "sampling_params": greedy(max_new_tokens=2000),
        "stream": stream,
        "rid": rid,
    }
    with connect(server) as connection:
        send_request(connection, body)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            while "in use" not in server.post("/generate", reused(rid)).text:
                time.sleep(0.001)
    server.wait_for_lines(f"client disconnected; aborting {rid}")
    deadline = time.monotonic() + 10
    while server.post("/generate", reused(rid)).status_code != 200:
        # The name is free once the scheduler has let go of the aborted request.
        assert time.monotonic() < deadline


def reused(rid: str) -> dict[str, Any]:
    return {"text": "x", "sampling_params": greedy(max_new_tokens=1), "rid": rid}


def connect(server: Server, *, receive_buffer: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    return connection


def send_request(connection: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)


def test_a_reader_that_stops_reading_blocks_nobody(server: Server) -> None:
    body = {
        "text": ["slow reader"] * 8,
        "sampling_params": greedy(max_new_tokens=250),
        "stream": True,
        "return_logprob": True,
    }
    with connect(server, receive_buffer=4096) as connection:
        send_request(connection, body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(5):
            assert server.generate("meanwhile", max_new_tokens=4)["output_ids"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
