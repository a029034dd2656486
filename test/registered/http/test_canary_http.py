"""A damaged KV cache as users of a server see it: log lines, incidents, errors."""

from __future__ import annotations

import json
import re
import sys
import time
import zlib
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from live_server import CONTEXT, Server, greedy
from starlette.testclient import TestClient

from kv_canary.checks import Reason, reason_labels
from sglang import Engine
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.managers.messages.errors import EngineFailure
from sglang.srt.mem_cache.page_map import PageState
from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import sampled
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=26, suite="cpu")
register_cuda_ci(est_time=110, suite="cuda")

VOCAB = 257
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PREFIX = "SGLANG_KV_CANARY_"
# Bytes of a prefix are compared by the launch before attention, or in it.
BY_TARGET = re.compile(r"kv_canary violation: launch_tag=target\.(verify|attention) ")
LINE = re.compile(
    r"kv_canary violation: launch_tag=\S+ group=\S+ fail_reason=(\S+) "
    r"rid=(?:\".*\"|null) slot_idx=-?\d+ position=-?\d+ "
)
READ = {
    "verify_lineage",
    "verify_position",
    "verify_token",
    "verify_freed",
    "read_set",
    "read_scratch",
}
# Variable -> reasons of which each report must have one, launches that find it, other
# variables, flags.
FAULTS: dict[str, tuple[set[str], set[str], dict[str, str], tuple[str, ...]]] = {
    "REQ_TO_TOKEN": (READ, {"verify"}, {}, ()),
    "REAL_KV_USED": (
        {"verify_real_kv"},
        {"verify", "attention"},
        {},
        ("--kv-canary-report-tokens",),
    ),
    "REAL_KV_POST_FORWARD": (
        {"verify_real_kv"},
        {"verify", "attention"},
        {},
        (),
    ),
    "REAL_KV_UNUSED_CACHE": (
        {"verify_real_kv"},
        {"sweep"},
        {},
        ("--kv-canary-sweep-interval", "1"),
    ),
    "NEXT_TOKEN_SWAP": (
        {"write_token"},
        {"head"},
        {"ENABLE_TOKEN_ORACLE": "1", "ENABLE_WRITE_INPUT_ASSERT": "1"},
        (),
    ),
}


@pytest.fixture
def start_damaged(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    """A server whose environment injects faults."""
    started: list[Server] = []

    def start(*flags: str, **variables: str) -> Server:
        for name, value in variables.items():
            monkeypatch.setenv(PREFIX + name, value)
        started.append(start_server("--device", DEVICE, *flags))
        return started[-1].wait_ready()

    yield start
    for server in started:
        server.stop()


def prompts() -> list[list[int]]:
    return [[(11 * i + j) % VOCAB for j in range(20)] for i in range(4)]


def kind_of(violation: dict[str, Any]) -> str:
    """The diagnosis without the name of a request."""
    diagnosis: str = violation["diagnosis"]
    return diagnosis.split(" with request ")[0]


def counts_by_reason(server: Server) -> Counter[str]:
    """The metric of violations, which has every reason from the start."""
    pattern = re.compile(
        r'sglang:kv_canary_violations_total\{.*reason="(\w+)".*\} (\S+)'
    )
    found = map(pattern.match, server.get("/metrics").text.splitlines())
    counts = Counter({m[1]: int(float(m[2])) for m in found if m})
    assert set(counts) == {label for r in Reason for label in reason_labels(r)}
    return counts


@pytest.mark.parametrize("fault", sampled(FAULTS, key=type, ci=2))
def test_log_mode_reports_and_serves_on(
    start_damaged: Callable[..., Server], tmp_path: Path, fault: str
) -> None:
    allowed, launches, variables, flags = FAULTS[fault]
    server = start_damaged(
        *("--kv-canary", "log", "--kv-canary-real-data", "all", "--enable-metrics"),
        *("--kv-canary-report-dir", str(tmp_path), *flags),
        **{f"PERTURB_{fault}_PROB": "0.1", "PERTURB_WARMUP_STEPS": "3"},
        **variables,
    )
    assert not counts_by_reason(server).total()
    # Something for the cache to hold alone.
    assert server.generate([5] * 30, max_new_tokens=2)
    body = {
        "input_ids": prompts(),
        "sampling_params": greedy(max_new_tokens=60),
        "rid": [f'"quoted" {i}' for i in range(4)],
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    assert [len(answer["output_ids"]) for answer in response.json()] == [60] * 4
    server.wait_idle()
    assert server.process.poll() is None

    shown = server.get("/canary/incidents").json()
    assert shown["mode"] == "log"
    incidents = shown["incidents"]
    violations = [v for incident in incidents for v in incident["violations"]]
    assert violations
    for violation in violations:
        assert allowed & set(violation["reasons"]), violation
        assert violation["launch"] in launches, violation
        has_tokens = "--kv-canary-report-tokens" in flags
        assert ("token" in violation["found"]) == has_tokens
    on_disk = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("*.json"))]
    assert on_disk == incidents
    # Of each diagnosis the first: a fault that goes on does not fill the disk.
    firsts = {kind_of(v): v for v in reversed(violations)}
    lines = server.wait_for_lines("kv_canary violation:", len(firsts))
    labels = [match[1] for match in map(LINE.search, lines) if match]
    expected = sorted("+".join(v["reasons"]) for v in firsts.values())
    assert sorted(labels) == expected and len(labels) == len(lines)
    assert server.wait_for_lines(f"kv_canary: incident in {tmp_path}")
    reasons = Counter(r for violation in violations for r in violation["reasons"])
    assert counts_by_reason(server) == reasons


