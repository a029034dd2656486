"""Runs of models with recurrent states replay from checkpoints of the engine, too, and
faults planted in states appear at the same forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from state_world import ENGINES, LENGTHS, drafting, options, write_model

from kv_canary.faults.catalogue import STATE_FAULTS
from kv_canary.faults.fault import Bound
from sglang.srt.replay.playing.command import main
from sglang.srt.replay.recording.record_file import read_record
from sglang.test.canary_traffic import plant
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.replay_traffic import (
    LONG_AGO,
    check_same,
    record_of,
    recorded_engine,
    replayed,
    serve,
)
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=8, suite="cpu", full_time=200)

SEEDS = count(ci=1, full=20)
REQUIRED_SHARE = 0.95
OFTEN = {"mamba_track_interval": 8}
TRAFFIC = [
    OFTEN,
    OFTEN | {"page_size": 4, "max_mamba_cache_size": 14, "max_total_tokens": 600},
    OFTEN
    | {"overlap": True, "chunked_prefill_size": 64, "kv_canary_sweep_interval": 3},
    {"page_size": 16, "overlap": True, "mamba_track_interval": 16},
    {"disable_radix_cache": True, "max_mamba_cache_size": 8},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mock"))


@pytest.mark.parametrize("name", sampled(sorted(STATE_FAULTS), key=len, ci=1))
def test_planted_faults_appear_at_the_same_forward(
    model: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the engine's start and from a checkpoint, with the tokens and without."""
    # Others are planted long before they are found.
    is_found_at_once = STATE_FAULTS[name].bound is Bound.SAME
    reproduced = from_checkpoint = 0
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        page_size, overlap, chunk = ENGINES[seed % len(ENGINES)]
        outcome = plant(
            model,
            name,
            seed=seed,
            group="state",
            lengths=LENGTHS,
            kv_canary_real_data="all",
            kv_canary_report_dir=str(folder),
            kv_canary_record=4 if is_found_at_once and seed % 2 == 0 else LONG_AGO,
            kv_canary_report_tokens=bool(seed // 2 % 2),
            **options(page_size, overlap, chunk),
        )
        file = next(folder.glob("*.json"))
        record = read_record(file.with_suffix(".record"))
        from_checkpoint += record.checkpoint is not None
        reproduced += main([str(file)]) == 0
        said = capsys.readouterr().out
        assert f"all {record.num_launches} batches as recorded" in said
        assert f"in forward {outcome.forward}" in said
    assert reproduced >= REQUIRED_SHARE * SEEDS
    assert (from_checkpoint > 0) == is_found_at_once


@pytest.mark.parametrize(
    "flags", sampled(TRAFFIC, key=lambda flags: None, ci=2), ids=str
)
def test_a_clean_run_replays_clean(
    model: Path, flags: dict[str, Any], tmp_path: Path
) -> None:
    for seed in range(count(ci=1, full=20)):
        has_tokens = bool(seed % 2)
        harness = recorded_engine(
            model,
            tmp_path,
            kv_canary_record=20,
            kv_canary_report_tokens=has_tokens,
            kv_canary_real_data="all",
            max_running_requests=8,
            **flags,
        )
        serve(harness, seed=seed, requests=40, steps=(70, 10_000)[seed // 2 % 2])
        record = record_of(harness)
        assert record.checkpoint is not None
        is_cached = not harness.server_args.disable_radix_cache
        assert (record.checkpoint.states is not None) == is_cached
        played = replayed(record)
        check_same(played, record)
        assert played.other_tokens == (0 if has_tokens else None)


@pytest.mark.parametrize("tree", [(1, 3, 4), (3, 3, 8)], ids=["chain", "tree"])
def test_a_run_with_drafts_replays_clean(
    model: Path, tmp_path: Path, tree: tuple[int, int, int]
) -> None:
    drafts = drafting(tmp_path, tree)
    for seed in range(count(ci=1, full=10)):
        harness = recorded_engine(
            model,
            tmp_path,
            kv_canary_record=12,
            kv_canary_report_tokens=True,
            kv_canary_real_data="all",
            max_running_requests=8,
            mamba_track_interval=16,
            overlap=bool(seed % 2),
            disable_overlap_schedule=not seed % 2,
            **drafts,
        )
        serve(harness, seed=seed, requests=30, steps=(70, 10_000)[seed // 2 % 2])
        record = record_of(harness)
        assert record.checkpoint is not None and record.checkpoint.states is not None
        check_same(replayed(record), record)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
