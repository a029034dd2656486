"""Hostile clients of one server, and an honest one beside each of them.

While an attack is repeated the honest client gets its answers, they are what they were,
and afterwards the server holds no more processes, threads, descriptors, memory and KV
slots than before. That the attacks themselves are answered as they should is checked
here in short; the tests of their parts say it in full.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Server, greedy

from sglang.bench_utils.crash_dumps import read_crash_dump
from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.srt.managers.front.snapshot_feed import MAX_VIEWERS_OF_CLIENT
from sglang.test.bystander import Bystander, Resources, check_nothing_left
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count

register_cpu_ci(est_time=25, suite="cpu")

ATTACKER, HONEST, ADMIN = "attacker-key", "honest-key", "admin-key"
# The inspector tells clients apart by address where both are the administrator.
ATTACKER_ADDRESS = "127.0.0.2"
MAX_CONNECTIONS = 50
CROWD = MAX_CONNECTIONS + 5
VOCAB = 257
# Two lists that are doubled 60 times: comparing them never ends.
TEMPLATE = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% if messages[0].content == 'now' %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    "{% endfor %}{{ ns.x == ns.y }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
WORDS = "word " * 320
SCHEMA_CHARS = 250_000
PROMPT = [1, 2, 3]
RID = "the bystander's own"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Server],
    tmp_path_factory: pytest.TempPathFactory,
    dumps: Path,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    keys, template = folder / "keys", folder / "template.jinja"
    keys.write_text(f"{ATTACKER}\n{HONEST}")
    keys.chmod(0o600)
    template.write_text(TEMPLATE)
    events = {"publisher": "zmq"} | dict(
        zip(("endpoint", "replay_endpoint"), event_endpoints(), strict=True)
    )
    running = start_server(
        *("--api-key-file", str(keys), "--admin-api-key", ADMIN),
        *("--chat-template", str(template), "--max-running-requests", "64"),
        *("--max-connections", str(MAX_CONNECTIONS), "--header-timeout", "2"),
        *("--page-size", "16"),
        *("--kv-events-config", json.dumps(events)),
        *("--crash-dump-folder", str(dumps)),
    )
    running.headers = bearer(ADMIN)
    yield running.wait_ready()


def event_endpoints() -> list[str]:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        return [f"tcp://127.0.0.1:{s.getsockname()[1]}" for s in (one, other)]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Scene:
    """A server as an attacker and as an honest client see it.

    Args:
        is_full: whether the honest client asks again where there is no place for its
            connection, as clients do after a 503 with Retry-After. Probes never do.
    """

    def __init__(self, server: Server, *, is_full: bool = False) -> None:
        self.server = server
        self._is_full = is_full
        host, port = server.url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.events = json.loads(
            server.get("/get_server_info").json()["kv_events_config"]
        )

    def ask(
        self, method: str, path: str, body: Any = None, *, key: str = ATTACKER
    ) -> httpx.Response:
        """One request on a connection of its own."""
        with self.server.client(headers=bearer(key), timeout=120) as client:
            return client.request(method, path, json=body)

    def post(self, path: str, body: Any, *statuses: int, times: int = 1) -> None:
        """Send the attacker's request `times` at once; each must end with a status of
        `statuses`."""
        with ThreadPoolExecutor(times) as pool:
            asked = [pool.submit(self.ask, "POST", path, body) for _ in range(times)]
        for answer in asked:
            response = answer.result()
            assert response.status_code in statuses, response.text[:500]

    def leave(self, path: str, body: Any) -> None:
        """Send the attacker's request and leave long before its end."""
        with (
            suppress(httpx.TimeoutException),
            self.server.client(headers=bearer(ATTACKER)) as client,
        ):
            client.post(path, json=body, timeout=0.2)

    def connect(self, address: tuple[str, int] | None = None) -> socket.socket:
        return socket.create_connection(address or self.address, timeout=30)

    def questions(self) -> dict[str, Callable[[], Any]]:
        """What the honest client asks: the engine, the template, the tokenizer, the
        inspector, and the probes of its operator."""
        generate: dict[str, Any] = {"input_ids": PROMPT, "rid": RID}
        generate["sampling_params"] = greedy(max_new_tokens=8)
        user = {"role": "user", "content": "Hi"}
        chat = {"messages": [user], "max_tokens": 4, "temperature": 0}

        def post(path: str, body: Any) -> dict[str, Any]:
            answer: dict[str, Any] = self._granted(
                lambda client: client.post(path, json=body), HONEST
            ).json()
            return answer

        def generated() -> Any:
            answer = post("/generate", generate)
            return answer["output_ids"], answer["meta_info"]["id"]

        return {
            "generate": generated,
            "chat": lambda: post("/v1/chat/completions", chat)["choices"],
            "tokenize": lambda: post("/tokenize", {"prompt": [WORDS] * 15})["tokens"],
            "inspector": lambda: self._granted(first_event, ADMIN).text,
            "probes": lambda: [
                self.ask("GET", path).status_code
                for path in ("/health", "/livez", "/readyz")
            ],
        }

    def _granted(
        self, ask: Callable[[httpx.Client], httpx.Response], key: str
    ) -> httpx.Response:
        """An answer with status 200, each try on a connection of its own."""
        while True:
            with self.server.client(headers=bearer(key)) as client:
                response = ask(client)
            if response.status_code == 200:
                return response
            assert self._is_full, response.text
            assert response.status_code == 503 and "Retry-After" in response.headers
            assert "--max-connections" in response.text