def test_raise_mode_ends_what_is_in_flight_and_the_server(
    start_damaged: Callable[..., Server],
) -> None:
    """Streamed tokens are the oracle's, up to the step that failed; then the error."""
    server = start_damaged(
        *("--kv-canary", "raise", "--kv-canary-real-data", "all"),
        PERTURB_REAL_KV_USED_PROB="1",
        PERTURB_WARMUP_STEPS="25",
    )
    prompt = prompts()[0]
    body = {
        "input_ids": prompt,
        "sampling_params": greedy(max_new_tokens=200),
        "stream": True,
        "rid": "the one",
    }
    with (
        server.client() as client,
        client.stream("POST", "/generate", json=body) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *said, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    error = last["error"]
    assert error["code"] == 500
    assert BY_TARGET.search(error["message"])
    assert "fail_reason=verify_real_kv" in error["message"]
    # Every client in flight reads it: no request and no token is named.
    assert "rid=" not in error["message"] and "token=" not in error["message"]
    output = said[-1]["output_ids"]
    predicted = next_tokens(prompt + output, vocab_size=VOCAB)
    assert output == predicted[len(prompt) - 1 : -1]
    # The first forward says the first token, and so on: the 26th said nothing.
    assert len(output) == 25
    if DEVICE == "cpu":  # elsewhere the capture of graphs counted, too
        assert re.findall(r" forward=(\d+)", error["message"])[0] == "26"
    assert server.wait_exit() not in (0, None)
    assert "kv_canary violation:" in server.log()


def test_raise_mode_answers_500_to_everyone_in_flight(
    start_damaged: Callable[..., Server],
) -> None:
    server = start_damaged(
        *("--kv-canary", "raise", "--kv-canary-real-data", "all"),
        PERTURB_REAL_KV_USED_PROB="1",
        PERTURB_WARMUP_STEPS="400",  # so that all have come
    )

    def ask(prompt: list[int]) -> Any:
        body = {"input_ids": prompt, "sampling_params": greedy(max_new_tokens=1000)}
        return server.post("/generate", body)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, prompts()))
    for answer in answers:
        assert answer.status_code == 500, answer.text
        message = answer.json()["error"]["message"]
        assert BY_TARGET.search(message)
        assert message.count("kv_canary violation") == 1
        assert len(message.splitlines()) == 1
    assert server.wait_exit() != 0
    # The scheduler's line, and the front's with the error's id.
    assert server.log().count("kv_canary violation: ") == 2, server.log()
    assert "Traceback" not in server.log()


