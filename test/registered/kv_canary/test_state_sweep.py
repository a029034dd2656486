"""Sweeps over checkpoints of recurrent state: what a pass takes, how soon it names
damage, and what `heal` does about it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from heal_world import healer_of, healing, heals, is_exact
from state_world import ROWS, STATES, options, write_model

from kv_canary.records import Counter
from kv_canary.reporter import CanaryViolation
from sglang.srt.kv_canary.runner.state_sweep import StateSweeper
from sglang.test.canary_traffic import VOCAB, canary_of, faults_of
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu", full_time=60)
register_cuda_ci(est_time=20, suite="cuda")

SEEDS = range(count(ci=2, full=20))
BUDGET = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mock"))


def prompts(seed: int, number: int = 10) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(150)]
    return [
        stem[: rng.choice((0, 100, 150))]
        + [rng.randrange(VOCAB) for _ in range(rng.randrange(70, 140))]
        for _ in range(number)
    ]


def swept(model: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> EngineHarness:
    """An engine that verifies `BUDGET` checkpoints in every launch."""
    harness = healing(
        model,
        **options(1, False, -1)
        | {"kv_canary_sweep_interval": 1, "kv_canary_real_data": "all"}
        | more,
    )
    for sweeper in sweepers(harness):
        monkeypatch.setattr(sweeper, "_budget", BUDGET)
    return harness


def sweepers(harness: EngineHarness) -> list[StateSweeper]:
    manager = canary_of(harness)
    return [own for own in manager._sweepers if isinstance(own, StateSweeper)]


def fill(harness: EngineHarness, seed: int) -> int:
    """Leave checkpoints in the cache; returns their number."""
    for i, prompt in enumerate(prompts(seed)):
        harness.submit(prompt, rid=f"fills{i}", max_new_tokens=3)
    harness.run()
    return int(harness.scheduler.cache.checkpoints.evictable_size())


def start_other(harness: EngineHarness, tokens: int = 26) -> str:
    """Decode something; with 26 tokens it leaves no checkpoint of its own."""
    return harness.submit([7] * 5, max_new_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flipped_bit_is_named_within_two_rotations(
    model: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """While another request decodes, which reads no checkpoint."""
    overlap = bool(seed % 2)
    engine = options(4, overlap, (64, -1, 128)[seed % 3])
    harness = swept(model, monkeypatch, kv_canary="raise", **engine)
    cached = fill(harness, seed)
    assert cached > BUDGET
    start_other(harness, tokens=100)
    for _ in range(1 + seed % 5):
        harness.scheduler.step()
    (sweeper,), faults = sweepers(harness), faults_of(harness)
    faults.arm("checkpoint_bytes", seed=seed, group="state")
    before = sweeper.passes
    with pytest.raises(CanaryViolation, match=r"launch_tag=target.sweep group=state"):
        harness.run()
    damage = faults.planted[0].damage
    (found,) = canary_of(harness).reporter.incidents[-1]["violations"]
    assert found["position"] == damage.position
    assert found["slot"] == damage.slot > ROWS
    assert found["owner"] == "a checkpoint"
    assert found["reasons"] == ["verify_real_kv"]
    assert (found["launch"], found["forward_mode"]) == ("sweep", "sweep")
    assert (found["rid"], found["request_row"], found["batch_row"]) == (None, 0, -1)
    passes = sweeper.passes - before
    assert passes <= 2 * math.ceil(cached / BUDGET) + harness.scheduler.max_in_flight


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_checkpoint_is_dropped_and_never_restored(
    model: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    harness = swept(model, monkeypatch, **options(1, bool(seed % 2), -1))
    fill(harness, seed)
    checkpoints = harness.scheduler.cache.checkpoints
    other, quarantine = start_other(harness), healer_of(harness).checkpoint_quarantine
    faults = faults_of(harness)
    faults.arm("checkpoint_bytes", seed=seed, group="state")
    seen = set()

    def on_step(step: int) -> None:
        seen.update(quarantine.pages.tolist())

    answers = harness.run(on_step=on_step)
    damage = faults.planted[0].damage
    assert heals(harness) == 1 and seen == {damage.slot}
    (incident,) = harness.scheduler.own_incidents()
    done = incident["healing"]
    assert done["checkpoints_watched"] == [damage.slot]
    assert (done["num_recomputed"], done["num_ended"]) == (0, 0)
    assert done["cached_tokens_cut"] == 0
    assert is_exact([7] * 5, answers[other])
    # It was left alone, so others may have the slot.
    assert quarantine.num_pages == 0 and not checkpoints.slots.is_used(damage.slot)
    met = harness.submit(damage.prompt, max_new_tokens=5, ignore_eos=True)
    answer = harness.run()[met]
    assert is_exact(damage.prompt, answer)
    assert answer.cached_tokens <= damage.position
    assert len(harness.scheduler.own_incidents()) == 1
    assert_none_lost(harness)


def assert_none_lost(harness: EngineHarness, kept: int = 0) -> None:
    cache = harness.scheduler.cache
    cache.check()
    cache.reset()
    assert cache.checkpoints.slots.available_size() == STATES - ROWS - kept


def test_a_slot_that_changes_while_it_is_watched_stays_out_of_use(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = swept(model, monkeypatch, kv_canary_quarantine_limit=0.05)
    for round_ in range(4):
        cached = fill(harness, round_)
        assert cached
        faults = faults_of(harness)
        faults.arm("checkpoint_bytes", seed=round_, group="state")
        quarantine = healer_of(harness).checkpoint_quarantine
        start_other(harness)
        damaged = []

        def on_step(step: int, quarantine=quarantine, damaged=damaged) -> None:
            for slot in set(quarantine.pages.tolist()).difference(quarantine.kept):
                canary_of(harness).target.states.pool.conv[slot] += 1
                damaged.append(slot)

        if round_ < 3:
            harness.run(on_step=on_step)
            assert len(quarantine.kept) == round_ + 1 and damaged[0] in quarantine.kept
            # The cache is cleared, and the slot stays aside.
            assert_none_lost(harness, kept=round_ + 1)
            continue
        # 4 of 64 are more than 5 %.
        with pytest.raises(CanaryViolation, match="4 of 64 checkpoints of recurrent"):
            harness.run(on_step=on_step)


def test_passes_rotate_over_what_is_cached(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = swept(model, monkeypatch, kv_canary="raise", kv_canary_sweep_interval=999)
    (sweeper,) = sweepers(harness)
    assert sweeper.run() == 0 and sweeper.passes == 0
    cached = fill(harness, 1)
    passes = [sweeper.next_nodes() for _ in range(math.ceil(cached / BUDGET))]
    assert all(len(nodes) <= BUDGET for nodes in passes)
    visited = [id(node) for nodes in passes for node in nodes]
    assert len(set(visited)) == len(visited) == cached
    # Evicted ones are left out.
    harness.scheduler.cache.checkpoints.evict(cached - 1)
    assert len({id(node) for _ in passes for node in sweeper.next_nodes()}) <= 1
    counters = canary_of(harness).target.states.state.counters
    before = counters.tolist()
    assert sweeper.run() + sweeper.run() >= 1
    after = counters.tolist()
    assert after[Counter.SWEPT_SLOTS] > before[Counter.SWEPT_SLOTS]
    assert after[Counter.SWEEP_LAUNCHES] > before[Counter.SWEEP_LAUNCHES]
    for same in (Counter.VERIFIED_SLOTS, Counter.VERIFY_LAUNCHES):
        assert after[same] == before[same]


@pytest.mark.parametrize("word", ["position", "lineage", "poison", "run"])
def test_records_that_do_not_fit_the_run(
    model: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    harness = swept(model, monkeypatch, kv_canary="raise", kv_canary_real_data="none")
    fill(harness, 2)
    manager = canary_of(harness)
    states, primary = manager.target.states, manager.target.groups[0]
    node = next(
        node
        for node in harness.scheduler.cache.iter_nodes()
        if harness.scheduler.cache.checkpoints.has_checkpoint(node)
    )
    slot = harness.scheduler.cache.checkpoints.slot_at(node)
    reason = f"verify_{word}"
    if word == "position":
        states.state.tail[slot, 0] -= 1 << 32
    elif word == "lineage":
        states.state.tail[slot, 1] ^= 1
    elif word == "poison":
        states.poison(states.state.counters.new_tensor([slot]))
        reason = "verify_freed"
    else:
        primary.state.tail[int(node.slots[-1]), 1] ^= 1
        reason = "verify_lineage"
    start_other(harness)
    with pytest.raises(CanaryViolation, match="launch_tag=target.sweep"):
        harness.run()
    violations = manager.reporter.incidents[-1]["violations"]
    (found,) = [one for one in violations if one["group"] == "state"]
    assert (found["slot"], found["position"]) == (slot, node.end - 1)
    assert found["reasons"] == [reason]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
