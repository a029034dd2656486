"""Snapshots of a scheduler while it runs: frames, requests, records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduler_world import CONTEXT, VOCAB, engine, prompt_of

from sglang.srt.managers.messages.io_struct import (
    FlushCacheReq,
    FlushCacheRsp,
    GetSlotReq,
    GetSlotRsp,
    GetSnapshotReq,
    GetSnapshotRsp,
)
from sglang.srt.managers.messages.pool_snapshot import PageFrame, PoolSnapshot
from sglang.srt.mem_cache.page_map import PageState
from sglang.srt.mem_cache.state_map import SlotColumn, SlotState
from sglang.srt.mem_cache.tree_table import TreeColumn
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import sampled
from sglang.test.tiny_models import MOCK_STATE, write_mock_model

register_cpu_ci(est_time=5, suite="cpu")

PAGE = 4


class Mirror:
    """The pages of a viewer, who knows nothing but the frames."""

    def __init__(self) -> None:
        self.seq: int | None = None
        self.cells = np.empty(0, np.int32)
        self.written = np.empty(0, np.int32)

    def take(self, frames: list[PageFrame]) -> None:
        """Apply the changes where they fit, else all pages."""
        for frame in frames:
            cells, written = map(ints, (frame.cells, frame.written))
            if frame.base is None:
                if self.seq != frame.seq:
                    self.cells, self.written = cells.copy(), written.copy()
            elif frame.base == self.seq:
                at = ints(frame.at)
                self.cells[at] = cells
                if len(written):
                    self.written[at] = written
            else:
                continue
            self.seq = frame.seq

    def states(self) -> dict[str, int]:
        found = np.bincount(self.cells & 7, minlength=len(PageState))
        return {s.name: int(found[s]) for s in PageState if found[s]}

    def holders(self) -> set[int]:
        return set((self.cells >> 4).tolist()) - {0}


def ints(data: bytes) -> Any:
    return np.frombuffer(data, dtype="<i4")


def ask(harness: EngineHarness, message: Any, kind: type[Any]) -> Any:
    """The scheduler's answer, of a step of its own."""
    harness.io.requests.append(message)
    harness.scheduler.step()
    (answer,) = [m for m in harness.io.responses if isinstance(m, kind)]
    harness.io.responses.remove(answer)
    return answer


def look(harness: EngineHarness, *, is_whole: bool = False) -> PoolSnapshot:
    question = GetSnapshotReq(call_id=1, is_whole=is_whole)
    answer: GetSnapshotRsp = ask(harness, question, GetSnapshotRsp)
    assert answer.stats.max_total_num_tokens == harness.scheduler.cache.allocator.size
    return answer.snapshot


def records(harness: EngineHarness, slot: int) -> list[dict[str, Any]]:
    answer: GetSlotRsp = ask(harness, GetSlotReq(call_id=2, slot=slot), GetSlotRsp)
    return answer.records


def run_looking(
    harness: EngineHarness, on_snapshot: Callable[[PoolSnapshot], None]
) -> None:
    """Run to the end and look once in three steps."""
    while harness.io.requests or harness.scheduler.has_work():
        on_snapshot(look(harness))
        for _ in range(2):
            harness.scheduler.step()


@pytest.mark.parametrize(
    ("kind", "canary"),
    sampled(
        [
            (kind, canary)
            for kind in ("spec", "spec-overlap", "plain", "overlap")
            for canary in ("none", "heal")
        ],
        key=lambda variant: None,
        ci=2,
    ),
)
def test_frames_add_up_to_the_whole_map_and_name_every_holder(
    models: Path, kind: str, canary: str
) -> None:
    harness = engine(
        models, kind, kv_canary=canary, page_size=PAGE, max_total_tokens=CONTEXT * 2
    )
    num_pages = CONTEXT * 2 // PAGE
    mirror = Mirror()
    seen: set[str] = set()
    rids: set[str] = set()

    def check(snapshot: PoolSnapshot) -> None:
        mirror.take(snapshot.frames)
        whole = look(harness, is_whole=True)
        mirror.take(whole.frames)
        (everything,) = [frame for frame in whole.frames if frame.base is None]
        assert np.array_equal(mirror.cells, ints(everything.cells))
        assert np.array_equal(mirror.written, ints(everything.written))
        states = mirror.states()
        assert sum(states.values()) == num_pages == whole.pool.num_pages
        assert "UNKNOWN" not in states, states
        seen.update(states)
        tree = ints(whole.tree).reshape(-1, len(TreeColumn))
        listed = {view.serial for view in whole.requests}
        listed |= {-serial for serial in tree[:, TreeColumn.SERIAL].tolist()}
        assert mirror.holders() <= listed
        for view in whole.requests:
            rids.add(view.rid)
            if view.tail_page:
                owner = int(mirror.cells[view.tail_page - 1]) >> 4
                assert owner == view.serial or owner < 0
                assert view.tail_fill == (view.committed_len - 1) % PAGE + 1

    for i in range(3):
        harness.submit(prompt_of(30, start=i % 2), rid=f"r{i}", max_new_tokens=24)
    run_looking(harness, check)
    check(look(harness))
    assert rids == {"r0", "r1", "r2"}
    assert {"RUNNING", "CACHED", "LOCKED", "FREE"} <= seen
    assert ("DRAFT" in seen) == kind.startswith("spec")
    # Records say which free pages were in use; without them nobody knows.
    assert ("POISONED" in seen) == (canary != "none")
    assert bool(len(mirror.written)) == (canary != "none")


