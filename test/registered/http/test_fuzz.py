"""The fuzz command: it sees what is wrong with a server, and finds nothing here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sglang.srt.entrypoints.endpoint import Endpoint, Operation
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import all_routes
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fuzz.__main__ import CONFIGS, main
from sglang.test.fuzz.attack import (
    MIN_BYSTANDER_ROUNDS,
    Attack,
    Outcome,
    tracebacks,
)
from sglang.test.fuzz.cases import LEFT_OUT, Cases, Manner, Shot
from sglang.test.fuzz.shooter import Failure, Shooter, parse_shot, verdict
from sglang.test.fuzz.values import Literal, Pairs, encode
from sglang.test.fuzz.watch import Bystander, HealthProber
from sglang.test.fuzz.wire import Answer
from sglang.test.scale import count, sampled
from sglang.test.server_process import ServerProcess

register_cpu_ci(est_time=10, suite="cpu", full_time=600)

REQUESTS = count(ci=200, full=34_000)
CLIENTS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess(CONFIGS["plain"]).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def schema(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.url + "/openapi.json").json()
    return found


# -- a real server ---------------------------------------------------------------------


def endpoints() -> list[Endpoint]:
    """Those of any server, with the types of their answers."""
    args = ServerArgs(model_path=str(bundled_demo_model_path()))
    manager = TokenizerManager(server_args=args, tokenizer=None, send=lambda _: None)
    front = Front(server_args=args, manager=manager, model_name="m")
    return [r for r in all_routes(front) if isinstance(r, Endpoint)]


def test_the_examples_work_and_their_answers_have_the_types_of_the_schema(
    server: ServerProcess,
) -> None:
    asked = 0
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        for endpoint in endpoints():
            operation = endpoint.operation
            if endpoint.path in LEFT_OUT:
                continue
            for name, body in operation.examples.items():
                response = client.post(endpoint.path, json=body)
                assert response.status_code == 200, (endpoint.path, name, response.text)
                check_answer(response, operation)
                asked += 1
    assert asked >= 10


def check_answer(response: httpx.Response, operation: Operation) -> None:
    answer, event, is_named = operation.answer, operation.event, operation.is_named
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        if answer is not None:
            msgspec.json.decode(response.content, type=answer)
        return
    lines = [line for line in response.text.split("\n\n") if line]
    if not is_named:
        assert lines.pop() == "data: [DONE]"
    for line in lines:
        name, _, data = line.rpartition("data: ")
        msgspec.json.decode(data, type=event)
        assert name == (f"event: {json.loads(data)['type']}\n" if is_named else "")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo", "/model_info"])
def test_answers_without_a_body_have_the_types_of_the_schema(
    server: ServerProcess, path: str
) -> None:
    response = httpx.get(server.url + path)
    shape = path.replace("/demo", "/{model:path}")
    (kind,) = [e.operation.answer for e in endpoints() if e.path == shape]
    msgspec.json.decode(response.content, type=kind)


def test_a_profile_of_a_server(server: ServerProcess, tmp_path: Path) -> None:
    if not tmp_path.is_relative_to(Path(tempfile.gettempdir()).resolve()):
        pytest.skip("the folder of the tests is no folder for traces")
    body = {"output_dir": str(tmp_path), "num_steps": 50, "with_stack": False}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        assert client.post("/stop_profile").status_code == 400
        started = client.post("/start_profile", json=body)
        assert started.status_code == 200, started.text
        assert client.post("/start_profile", json=body).status_code == 400
        client.post("/generate", json={"text": "x", "sampling_params": GREEDY})
        assert client.post("/stop_profile").json()["status"] == "stopped"
    assert os.path.getsize(started.json()["path"]) > 1000


GREEDY = {"max_new_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    "config", sampled(CONFIGS, key=lambda config: None, ci=1), ids=str
)
def test_attack(config: str, request: pytest.FixtureRequest) -> None:
    is_own = config != "plain"
    server = (
        ServerProcess(CONFIGS[config]).wait_ready()
        if is_own
        else request.getfixturevalue("server")
    )
    try:
        attack = Attack(
            server, name=config, requests=REQUESTS, clients=CLIENTS, number=22
        )
        outcome = asyncio.run(attack.run())
    finally:
        if is_own:
            server.stop()
    assert outcome.has_passed, (
        outcome.complaints,
        [failure.as_dict() for failure in outcome.failures[:3]],
    )
    assert outcome.requests >= REQUESTS
    # Neither all of it is refused, nor all of it is harmless.
    assert outcome.statuses["200"] > 0.2 * REQUESTS
    assert outcome.statuses["400"] > 0.2 * REQUESTS
    assert outcome.bystander_rounds >= MIN_BYSTANDER_ROUNDS


# -- what is sent ----------------------------------------------------------------------


def shots_of(schema: dict[str, Any], number: int, least: int) -> list[Shot]:
    cases, shots = Cases(schema, number=number), []
    while len(shots) < least:
        shots += cases.next()
    return shots


def test_a_seed_repeats_itself(schema: dict[str, Any]) -> None:
    assert shots_of(schema, 5, 200) == shots_of(schema, 5, 200)
    assert shots_of(schema, 5, 200) != shots_of(schema, 6, 200)


def test_cases_reach_every_path_in_every_manner(schema: dict[str, Any]) -> None:
    shots = shots_of(schema, 1, 3000)
    paths = {shot.path for shot in shots}
    known = {
        re.sub(r"\{\w+\}", "a%2Fb", path): methods
        for path, methods in schema["paths"].items()
    }
    served = {
        path
        for path, methods in known.items()
        if any("200" in shown["responses"] for shown in methods.values())
    }
    assert served - LEFT_OUT <= paths
    assert len(paths & set(known)) > len(served) + 10
    assert {shot.manner for shot in shots} == set(Manner)
    bodies = [shot.body for shot in shots if shot.path == "/generate"]
    assert len(set(bodies)) > len(bodies) / 2
    assert max(map(len, bodies)) > 100_000


def test_nobody_else_is_aborted(schema: dict[str, Any]) -> None:
    for shot in shots_of(schema, 2, 3000):
        if shot.path == "/abort_request":
            # Also 1 and "true" are true there.
            assert b"abort_all" not in shot.body


def test_values_that_python_does_not_hold_are_sent_as_they_are() -> None:
    value = {"a": [Literal("1e999"), "\ud800"], "b": Pairs((("c", 1), ("c", None)))}
    assert encode(value) == '{"a":[1e999,"\\ud800"],"b":{"c":1,"c":null}}'


# -- what is seen ----------------------------------------------------------------------

ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": 400}}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def answer_of(
    status: int, body: Any = "", headers: dict[str, str] | None = None
) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return Answer(status=status, headers=headers or {}, body=text.encode())


MESSAGES_ERROR = {"type": "invalid_request_error", "message": "x"}


def named(*kinds: str, **fields: Any) -> str:
    """A stream of events of these types, each with `fields`."""
    return "".join(
        f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n"
        for kind in kinds
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answer_of(200, {"text": "x"}), None),
        (answer_of(400, ERROR), None),
        (answer_of(500, ERROR), "5xx"),
        (answer_of(502), "5xx"),
        (answer_of(503), "503 without Retry-After"),
        (answer_of(503, "", {"retry-after": "1"}), None),
        (answer_of(400, {"detail": "x"}), "an error of another shape"),
        (answer_of(404, ERROR), "an error of another shape"),
        (answer_of(200, "data: {}\n\ndata: [DONE]\n\n", STREAM), None),
        (
            answer_of(200, 'data: {"id": "data: [DONE]"}\n\ndata: [DONE]\n\n', STREAM),
            None,
        ),
        (answer_of(200, "data: {}\n\n", STREAM), "a stream without an end"),
        (answer_of(200, "", STREAM), "a stream without an end"),
        (
            answer_of(200, "data: {\n\ndata: [DONE]\n\n", STREAM),
            "an event that is no JSON",
        ),
        (
            answer_of(
                200, 'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', STREAM
            ),
            "5xx in a stream",
        ),
        (answer_of(400, {"type": "error", "error": MESSAGES_ERROR}), None),
        (
            answer_of(400, {"type": "error", "error": MESSAGES_ERROR | {"code": 400}}),
            "an error of another shape",
        ),
        (answer_of(200, named("message_start", "message_stop"), STREAM), None),
        (
            answer_of(200, named("message_start"), STREAM),
            "a stream without an end",
        ),
        (
            answer_of(200, named("a").replace("event: a", "event: b"), STREAM),
            "an event of another name",
        ),
        (
            answer_of(200, named("error", error={"type": "api_error"}), STREAM),
            "5xx in a stream",
        ),
        (
            answer_of(
                200,
                named("response.failed", response={"error": {"code": "server_error"}}),
                STREAM,
            ),
            "5xx in a stream",
        ),
        (
            answer_of(
                200, named("response.completed", response={"error": None}), STREAM
            ),
            None,
        ),
    ],
)
def test_verdicts(answer: Answer, reason: str | None) -> None:
    assert verdict(answer) == reason


Reply = Callable[[bytes], bytes]


SHOT = Shot(method="GET", path="/x", body=b"")


async def with_fake(
    reply: Reply, use: Callable[[str], Any], *, stall: bool = False
) -> Any:
    """Run `use(url)` against a server that answers `reply(head of the request)`; where
    that is empty, it closes the connection. `stall`: each answer takes 0.3 s."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
                await reader.readexactly(int(length or 0))
                await asyncio.sleep(0.3 * stall)
                data = reply(head)
                if not data:
                    break
                writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        return await use(f"http://127.0.0.1:{port}")


