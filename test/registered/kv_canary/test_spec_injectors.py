"""Every fault of speculative decoding is reported with the expected reason, in the
right pool, by the first forward that reads (or writes) it, under the right request,
draft step, branch, slot and position."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary.checks import reason_labels
from kv_canary.faults.catalogue import DRAFT_FAULTS, POOL_FAULTS, in_serving
from kv_canary.faults.fault import Serving, SlotGroup
from kv_canary.reporter import CanaryViolation
from kv_canary.view import KVReadView
from sglang.faults.fault_points import (
    EARLY_POSITIONS,
    NARROW_ROWS,
    PROMPT_TAIL,
    SAMPLED_TAIL,
    SHORT_BRANCH_TABLE,
    SMALL_INDEX_BUFFER,
    FaultPoint,
)
from sglang.faults.pools.scene import Damage
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.layers.attention.branch_lists import BranchLists
from sglang.srt.layers.attention.paged_backend import BranchDraftDecode
from sglang.srt.mem_cache.ops.branch_slots.op import BranchPaths, SlotRows
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count, is_full
from sglang.test.spec_canary_traffic import (
    CONTEXT,
    POOLS,
    VOCAB,
    WARM_STEPS,
    SpecForward,
    SpecOutcome,
    SpecTraffic,
    canaries_of,
    faults_of,
    logged,
    plant_in,
    speculating,
    worker_of,
    write_mock_models,
)

register_cpu_ci(est_time=30, suite="cpu", full_time=650)

SEEDS = range(count(ci=1, full=20))
# (topk, steps, nodes), page size
CHAIN, FLAT = ((1, 4, 5), 4), ((4, 4, 12), 1)
TREE, WIDE = ((4, 4, 12), 4), ((8, 3, 16), 64)
# Those of draft steps and moves that trees alone have; the others on chains, too.
MOVES = {name for name, fault in DRAFT_FAULTS.items() if SlotGroup.FULL in fault.groups}
NEED_BRANCHES = set(DRAFT_FAULTS) - {*in_serving(DRAFT_FAULTS, Serving.CHAIN)} - MOVES
# Found where they are planted, by the forward's own reads or writes.
AT_ONCE = {
    "branch_offset",
    "wrong_ancestor",
    "short_reserve",
    "short_branch_table",
    "small_index_buffer",
    "idle_row_write",
    "no_draft_prefix",
}
# Reported about slots that are not the row's own.
ELSEWHERE = AT_ONCE - {"no_draft_prefix"}
# Faults that both pools can have, of which the draft's are planted here.
COMMON = ["real_kv_used", "real_kv_post_forward", "record", "early_free"]


def id_of(value: object) -> str:
    return str(value).replace(" ", "")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_mock_models(tmp_path_factory.mktemp("mock"))


@pytest.fixture(scope="module")
def with_language_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("standalone")
    return write_mock_models(folder, kind="STANDALONE", source=None)


def cases() -> list[tuple[str, str, tuple[tuple[int, int, int], int]]]:
    found = []
    for name in DRAFT_FAULTS:
        if name in MOVES:
            # Accepted paths in the target's pool, copies of tails in the draft's.
            found += [("target", name, shape) for shape in (FLAT, TREE, WIDE)]
            found += [("draft", name, shape) for shape in (TREE, WIDE)]
            continue
        shapes = (FLAT, TREE, WIDE) if name in NEED_BRANCHES else (CHAIN, TREE, WIDE)
        found += [("draft", name, shape) for shape in shapes]
    return [*found, *(("draft", name, TREE) for name in COMMON)]


def cases_by_layout() -> list[tuple[str, str, tuple[tuple[int, int, int], int], str]]:
    """Those of a draft's branches in either layout of their slots."""
    return [
        (*case, layout)
        for case in cases()
        for layout in ("region", "paged")
        if layout in _layouts(*case)
    ]


def _layouts(
    pool: str, name: str, shape: tuple[tuple[int, int, int], int]
) -> tuple[str, ...]:
    """Layouts in which a case exists and differs."""
    if pool == "draft" and name in MOVES:
        return ("paged",)  # nothing is copied to a region
    is_tree = shape[0][0] > 1
    return ("region", "paged") if pool == "draft" and is_tree else ("region",)


