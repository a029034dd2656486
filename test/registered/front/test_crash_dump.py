"""Crash dumps: bounded, without keys, refused when bad.

Written by a real server: `test_lifecycle.py`; sent again: `test_bench_commands.py`."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_world import Wire, prompt, run

from sglang.bench_serving import BenchArgs
from sglang.bench_utils.crash_dumps import read_crash_dump
from sglang.srt.managers.front.crash_dump import FORMAT, KEPT_SECONDS, CrashDump
from sglang.srt.managers.messages.errors import EngineFailure
from sglang.srt.managers.messages.io_struct import (
    FinishReason,
    GenerateReq,
    LoraRef,
    RequestOutput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.salt_chain import content_ids
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=3, suite="cpu")


HEAD = json.dumps({"format": FORMAT, "requests": 1})
# Large enough that the rest of a line hardly counts.
UNIT = 10_000


def request(rid: str, length: int, **options: Any) -> GenerateReq:
    params = SamplingParams(max_new_tokens=7, temperature=0.0, stop=["."], n=3)
    return GenerateReq(
        rid=rid, input_ids=[5] * length, sampling_params=params, **options
    )


def output(rid: str, tokens: int, finish: FinishReason | None) -> RequestOutput:
    return RequestOutput(
        rid=rid,
        output_ids=[],
        prompt_tokens=1,
        completion_tokens=tokens,
        cached_tokens=0,
        finish_reason=finish,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(path)[1:] if "shared" not in line]


def units_of(*kept: list[Any]) -> int:
    return sum(entry[1] for entries in kept for entry in entries)


@settings(max_examples=count(ci=30, full=2000), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("sse t"), st.integers(1, 9)), min_size=1, max_size=60
    )
)
def test_a_dump_is_what_a_simple_model_keeps(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]]
) -> None:
    now = [0.0]
    dump = CrashDump(
        tmp_path_factory.mktemp("dump"),
        clock=lambda: now[0],
        max_requests=6,
        max_bytes=30 * 8 * UNIT + 8 * UNIT // 2,
    )
    # (rid, length, time of its end) in order of end, and those in flight.
    ended: list[tuple[str, int, float]] = []
    running: list[tuple[str, int]] = []
    for number, (kind, value) in enumerate(events):
        if kind == "s":
            dump.on_sent(request(f"r{number}", value * UNIT))
            running.append((f"r{number}", value))
            ended = [e for e in ended if e[2] >= now[0] - KEPT_SECONDS]
            while len(ended) + len(running) > 6 or units_of(ended, running) > 30:
                (ended or running).pop(0)
        elif kind == "e" and running:
            rid, length = running.pop(value % len(running))
            dump.on_output(output(rid, value, FinishReason(type="length")))
            ended.append((rid, length, now[0]))
        elif kind == "t":
            now[0] += value * KEPT_SECONDS / 6
    path = dump.write("it died")
    assert path is not None
    head, entries = lines_of(path)[0], requests_of(path)
    found = {e["request"]["rid"]: e["finish"] for e in entries}
    expected = {rid: "length" for rid, *_ in ended} | {rid: None for rid, _ in running}
    assert found == expected
    assert (head["requests"], head["in_flight"]) == (len(found), len(running))
    assert path.stat().st_size <= 30 * 8 * UNIT + 8 * UNIT // 2


def test_a_dump_holds_requests_as_they_were_and_no_key(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path)
    digest = "ab" * 20
    dump.on_sent(request("a", 3, extra_key=digest, client="client digest", copy=2))
    embedded = request("b", 2, extra_key=digest, input_embeds=b"12345678")
    embedded.input_ids = content_ids(b"12345678", 2)
    embedded.lora = LoraRef(name="fr", path="/adapters/fr", revision="ab")
    dump.on_sent(embedded)
    dump.on_output(output("a", 4, None))
    path = dump.write("reason")
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines_of(path)[0]["reason"] == "reason"
    first, second = requests_of(path)
    assert first["output_tokens"] == 4
    assert "lora_path" not in first["request"]
    assert second["request"]["lora_path"] == "fr"
    keys = [entry["request"]["extra_key"] for entry in (first, second)]
    assert keys == ["namespace 1"] * 2
    text = path.read_text()
    assert digest not in text
    assert "client digest" not in text
    read = read_crash_dump(path)
    (one,) = read.requests
    assert (one.input_ids, one.output_len, read.skipped) == ([5, 5, 5], 7, 1)
    assert one.body["sampling_params"]["stop"] == ["."]
    assert "n" not in one.body["sampling_params"]


def test_what_requests_share_is_written_once(tmp_path: Path) -> None:
    """4,000 prompts with one schema of 250 KB, twice; and 64 outputs of one prompt."""
    dump = CrashDump(tmp_path)
    schema = json.dumps({"enum": ["x" * 250_000]})
    for call in range(2):
        params = SamplingParams(json_schema=schema, sampling_seed=4)
        for i in range(count(ci=400, full=4000)):
            dump.on_sent(
                GenerateReq(rid=f"{call}-{i}", input_ids=[i], sampling_params=params)
            )
    ids, params = list(range(10_000)), SamplingParams(n=64, sampling_seed=4)
    for copy in range(64):
        dump.on_sent(
            GenerateReq(
                rid=f"n-{copy}", input_ids=ids, sampling_params=params, copy=copy
            )
        )
    path = dump.write("reason")
    assert path is not None
    assert path.stat().st_size < count(ci=1, full=3) * 1_000_000
    read = read_crash_dump(path).requests
    assert {r.body["sampling_params"]["sampling_seed"] for r in read[-64:]} == set(
        range(4, 68)
    )
    assert all(r.input_ids == ids for r in read[-64:])
    assert read[0].body["sampling_params"]["json_schema"] == schema


def test_different_large_parameters_are_bounded(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path, max_bytes=1_000_000)
    for i in range(40):
        params = SamplingParams(regex=str(i) * 100_000)
        dump.on_sent(GenerateReq(rid=str(i), input_ids=[i], sampling_params=params))
    path = dump.write("reason")
    assert path is not None
    assert path.stat().st_size < 1_000_000
    head = lines_of(path)[0]
    assert head["requests"] + head["dropped"] == 40
    assert requests_of(path)[-1]["request"]["rid"] == "39"


def test_clients_are_answered_before_the_dump_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk waits until the client has its answer; an exit waits for the disk."""
    answered = threading.Event()
    write = CrashDump.write

    def write_late(dump: CrashDump, reason: str) -> Path | None:
        assert answered.wait(20)
        return write(dump, reason)

    monkeypatch.setattr(CrashDump, "write", write_late)

    async def work() -> None:
        wire = Wire(crash_dump_folder=str(tmp_path))
        group = await wire.manager.submit([prompt(rid="a")])
        failure = wire.manager.set_dead("it died")
        with pytest.raises(EngineFailure) as caught:
            await wire.manager.results(group)
        assert caught.value is failure
        answered.set()
        wire.manager.close()

    run(work())
    (path,) = tmp_path.iterdir()
    assert [e["request"]["rid"] for e in requests_of(path)] == ["a"]


