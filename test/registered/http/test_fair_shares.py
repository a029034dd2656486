"""What large events, long texts and endless templates cost: their clients' own time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Server, greedy

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count

register_cpu_ci(est_time=20, suite="cpu")

VOCAB = 257
HOSTILE, LONG, SHORT = 8, 220, 100


def events_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each holds the whole answer so far, and `at`, when it
    came."""
    found = []
    with (
        server.client() as http,
        http.stream(
            "POST", "/generate", json=body | {"stream": True}, timeout=120
        ) as r,
    ):
        assert r.status_code == 200
        for line in r.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]) | {"at": time.monotonic()})
    return found


def test_large_events_are_merged_and_small_ones_are_not(
    start_server: Callable[..., Server],
) -> None:
    """Eleven kilobytes asked for hundreds of megabytes: a cumulative stream repeats 20
    alternatives of every token in each event."""
    server = start_server().wait_ready()
    hostile: list[list[dict[str, Any]]] = []
    prompt = [7 * i % VOCAB for i in range(20)]
    greedy_body = {
        "input_ids": prompt,
        "sampling_params": greedy(max_new_tokens=LONG),
        "return_logprob": True,
        "top_logprobs_num": 20,
    }

    def attack() -> None:
        hostile.append(events_of(server, greedy_body))

    attacks = [threading.Thread(target=attack) for _ in range(HOSTILE)]
    for thread in attacks:
        thread.start()
    honest = events_of(
        server,
        {"input_ids": prompt, "sampling_params": greedy(max_new_tokens=SHORT)},
    )
    for thread in attacks:
        thread.join()
    due = next_tokens(prompt + honest[-1]["output_ids"], vocab_size=VOCAB)
    assert honest[-1]["output_ids"] == due[len(prompt) - 1 : -1]
    assert len(honest[-1]["output_ids"]) == SHORT
    assert len(hostile) == HOSTILE
    for events in hostile:
        assert len(events[-1]["meta_info"]["output_token_logprobs"]) == LONG
    assert sum(map(len, hostile)) < LONG * HOSTILE
    # However busy the machine: while it lasts, the honest stream hears of its tokens
    # no less often. (It heard of 11 at once where the others heard of 4.)
    begin, end = honest[0]["at"], honest[-1]["at"]
    others = [event for events in hostile for event in events]
    assert sum(begin < e["at"] < end for e in others) <= len(honest) * HOSTILE
    assert server.get("/health").status_code == 200
    server.wait_idle()


CLIENTS = ("attacker", "honest")
# Equal lists that are doubled 60 times: comparing them never ends.
BOMB = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% if messages[0].content == 'now' %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    "{% endfor %}{{ ns.x == ns.y }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
# As long as a prompt may be here, and as many as one call may have.
TEXT, NUM_TEXTS = "word " * 1600, count(ci=130, full=520)


@pytest.fixture(scope="module")
def shared(start_server: Callable[..., Server], tmp_path_factory: Any) -> Server:
    """A server with a hostile template and a key for each of two clients."""
    folder: Path = tmp_path_factory.mktemp("shared")
    keys, template = folder / "keys", folder / "bomb.jinja"
    keys.write_text("\n".join(CLIENTS))
    keys.chmod(0o600)
    template.write_text(BOMB)
    return start_server(
        *("--api-key-file", str(keys), "--chat-template", str(template)),
        *("--max-running-requests", "64"),
    ).wait_ready()


def client_of(server: Server, name: str) -> httpx.Client:
    return server.client(headers={"Authorization": f"Bearer {name}"}, timeout=120)


@contextmanager
def attackers(server: Server, path: str, body: Any, number: int) -> Iterator[list[int]]:
    """Clients that ask for `body` at once; statuses as they come."""
    statuses: list[int] = []

    def attack() -> None:
        with client_of(server, "attacker") as http:
            statuses.append(http.post(path, json=body).status_code)

    threads = [threading.Thread(target=attack) for _ in range(number)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    yield statuses
    for thread in threads:
        thread.join()


def test_long_texts_of_one_client_let_others_in(shared: Server) -> None:
    body = {"prompt": [TEXT] * NUM_TEXTS}
    with (
        attackers(shared, "/tokenize", body, 8) as statuses,
        client_of(shared, "honest") as http,
    ):
        for _ in range(3):
            answer = http.post("/tokenize", json={"prompt": [TEXT] * 3}).json()
            assert answer["count"] == [len(TEXT)] * 3
            assert http.get("/health").status_code == 200
        assert len(statuses) < 8, "the honest client waited for all of them"
    assert statuses == [200] * 8


def test_many_outputs_of_one_client_let_others_in(shared: Server) -> None:
    """They take all places of the batch, and more wait."""
    body = {
        "input_ids": [7 * i % VOCAB for i in range(700)],
        "sampling_params": greedy(max_new_tokens=120, n=64),
    }
    honest = {"input_ids": [1, 2, 3], "sampling_params": greedy(max_new_tokens=8)}
    with client_of(shared, "honest") as http:
        expected = http.post("/generate", json=honest).json()["output_ids"]
        with attackers(shared, "/generate", body, 3) as statuses:
            answers = [http.post("/generate", json=honest).json() for _ in range(3)]
            assert statuses == [], "the honest client waited for them"
        assert [answer["output_ids"] for answer in answers] == [expected] * 3
        assert statuses == [200] * 3
        texts = {"text": [TEXT] * 40, "sampling_params": greedy(max_new_tokens=1)}
        with attackers(shared, "/generate", texts, 2):
            for _ in range(5):
                assert http.get("/health").status_code == 200
            answer = http.post("/generate", json=honest).json()
        assert answer["output_ids"] == expected


def test_an_endless_template_ends_its_own_client_only(shared: Server) -> None:
    user = {"role": "user", "content": "Hi"}
    honest = {"messages": [user], "max_tokens": 4, "temperature": 0}
    with client_of(shared, "honest") as http:
        expected = http.post("/v1/chat/completions", json=honest).json()["choices"]
        bomb = honest | {"messages": [{"role": "user", "content": "now"}]}
        with attackers(shared, "/v1/chat/completions", bomb, 2) as statuses:
            for path in ("/livez", "/health"):
                assert http.get(path).status_code == 200
            # Both attacks run in turns, and the honest client's turn comes between.
            answer = http.post("/v1/chat/completions", json=honest)
            assert answer.json()["choices"] == expected
        assert statuses == [400, 400]
        # Whoever leaves takes the work along.
        with (
            pytest.raises(httpx.TimeoutException),
            client_of(shared, "attacker") as leaving,
        ):
            leaving.post("/tokenize", json={"prompt": [TEXT] * 500}, timeout=0.3)
        answer = http.post("/v1/chat/completions", json=honest)
        assert answer.json()["choices"] == expected
    assert "Traceback" not in shared.log()


def test_an_exit_does_not_wait_for_work_beside(shared: Server) -> None:
    with client_of(shared, "attacker") as http, pytest.raises(httpx.TimeoutException):
        http.post("/tokenize", json={"prompt": [TEXT] * 500}, timeout=0.3)
    shared.process.terminate()
    assert shared.process.wait(30) == 0