def test_incidents_of_an_engine_that_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As long as the front is there; here it lives in this process."""
    monkeypatch.setenv(PREFIX + "PERTURB_REAL_KV_USED_PROB", "1")
    monkeypatch.setenv(PREFIX + "PERTURB_WARMUP_STEPS", "10")
    model = write_mock_model(
        tmp_path / "mock", vocab_size=VOCAB, max_position_embeddings=CONTEXT
    )
    options: dict[str, Any] = {"kv_canary": "raise", "kv_canary_real_data": "all"}
    folder = tmp_path / "reports"
    with Engine(
        model_path=str(model),
        device=DEVICE,
        kv_canary_report_dir=str(folder),
        **options,
    ) as engine:
        with pytest.raises(EngineFailure, match="kv_canary violation"):
            engine.generate(
                input_ids=prompts()[0], sampling_params=greedy(max_new_tokens=99)
            )
        wait_gone(engine)
        (file,) = folder.glob("*.json")
        (incident,) = engine.canary_incidents()
        # Said once, in words, with the file.
        said = capfd.readouterr().err
        assert said.count("kv_canary violation: ") == 1, said
        assert said.count(f"kv_canary: incident in {file}:\n") == 1
        assert "Traceback" not in said
        assert incident == json.loads(file.read_text())
        front = Front(
            server_args=engine.server_args,
            manager=engine.tokenizer_manager,
            model_name="mock",
        )
        with TestClient(create_app(front)) as client:
            answer = client.get("/canary/incidents")
        assert answer.status_code == 200
        assert answer.json() == {"mode": "raise", "incidents": [incident]}


def wait_gone(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in engine.scheduler_pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a speculating server."""
    draft = write_mock_draft(
        tmp_path_factory.mktemp("draft") / "eagle",
        kind="EAGLE",
        source="hidden",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )
    flags = (
        f"--speculative-algorithm EAGLE --speculative-draft-model-path {draft} "
        "--speculative-num-steps 4 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 12 --page-size 4 --kv-canary-real-data all"
    )
    return tuple(flags.split())


