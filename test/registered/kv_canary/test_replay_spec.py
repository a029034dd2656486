"""Records of an engine that drafts trees: decisions and planted faults replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_canary.faults.catalogue import DRAFT_FAULTS
from sglang.srt.replay.playing.command import main
from sglang.srt.replay.playing.player import Setting
from sglang.srt.speculative import eagle_catch_up
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.replay_traffic import LONG_AGO, check_same, record_of, replayed
from sglang.test.scale import count, is_full
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_adaptive import InTurn
from sglang.test.spec_canary_traffic import (
    SpecTraffic,
    plant_in,
    speculating,
    write_mock_models,
)

register_cpu_ci(est_time=4, suite="cpu")

SEEDS = count(ci=1, full=20)
REQUIRED_SHARE = 0.95
# (topk, steps, nodes), page size.
TREE, CHAIN = ((4, 4, 12), 4), ((1, 4, 5), 4)
FAULTS = [
    *(("draft", name) for name in sorted(DRAFT_FAULTS)),
    *(("draft", name) for name in ("real_kv_used", "record", "early_free")),
    *(("target", name) for name in ("skipped_move", "input_token")),
]
IN_CI = {("draft", "branch_offset"), ("draft", "skip_draft_extend")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_mock_models(tmp_path_factory.mktemp("mock"))


@pytest.mark.parametrize(
    ("pool", "name"), FAULTS if is_full() else sorted(IN_CI), ids=str
)
def test_planted_faults_appear_at_the_same_forward(
    models: dict[str, Path], pool: str, name: str, tmp_path: Path
) -> None:
    """From the engine's start, and from checkpoint: drafts are drawn again there."""
    reproduced = 0
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        plant_in(
            pool,
            name,
            seed=seed,
            **models,
            tree=TREE[0],
            page_size=TREE[1],
            kv_canary_report_dir=str(folder),
            kv_canary_report_tokens=True,
            kv_canary_record=(6, LONG_AGO)[seed % 2],
        )
        reproduced += main([str(next(folder.glob("*.json")))]) == 0
    assert reproduced >= REQUIRED_SHARE * SEEDS


@pytest.mark.parametrize(
    ("kind", "tree", "page_size"),
    [("EAGLE", *TREE), ("EAGLE", *CHAIN), ("STANDALONE", *TREE)],
    ids=str,
)
def test_a_clean_run_replays_clean(
    models: dict[str, Path],
    kind: str,
    tree: tuple[int, int, int],
    page_size: int,
    tmp_path: Path,
) -> None:
    if kind == "STANDALONE":
        models = write_mock_models(tmp_path / kind, kind=kind, source=None)
    for seed in range(count(ci=1, full=20)):
        harness = speculating(
            models["model"],
            models["draft"],
            speculative_algorithm=kind,
            tree=tree,
            page_size=page_size,
            kv_canary_report_dir=str(tmp_path),
            kv_canary_report_tokens=True,
            kv_canary_record=(7, LONG_AGO)[seed % 2],
        )
        traffic = SpecTraffic(harness, seed=seed)
        for step in range(30):
            traffic.on_step(step)
            harness.scheduler.step()
        record = record_of(harness)
        assert (record.checkpoint is not None) == (not seed % 2)
        check_same(replayed(record), record)


@pytest.mark.parametrize("kind", ["EAGLE", "STANDALONE"])
@pytest.mark.parametrize("forwards", [7, LONG_AGO])
@pytest.mark.parametrize("ring", [eagle_catch_up.MAX_BEHIND, 2])
def test_shapes_that_change_replay(
    models: dict[str, Path],
    kind: str,
    ring: int,
    forwards: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each iteration gets its shape again, and a draft catches up where it did, or its
    request is prefilled again."""
    monkeypatch.setattr(eagle_catch_up, "MAX_BEHIND", ring)
    if kind == "STANDALONE":
        models = write_mock_models(tmp_path / kind, kind=kind, source=None)
    harness = speculating(
        models["model"],
        models["draft"],
        speculative_algorithm=kind,
        tree=TREE[0],
        page_size=TREE[1],
        speculative_adaptive=True,
        skip_server_warmup=True,
        kv_canary_report_dir=str(tmp_path),
        kv_canary_report_tokens=True,
        kv_canary_record=forwards,
    )
    shapes = harness.scheduler.shapes
    shapes.policy = InTurn(shapes, 3)
    traffic = SpecTraffic(harness, seed=1)
    for step in range(40):
        traffic.on_step(step)
        harness.scheduler.step()
    record = record_of(harness)
    retracted = harness.scheduler.stats_snapshot().num_retracted_reqs
    assert (retracted > 0) == (ring == 2)
    assert (record.checkpoint is not None) == (forwards == 7)
    assert len({round_.shape for round_ in record.rounds}) == len(shapes.ladder)
    check_same(replayed(record), record)


@pytest.mark.parametrize("forwards", [7, LONG_AGO])
def test_ngram_drafts_replay(
    models: dict[str, Path], forwards: int, tmp_path: Path
) -> None:
    """They are read from the tokens since the checkpoint, and from no earlier ones."""
    harness = EngineHarness(
        models["model"],
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        max_total_tokens=4096,
        max_running_requests=8,
        skip_tokenizer_init=True,
        kv_canary="raise",
        kv_canary_report_dir=str(tmp_path),
        kv_canary_report_tokens=True,
        kv_canary_record=forwards,
    )
    recorder = AcceptRecorder(harness.scheduler)
    prompt = [5, 9, 20, 44] * 4
    for i in range(20):
        if i % 4 == 0:
            harness.submit(prompt, rid=str(i), max_new_tokens=60, ignore_eos=True)
        harness.scheduler.step()
    assert recorder.mean() > 1.5
    record = record_of(harness)
    assert (record.checkpoint is not None) == (forwards == 7)
    check_same(replayed(record), record)


def test_a_draft_in_the_targets_folder_moves_with_it() -> None:
    """A replay of the record of another machine, where the model lies elsewhere."""
    recorded = {"model_path": "a", "speculative_draft_model_path": "a"}
    other = recorded | {"speculative_draft_model_path": "b"}
    here = Setting(model_path="here")
    assert here.target_path(recorded) == here.draft_path(recorded) == "here"
    assert here.draft_path(other) == "b"
    assert here.draft_path({"model_path": "a"}) is None
    both = Setting(model_path="here", draft_model_path="there")
    assert both.draft_path(recorded) == "there"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