def first_event(client: httpx.Client) -> httpx.Response:
    """The operator's inspector, up to its first event."""
    with client.stream("GET", "/canary/events") as opened:
        body = opened.read() if opened.is_error else next(opened.iter_raw())
        first = body.partition(b"\n\n")[0]
        return httpx.Response(opened.status_code, headers=opened.headers, content=first)


def check_right(scene: Scene) -> None:
    """Check the answers of a quiet server, with which all others are compared."""
    questions = scene.questions()
    output, rid = questions["generate"]()
    due = next_tokens(PROMPT + output, vocab_size=VOCAB)
    assert (output, rid) == (due[len(PROMPT) - 1 : -1], RID)
    assert questions["tokenize"]() == [[*WORDS.encode()]] * 15
    assert questions["probes"]() == [200] * 3
    assert "hello" in questions["inspector"]()


# -- the attacks -------------------------------------------------------------------


def parse_large_schema(scene: Scene) -> None:
    """The cost was parameters x size of the schema, also for a client that has left."""
    names = [f"parameter_{i}" for i in range(count(ci=4000, full=6000))]
    schema = {
        "type": "object",
        "properties": {
            name: {"anyOf": [{"type": "integer"}, {"type": "string"}]} for name in names
        },
    }
    calls = "".join(f"<parameter={name}>1</parameter>" for name in names)
    body = {
        "text": f"<tool_call><function=f>{calls}</function></tool_call>",
        "tool_call_parser": "qwen3_coder",
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": schema}}
        ],
    }
    scene.leave("/parse_function_call", body)
    scene.post("/parse_function_call", body, 200, times=2)


def tokenize_megabytes(scene: Scene) -> None:
    texts = {"prompt": [WORDS * 5] * count(ci=130, full=520)}
    scene.post("/tokenize", texts, 200, times=4)