def test_log_mode_names_pool_step_and_branch(
    start_damaged: Callable[..., Server],
    tmp_path: Path,
    trees: tuple[str, ...],
) -> None:
    """Both pools of a speculating server are damaged; answers stay those of a healthy
    one where only the draft's is read wrongly."""
    server = start_damaged(
        *("--kv-canary", "log", "--enable-metrics"),
        *("--kv-canary-report-dir", str(tmp_path), *trees),
        PERTURB_REAL_KV_USED_PROB="0.1",
        PERTURB_WARMUP_STEPS="3",
    )
    body = {
        "input_ids": prompts(),
        "sampling_params": greedy(max_new_tokens=60),
        "rid": [f"tree {i}" for i in range(4)],
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    assert [len(answer["output_ids"]) for answer in response.json()] == [60] * 4
    server.wait_idle()
    incidents = server.get("/canary/incidents").json()["incidents"]
    violations = [v for incident in incidents for v in incident["violations"]]
    assert {v["worker"] for v in violations} == {"target", "draft"}
    reasons = Counter(r for violation in violations for r in violation["reasons"])
    assert set(reasons) == {"verify_real_kv"}
    assert counts_by_reason(server) == reasons
    of_target = {v["forward_mode"] for v in violations if v["worker"] == "target"}
    assert of_target <= {"extend", "target_verify"}
    stepped = [v for v in violations if "step" in v]
    assert stepped
    for violation in stepped:
        assert (violation["worker"], violation["forward_mode"]) == ("draft", "decode")
        assert violation["step"] in range(3) and violation["branch"] in range(4)
    files = sorted(tmp_path.glob("*.json"))
    assert [json.loads(p.read_text()) for p in files] == incidents
    explained = forked_process.run(
        [sys.executable, "-m", "sglang.srt.kv_canary.explain", *map(str, files)],
        timeout=60,
    )
    assert explained.returncode == 0, explained.stderr
    told = explained.stdout
    assert "(target pool, found by verify, batch row " in told
    first = stepped[0]
    assert (
        f"(draft pool, found by verify, draft step {first['step']}, "
        f"branch {first['branch']})"
    ) in told


def test_raise_mode_stops_a_speculating_server(
    start_damaged: Callable[..., Server], trees: tuple[str, ...]
) -> None:
    server = start_damaged(
        *("--kv-canary", "raise", *trees),
        PERTURB_REAL_KV_USED_PROB="1",
        PERTURB_WARMUP_STEPS="20",
    )
    prompt = prompts()[0]
    body = {
        "input_ids": prompt,
        "sampling_params": greedy(max_new_tokens=300),
        "stream": True,
    }
    with (
        server.client() as client,
        client.stream("POST", "/generate", json=body) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    *said, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert last["error"]["code"] == 500
    # Two launches of three are the draft's: its pool is damaged first.
    assert "launch_tag=draft.verify" in last["error"]["message"]
    output = said[-1]["output_ids"]
    predicted = next_tokens(prompt + output, vocab_size=VOCAB)
    assert output == predicted[len(prompt) - 1 : -1]
    assert server.wait_exit() not in (0, None)


def test_incidents_are_behind_the_api_key(start_server: Callable[..., Server]) -> None:
    flags = ("--device", DEVICE, "--kv-canary", "log", "--api-key", "secret")
    server = start_server(*flags).wait_ready()
    assert server.get("/canary/incidents").status_code == 401
    wrong = {"Authorization": "Bearer other"}
    assert server.get("/canary/incidents", headers=wrong).status_code == 401
    right = {"Authorization": "Bearer secret"}
    answer = server.get("/canary/incidents", headers=right)
    assert answer.status_code == 200
    assert answer.json() == {"mode": "log", "incidents": []}
    check_inspector(server, right)
    server.stop()


def check_inspector(server: Server, key: dict[str, str]) -> None:
    """The page of a real server: a snapshot and the record of a cached slot."""
    assert server.get("/canary").status_code == 200
    for path in ("/canary/events", "/canary/slot/1", "/canary/incidents/0-1"):
        assert server.get(path).status_code == 401
    body = {
        "input_ids": prompts()[0],
        "sampling_params": greedy(max_new_tokens=4),
        "rid": "looked at",
    }
    assert server.post("/generate", body, headers=key).status_code == 200
    with (
        server.client(headers=key) as client,
        client.stream("GET", "/canary/events") as response,
    ):
        events = (
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: ")
        )
        assert next(events)["kv_canary"] == "log"
        (snapshot,) = [e for e, _ in zip(events, range(2), strict=False)][1:]
    (frame,) = snapshot["frames"]
    cells, tree = (
        numpy.frombuffer(zlib.decompress(b64decode(packed)), "<i4")
        for packed in (frame["cells"], snapshot["tree"])
    )
    assert len(cells) == snapshot["pool"]["num_pages"]
    assert snapshot["stats"]["num_requests_total"] == 1
    # The run at position 0 is the first one.
    page = int((cells >> 4 == -tree[0]).argmax()) + 1
    assert cells[page - 1] & 7 == PageState.CACHED
    slot = page * snapshot["pool"]["page_size"]
    (record,) = server.get(f"/canary/slot/{slot}", headers=key).json()["records"]
    assert record["state"] == "live" and record["position"] == 0
    # Forwards that graphs are captured with count, too.
    forward = record["writer"].pop("forward")
    assert forward == 1 if DEVICE == "cpu" else forward > 1
    # The rid of a key's request comes after a mark that tells nothing of the key.
    scope, _, rid = record["writer"].pop("rid").partition(":")
    assert re.fullmatch(r"[0-9a-f]{12}", scope) and rid == "looked at"
    assert record["writer"] == {"kind": "extend"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
