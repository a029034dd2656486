"""Recorded runs replay decision by decision; planted faults at the same forward."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_canary.faults.catalogue import POOL_FAULTS
from kv_canary.reporter import CanaryViolation
from sglang.srt.managers.messages.io_struct import FlushCacheReq, PauseReq
from sglang.srt.replay.playing.bisect import bisect
from sglang.srt.replay.playing.command import main
from sglang.srt.replay.playing.player import Setting
from sglang.srt.replay.recording.record_file import RecordFile, read_record
from sglang.test import forked_process
from sglang.test.canary_traffic import VOCAB, canary_of, plant
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.replay_traffic import (
    LONG_AGO,
    check_same,
    record_of,
    recorded_engine,
    replayed,
    serve,
)
from sglang.test.scale import count, is_full, sampled

register_cpu_ci(est_time=8, suite="cpu", full_time=250)

SEEDS = count(ci=2, full=20)
REQUIRED_SHARE = 0.95
# Forwards, page size and whether tokens are recorded, by turns. With 8 forwards the
# record begins with a checkpoint.
WAYS = [(LONG_AGO, 1, False), (8, 4, True), (8, 1, False), (LONG_AGO, 16, True)]
# Planted long before they are found.
CACHED = {
    "phantom_prefix": {},
    "real_kv_unused_cache": {"kv_canary_sweep_interval": 2},
}
ORACLE = {
    "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE": "1",
    "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT": "1",
}
TRAFFIC = [
    {},
    {"page_size": 4, "max_total_tokens": 400, "schedule_policy": "lpm"},
    {"page_size": 16, "disable_radix_cache": True, "max_total_tokens": 480},
    {"max_total_tokens": 300, "chunked_prefill_size": 16, "overlap": True},
]


def incident_in(folder: Path) -> tuple[Path, RecordFile]:
    file = next(folder.glob("*.json"))
    return file, read_record(file.with_suffix(".record"))


def begin_of(record: RecordFile) -> int:
    """Number of the first forward that a replay runs."""
    return record.rounds[0].launches[0].clocks[0] if record.rounds[0].launches else 0


# -- planted faults ------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POOL_FAULTS)[:: count(ci=2, full=1)])
def test_planted_faults_appear_at_the_same_forward(
    model: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least 95 % of them, whether the record reaches back to the engine's start or
    begins with a checkpoint, and whether it holds the tokens or not."""
    reproduced = 0
    offset = sorted(POOL_FAULTS).index(name)
    for seed in range(SEEDS):
        num_forwards, page_size, has_tokens = WAYS[(seed + offset) % len(WAYS)]
        folder = tmp_path / str(seed)
        outcome = plant(
            model,
            name,
            seed=seed,
            page_size=page_size,
            kv_canary_report_dir=str(folder),
            kv_canary_record=LONG_AGO if name in CACHED else num_forwards,
            kv_canary_report_tokens=has_tokens,
            **CACHED.get(name, {}),
        )
        file, record = incident_in(folder)
        assert (record.checkpoint is not None) == (begin_of(record) > 2)
        reproduced += main([str(file)]) == 0
        said = capsys.readouterr().out
        assert f"all {record.num_launches} batches as recorded" in said
        assert f"in forward {outcome.forward}" in said
    assert reproduced >= REQUIRED_SHARE * SEEDS


def test_swapped_tokens_replay_with_their_tokens_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The token oracle gives tokens that nothing else can stand for."""
    for name, text in ORACLE.items():
        monkeypatch.setenv(name, text)
    codes = {}
    for has_tokens in (True, False):
        folder = tmp_path / str(has_tokens)
        plant(
            model,
            "next_token_swap",
            seed=3,
            kv_canary_report_dir=str(folder),
            kv_canary_report_tokens=has_tokens,
        )
        codes[has_tokens] = main([str(incident_in(folder)[0])])
    assert codes == {True: 0, False: 2}
    assert "--kv-canary-report-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        {"SGLANG_DEBUG_REVERT_PR": "EARLY_FREE"},
        {
            "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB": "0.1",
            "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "12",
        },
    ],
    ids=lambda variables: next(iter(variables)),
)
@pytest.mark.parametrize("mode", ["raise", "heal"])
def test_faults_of_the_environment_replay(
    model: Path,
    variables: dict[str, str],
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record says which variables were set; whoever replays it sets none."""
    with monkeypatch.context() as patched:
        for name, text in variables.items():
            patched.setenv(name, text)
        harness = recorded_engine(model, tmp_path, kv_canary=mode, kv_canary_record=8)
        try:
            serve(harness, seed=1, requests=12, steps=10_000)
        except CanaryViolation:
            assert mode == "raise"
    files = sorted(tmp_path.glob("*.json"))
    with_record = [file for file in files if "record" in json.loads(file.read_text())]
    assert with_record
    assert [main([str(file)]) for file in with_record] == [0] * len(with_record)