def first_read(outcome: SpecOutcome) -> SpecForward:
    """The first forward with the damage among its rows, by the host's records."""
    since, damage = outcome.since_planted(), outcome.planted.damage
    if outcome.planted.name in AT_ONCE:
        return since[0]
    slots = [slot for slot, _ in damage.places]
    return next(f for f in since if any(map(f.reads, slots)))


def check_named(outcome: SpecOutcome, topk: int) -> None:
    """The first forward reports the fault, at its place and nowhere else, under the
    request; in a draft step with the step and the branch."""
    name, damage = outcome.planted.name, outcome.planted.damage
    forward = first_read(outcome)
    assert {v["worker"] for v in outcome.violations} == {outcome.pool}
    assert min(v["forward"] for v in outcome.violations) == forward.clock
    allowed = set(reason_labels({**POOL_FAULTS, **DRAFT_FAULTS}[name].reasons))
    victim = outcome.victim(damage.serial)
    assert (victim is None) == (name == "idle_row_write")
    found = [
        v
        for v in outcome.violations
        if allowed & set(v["reasons"])
        and v["forward"] == forward.clock
        and v["rid"] == victim
    ]
    named = {(v["slot"], v["position"]) for v in found}
    if (-1, damage.position + 1) in damage.places:
        # A token that a branch had drafted there has the same past: then the record
        # after it does not follow.
        assert named, outcome.text
    else:
        wanted = {(damage.slot, damage.position)}
        # Or in the copies that branches have of it.
        wanted |= {
            (row.slots[damage.position], damage.position)
            for row in forward.rows
            if row.copies.get(damage.position) == damage.slot
        }
        assert named & wanted, outcome.text
    for violation in found:
        _check_place(outcome, forward, violation, topk)
        row = violation["batch_row"]
        assert violation["branch"] == (row % topk if "step" in violation else -1)
    _check_line(outcome)


def _check_line(outcome: SpecOutcome) -> None:
    """The error is the line of one violation, as the document has it."""
    (line,) = outcome.text.splitlines()
    assert any(
        f" slot_idx={v['slot']} position={v['position']} " in line
        and f" branch={v['branch']} batch_row={v['batch_row']} " in line
        and f" forward={v['forward']} " in line
        for v in outcome.violations
    ), outcome.text


def _positions(damage: Damage) -> set[int]:
    return {position for _, position in damage.places}


def _check_place(
    outcome: SpecOutcome, forward: SpecForward, violation: dict[str, Any], topk: int
) -> None:
    damage, place = outcome.planted.damage, (violation["slot"], violation["position"])
    assert violation["request_row"] == damage.req_row
    assert violation.get("step") == forward.step
    rows = [row for row in forward.rows if row.rid == violation["rid"]]
    if forward.step is not None:
        assert 0 <= violation["branch"] < topk
        rows = [
            row
            for i, row in enumerate(forward.rows)
            if row.rid == violation["rid"] and i % topk == violation["branch"]
        ]
    if violation["rid"] is None:
        assert place in damage.places
        return
    (row,) = rows
    assert row.req_row == damage.req_row
    if outcome.planted.name in ELSEWHERE:
        assert place in damage.places
        own = row.slots[violation["position"]]
        assert violation["expected"]["slot"] in (own, violation["slot"])
        return
    assert violation["position"] in _positions(damage)
    assert violation["slot"] == row.slots[violation["position"]]


@pytest.mark.parametrize(
    ("pool", "name", "shape", "layout"), cases_by_layout(), ids=id_of
)
def test_is_reported_by_the_first_read(
    models: dict[str, Path],
    pool: str,
    name: str,
    shape: tuple[tuple[int, int, int], int],
    layout: str,
) -> None:
    plant_and_check(pool, name, shape, models, speculative_draft_layout=layout)


# Slots of a language model hold their own tokens, and it is one token ahead.
IN_CI_STANDALONE = {
    ("no_draft_prefix", CHAIN),
    ("skip_draft_extend", CHAIN),
    ("drop_draft_extend_rows", TREE),
    ("branch_offset", WIDE),
    ("skipped_move", TREE),
    ("record", TREE),
}


@pytest.mark.parametrize(
    ("pool", "name", "shape"),
    [
        c
        for c in cases()
        if is_full() or (c[0] == "draft" and c[1:] in IN_CI_STANDALONE)
    ],
    ids=id_of,
)
def test_is_reported_with_a_language_model_as_the_draft(
    with_language_model: dict[str, Path],
    pool: str,
    name: str,
    shape: tuple[tuple[int, int, int], int],
) -> None:
    plant_and_check(
        pool,
        name,
        shape,
        with_language_model,
        speculative_algorithm="STANDALONE",
        speculative_draft_layout=_layouts(pool, name, shape)[0],
    )


