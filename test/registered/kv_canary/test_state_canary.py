"""Faults in recurrent states: each is reported by the forward that reads or leaves the
damage, in the group `state`, under the right request, slot and position, before a wrong
token is sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from state_world import ENGINES, LENGTHS, ROWS, drafting, options, write_model

from kv_canary.checks import reason_labels
from kv_canary.explain import explain
from kv_canary.faults.catalogue import STATE_FAULTS, in_serving
from kv_canary.faults.fault import Bound, Serving
from kv_canary.records import Counter
from kv_canary.reporter import CanaryViolation
from sglang.srt.layers.state.forward import StateForward
from sglang.test.canary_traffic import (
    VOCAB,
    Lengths,
    Outcome,
    canary_of,
    plant,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.hybrid_models import write_hybrid_model
from sglang.test.mock_oracle import next_tokens
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count, is_full, sampled

register_cpu_ci(est_time=25, suite="cpu", full_time=1000)
register_cuda_ci(est_time=120, suite="cuda")

SEEDS = range(count(ci=2, full=20))


def seeds_of(engine: tuple[int, bool, int]) -> Sequence[int]:
    """In CI one for each engine, and both kinds of checks of bytes."""
    return SEEDS if is_full() else [ENGINES.index(engine) % 2]


# What a reader is told first.
DIAGNOSES = {
    "other_state_slot": "wrong state slot",
    "stale_state_slots": "wrong state slot",
    "resumed_in_old_slot": "wrong state slot",
    "early_state_free": "no state in the slot",
    "skipped_restore": "no state in the slot",
    "skipped_fold": "state of one layer behind or ahead",
    "short_checkpoint": "state of one layer behind or ahead",
    "late_checkpoint": "state of another prefix",
    "other_checkpoint": "state of another prefix",
    "state_bytes": "bytes changed in place",
    "checkpoint_bytes": "bytes of a copied state differ",
    "restore_without_conv": "bytes of a copied state differ",
}

each_engine = pytest.mark.parametrize(
    ("page_size", "overlap", "chunk"),
    ENGINES,
    ids=lambda value: f"{value}",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mock"))


def plant_state(
    model: Path, name: str, seed: int, engine: dict[str, Any], **more: Any
) -> Outcome:
    needs_all = STATE_FAULTS[name].needs_all
    return plant(
        model,
        name,
        seed=seed,
        group="state",
        kv_canary_real_data="all" if needs_all or seed % 2 else "partial",
        **{"lengths": LENGTHS} | engine | more,
    )


def check_outcome(outcome: Outcome, name: str) -> None:
    check_report(outcome, name)
    check_sent(outcome)


def check_report(outcome: Outcome, name: str) -> None:
    """The first report has an expected reason and the fault's place, and whatever the
    same forward reports besides follows from it."""
    damage, text = outcome.planted.damage, outcome.text
    allowed = set(reason_labels(STATE_FAULTS[name].reasons))
    first = min(v["forward"] for v in outcome.violations)
    reports = [v for v in outcome.violations if v["forward"] == first]
    assert {v["group"] for v in reports} == {"state"}, text
    found = [v for v in reports if allowed & set(v["reasons"])]
    assert found, text
    if STATE_FAULTS[name].bound in (Bound.HIT, Bound.SWEEP):
        assert first == check_hits(outcome, found)
    else:
        assert first == outcome.planted.clock, text
        assert {(v["slot"], v["position"]) for v in reports} <= damage.places, text
        rid = outcome.rids[damage.serial]
        (named,) = [v for v in found if v["rid"] == rid and v["slot"] == damage.slot]
        assert named["position"] == damage.position
        assert named["request_row"] == damage.req_row


def check_hits(outcome: Outcome, found: list[dict[str, Any]]) -> int:
    """Return the forward in which requests first restored the damaged checkpoint, after
    comparing the reports with them."""
    damage, known = outcome.planted.damage, set(outcome.asked)
    assert damage.prompt is not None
    length = damage.position + 1
    prefix = damage.prompt[:length]
    for forward in outcome.since_planted():
        new = {row.rid: row for row in forward.rows if row.rid in known}
        hits = {
            rid
            for rid, row in new.items()
            if row.prefix_len == length and outcome.asked[rid][:length] == prefix
        }
        if hits:
            assert {v["rid"] for v in found} == hits, outcome.text
            for violation in found:
                assert violation["position"] == damage.position
                assert violation["slot"] == violation["request_row"]
            return forward.clock
        known -= set(new)
    raise AssertionError(f"nothing hit {damage}")


def check_sent(outcome: Outcome) -> None:
    """Nothing that clients have is wrong."""
    for rid, said in outcome.said.items():
        prompt = outcome.asked[rid]
        due = next_tokens(prompt + said, vocab_size=VOCAB)
        assert said == due[len(prompt) - 1 :][: len(said)], rid


@pytest.mark.parametrize(
    ("name", "engine"),
    sampled(itertools.product(STATE_FAULTS, ENGINES), key=itemgetter(0), ci=2),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_is_reported_at_once(
    model: Path, name: str, engine: tuple[int, bool, int]
) -> None:
    for seed in seeds_of(engine):
        check_outcome(plant_state(model, name, seed, options(*engine)), name)


@pytest.mark.parametrize(
    ("architecture", "name"),
    sampled(
        itertools.product(("Lfm2ForCausalLM", "Qwen3NextForCausalLM"), STATE_FAULTS),
        key=itemgetter(0),
        ci=6,
    ),
)
def test_layers_of_hybrid_models(tmp_path: Path, architecture: str, name: str) -> None:
    """One of several layers, with and without matrices."""
    model = write_hybrid_model(tmp_path, architecture, vocab_size=VOCAB)
    for seed in range(count(ci=1, full=20)):
        engine = options(*ENGINES[(seed + sum(map(ord, name))) % len(ENGINES)])
        check_report(plant_state(model, name, seed, engine), name)


@pytest.mark.parametrize(
    ("tree", "name"),
    sampled(
        itertools.product(
            [(1, 3, 4), (4, 3, 12)], in_serving(STATE_FAULTS, Serving.SPECULATION)
        ),
        key=lambda case: (case[0], case[1] == "late_checkpoint"),
        ci=1,
    ),
    ids=str,
)
def test_while_drafting(
    model: Path, tmp_path: Path, tree: tuple[int, int, int], name: str
) -> None:
    """A checkpoint that is late holds all that was accepted, where only a part of it is
    due."""
    drafts = drafting(tmp_path, tree)
    for seed in SEEDS:
        page_size, overlap = (1, 4, 16)[seed % 3], bool(seed % 2)
        engine = options(page_size, overlap, -1) | drafts
        check_outcome(plant_state(model, name, seed, engine), name)


@pytest.mark.parametrize(
    ("name", "length"),
    [("skipped_fold", 50), ("skipped_state_store", 50), ("short_checkpoint", 100)],
)
def test_the_last_owner_had_folded_as_many_tokens(
    model: Path, name: str, length: int
) -> None:
    """Its count must not stand in for one that is missing."""
    same = Lengths(shared=0, own=range(length, length + 1), generated=range(1, 2))
    engine = options(1, False, -1) | {"max_mamba_cache_size": ROWS + 2}
    for seed in SEEDS:
        check_outcome(plant_state(model, name, seed, engine, lengths=same), name)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_new_request_must_not_fold_onto_a_state(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    """Of a slot that was freed, or never written."""
    harness = EngineHarness(model, kv_canary="raise", **options(1, False, -1))
    if is_used:
        harness.generate(list(range(30)), max_new_tokens=2)
    of = StateForward.of

    def onto(*args: Any) -> StateForward:
        state = of(*args)
        if state.has_state is None:
            return state
        return replace(state, has_state=torch.ones_like(state.has_state))

    monkeypatch.setattr(StateForward, "of", onto)
    with pytest.raises(CanaryViolation, match="fail_reason=state_folds"):
        harness.generate(list(range(50, 80)), max_new_tokens=2)
    (incident,) = harness.scheduler.own_incidents()
    assert "the state of a freed or new slot, by counter 0" in explain(incident)


@each_engine
def test_nothing_is_reported_without_a_fault(
    model: Path, page_size: int, overlap: bool, chunk: int
) -> None:
    for seed in seeds_of((page_size, overlap, chunk)):
        harness = EngineHarness(
            model,
            kv_canary="raise",
            kv_canary_real_data="all" if seed % 2 else "partial",
            **options(page_size, overlap, chunk),
        )
        traffic = Traffic(harness, random.Random(seed), count(ci=10, full=100))
        answers = {}
        while traffic.left:
            answers |= harness.run(on_step=traffic.on_step)
        check(traffic.expected, answers, vocab_size=VOCAB)
        manager = canary_of(harness)
        assert not manager.reporter.incidents
        assert manager.target.states is not None
        counters = manager.target.states.state.counters.tolist()
        assert counters[Counter.VERIFIED_SLOTS] > 0
        assert counters[Counter.TAIL_SLOTS] > counters[Counter.VERIFIED_SLOTS]


@pytest.mark.parametrize("name", DIAGNOSES)
def test_diagnoses(model: Path, name: str) -> None:
    outcome = plant_state(model, name, 0, options(16, False, -1))
    first = outcome.violations[0]
    assert first["diagnosis"] == DIAGNOSES[name]
    # A state has no pages.
    assert first["page"] == first["slot"]
    is_row = first["slot"] <= ROWS
    holder = f"request row {first['slot']}" if is_row else "a checkpoint"
    assert first["owner"] == holder
    assert f"launch_tag=target.{first['launch']} group=state fail_" in outcome.text


def test_a_copy_of_nothing_names_the_last_owner(model: Path) -> None:
    """The first checkpoint of a request: the cache notes it, and nobody took it."""
    for seed in range(20):
        outcome = plant_state(
            model, "misplaced_checkpoint", seed, options(1, False, -1)
        )
        first = outcome.violations[0]
        if "verify_freed" in first["reasons"]:
            assert first["writer"]["kind"] in ("poison", "none")
            return
    raise AssertionError("no checkpoint was left out")


def test_the_group_must_have_the_fault(model: Path) -> None:
    with pytest.raises(ValueError, match=r"group state is called 'alias_row'.*torn_re"):
        plant(model, "alias_row", seed=1, group="state")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