def test_a_damaged_page_is_shown_as_long_as_it_is_watched(models: Path) -> None:
    harness = engine(
        models, "plain", kv_canary="heal", kv_canary_real_data="all", page_size=PAGE
    )
    harness.submit(prompt_of(30), rid="hit", max_new_tokens=20)
    for _ in range(4):
        harness.scheduler.step()
    (view,) = look(harness).requests
    slot = (view.tail_page - 1) * PAGE
    harness.scheduler.worker.model_runner.token_to_kv_pool.get_kv_buffer(0)[0][
        slot
    ] += 1
    seen = []
    mirror = Mirror()

    def check(snapshot: PoolSnapshot) -> None:
        mirror.take(snapshot.frames)
        seen.append((mirror.cells[slot // PAGE - 1] & 7, snapshot.requests))

    mirror.take(look(harness, is_whole=True).frames)
    while harness.scheduler.has_work():
        check(look(harness))
    assert PageState.QUARANTINED in [state for state, _ in seen]
    assert max(view.num_heals for _, views in seen for view in views) == 1
    assert seen[-1][0] != PageState.QUARANTINED


def test_the_record_of_a_slot_says_who_wrote_and_who_freed_it(models: Path) -> None:
    harness = engine(models, "plain", kv_canary="raise", page_size=PAGE)
    harness.submit(prompt_of(10), rid="writer", max_new_tokens=12)
    for _ in range(4):
        harness.scheduler.step()
    (view,) = look(harness).requests
    slot = view.tail_page * PAGE + view.tail_fill - 1
    (record,) = records(harness, slot)
    assert (record["pool"], record["group"], record["slot"]) == ("target", "full", slot)
    assert record["state"] == "live" and record["token"] is None
    assert record["position"] == view.committed_len - 1
    assert record["writer"]["rid"] == "writer"
    assert record["writer"]["kind"] == "decode"
    snapshot = look(harness, is_whole=True)
    assert snapshot.clocks[0] > record["writer"]["forward"] > 1
    # A page's clock is that of its first slot.
    written = ints(snapshot.frames[-1].written)
    (first,) = records(harness, view.tail_page * PAGE)
    assert written[view.tail_page - 1] == first["writer"]["forward"]

    harness.run()
    # A freed page is poisoned before the next forward.
    ask(harness, FlushCacheReq(call_id=3), FlushCacheRsp)
    harness.submit(prompt_of(3, start=500), rid="other", max_new_tokens=1)
    harness.run()
    last = harness.scheduler.cache.allocator.num_pages
    (never,) = records(harness, last * PAGE)
    assert never["state"] == "never written" and never["writer"]["rid"] is None
    mirror = Mirror()
    mirror.take(look(harness, is_whole=True).frames)
    poisoned = np.flatnonzero(mirror.cells & 7 == PageState.POISONED) + 1
    assert len(poisoned) >= 3
    for page in poisoned.tolist():
        (record,) = records(harness, page * PAGE)
        assert record["state"] == "freed"
        assert record["writer"]["kind"] == "poison"
        assert record["writer"]["rid"] == "writer"


def test_a_torn_record_and_tokens_are_shown_where_reports_may_hold_them(
    models: Path,
) -> None:
    harness = engine(
        models, "plain", kv_canary="log", kv_canary_report_tokens=True, page_size=PAGE
    )
    prompt = prompt_of(10)
    harness.submit(prompt, max_new_tokens=8)
    for _ in range(3):
        harness.scheduler.step()
    (manager,) = harness.scheduler.worker.canary_managers()
    slot = PAGE + 1
    assert records(harness, slot)[0]["token"] == prompt[1]
    manager.target.buffers.state.tail[slot, 1] += 1
    assert records(harness, slot)[0]["state"] == "torn"


def test_pages_out_of_the_window_have_lost_their_window_slots(tmp_path: Path) -> None:
    model = write_mock_model(
        tmp_path / "windows",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
    )
    harness = EngineHarness(
        model, kv_canary="raise", page_size=PAGE, skip_tokenizer_init=True
    )
    harness.submit(prompt_of(100), rid="slides", max_new_tokens=60)
    for _ in range(50):
        harness.scheduler.step()
    snapshot = look(harness, is_whole=True)
    mirror = Mirror()
    mirror.take(snapshot.frames)
    has_window = (mirror.cells & 8) != 0
    (view,) = snapshot.requests
    assert 0 < has_window.sum() < view.committed_len // PAGE
    assert has_window[view.tail_page - 1] and not has_window[mirror.cells == 0].any()
    pool = snapshot.pool
    in_use = pool.num_window_pages - pool.num_free_window_pages
    assert in_use == has_window.sum()
    groups = [r["group"] for r in records(harness, view.tail_page * PAGE)]
    assert groups == ["full", "swa"]
    first = int(np.flatnonzero((mirror.cells != 0) & ~has_window)[0]) + 1
    assert [r["group"] for r in records(harness, first * PAGE)] == ["full"]


def test_states_and_checkpoints_are_shown_with_their_holders(tmp_path: Path) -> None:
    model = write_mock_model(
        tmp_path / "states",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        **MOCK_STATE,
    )
    rows, size = 4, 12
    harness = EngineHarness(
        model,
        kv_canary="heal",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=1,
        max_running_requests=rows,
        max_mamba_cache_size=rows + size,
        mamba_track_interval=8,
        skip_tokenizer_init=True,
    )
    cache = harness.scheduler.cache
    seen = []

    def check(snapshot: PoolSnapshot) -> None:
        table = ints(snapshot.states).reshape(-1, len(SlotColumn))
        assert len(table) == rows + size and snapshot.pool.num_request_states == rows
        runs = ints(snapshot.tree).reshape(-1, len(TreeColumn))
        last = runs[:, TreeColumn.START] + runs[:, TreeColumn.LENGTH]
        ends = dict(zip(runs[:, TreeColumn.SERIAL], last, strict=True))
        lengths = {view.serial: view.committed_len for view in snapshot.requests}
        states = table[:, SlotColumn.STATE]
        for slot, (state, position, holder) in enumerate(table.tolist(), start=1):
            assert slot > rows or state <= SlotState.RUNNING
            if state == SlotState.CHECKPOINT:
                assert ends[-holder] == position
            elif state == SlotState.RUNNING:
                assert lengths[holder] == position
            elif state == SlotState.TAKEN:
                assert position % 8 == 0 and 0 < position <= lengths[holder]
            else:
                assert position == holder == 0
        seen.append(np.bincount(states, minlength=len(SlotState)))

    for i in range(3):
        harness.submit(prompt_of(70, start=i), rid=f"r{i}", max_new_tokens=30)
    run_looking(harness, check)
    check(look(harness))
    # Damage is found by the next sweep, while something runs.
    slots = [
        cache.checkpoints.slot_at(n)
        for n in cache.iter_nodes()
        if cache.checkpoints.has_checkpoint(n)
    ]
    harness.scheduler.worker.model_runner.state_pool.conv[slots[0]] += 1
    harness.submit(prompt_of(5, start=9), rid="other", max_new_tokens=6)
    while harness.io.requests or harness.scheduler.has_work():
        check(look(harness))
    check(look(harness))
    assert (np.max(seen, axis=0) > 0).all(), "a state was never shown"
    assert seen[-1][SlotState.RUNNING] == seen[-1][SlotState.QUARANTINED] == 0


def test_a_model_without_states_shows_none(models: Path) -> None:
    snapshot = look(engine(models, "plain", page_size=PAGE))
    assert snapshot.states == b"" and snapshot.pool.num_request_states == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
