"""Recorded engines for the tests of replays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from sglang.srt.replay.playing.player import Played, Setting, play
from sglang.srt.replay.recording.record_file import RecordFile, decode_record
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Traffic

LONG_AGO = 1000


def recorded_engine(model: Path, folder: Path, **server_args: Any) -> EngineHarness:
    """Create an engine whose decisions are recorded, with incidents in `folder`."""
    defaults: dict[str, Any] = {
        "max_total_tokens": 1024,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_report_dir": str(folder),
        "kv_canary_record": LONG_AGO,
    }
    return EngineHarness(model, **(defaults | server_args))


def record_of(harness: EngineHarness) -> RecordFile:
    """Return the record of an engine, as a file would contain it."""
    recorder = harness.scheduler.recorder
    assert recorder is not None
    return decode_record(recorder.encode(), name="record")


def serve(harness: EngineHarness, *, seed: int, requests: int, steps: int) -> None:
    """Serve random requests, some of them aborted, for at most `steps` steps."""
    traffic = Traffic(harness, random.Random(seed), requests, longest_output=60)
    for step in range(steps):
        traffic.on_step(step)
        did_something = harness.scheduler.step()
        is_over = not traffic.left and not harness.scheduler.has_work()
        if is_over and not did_something:
            return


def check_same(played: Played, record: RecordFile) -> None:
    """Check that a replay is the recorded run, decision by decision."""
    assert played.error is None, played.error
    assert played.difference is None, played.difference
    assert played.num_launches == record.num_launches
    assert not played.incidents


def replayed(record: RecordFile, **setting: Any) -> Played:
    return play(record, Setting(**setting))