def share_a_large_schema(scene: Scene) -> None:
    """Each prompt held a copy: in the scheduler, and in the requests that a crash dump
    keeps."""
    schema = {"enum": [letter * (SCHEMA_CHARS // 10) for letter in "abcdefghij"]}
    body = {
        "text": ["x"] * count(ci=1200, full=4000),
        "sampling_params": {"max_new_tokens": 1, "json_schema": json.dumps(schema)},
    }
    scene.post("/generate", body, 200)


def call_with_what_cannot_be_hashed(scene: Scene) -> None:
    for text in ("[f(a={[]})]", "[f(a={{}: 1})]", "[f(**{1: []})]", "[f(a=-[])]"):
        body = {
            "text": text,
            "tool_call_parser": "pythonic",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
        scene.post("/parse_function_call", body, 200)


def crowd_the_event_sockets(scene: Scene) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48)
    firsts = (b"x" * 100, b"GET / HTTP/1.1\r\n\r\n", greeting, greeting[:20], b"")
    for name in ("endpoint", "replay_endpoint"):
        host, port = scene.events[name].removeprefix("tcp://").split(":")
        with ExitStack() as stack:
            for i in range(count(ci=100, full=1500)):
                peer = stack.enter_context(scene.connect((host, int(port))))
                with suppress(OSError):
                    peer.sendall(firsts[i % len(firsts)])


def profile(scene: Scene) -> None:
    """Nobody but the administrator may; and even that slows nobody down for long."""
    scene.post("/start_profile", {}, 403)
    with tempfile.TemporaryDirectory() as folder:
        start = scene.ask(
            "POST", "/start_profile", {"output_dir": folder, "num_steps": 40}, key=ADMIN
        )
        assert start.status_code == 200, start.text
        path = Path(start.json()["path"])
        body = {"input_ids": [5] * 50, "sampling_params": greedy(max_new_tokens=20)}
        scene.post("/generate", body, 200)
        # The bystander's forwards may have ended it.
        stop = scene.ask("POST", "/stop_profile", key=ADMIN)
        assert stop.status_code in (200, 400), stop.text
        assert path.stat().st_mode & 0o077 == 0


def render_for_ever(scene: Scene) -> None:
    body = {"messages": [{"role": "user", "content": "now"}], "max_tokens": 1}
    scene.post("/v1/chat/completions", body, 400, times=2)


def refer_to_itself(scene: Scene) -> None:
    schemas: list[Any] = [
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"$ref": "#"},
    ]
    for schema in schemas:
        for stream in (False, True):
            body = {
                "text": "hello",
                "stream": stream,
                "sampling_params": {"json_schema": json.dumps(schema)},
            }
            scene.post("/generate", body, 400)


def smuggle(scene: Scene) -> None:
    """The second request of each must not be taken for one."""
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    head += ATTACKER.encode() + b"\r\n"
    for framing in (
        b"A: b\r\n Content-Length: 2\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"A: b\nContent-Length: 2\r\n",
        b"Content-Length: 2\n",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
    ):
        with scene.connect() as peer:
            peer.sendall(head + framing + b"\r\n{}" + head + b"\r\n")
            answer = b""
            while part := peer.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert answer.count(b"HTTP/1.1 ") == 1, answer


def squat(scene: Scene) -> None:
    """Take the bystander's rid, and end what runs under it."""
    body = {"input_ids": [9], "rid": RID, "sampling_params": greedy(max_new_tokens=40)}
    with ThreadPoolExecutor(1) as pool:
        squatting = pool.submit(scene.ask, "POST", "/generate", body)
        for _ in range(10):
            scene.post("/abort_request", {"rid": RID}, 200)
    response = squatting.result()
    assert response.status_code == 200, response.text


def send_half_heads(scene: Scene) -> None:
    """More than there are places, each until the server closes it."""
    with ExitStack() as stack:
        peers = [stack.enter_context(scene.connect()) for _ in range(CROWD)]
        for peer in peers:
            peer.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-")
        assert scene.ask("GET", "/health").status_code == 200
        assert all(peer.recv(65536).startswith(b"HTTP/1.1 408") for peer in peers)


def watch_from_everywhere(scene: Scene) -> None:
    """More pages of the inspector than one client may have."""
    transport = httpx.HTTPTransport(
        verify=False, local_address=ATTACKER_ADDRESS, trust_env=False
    )
    statuses = []
    with (
        scene.server.client(transport=transport) as client,
        ExitStack() as stack,
    ):
        for _ in range(MAX_VIEWERS_OF_CLIENT + 4):
            opened = client.stream("GET", "/canary/events")
            statuses.append(stack.enter_context(opened).status_code)
    # Those of the attack before may not have been missed yet.
    assert set(statuses) <= {200, 503} and statuses.count(200) <= MAX_VIEWERS_OF_CLIENT


def take_all_places(scene: Scene) -> None:
    """Two legal requests of 4 KB: one for all places, one for all that become free."""
    body = {
        "input_ids": [7 * i % VOCAB for i in range(700)],
        "sampling_params": greedy(max_new_tokens=40, n=64),
        "return_logprob": True,
        "top_logprobs_num": 20,
    }
    scene.post("/generate", body, 200, times=2)


def send_long_texts(scene: Scene) -> None:
    """They are no work for the loop, and prompts for many steps of the engine."""
    texts = {"text": [WORDS] * 300, "sampling_params": greedy(max_new_tokens=1)}
    scene.post("/generate", texts, 200)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table of hostile clients.

    Attributes:
        attack: what the hostile client does, once.
        mib: how much memory each process of the server may keep after an attack that
            is not the first.
        peak: how much it may hold more while there are attacks, the first one included.
        is_full: whether it takes all connections that are admitted.
        is_long: whether it occupies the server for so long that a bystander has whole
            rounds meanwhile, unless it waits for the end of the attack.
    """

    attack: Callable[[Scene], None]
    mib: float = 16.0
    peak: float = 48.0
    is_full: bool = False
    is_long: bool = False


ROWS = {
    "1 costly tool texts": Row(attack=parse_large_schema, is_long=True),
    "2 megabytes for the tokenizer": Row(
        # Four bodies and their answers.
        attack=tokenize_megabytes,
        is_long=True,
        peak=count(ci=48, full=128),
    ),
    "3 and 12 prompts with one schema": Row(attack=share_a_large_schema, is_long=True),
    "4 literals that are none": Row(attack=call_with_what_cannot_be_hashed),
    "5 strangers at the event sockets": Row(attack=crowd_the_event_sockets, mib=4.0),
    "6 profiles": Row(attack=profile),
    "7 a template without end": Row(attack=render_for_ever),
    "8 a schema of itself": Row(attack=refer_to_itself),
    "9 ambiguous framing": Row(attack=smuggle),
    "11 another client's rid": Row(attack=squat),
    "13 half heads": Row(attack=send_half_heads, is_full=True),
    "14 many pages": Row(attack=watch_from_everywhere),
    "15 all places": Row(attack=take_all_places, is_long=True),
    "15 long texts": Row(attack=send_long_texts, is_long=True),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_attack_costs_nobody_else(server: Server, name: str) -> None:
    row = ROWS[name]
    scene = Scene(server, is_full=row.is_full)
    check_right(scene)
    quiet = Resources.measure(server)
    with Bystander(scene.questions()) as bystander:
        row.attack(scene)
        bystander.wait()
    server.wait_idle()
    # What is made once, at the first use, is no leak.
    used = Resources.measure(server)
    with Bystander(scene.questions()) as bystander:
        bystander.endure(
            lambda: row.attack(scene), rounds=count(ci=2, full=10), is_long=row.is_long
        )
        bystander.wait()
    server.wait_idle()
    for found in (used, Resources.measure(server)):
        assert not (rise := found.rise(quiet, mib=row.peak)), rise
    check_nothing_left(server, used, mib=row.mib)
    assert "Traceback" not in server.log()


def test_a_crash_dump_of_large_requests_is_small(server: Server, dumps: Path) -> None:
    """The rest of row 3, which ends the server: whoever waits is told."""
    scene = Scene(server)
    for _ in range(2):
        share_a_large_schema(scene)
    body = {"input_ids": [4], "sampling_params": greedy(max_new_tokens=2000)}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scene.ask, "POST", "/generate", body, key=HONEST)
        server.wait_running(1)
        os.kill(server.scheduler_pid(), signal.SIGKILL)
        answer = waiting.result()
    assert answer.status_code == 500 and "error id" in answer.text
    assert server.wait_exit() == ExitCode.FAILURE
    (dump,) = dumps.iterdir()
    # With a copy of the schema for each request it would be as much as a dump holds.
    assert dump.stat().st_size < 100 * SCHEMA_CHARS
    assert read_crash_dump(dump).requests[-1].input_ids == [4]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
