"""Every injector is reported with the expected reason, by the first forward (or sweep
pass) that reads its damage, and under the right request, slot and position."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kv_canary.checks import Reason, reason_labels
from kv_canary.faults.catalogue import POOL_FAULTS
from sglang.test.canary_traffic import Forward, Outcome, plant
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

SEEDS = range(count(ci=2, full=20))
PAGE_SIZES = [1, 4, 16]
# Found by the sweep or by a hit, whichever comes first.
CACHED = "real_kv_unused_cache"
# So small that a rotation has many passes.
SWEEP_BUDGET, SWEEP_INTERVAL = 64, 2

each_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


def fitting(outcome: Outcome, reasons: Reason) -> list[dict[str, Any]]:
    """The violations that have one of the expected reasons, of the forward that found
    the first: where steps overlap, the next one has run before the engine stops."""
    allowed = set(reason_labels(reasons))
    found = [v for v in outcome.violations if allowed & set(v["reasons"])]
    assert found, outcome.text
    first = min(v["forward"] for v in found)
    return [v for v in found if v["forward"] == first]


def first_read(outcome: Outcome) -> Forward:
    """The forward that first reads the damage, by the host's records."""
    damage, since = outcome.planted.damage, outcome.since_planted()
    if damage.undo is not None or outcome.planted.name == "write_foreign":
        return since[0]  # it lasts for the forward whose row it is
    slots = {slot for slot, _ in damage.places}
    return next(forward for forward in since if forward.reads(slots))


def check_place(outcome: Outcome, found: list[dict[str, Any]]) -> None:
    """Only the fault's own places are named, and the required one is, under the request
    that it was planted on. Others may read the same slots by right."""
    damage, forward = outcome.planted.damage, first_read(outcome)
    victim = outcome.rids.get(damage.serial)
    for violation in found:
        slot, position = violation["slot"], violation["position"]
        assert (slot, position) in damage.places
        if violation["rid"] != victim:
            readers = [row for row in forward.rows if row.rid == violation["rid"]]
            is_swept = violation["launch"] == "sweep" and slot in forward.swept
            assert is_swept or any(
                slot in row.slots or damage.undo is not None for row in readers
            )
    named = [v for v in found if v["rid"] == victim] if damage.serial else found
    places = {(v["slot"], v["position"]) for v in named}
    assert (damage.slot, damage.position) in places
    rows = {v["request_row"] for v in named}
    assert rows == {damage.req_row}


@each_page_size
@pytest.mark.parametrize("name", sorted(set(POOL_FAULTS) - {CACHED, "phantom_prefix"}))
def test_is_reported_at_once(model: Path, name: str, page_size: int) -> None:
    for seed in SEEDS:
        outcome = plant(model, name, seed=seed, page_size=page_size)
        found = fitting(outcome, POOL_FAULTS[name].reasons)
        assert outcome.forward == first_read(outcome).clock, (seed, outcome.text)
        check_place(outcome, found)


@each_page_size
def test_damage_of_what_only_the_cache_holds(
    model: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep that reaches it, or a hit before that; two rotations at most."""
    monkeypatch.setenv("SGLANG_KV_CANARY_SWEEP_BUDGET", str(SWEEP_BUDGET))
    launches = set()
    for seed in SEEDS:
        outcome = plant(
            model,
            CACHED,
            seed=seed,
            page_size=page_size,
            kv_canary_sweep_interval=SWEEP_INTERVAL,
        )
        damage = outcome.planted.damage
        assert outcome.forward == first_read(outcome).clock, (seed, outcome.text)
        until = [f for f in outcome.since_planted() if f.clock <= outcome.forward]
        passes = sum(bool(forward.swept) for forward in until)
        assert passes <= 2 * math.ceil(outcome.cached / SWEEP_BUDGET)
        assert len(until) <= SWEEP_INTERVAL * (passes + 1)
        for violation in fitting(outcome, POOL_FAULTS[CACHED].reasons):
            assert (violation["slot"], violation["position"]) in damage.places
            launches.add(violation["launch"])
            readers = {
                row.rid
                for row in until[-1].rows
                if damage.slot in row.slots[: row.prefix_len]
            }
            is_swept = violation["launch"] == "sweep"
            assert violation["rid"] in ({None} if is_swept else readers)
    assert "sweep" in launches


@each_page_size
def test_phantom_prefix(model: Path, page_size: int) -> None:
    """Reported by the hit, under the request that got the other prefix: its last cached
    token is not its own, or the first one after the swapped slots has another past."""
    for seed in SEEDS:
        outcome = plant(model, "phantom_prefix", seed=seed, page_size=page_size)
        forward = first_read(outcome)
        assert outcome.forward == forward.clock, (seed, outcome.text)
        rows = {row.rid: row for row in forward.rows}
        end = 1 + max(position for _, position in outcome.planted.damage.places)
        for violation in fitting(outcome, POOL_FAULTS["phantom_prefix"].reasons):
            row, position = rows[violation["rid"]], violation["position"]
            assert position in (end, row.prefix_len - 1)
            assert violation["slot"] == row.slots[position]


@each_page_size
def test_next_token_swap(
    model: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests get each other's token: each is named at the place where the next
    decode step writes it."""
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "1")
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT", "1")
    for seed in SEEDS:
        outcome = plant(model, "next_token_swap", seed=seed, page_size=page_size)
        damage = outcome.planted.damage
        assert damage.other is not None
        ends = {
            outcome.rids[serial]: position
            for serial, position in ((damage.serial, damage.position), damage.other)
        }
        readers, forward = next(
            (readers, forward)
            for forward in outcome.since_planted()
            for readers in [{r.rid: r for r in forward.rows if r.rid in ends}]
            if forward.is_decode and readers
        )
        assert outcome.forward == forward.clock, (seed, outcome.text)
        found = fitting(outcome, Reason.WRITE_TOKEN)
        # One of the two may have ended with the token it was given.
        assert {v["rid"] for v in found} == set(readers)
        for violation in found:
            position = violation["position"]
            assert position == ends[violation["rid"]]
            assert violation["slot"] == readers[violation["rid"]].slots[position]
            assert violation["launch"] == "head"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