def http(status: int, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)


def shoot(reply: Reply, *manners: Manner) -> tuple[Counter[str], list[Failure]]:
    statuses: Counter[str] = Counter()
    failures: list[Failure] = []

    async def use(url: str) -> None:
        shooter = Shooter(url, statuses=statuses, failures=failures)
        await shooter.run(
            [
                Shot(method="POST", path="/generate", body=b'{"a": 1}', manner=manner)
                for manner in manners
            ]
        )
        shooter.close()

    asyncio.run(with_fake(reply, use))
    return statuses, failures


def test_a_failing_server_is_seen_in_every_manner() -> None:
    manners = [m for m in Manner if m not in (Manner.LEAVES_IN_BODY, Manner.CHUNKED)]
    statuses, failures = shoot(lambda head: http(500, {"oh": "no"}), *manners)
    assert statuses["500"] >= len(manners)
    assert {failure.shot.manner for failure in failures} == set(manners)
    assert {failure.reason for failure in failures} >= {"5xx"}
    assert "oh" in failures[0].answer


def test_a_server_that_hangs_up_is_seen() -> None:
    _, failures = shoot(lambda head: b"", Manner.WHOLE, Manner.PIPELINED)
    assert {failure.reason for failure in failures} == {"closed without an answer"}


def test_a_request_that_spoils_the_next_one_is_seen() -> None:
    def reply(head: bytes) -> bytes:
        return http(400 if b"/tokenize" in head else 200, ERROR)

    _, failures = shoot(reply, Manner.PIPELINED)
    assert "a good request after it in the pipe" in {f.reason for f in failures}


