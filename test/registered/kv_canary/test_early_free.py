"""Frees that come too early or twice, and writes into slots of another request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary.reporter import CanaryViolation
from sglang.test.canary_traffic import VOCAB, Outcome, canary_of, plant
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=40, suite="cuda")

SEEDS = range(count(ci=3, full=20))
PROMPT = list(range(40))


# -- frees through the allocator ---------------------------------------------------


def decoding(model: Path, *, page_size: int, **options: Any) -> EngineHarness:
    """One request, some tokens into its answer."""
    harness = EngineHarness(
        model,
        page_size=page_size,
        max_total_tokens=512,
        skip_tokenizer_init=True,
        **options,
    )
    harness.submit(PROMPT, rid="victim", max_new_tokens=100, ignore_eos=True)
    for _ in range(8):
        harness.scheduler.step()
    return harness


def free_early(harness: EngineHarness) -> torch.Tensor:
    """Free pages of a running request that does not notice: the last whole ones that it
    owns alone."""
    scheduler = harness.scheduler
    assert scheduler.running is not None
    (req,) = scheduler.running.reqs
    slots = scheduler.cache.req_to_token_pool.row_slots(req.req_pool_idx, 0, 44)
    scheduler.cache.allocator.free(slots[40:44].clone())
    return slots[40:44]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_double_free_is_refused_by_name(model: Path, page_size: int) -> None:
    """Without the canary the allocator notices when the request ends: at once, or after
    it took the same pages again for its new tokens."""
    pattern = r"double free of slot (\d+) \(page (\d+)\): "
    for is_aborted, why in (
        (True, "the page is free already"),
        (False, "given twice in one call"),
    ):
        harness = decoding(
            model, kv_canary="none", page_size=page_size, disable_radix_cache=True
        )
        slots = free_early(harness).tolist()
        if is_aborted:
            harness.abort("victim")
        with pytest.raises(RuntimeError, match=pattern + why) as refused:
            harness.run()
        match = re.search(pattern, str(refused.value))
        assert match is not None
        slot, page = map(int, match.groups())
        assert slot in slots
        assert page == slot // page_size


def test_a_free_of_what_is_cached_later_is_refused_by_name(model: Path) -> None:
    """Without the canary the prefix cache takes the pages; the idle check finds it."""
    harness = decoding(model, kv_canary="none", page_size=1)
    free_early(harness)
    with pytest.raises(RuntimeError, match="at idle: 4 slots counted twice"):
        harness.run()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_read_after_free_is_found_at_once(model: Path, page_size: int) -> None:
    harness = decoding(model, kv_canary="raise", page_size=page_size)
    manager = canary_of(harness)
    assert harness.scheduler.running is not None
    (req,) = harness.scheduler.running.reqs
    forwards, allocated = manager.num_forwards, req.allocated_len
    slots = free_early(harness).tolist()
    with pytest.raises(CanaryViolation, match="verify_freed"):
        harness.run()
    # With overlap one more was launched before the result was seen.
    overlap = harness.scheduler.max_in_flight
    assert manager.num_forwards == forwards + 1 + overlap
    (incident,) = manager.reporter.incidents
    found = {v["slot"]: v for v in incident["violations"]}
    assert set(slots) == set(found)
    # Slots that the victim got again, for new tokens, are written by the launch that
    # reads them (`triton/before.py`).
    row, end = req.req_pool_idx, req.allocated_len
    new = harness.scheduler.cache.req_to_token_pool.row_slots(
        row, allocated, end
    ).tolist()
    again = set(new) & set(slots)
    assert len(again) == len(new) or page_size > 1
    for position, slot in enumerate(slots, start=40):
        violation = found[slot]
        assert violation["rid"] == violation["writer"]["rid"] == "victim"
        assert violation["position"] == position
        ways = {"use after free"} | ({"torn write"} if slot in again else set())
        assert violation["diagnosis"] in ways


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_that_got_a_new_owner_too_early(model: Path, page_size: int) -> None:
    """The freed pages are written by another request before the next read."""
    harness = decoding(model, kv_canary="raise", page_size=page_size)
    slots = free_early(harness).tolist()
    harness.submit([999] * 60, rid="thief", max_new_tokens=100, ignore_eos=True)
    with pytest.raises(CanaryViolation):
        harness.run()
    incident = canary_of(harness).reporter.incidents[-1]
    stolen = [v for v in incident["violations"] if v["slot"] in slots]
    assert {v["slot"] for v in stolen} == set(slots)
    for violation in stolen:
        assert violation["rid"] == "victim"
        assert violation["writer"]["rid"] == "thief"
        assert {"verify_lineage", "verify_position"} & set(violation["reasons"])
        # The thief's prompt is in the prefix cache by now; under overlap the victim may
        # have ended.
        assert violation["owner"] in ('request "victim", prefix cache', "prefix cache")


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_fault_point(
    model: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EARLY_FREE: the last forward of the request reads freed slots and is reported;
    every other token was sent."""
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", "EARLY_FREE")
    harness = EngineHarness(
        model, page_size=page_size, skip_tokenizer_init=True, kv_canary="raise"
    )
    harness.submit(PROMPT, rid="victim", max_new_tokens=10, stream=True)
    with pytest.raises(CanaryViolation, match="verify_freed"):
        harness.run()
    (incident,) = canary_of(harness).reporter.incidents
    # The cached part of the prompt stays (where steps overlap, the first output
    # token had a slot when it was cached); the token at 48 is this forward's own.
    cached = 40 + harness.scheduler.max_in_flight
    own = range(cached // page_size * page_size, 48)
    assert sorted(v["position"] for v in incident["violations"]) == list(own)
    assert {v["rid"] for v in incident["violations"]} == {"victim"}
    said = harness.collect()["victim"].output_ids
    predicted = next_tokens(PROMPT + said, vocab_size=VOCAB)
    assert said == predicted[len(PROMPT) - 1 : -1]
    assert len(said) == 9


# -- tokens that clients got -------------------------------------------------------


def assert_all_said_is_true(outcome: Outcome) -> None:
    assert outcome.said
    for rid, said in outcome.said.items():
        prompt = outcome.asked[rid]
        predicted = next_tokens(prompt + said, vocab_size=VOCAB)
        assert said == predicted[len(prompt) - 1 : -1], rid


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_into_another_prefix(
    model: Path, page_size: int, overlap: bool, seed: int
) -> None:
    """It is found in the same forward; no token of that step is sent to anybody."""
    outcome = plant(
        model, "write_foreign", seed=seed, page_size=page_size, overlap=overlap
    )
    damage = outcome.planted.damage
    assert outcome.forward == outcome.planted.clock
    foreign = [v for v in outcome.violations if "write_foreign" in v["reasons"]]
    (writer,) = [v for v in foreign if v["slot"] == damage.slot]
    assert writer["request_row"] == damage.req_row
    assert writer["position"] == damage.position
    assert writer["launch"] == "head"
    assert writer["rid"] != writer["writer"]["rid"]
    assert_all_said_is_true(outcome)
    # A token at position p is written in the step after the one that sampled it.
    prompt = outcome.asked[writer["rid"]]
    assert len(outcome.said[writer["rid"]]) == damage.position - len(prompt) + 1


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize(
    "name", ["early_free", "alias_row", "recycle_row", "real_kv_used", "shift_view"]
)
def test_nothing_false_is_said(model: Path, name: str, overlap: bool) -> None:
    """No token of the step that read or wrote the damage is sent."""
    for seed in SEEDS:
        outcome = plant(model, name, seed=seed, overlap=overlap)
        assert outcome.forward == outcome.planted.clock
        assert_all_said_is_true(outcome)


# -- python -O ---------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
from sglang.test.canary_traffic import plant
assert False, "-O is off"
outcome = plant(Path(sys.argv[1]), sys.argv[2], seed=0)
print(json.dumps([outcome.forward, outcome.text, outcome.violations, outcome.said]))
"""


@pytest.mark.parametrize(
    "name", sampled(["early_free", "write_foreign"], key=type, ci=1)
)
def test_python_o_changes_nothing(model: Path, name: str) -> None:
    here = plant(model, name, seed=0)
    result = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT, str(model), name],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    there = json.loads(result.stdout.splitlines()[-1])
    assert there == [here.forward, here.text, here.violations, here.said]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
