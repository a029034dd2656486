"""Crash dumps: bounded, without keys, refused when bad.

Written by a real server: `test_lifecycle.py`; sent again: `test_bench_commands.py`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.bench_serving import BenchArgs
from sglang.bench_utils.crash_dumps import read_crash_dump
from sglang.srt.managers.crash_dump import KEPT_SECONDS, CrashDump
from sglang.srt.managers.io_struct import FinishReason, GenerateReq, RequestOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=1, suite="cpu")


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


def written(dump: CrashDump) -> list[dict[str, Any]]:
    path = dump.write("it died")
    assert path is not None
    return lines_of(path)


def tokens_of(*kept: list[Any]) -> int:
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
        max_tokens=30,
    )
    # (rid, length, time of its end) in order of end, and those in flight.
    ended: list[tuple[str, int, float]] = []
    running: list[tuple[str, int]] = []
    for number, (kind, value) in enumerate(events):
        if kind == "s":
            dump.on_sent(request(f"r{number}", value))
            running.append((f"r{number}", value))
            ended = [e for e in ended if e[2] >= now[0] - KEPT_SECONDS]
            while len(ended) + len(running) > 6 or tokens_of(ended, running) > 30:
                (ended or running).pop(0)
        elif kind == "e" and running:
            rid, length = running.pop(value % len(running))
            dump.on_output(output(rid, value, FinishReason(type="length")))
            ended.append((rid, length, now[0]))
        elif kind == "t":
            now[0] += value * KEPT_SECONDS / 6
    head, *entries = written(dump)
    found = {e["request"]["rid"]: e["finish"] for e in entries}
    expected = {rid: "length" for rid, *_ in ended} | {rid: None for rid, _ in running}
    assert found == expected
    assert (head["requests"], head["in_flight"]) == (len(found), len(running))


def test_a_dump_holds_requests_as_they_were_and_no_key(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path)
    digest = "ab" * 20
    dump.on_sent(request("a", 3, extra_key=digest, client="client digest", copy=2))
    dump.on_sent(request("b", 2, extra_key=digest, input_embeds=b"1234"))
    dump.on_output(output("a", 4, None))
    path = dump.write("reason")
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    head, first, second = lines_of(path)
    assert head["reason"] == "reason"
    body = first["request"]
    assert body["input_ids"] == [5, 5, 5]
    assert body["sampling_params"]["stop"] == ["."]
    assert "n" not in body["sampling_params"]
    assert first["output_tokens"] == 4
    assert body["extra_key"] == second["request"]["extra_key"] == "namespace 1"
    text = path.read_text()
    assert digest not in text
    assert "client digest" not in text
    read = read_crash_dump(path)
    assert [r.input_ids for r in read.requests] == [[5, 5, 5]]
    assert read.skipped == 1


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
        ('{"format": "sglang crash dump", "requests": 2}\n{}', "is cut"),
        ('{"format": "sglang crash dump", "requests": 1}\n{"a": 1}', "line 2"),
        ('{"format": "sglang crash dump", "requests": 1}\n{"a"', "line 2"),
    ],
)
def test_a_bad_dump_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_crash_dump(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_crash_dump(tmp_path / "nowhere")


def test_other_backends_do_not_take_a_dump(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="remove --backend sglang-oai"):
        BenchArgs(replay=tmp_path, backend="sglang-oai")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