def plant_and_check(
    pool: str,
    name: str,
    shape: tuple[tuple[int, int, int], int],
    models: dict[str, Path],
    **options: Any,
) -> None:
    tree, page_size = shape
    for seed in SEEDS:
        outcome = plant_in(
            pool,
            name,
            seed=seed,
            **models,
            tree=tree,
            page_size=page_size,
            max_total_tokens=256 * page_size + 4096,
            **options,
        )
        check_named(outcome, tree[0])
        # Nothing of the step that failed was sent, and nothing wrong before it.
        assert outcome.last_messages == 0
        for rid, answer in outcome.said.items():
            check_answer(outcome.asked[rid], answer.output_ids)


@pytest.mark.parametrize(
    ("algorithm", "pool"), [*(("EAGLE", p) for p in POOLS), ("STANDALONE", "draft")]
)
def test_sweep_finds_what_only_the_cache_holds(
    models: dict[str, Path],
    with_language_model: dict[str, Path],
    algorithm: str,
    pool: str,
) -> None:
    """The pass of the same launch finds it: it takes all cached slots."""
    folders = models if algorithm == "EAGLE" else with_language_model
    for seed in SEEDS:
        outcome = plant_in(
            pool,
            "real_kv_unused_cache",
            seed=seed,
            **folders,
            speculative_algorithm=algorithm,
            tree=(4, 4, 12),
            page_size=4,
            kv_canary_sweep_interval=1,
        )
        (violation,) = outcome.violations
        damage = outcome.planted.damage
        assert (violation["worker"], violation["launch"]) == (pool, "sweep")
        assert violation["forward"] == outcome.planted.clock
        assert violation["reasons"] == ["verify_real_kv"]
        assert (violation["slot"], violation["position"]) in damage.places
        assert violation["rid"] is None and "step" not in violation


def test_both_pools_are_reported_before_the_engine_stops(
    models: dict[str, Path],
) -> None:
    """One iteration reads damage in the draft's pool and then in the target's."""
    for seed in SEEDS:
        harness = speculating(**models, tree=(4, 4, 12), page_size=4)
        traffic, managers = SpecTraffic(harness, seed=seed), canaries_of(harness)
        for step in range(WARM_STEPS + 1):
            traffic.on_step(step)
            harness.scheduler.step()
        for faults in faults_of(harness).values():
            faults.arm("real_kv_used", seed=seed)
        with pytest.raises(CanaryViolation, match=r"launch_tag=target\.verify"):
            harness.scheduler.step()
        incidents = managers["target"].reporter.incidents
        workers = [{v["worker"] for v in i["violations"]} for i in incidents]
        assert workers == [{"target"}, {"draft"}]


class Highest(random.Random):
    """Draws the end of every range."""

    def randint(self, a: int, b: int) -> int:
        return b


def test_a_flipped_entry_names_a_slot_of_both_pools(models: dict[str, Path]) -> None:
    """Both read one table, and the draft's pool alone has a region for branches: the
    target would write where it has no bytes."""
    harness = speculating(**models, tree=(4, 4, 12), page_size=4)
    traffic, draft = SpecTraffic(harness, seed=0), canaries_of(harness)["draft"]
    for step in range(WARM_STEPS + 1):
        traffic.on_step(step)
        harness.scheduler.step()
    faults = faults_of(harness)["draft"]
    faults.arm("req_to_token", seed=0)
    faults._rng = Highest(0)
    stop(harness)
    (planted,) = faults.planted
    allocator = harness.scheduler.cache.allocator
    assert planted.damage.slot == allocator.num_pages * allocator.page_size
    assert draft.target.buffers.state.num_slots > planted.damage.slot + 4