def test_failures_can_be_sent_again() -> None:
    shot = Shot(method="PUT", path="/x", body=bytes(range(256)), part=0.25)
    line = json.dumps(Failure(reason="5xx", shot=shot).as_dict())
    assert parse_shot(json.loads(line)) == shot


def test_a_bystander_sees_another_answer() -> None:
    answers = iter([[1, 2], [1, 2], [1, 3], [1, 2]])

    async def use(url: str) -> Bystander:
        bystander = Bystander(url)
        await bystander.begin()
        for _ in range(3):
            await bystander.check()
        return bystander

    bystander = asyncio.run(
        with_fake(lambda head: http(200, {"output_ids": next(answers)}), use)
    )
    assert bystander.rounds == 3 and len(bystander.wrong) == 1


def test_a_prober_sees_a_server_that_is_not_well() -> None:
    async def use(url: str) -> HealthProber:
        prober = HealthProber(url, lambda: [])
        probing = asyncio.create_task(prober.run())
        while prober.rounds < 3:
            await asyncio.sleep(0.01)
        probing.cancel()
        return prober

    prober = asyncio.run(with_fake(lambda head: http(503, {}), use))
    assert prober.bad >= 3 and prober.longest > 0


@pytest.mark.parametrize("is_server", [True, False])
def test_a_stall_is_the_servers_unless_this_process_stood_still(
    is_server: bool,
) -> None:
    async def use(url: str) -> HealthProber:
        prober = HealthProber(url, lambda: [SHOT])
        probing = asyncio.create_task(prober.run())
        while not prober.rounds:
            await asyncio.sleep(0.001)
        if not is_server:
            time.sleep(0.3)
        target = prober.rounds + 3
        while prober.rounds < target:
            await asyncio.sleep(0.01)
        probing.cancel()
        return prober

    prober = asyncio.run(with_fake(lambda head: http(200, {}), use, stall=is_server))
    assert (prober.longest > 0.2) == is_server
    assert prober.suspects == [SHOT]


def test_growth_is_judged() -> None:
    class Grown(Attack):
        def __init__(self, before: tuple[float, float]) -> None:
            self.outcome = Outcome(
                name="x", memory_before=before, memory_after=(110.0, 500.0)
            )

    for before, grown in (((95.0, 485.0), []), ((93.0, 483.0), ["front", "sched"])):
        attack = Grown(before)
        attack._judge_memory()
        found = attack.outcome.complaints
        assert len(found) == len(grown)
        assert all(name in text for name, text in zip(grown, found, strict=True))


def test_tracebacks_are_found_with_the_line_before_them() -> None:
    lines = ["ERROR id", "Traceback (most recent call last):", "  File x", "E"]
    (found,) = tracebacks(["INFO", *lines])
    assert found.splitlines()[:2] == lines[:2]
    assert tracebacks(["INFO a Traceback of"]) == []


def test_the_command_ends_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def attack(config: str, **options: Any) -> Outcome:
        failures = [Failure(reason="5xx", shot=SHOT)] if config == "eagle3" else []
        return Outcome(name=config, requests=options["requests"], failures=failures)

    monkeypatch.setattr("sglang.test.fuzz.__main__.attack", attack)
    saved = tmp_path / "failures.jsonl"
    arguments = ["--requests", "20", "--seed", "3", "--save", str(saved)]
    assert main([*arguments, "--configs", "plain"]) == 0
    assert not saved.exists()
    assert main([*arguments, "--configs", "plain", "eagle3"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["seed"] == 3 and report["passed"] is False
    assert [one["requests"] for one in report["configs"]] == [10, 10]
    (line,) = saved.read_text().splitlines()
    assert json.loads(line)["config"] == "eagle3"
    assert parse_shot(json.loads(line)) == SHOT


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