def test_a_dump_that_is_not_whole_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = CrashDump(tmp_path)
    dump.on_sent(request("a", 3))
    lines = CrashDump._lines

    def full_disk(dump: CrashDump, reason: str) -> Iterator[dict[str, Any]]:
        yield from list(lines(dump, reason))[:2]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CrashDump, "_lines", full_disk)
    assert dump.write("reason") is None
    assert "No space left" in caplog.text
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".jsonl.incomplete")
    with pytest.raises(ValueError, match="is cut: 0 of 1"):
        read_crash_dump(path)


def test_a_folder_that_takes_nothing_is_refused_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=f"--crash-dump-folder {file} cannot"):
        ServerArgs(device="cpu", crash_dump_folder=str(file))
    dump = CrashDump(tmp_path / "gone")
    assert dump.write("reason") is None
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not a crash dump"),
        ("{}", "is not a crash dump"),
        ("[1]", "is not a crash dump"),
        ('{"format": "sglang crash dump", "requests": 1}', "is not a crash dump"),
        (HEAD, "is cut"),
        (HEAD + '\n{"a": 1}', "line 2"),
        (HEAD + '\n{"a"', "line 2"),
        (HEAD + '\n{"has_input_embeds": false, "request": {"input_ids": 1}}', "line 2"),
    ],
)
def test_a_bad_dump_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_crash_dump(path)
    with pytest.raises(ValueError, match="no such file"):
        read_crash_dump(tmp_path / "nowhere")


def test_other_backends_do_not_take_a_dump(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="remove --backend sglang-oai"):
        BenchArgs(replay=tmp_path, backend="sglang-oai")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
