"""A server that speculates: what clients and Prometheus see of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from live_server import Server, events, greedy

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_prompts import CODE

register_cpu_ci(est_time=12, suite="cpu")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    running = start_server(
        "--speculative-algorithm", "EAGLE3", "--enable-metrics", model=None
    ).wait_ready()
    yield running
    running.wait_idle()


@pytest.fixture(scope="module")
def plain(start_server: Callable[..., Server]) -> Iterator[Server]:
    running = start_server(model=None).wait_ready()
    yield running
    running.wait_idle()


def test_answers_are_those_of_a_plain_server(server: Server, plain: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda text: server.generate(text), CODE))
        theirs = list(pool.map(lambda text: plain.generate(text), CODE))
    assert [a["text"] for a in ours] == [a["text"] for a in theirs]
    for answer in theirs:
        assert not {"spec_verify_ct", "spec_accept_length"} & set(answer["meta_info"])


def test_meta_info_counts_verifications(server: Server) -> None:
    answer = server.generate(CODE[0], max_new_tokens=60)
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == 60
    # The prefill gives the first token; a verification gives one to six.
    assert 59 / 6 <= meta["spec_verify_ct"] < 59 / 1.5
    assert meta["spec_accept_length"] == pytest.approx(59 / meta["spec_verify_ct"])


def test_one_token_needs_no_verification(server: Server) -> None:
    meta = server.generate(CODE[0], max_new_tokens=1)["meta_info"]
    assert not {"spec_verify_ct", "spec_accept_length"} & set(meta)


def test_streams_add_up(server: Server) -> None:
    whole = server.generate(CODE[1], max_new_tokens=400)
    body = {
        "text": CODE[1],
        "sampling_params": greedy(max_new_tokens=400),
        "stream": True,
    }
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        chunks = events(r)
    assert chunks[-1]["text"] == whole["text"]
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
    # Several tokens came at a time.
    assert 1 < len(chunks) < 350
    assert chunks[-1]["meta_info"]["spec_verify_ct"] > 0


def test_logprobs_have_one_entry_per_token(server: Server, plain: Server) -> None:
    body = {
        "text": CODE[2],
        "sampling_params": greedy(max_new_tokens=24),
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    ours, theirs = (s.post("/generate", body).json() for s in (server, plain))
    found, expected = (
        answer["meta_info"]["output_token_logprobs"] for answer in (ours, theirs)
    )
    assert [entry[1] for entry in found] == ours["output_ids"]
    assert len(found) == len(expected) == 24
    for own, other in zip(found, expected, strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-4)
    assert len(ours["meta_info"]["output_top_logprobs"]) == 24


def test_openai_client_with_a_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        text = client.completions.create(
            model="demo", prompt=CODE[3], max_tokens=30, temperature=0
        )
        assert text.choices[0].text
        assert text.usage is not None and text.usage.completion_tokens <= 30
        chat = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Two values as JSON."}],
            max_tokens=200,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "pair", "schema": schema},
            },
        )
    content = chat.choices[0].message.content
    assert content is not None
    if chat.choices[0].finish_reason == "stop":
        assert set(json.loads(content)) == {"a", "b"}


def test_a_client_that_leaves_frees_its_slots(server: Server) -> None:
    body = {
        "text": CODE[4],
        "sampling_params": greedy(max_new_tokens=1500),
        "stream": True,
    }
    aborted = server.stats()["num_aborted_requests_total"]
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        next(r.iter_lines())
    server.wait_idle()
    assert server.stats()["num_aborted_requests_total"] == aborted + 1


def test_metrics_have_the_accept_length(server: Server) -> None:
    server.generate(CODE[0], max_new_tokens=60)
    server.wait_idle()
    text = server.get("/metrics").text
    found = re.search(r"^sglang:spec_accept_length(?:\{[^}]*\})? (\S+)$", text, re.M)
    assert found is not None, text
    assert 1.0 < float(found.group(1)) <= 6.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "33"],
            ["--speculative-eagle-topk 33", "at most 32"],
        ),
        (
            ["--speculative-num-steps", "3"],
            ["--speculative-num-steps 3", "--speculative-algorithm"],
        ),
    ],
)
def test_a_refused_start_says_why(
    start_server: Callable[..., Server], flags: list[str], words: list[str]
) -> None:
    refused = start_server(*flags, model=None)
    assert refused.wait_exit() != 0
    for word in words:
        assert word in refused.log()
    assert "Traceback" not in refused.log()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
