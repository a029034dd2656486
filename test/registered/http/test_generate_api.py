"""`/generate` and the control routes, on a running server."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import CONTEXT, Server, events, greedy
from safetensors.torch import load_file

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=10, suite="cpu")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    running = start_server("--enable-metrics", "--log-requests").wait_ready()
    yield running
    running.wait_idle()


def test_answer_has_the_documented_fields(server: Server) -> None:
    answer = server.generate("hello", max_new_tokens=5)
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 5)
    assert len(answer["output_ids"]) == 5
    assert bytes(answer["output_ids"]).decode(errors="replace") == answer["text"]
    assert {"id", "cached_tokens", "e2e_latency"} <= set(meta)


def test_a_list_of_prompts_gives_a_list_in_order(server: Server) -> None:
    prompts = ["one", "two", "three"]
    single = [server.generate(prompt)["output_ids"] for prompt in prompts]
    body = {"text": prompts, "sampling_params": greedy(), "rid": ["l1", "l2", "l3"]}
    answers = server.post("/generate", body).json()
    assert [answer["output_ids"] for answer in answers] == single
    assert [answer["meta_info"]["id"] for answer in answers] == ["l1", "l2", "l3"]


def test_options_per_prompt(server: Server) -> None:
    params = [greedy(max_new_tokens=2), greedy(max_new_tokens=3)]
    body = {"input_ids": [[1, 2], [3]], "sampling_params": params}
    answers = server.post("/generate", body).json()
    assert [len(answer["output_ids"]) for answer in answers] == [2, 3]


def test_n_outputs_are_a_list_and_seeds_repeat(server: Server) -> None:
    params = greedy(temperature=1.0, n=3, sampling_seed=11)
    body = {"text": "x", "sampling_params": params}
    first, second = (server.post("/generate", body).json() for _ in range(2))
    outputs = [answer["output_ids"] for answer in first]
    assert outputs == [answer["output_ids"] for answer in second]
    assert len({tuple(output) for output in outputs}) == 3


def test_streams_are_cumulative_and_end_like_the_whole_answer(server: Server) -> None:
    # A reader that is late gets many tokens in one event.
    whole = server.generate("stream me", max_new_tokens=1000)
    body = {
        "text": "stream me",
        "sampling_params": greedy(max_new_tokens=1000),
        "stream": True,
    }
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        assert r.status_code == 200
        assert r.headers["content-type"].startswith("text/event-stream")
        chunks = events(r)
    assert len(chunks) > 1
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])


def test_a_stream_of_a_list_carries_indices(server: Server) -> None:
    body = {"text": ["a", "b"], "sampling_params": greedy(), "stream": True}
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        chunks = events(r)
    last = {chunk["index"]: chunk for chunk in chunks}
    for index, prompt in enumerate("ab"):
        expected = server.generate(prompt)["output_ids"]
        assert last[index]["output_ids"] == expected


def test_logprobs(server: Server) -> None:
    body = {
        "text": "abc",
        "sampling_params": greedy(max_new_tokens=4),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    answer = server.post("/generate", body).json()
    meta = answer["meta_info"]
    tokens = [entry[1] for entry in meta["output_token_logprobs"]]
    assert tokens == answer["output_ids"]
    inputs = meta["input_token_logprobs"]
    assert [entry[1:] for entry in inputs] == [[97, "a"], [98, "b"], [99, "c"]]
    assert inputs[0][0] is None and inputs[1][0] < 0
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4
    for entry, top in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert top[0][:2] == entry[:2] and top[0][0] >= top[1][0]
    body |= {"stream": True}
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        last = events(r)[-1]["meta_info"]
    assert last["input_token_logprobs"] == inputs
    assert [e[1] for e in last["output_token_logprobs"]] == tokens


def test_token_ids_logprob(server: Server) -> None:
    """Ids for all prompts, or a list of them per prompt; as top logprobs show them."""
    body = {
        "text": ["abc", "de"],
        "sampling_params": greedy(max_new_tokens=3),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
        "token_ids_logprob": [104, 97],
        "return_text_in_logprobs": True,
    }
    shared = server.post("/generate", body).json()
    body["token_ids_logprob"] = [[104, 97], None]
    apart = server.post("/generate", body).json()
    assert "output_token_ids_logprobs" not in apart[1]["meta_info"]
    for answer in (*shared, apart[0]):
        meta = answer["meta_info"]
        assert meta["input_token_ids_logprobs"][0] is None
        for named, top in zip(
            [
                *meta["input_token_ids_logprobs"][1:],
                *meta["output_token_ids_logprobs"],
            ],
            [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]],
            strict=True,
        ):
            assert [entry[1:] for entry in named] == [[104, "h"], [97, "a"]]
            best = {entry[1]: entry[0] for entry in top}
            assert all(best.get(e[1], e[0]) == e[0] for e in named)


def test_score(server: Server) -> None:
    body = {
        "query": "ab",
        "items": ["cd", "e"],
        "label_token_ids": [104, 97],
        "model": "mine",
        "priority": None,
    }
    answer = server.post("/v1/score", body).json()
    assert (answer["object"], answer["model"]) == ("scoring", "mine")
    assert answer["usage"]["total_tokens"] == 7
    asked = {
        "text": ["abcd", "abe"],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "token_ids_logprob": [104, 97],
    }
    for scores, shown in zip(
        answer["scores"], server.post("/generate", asked).json(), strict=True
    ):
        (named,) = shown["meta_info"]["output_token_ids_logprobs"]
        assert scores == pytest.approx([math.exp(entry[0]) for entry in named])
    for change, param in (
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1 << 40]}, "label_token_ids"),
        ({"label_token_ids": [1] * 5000}, "label_token_ids"),
        ({"items": [[1]]}, "items"),
        ({"items": ["x"] * 3000, "label_token_ids": [1] * 4000}, "label_token_ids"),
    ):
        refused = server.post("/v1/score", body | change)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param


def test_the_prompt_is_scored_once_for_all_outputs(server: Server) -> None:
    """And all of them show it; in a stream, before anything that follows it."""
    body = {
        "text": "abcdefgh",
        "sampling_params": {"max_new_tokens": 4, "n": 5, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [104],
    }
    answers = server.post("/generate", body).json()
    shown = [
        [
            answer["meta_info"][f"input_{name}_logprobs"]
            for name in ("token", "top", "token_ids")
        ]
        for answer in answers
    ]
    assert len(shown) == 5 and all(one == shown[0] for one in shown)
    assert len(shown[0][0]) == 8
    body["stream"] = True
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        chunks = events(r)
    assert {chunk["index"] for chunk in chunks} == set(range(5))
    for chunk in chunks:
        assert chunk["meta_info"]["input_token_logprobs"] == shown[0][0]


def test_a_stop_string_ends_and_is_cut(server: Server) -> None:
    text = server.generate("stop", max_new_tokens=200)["text"]
    pairs = (text[i : i + 2] for i in range(5, len(text)))
    stop = next(pair for pair in pairs if pair.isprintable() and pair.isascii())
    answer = server.generate("stop", max_new_tokens=200, stop=[stop])
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = server.generate("stop", max_new_tokens=200, stop=stop, no_stop_trim=True)
    assert kept["text"].endswith(stop)
    body = {
        "text": "stop",
        "sampling_params": greedy(max_new_tokens=200, stop=stop),
        "stream": True,
    }
    with server.client() as client, client.stream("POST", "/generate", json=body) as r:
        chunks = events(r)
    assert chunks[-1]["text"] == answer["text"]
    assert all(stop not in chunk["text"] for chunk in chunks)


def test_a_stop_token_ends(server: Server) -> None:
    ids = server.generate("token", max_new_tokens=50)["output_ids"]
    stop = ids[20]
    answer = server.generate("token", max_new_tokens=50, stop_token_ids=[stop])
    assert answer["output_ids"] == ids[: ids.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_constrained_decoding(server: Server) -> None:
    answer = server.generate("x", regex="[0-9]{3}-[a-f]{2}", ignore_eos=False)
    digits, _, letters = answer["text"].partition("-")
    assert len(digits) == 3 and digits.isdigit() and set(letters) <= set("abcdef")


def test_a_prompt_fills_the_context_to_the_last_position(server: Server) -> None:
    ids = [i % 250 for i in range(CONTEXT - 1)]
    answer = server.generate(ids, max_new_tokens=1)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    default = server.post(
        "/generate", {"input_ids": ids[:-4], "sampling_params": {"ignore_eos": True}}
    ).json()
    assert default["meta_info"]["completion_tokens"] == 5


def test_the_cache_is_reported_and_flushed(server: Server) -> None:
    ids = [9, 8, 7, 6, 5, 4, 3, 2, 1] * 4
    server.generate(ids)
    assert server.generate(ids)["meta_info"]["cached_tokens"] == len(ids) - 1
    server.wait_idle()
    for method in ("POST", "GET"):
        with server.client() as client:
            response = client.request(method, "/flush_cache")
        assert response.status_code == 200, response.text
        assert server.generate(ids)["meta_info"]["cached_tokens"] == 0
        server.wait_idle()
    key, salt = {"extra_key": "a"}, {"cache_salt": "a"}
    for tenant in (key, salt, key | salt):
        keyed = {"input_ids": ids, "sampling_params": greedy(), **tenant}
        answer = server.post("/generate", keyed).json()
        assert answer["meta_info"]["cached_tokens"] == 0, tenant
    lists = {"input_ids": [ids, ids], "sampling_params": greedy(), "extra_key": "a"}
    both = server.post("/generate", lists | {"cache_salt": ["a", "b"]}).json()
    assert [bool(each["meta_info"]["cached_tokens"]) for each in both] == [True, False]


@pytest.mark.parametrize("whom", [{"rid": "doomed"}, {"rid": None, "abort_all": True}])
def test_abort_ends_the_request_with_an_answer(
    server: Server, whom: dict[str, Any]
) -> None:
    body = {
        "text": "long",
        "sampling_params": greedy(max_new_tokens=CONTEXT - 10),
        "rid": "doomed",
    }
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.post, "/generate", body)
        server.wait_running(1)
        # The cache cannot be flushed under a running request.
        flush = server.post("/flush_cache", {})
        assert server.post("/abort_request", whom).status_code == 200
        answer = pending.result(20).json()
    assert flush.status_code == 400
    assert "requests are running" in flush.json()["error"]["message"]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["completion_tokens"] < CONTEXT - 10


# As SGLang's own router and benchmark send them.
NEUTRAL: dict[str, Any] = {
    "model": None,
    "log_metrics": True,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
    "lora_path": None,
    "return_routed_experts": False,
    "image_data": None,
    "custom_logit_processor": None,
}


def test_fields_that_ask_for_nothing_are_accepted(server: Server) -> None:
    body = {"text": "x", "sampling_params": greedy(max_new_tokens=2)}
    plain = server.post("/generate", body).json()
    same = server.post("/generate", body | NEUTRAL).json()
    assert same["text"] == plain["text"]
    other = server.post("/generate", body | {"model": "another name"}).json()
    assert other["text"] == plain["text"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_data", ["x"]),
        ("background", True),
        ("session_params", ["a" * 500]),
    ],
)
def test_fields_that_ask_for_more_are_refused_by_name(
    server: Server, name: str, value: object
) -> None:
    answer = server.post("/generate", {"text": "x", name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert f"{name} is not supported" in answer.json()["error"]["message"]


def test_newer_names_of_the_routes(server: Server) -> None:
    index = server.get("/").json()
    assert index["model"] == "mock"
    for path in index["paths"]:
        assert server.get(path).status_code != 404
    for name in ("model_info", "server_info"):
        old, new = server.get(f"/get_{name}").json(), server.get(f"/{name}").json()
        assert old.keys() == new.keys()


def test_health_and_info(server: Server) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/health_generate").status_code == 200
    info = server.get("/get_model_info").json()
    assert info["is_generation"] and info["context_length"] == CONTEXT
    args = server.get("/get_server_info").json()
    assert not args.keys() & {"api_key", "random_seed"}
    assert args["max_running_requests"] == 64 and args["status"] == "ready"


def test_input_embeds(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """The rows of the embedding table mean what their tokens mean."""
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    server = start_server(model=folder).wait_ready()
    prompts = [[5, 6, 7, 8], [9, 10]]
    expected = server.post(
        "/generate", {"input_ids": prompts, "sampling_params": greedy()}
    ).json()
    rows = [table[prompt].tolist() for prompt in prompts]
    whole = server.post(
        "/generate", {"input_embeds": rows, "sampling_params": greedy()}
    ).json()
    one = server.post(
        "/generate", {"input_embeds": rows[0], "sampling_params": greedy()}
    ).json()
    for answer, wanted in zip([*whole, one], [*expected, expected[0]], strict=True):
        assert answer["output_ids"] == wanted["output_ids"]
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == wanted["meta_info"]["prompt_tokens"]
        assert meta["cached_tokens"] == (len(rows[0]) - 1 if answer is one else 0)
    for rows_of_one, message in (
        ([[0.5, 1]], "rows of 2 numbers, but the model's hidden_size is 64"),
        ([[1e39] * 64], "a number beyond float32"),
        ([[0] * 64] * 300, "the input (300 tokens) is longer than"),
    ):
        refused = server.post("/generate", {"input_embeds": rows_of_one})
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]


def test_the_prefill_role_serves_one_token(start_server: Callable[..., Server]) -> None:
    role = ("--disaggregation-mode", "prefill")
    server = start_server(*role, "--disaggregation-bootstrap-port", "0").wait_ready()
    for new_tokens in (0, 1):
        params = greedy(max_new_tokens=new_tokens)
        body = {"text": "prefill me", "sampling_params": params}
        answer = server.post("/generate", body).json()
        assert len(answer["output_ids"]) == new_tokens
    assert server.get("/health_generate").status_code == 200
    for params in (greedy(max_new_tokens=2), {}):
        refused = server.post("/generate", {"text": "x", "sampling_params": params})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "--disaggregation-mode prefill serves at most 1" in message


METRICS = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "prompt_tokens_total",
    "cached_tokens_total",
    "num_retracted_reqs",
    "num_aborted_requests_total",
    "spec_accept_length",
    "draft_never_accepted_total",
    "cuda_graph_passes_total",
    "prefill_cuda_graph_passes_total",
    "kernel_loads_after_ready_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
)


def paused_in_between(server: Server, mode: str | None, expected: str) -> dict:
    """The last message of a request that streams while the engine is paused, and that
    may have ended just before; another one arrives meanwhile, and waits."""
    long = {"text": "p", "sampling_params": greedy(max_new_tokens=60), "stream": True}
    with (
        ThreadPoolExecutor(1) as pool,
        server.client() as client,
        client.stream("POST", "/generate", json=long) as response,
    ):
        lines = response.iter_lines()
        first = next(lines)
        paused = server.post(
            "/pause_generation", {} if mode is None else {"mode": mode}
        )
        assert paused.json()["status"] == "ok", paused.text
        waiting = pool.submit(server.generate, "p", max_new_tokens=60)
        assert server.get("/health").status_code == 200
        time.sleep(0.2)
        assert not waiting.done()
        assert server.post("/continue_generation", {}).status_code == 200
        *_, last, _ = [first, *(line for line in lines if line)]
        assert waiting.result(20)["text"] == expected
    return json.loads(last.removeprefix("data: "))


def test_a_pause(server: Server) -> None:
    """Whoever runs is aborted or waits; who arrives waits; all as it was after."""
    expected = server.generate("p", max_new_tokens=60)["text"]
    ends = []
    while "abort" not in ends:
        assert len(ends) < 20, f"no request ran when the engine paused: {ends}"
        last = paused_in_between(server, None, expected)
        ends.append(last["meta_info"]["finish_reason"]["type"])
    for mode in ("in_place", "retract"):
        last = paused_in_between(server, mode, expected)
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert last["text"] == expected
    with server.client() as client:
        assert client.post("/pause_generation").status_code == 200
        assert client.post("/continue_generation").status_code == 200


def test_what_is_logged_can_be_changed(server: Server) -> None:
    def ask(rid: str) -> None:
        body = {"text": "x", "rid": rid, "sampling_params": {"max_new_tokens": 1}}
        assert server.post("/generate", body).status_code == 200

    def logged(rid: str) -> str:
        ask(rid)
        # When it is received, and when it has finished.
        return "\n".join(server.wait_for_lines(f"rid={rid} ", 2))

    def change(**body: Any) -> None:
        assert server.post("/configure_logging", body).status_code == 200

    assert "params=" in logged("log-1")
    change(log_requests_level=0)
    assert "params=" not in logged("log-2")
    change(log_requests=False, log_requests_format="text", dump_requests_folder="")
    ask("log-3")
    change(log_requests=True, log_requests_level=1)
    assert "params=" in logged("log-4")
    assert "rid=log-3 " not in server.log()
    for body, param in (
        ({"log_requests_level": 2}, "log_requests_level"),
        ({"log_requests_level": -1}, "log_requests_level"),
        ({"log_requests_format": "json"}, "log_requests_format"),
        ({"dump_requests_folder": "/etc"}, "dump_requests_folder"),
        ({"crash_dump_folder": "/etc"}, "crash_dump_folder"),
        ({"log_level": "debug"}, "log_level"),
    ):
        refused = server.post("/configure_logging", body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


def test_metrics(server: Server) -> None:
    server.generate("count me", max_new_tokens=3)
    before = metrics(server)
    server.generate("count me", max_new_tokens=3)
    after = metrics(server)
    assert after["sglang:generation_tokens_total"] == (
        before["sglang:generation_tokens_total"] + 3
    )
    assert after["sglang:num_requests_total"] == before["sglang:num_requests_total"] + 1
    for name in METRICS:
        assert f"sglang:{name}" in after, name


def metrics(server: Server) -> dict[str, float]:
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name.split("{")[0]] = float(value)
    return samples


def test_answers_do_not_wait_for_acknowledgements(server: Server) -> None:
    """With Nagle's algorithm on, every answer takes at least 40 ms."""
    body = {"text": "x", "sampling_params": greedy(max_new_tokens=1)}
    with server.client() as client:
        seconds = [
            client.post("/generate", json=body).elapsed.total_seconds()
            for _ in range(20)
        ]
    assert min(seconds) < 0.035


def test_requests_are_logged(server: Server) -> None:
    body = {"text": "x", "sampling_params": greedy(), "rid": "logged-one"}
    server.post("/generate", body)
    server.wait_for_lines("received rid=logged-one")
    server.wait_for_lines("finished rid=logged-one reason=length")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