class DeclaredLists:
    """Lets a tree's backend declare the lists of slots that backends have whose kernels
    take (indptr, indices); attention reads the same slots as before."""

    def __init__(self, harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
        attention = worker_of(harness).draft_worker.phase.attention
        assert isinstance(attention, BranchDraftDecode)
        self._layout, self._prepare = attention.layout, attention.prepare
        self._follow = attention.follow
        self._pool = harness.scheduler.worker.model_runner.req_to_token_pool
        self._seq_lens = torch.empty(0)
        self.lists = self._allocate()
        patch.setattr(attention, "prepare", self._fill)
        patch.setattr(attention, "follow", self._fill_ancestors)
        patch.setattr(attention._backend, "read_view", self._view)
        # Attention's calls take the table, not the lists.
        calls = canaries_of(harness)["draft"].calls
        patch.setattr(calls, "begin", lambda batch, *reads: None)

    def _allocate(self) -> BranchLists:
        return BranchLists(self._layout, max_requests=self._pool.size, pool=self._pool)

    def reopen(self, fault: FaultPoint) -> None:
        with fault.opened():
            self.lists = self._allocate()

    def _fill(self, rows: SlotRows) -> None:
        self._prepare(rows)
        self._seq_lens = rows.seq_lens
        self.lists.fill(rows)

    def _fill_ancestors(self, step: int, paths: BranchPaths) -> None:
        self._follow(step, paths)
        self.lists.follow(step, paths)

    def _view(self, batch: ForwardBatch) -> tuple[KVReadView]:
        lists, step = self.lists, int(batch.prefix_lens[0] - self._seq_lens[0])
        offsets = lists.indptr[: lists.steps * (batch.batch_size + 1)]
        return (
            KVReadView(
                read_lens=batch.seq_lens,
                page_size=1,
                indptr=offsets.view(lists.steps, -1)[step],
                slot_indices=lists.indices[step],
            ),
        )


@pytest.mark.parametrize(
    "fault", [None, SMALL_INDEX_BUFFER, SHORT_BRANCH_TABLE], ids=lambda f: f and f.name
)
def test_index_lists_of_branches(
    models: dict[str, Path], fault: FaultPoint | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """27338: sized without the factor top-k, so that the last branch's list is cut;
    27360: no entry for the newest slot. Right lists are silent."""
    for seed in SEEDS:
        harness = speculating(**models, tree=(4, 4, 12), max_running_requests=2)
        lists = DeclaredLists(harness, monkeypatch)
        for i in range(2):
            prompt = [(seed * 43 + 17 * i + 3 * j) % VOCAB for j in range(140 + seed)]
            harness.submit(prompt, rid=f"q{i}", max_new_tokens=60, ignore_eos=True)
        for _ in range(2 + seed % 4):
            harness.scheduler.step()
        if fault is None:
            harness.run()
            continue
        lists.reopen(fault)
        with logged(harness) as logs, pytest.raises(CanaryViolation):
            harness.scheduler.step()
        first = next(f for f in logs["draft"].forwards if f.step == 0)
        incident = canaries_of(harness)["target"].reporter.incidents[-1]
        assert incident["forward"] == first.clock
        found = [v for v in incident["violations"] if v["forward"] == first.clock]
        for violation in found:
            assert violation["worker"] == "draft" and violation["step"] == 0
            assert "read_set" in violation["reasons"]
        named = {(v["rid"], v["branch"], v["position"], v["slot"]) for v in found}
        if fault == SHORT_BRANCH_TABLE:
            # Every request at its newest slot; its branches say the same.
            assert named == {(row.rid, 0, row.prefix_len, 0) for row in first.rows}
            continue
        # After the declared end there is no slot.
        ends = list(accumulate(len(row.slots) for row in first.rows))
        at = next(i for i, end in enumerate(ends) if end > lists.lists.capacity)
        place = lists.lists.capacity - ends[at - 1]
        assert (first.rows[at].rid, at % 4, place, -1) in named
        assert {slot for *_, slot in named} == {-1}


def check_answer(prompt: list[int], output: list[int]) -> None:
    predicted = next_tokens(prompt + output, vocab_size=VOCAB)
    assert output == predicted[len(prompt) - 1 : -1]


def stop(harness: EngineHarness) -> list[dict[str, Any]]:
    """Run until the canary stops the engine; the violations of its incident."""
    with pytest.raises(CanaryViolation):
        while harness.scheduler.step() or harness.scheduler.has_work():
            pass
    violations = canaries_of(harness)["target"].reporter.incidents[-1]["violations"]
    assert {v["worker"] for v in violations} == {"draft"}
    return list(violations)


@pytest.mark.parametrize("shape", [CHAIN, TREE, WIDE], ids=id_of)
def test_positions_moved_before_the_draft_forward(
    models: dict[str, Path],
    shape: tuple[tuple[int, int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """25015: the first draft step writes at positions that do not follow its prefix."""
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", EARLY_POSITIONS.name)
    tree, page_size = shape
    for seed in SEEDS:
        harness = speculating(
            **models, tree=tree, page_size=page_size, max_total_tokens=8192
        )
        prompt = [(seed * 31 + i) % VOCAB for i in range(40 + 7 * seed)]
        harness.submit(prompt, rid="q", max_new_tokens=40)
        with logged(harness) as logs:
            violations = stop(harness)
        (first,) = [
            f for f in logs["draft"].forwards if f.clock == violations[0]["forward"]
        ]
        assert first.step == 0 and first is logs["draft"].forwards[1]
        found = [v for v in violations if v["forward"] == first.clock]
        assert [v["branch"] for v in found] == list(range(tree[0]))
        for violation, row in zip(found, first.rows, strict=True):
            assert violation["reasons"] == ["write_position"]
            assert violation["diagnosis"] == "wrong input of the forward"
            assert (violation["rid"], violation["step"]) == ("q", 0)
            assert violation["expected"]["position"] == len(prompt)
            assert violation["slot"] == row.slots[len(prompt)]
            assert violation["found"]["position"] == len(prompt) + 1


@pytest.mark.parametrize("shape", [CHAIN, TREE, WIDE], ids=id_of)
def test_sampled_token_at_the_end_of_a_chunk(
    models: dict[str, Path],
    shape: tuple[tuple[int, int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """26329: the last input of a chunk is not the prompt's next token."""
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", SAMPLED_TAIL.name)
    tree, page_size = shape
    for seed in SEEDS:
        harness = speculating(
            **models,
            tree=tree,
            page_size=page_size,
            chunked_prefill_size=64,
            max_total_tokens=8192,
        )
        prompt = [(seed * 37 + 5 * i) % VOCAB for i in range(70 + 9 * seed)]
        harness.submit(prompt, rid="q", max_new_tokens=40)
        with logged(harness) as logs:
            violation = stop(harness)[0]
        chunk = logs["draft"].forwards[0]
        assert violation["forward"] == chunk.clock
        assert violation["reasons"] == ["write_token"]
        assert (violation["rid"], violation["position"]) == ("q", 63)
        assert violation["slot"] == chunk.rows[0].slots[63]


@pytest.mark.parametrize(
    "shape", [((1, 4, 5), 1, 640), ((4, 4, 12), 4, 1200)], ids=id_of
)
def test_tail_that_only_the_prompt_was_asked_for(
    models: dict[str, Path],
    shape: tuple[tuple[int, int, int], int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """28254: a request that was retracted is prefilled again, and a chunk ends among
    the tokens it had gained."""
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", PROMPT_TAIL.name)
    tree, page_size, slots = shape
    for seed in SEEDS:
        harness = speculating(
            **models,
            tree=tree,
            page_size=page_size,
            chunked_prefill_size=64,
            max_total_tokens=slots,
            schedule_conservativeness=0.05,
        )
        for i in range(6):
            prompt = [(seed * 41 + 13 * i + 7 * j) % VOCAB for j in range(30)]
            harness.submit(prompt, rid=f"q{i}", max_new_tokens=250, ignore_eos=True)
        with logged(harness) as logs:
            violation = stop(harness)[0]
        assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0
        assert violation["reasons"] == ["write_token"]
        log = logs["draft"]
        (first,) = [f for f in log.forwards if f.clock == violation["forward"]]
        (row,) = [row for row in first.rows if row.rid == violation["rid"]]
        assert violation["position"] == len(row.slots) - 1 >= 30
        assert violation["slot"] == row.slots[-1]


@pytest.mark.parametrize("shape", [TREE, WIDE], ids=id_of)
def test_narrow_rows_are_refused_before_anything_is_taken(
    models: dict[str, Path],
    shape: tuple[tuple[int, int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """26972: no canary is needed to see it; the host compares before it allocates."""
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", NARROW_ROWS.name)
    tree, page_size = shape
    harness = speculating(
        **models,
        tree=tree,
        page_size=page_size,
        max_total_tokens=8192,
        speculative_draft_layout="paged",
    )
    harness.submit(list(range(150)), max_new_tokens=CONTEXT - 150, ignore_eos=True)
    with pytest.raises(RuntimeError, match="rows must be widened by the reserve"):
        harness.run()
    assert canaries_of(harness)["target"].reporter.total == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