def test_a_fault_point_replays_in_its_own_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the scheduler of the replay is the first that opens the room of faults."""
    with monkeypatch.context() as patched:
        patched.setenv("SGLANG_DEBUG_REVERT_PR", "EARLY_FREE")
        harness = recorded_engine(model, tmp_path, kv_canary="raise")
        with pytest.raises(CanaryViolation):
            serve(harness, seed=1, requests=12, steps=10_000)
    command = [sys.executable, "-m", "sglang.srt.kv_canary.replay"]
    done = forked_process.run([*command, str(incident_in(tmp_path)[0])], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["req_to_token", "record", "input_token"])
def test_bisect_names_the_forward_of_the_fault(
    model: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(count(ci=1, full=20)):
        folder = tmp_path / str(seed)
        outcome = plant(
            model,
            name,
            seed=seed,
            kv_canary_report_dir=str(folder),
            kv_canary_record=(LONG_AGO, 8)[seed % 2],
        )
        file, record = incident_in(folder)
        assert main([str(file), "--bisect"]) == 0
        said = capsys.readouterr().out
        found = bisect(record, Setting()) if is_full() else None
        assert f"forward {outcome.planted.clock} (target) is the first" in said
        assert found is None or found.forward == outcome.planted.clock


def test_a_real_bit_flip_does_not_replay_and_is_said_to_be_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = recorded_engine(model, tmp_path)
    rid = harness.submit(list(range(40)), max_new_tokens=30)
    for _ in range(5):
        harness.scheduler.step()
    pool = canary_of(harness).target
    row = harness.scheduler.unfinished[0].req_pool_idx
    slots = pool.req_to_token_pool.row_slots(row, 0, 40)
    for source in pool.kv_pool.canary_sources():
        source.buffer[:, slots] += 1.0
    with pytest.raises(CanaryViolation):
        harness.run()
    file, _ = incident_in(tmp_path)
    capsys.readouterr()
    assert main([str(file)]) == 1
    said = capsys.readouterr().out
    assert repr(rid) in said and "decisions   all" in said
    assert "not host-side: a bit flip or a race" in said
    assert main([str(file.with_suffix(".record")), "--bisect"]) == 1


# -- clean runs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", sampled(TRAFFIC, key=lambda flags: None, ci=2), ids=str
)
def test_a_clean_run_replays_clean(
    model: Path, flags: dict[str, Any], tmp_path: Path
) -> None:
    """Under retractions, chunks, aborts and evictions; from the start and from a
    checkpoint, with the tokens and without, the run going on or over."""
    for seed in range(count(ci=1, full=20)):
        has_tokens, steps = bool(seed % 2), (70, 10_000)[seed // 2 % 2]
        harness = recorded_engine(
            model,
            tmp_path,
            kv_canary_record=(20, LONG_AGO * 10)[seed // 4 % 2],
            kv_canary_report_tokens=has_tokens,
            kv_canary_real_data="all",
            **flags,
        )
        serve(harness, seed=seed, requests=40, steps=steps)
        record = record_of(harness)
        played = replayed(record)
        check_same(played, record)
        # The model chooses the same tokens, where it is given the same.
        assert played.other_tokens == (0 if has_tokens else None)


def test_ends_by_stop_tokens_are_replayed(model: Path, tmp_path: Path) -> None:
    """Without the tokens nothing but the record says where an output ends."""
    harness = recorded_engine(model, tmp_path, kv_canary_record=10)
    first = harness.generate(list(range(20)), max_new_tokens=12)
    stops = [first.output_ids[5]]
    for i in range(6):
        harness.submit(
            [*range(20), *range(i)], max_new_tokens=12 + i, stop_token_ids=stops
        )
    harness.run(on_step=lambda step: None)
    record = record_of(harness)
    assert {request.end for request in record.requests} >= {"stop"}
    check_same(replayed(record), record)


@pytest.mark.parametrize("forwards", [12, LONG_AGO])
def test_pauses_are_replayed(model: Path, tmp_path: Path, forwards: int) -> None:
    """Also where the record begins after some of them."""
    harness = recorded_engine(model, tmp_path, kv_canary_record=forwards)
    modes = ["in_place", "retract", "abort", "retract", "in_place"]
    for turn, mode in enumerate(modes):
        for i in range(4):
            prompt = [(7 * i + turn) % VOCAB] * (9 * i + 1)
            harness.submit(prompt, max_new_tokens=12 + 8 * i)
        for is_pause in (True, False):
            for _ in range(4):
                harness.scheduler.step()
            harness.io.requests.append(
                PauseReq(call_id=turn, is_pause=is_pause, mode=mode)
            )
    harness.run()
    record = record_of(harness)
    check_same(replayed(record), record)


def test_a_flush_and_an_idle_hour_are_replayed(model: Path, tmp_path: Path) -> None:
    harness = recorded_engine(model, tmp_path, kv_canary_record=12)
    for turn in range(4):
        serve(harness, seed=turn, requests=4, steps=10_000)
        harness.io.requests.append(FlushCacheReq(call_id=turn))
        harness.run()
    record = record_of(harness)
    check_same(replayed(record), record)


@pytest.mark.parametrize("window", [10, LONG_AGO])
def test_turns_of_clients_are_replayed(
    model: Path, tmp_path: Path, window: int
) -> None:
    """One has all places, another comes; the record does not say who they are."""
    harness = recorded_engine(
        model, tmp_path, kv_canary_record=window, max_running_requests=4
    )

    def submit(client: str, number: int, new: int) -> None:
        for i in range(number):
            ids = [len(client), *range(5 * i, 5 * i + 12)]
            harness.submit(ids, client=client, max_new_tokens=new, ignore_eos=True)

    submit("key-one@10.0.0.1", 9, 30)
    for _ in range(12):
        harness.scheduler.step()
    submit("key-two@10.0.0.2", 4, 5)
    for _ in range(6):
        harness.scheduler.step()
    assert harness.scheduler.stats_snapshot().num_retracted_reqs
    record = record_of(harness)
    assert {request.rid for request in record.requests} >= {"r0", "r9"}
    assert not any(b"key-" in request.message for request in record.requests)
    check_same(replayed(record), record)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
