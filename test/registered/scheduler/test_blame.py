"""Who is touched by a damage, and who must have gained nothing: small engines of
requests, rows and cached runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary.checks import CHECKS, Blames, Reason
from sglang.srt.managers.batch.schedule_batch import StepStart
from sglang.srt.managers.scheduler.blame import Blame, Fact, StepDamage, find_blame
from sglang.srt.managers.scheduler.heal_check import HealingError
from sglang.srt.managers.scheduler.step_check import StepCheck
from sglang.srt.mem_cache.allocator import create_allocator
from sglang.srt.mem_cache.common import extend_rows
from sglang.srt.mem_cache.draft_region import DraftRegion
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

PAGE = 4
TARGET, DRAFT = 0, 1


@dataclass(eq=False)
class Req:
    """The least that blame needs of a request."""

    serial: int
    tokens: array[int]
    req_pool_idx: int = 0
    namespace: str | None = None
    no_cache: bool = False
    committed_len: int = 0
    allocated_len: int = 0
    cache_protected_len: int = 0
    branch_len: int = 0
    prefix_slots: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )
    last_node: TreeNode | None = None
    holds: tuple[()] = ()
    unready_len: int = 0
    input_embeds: None = None
    is_finished: bool = False
    is_healed_in_vain: bool = False

    @property
    def rid(self) -> str:
        return f"q{self.serial}"

    def fill_ids(self) -> array[int]:
        return self.tokens


@dataclass
class Launched:
    reqs: list[Req]
    starts: np.ndarray
    dropped: set[int] = field(default_factory=set)

    def live_rows(self) -> list[int]:
        return [
            i
            for i, req in enumerate(self.reqs)
            if not req.is_finished and req.serial not in self.dropped
        ]


class Scene:
    """Requests with all their tokens computed, in decode."""

    def __init__(self) -> None:
        allocator = create_allocator(size=64 * PAGE, page_size=PAGE)
        region = DraftRegion(first_slot=65 * PAGE, rows=8, columns=6, page_size=PAGE)
        rows = ReqToTokenPool(
            size=8, row_width=64, device="cpu", context_len=64, region=region
        )
        self.cache = RadixCache(req_to_token_pool=rows, allocator=allocator)
        self.reqs: list[Req] = []

    def add(self, tokens: list[int], *, shares: bool = False) -> Req:
        """A request; `shares`: its whole pages are in the cache."""
        cache, ids = self.cache, array("q", tokens)
        match = cache.match_prefix(cache.key(ids[:-1]))
        cache.inc_lock_ref(match.last_node)
        rows = cache.req_to_token_pool.alloc(1)
        assert rows is not None
        cache.req_to_token_pool.write(rows[0], 0, match.slots)
        req = Req(serial=len(self.reqs) + 1, tokens=ids, req_pool_idx=rows[0])
        self.cache.mark_admitted(req, match)
        slots = extend_rows(
            cache, rows=rows, prefix_lens=[len(match)], seq_lens=[len(tokens)]
        )
        assert slots is not None
        req.committed_len = req.allocated_len = len(tokens)
        if shares:
            cache.cache_unfinished_req(req)
        self.reqs.append(req)
        return req

    def slot(self, req: Req, position: int) -> int:
        pool = self.cache.req_to_token_pool
        return int(pool.row_slots(req.req_pool_idx, position, position + 1)[0])

    def launched(self) -> Launched:
        starts = np.array([req.committed_len - 1 for req in self.reqs])
        return Launched(self.reqs, starts)

    def blame(
        self,
        *facts: Fact,
        verdicts: dict[int, int] | None = None,
        pool: int = TARGET,
        overflow: bool = False,
        launched: Launched | None = None,
    ) -> Blame:
        words = [(verdicts or {}).get(req.serial, 0) for req in self.reqs]
        every = [[0] * len(words), words] if pool else [words]
        return find_blame(
            StepDamage(facts=facts, verdicts=every, has_overflowed=overflow),
            launched or self.launched(),  # type: ignore[arg-type]
            requests=[req for req in self.reqs if not req.is_finished],  # type: ignore[misc]
            cache=self.cache,
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


def serials(reqs: tuple[object, ...]) -> list[int]:
    return [req.serial for req in reqs]  # type: ignore[attr-defined]


STEM = list(range(12))


def test_a_damaged_slot_of_a_row_touches_its_request_alone(scene: Scene) -> None:
    first, _ = scene.add([1] * 9), scene.add([2] * 9)
    slot = scene.slot(first, 5)
    fact = Fact(TARGET, Reason.VERIFY_REAL_KV, first.serial, slot)
    found = scene.blame(fact, verdicts={1: Reason.VERIFY_REAL_KV})
    assert serials(found.withheld) == [1] and not found.rebuilt and not found.nodes
    assert found.pages.tolist() == [slot // PAGE]


def test_the_drafts_pool_alone_withholds_nothing(scene: Scene) -> None:
    first = scene.add([1] * 9)
    fact = Fact(DRAFT, Reason.VERIFY_REAL_KV, 1, scene.slot(first, 5))
    found = scene.blame(fact, verdicts={1: Reason.VERIFY_REAL_KV}, pool=DRAFT)
    assert serials(found.rebuilt) == [1] and not found.withheld
    found = scene.blame(Fact(DRAFT, Reason.CARRIED_STATE, 1, -1))
    assert serials(found.withheld) == [1]


def test_a_wrong_table_does_not_blame_what_it_points_at(scene: Scene) -> None:
    reader, other = scene.add([1] * 9), scene.add([2] * 9)
    fact = Fact(TARGET, Reason.READ_SET, reader.serial, scene.slot(other, 3))
    found = scene.blame(fact, verdicts={1: Reason.READ_SET})
    assert serials(found.withheld) == [1] and not len(found.pages)


def test_a_wrong_write_touches_whose_page_it_is(scene: Scene) -> None:
    writer, other = scene.add([1] * 9), scene.add([2] * 9)
    fact = Fact(TARGET, Reason.WRITE_FOREIGN, writer.serial, scene.slot(other, 3))
    found = scene.blame(fact, verdicts={1: Reason.WRITE_FOREIGN})
    assert serials(found.withheld) == [1, 2]
    # Of a padded row: the owner alone.
    found = scene.blame(Fact(TARGET, Reason.WRITE_FOREIGN, 0, scene.slot(other, 3)))
    assert serials(found.withheld) == [2]


def test_a_wrong_write_into_a_draft_region_touches_whose_row_it_is(
    scene: Scene,
) -> None:
    writer, other = scene.add(list(range(20))), scene.add(list(range(50, 70)))
    region = scene.cache.req_to_token_pool.region
    assert region is not None
    own, foreign = (
        int(region.rows_to_slots([r.req_pool_idx])[4]) for r in (writer, other)
    )
    fact = Fact(DRAFT, Reason.WRITE_FOREIGN, writer.serial, foreign)
    found = scene.blame(fact, verdicts={1: Reason.WRITE_FOREIGN}, pool=DRAFT)
    assert serials(found.rebuilt) == [1, 2] and not found.withheld
    # No page of it can be set aside, and what is read there is its own request's.
    assert not len(found.pages)
    fact = Fact(DRAFT, Reason.VERIFY_REAL_KV, writer.serial, own)
    assert serials(scene.blame(fact, pool=DRAFT).rebuilt) == [1]


def test_a_cached_run_goes_with_all_that_rely_on_it(scene: Scene) -> None:
    scene.add([*STEM, 50, 51], shares=True)
    scene.add([*STEM, 60, 61, 62, 63, 64], shares=True)
    deeper = scene.add([*STEM, 60, 61, 62, 63, 70], shares=True)
    scene.add([9] * 9)
    below = scene.blame(Fact(TARGET, Reason.VERIFY_REAL_KV, 0, scene.slot(deeper, 13)))
    assert serials(below.withheld) == [2, 3]
    assert {node.start for node in below.nodes} == {12}
    stem = scene.blame(Fact(TARGET, Reason.VERIFY_REAL_KV, 0, scene.slot(deeper, 1)))
    assert serials(stem.withheld) == [1, 2, 3]
    assert sorted(node.start for node in stem.nodes) == [0, 12]


def test_what_the_step_wrote_is_in_doubt(scene: Scene) -> None:
    """In the cache already, and under another request by now."""
    first = scene.add(STEM, shares=True)
    second = scene.add([*STEM, 60])
    launched = scene.launched()
    launched.starts[0] = 8
    found = scene.blame(verdicts={1: Reason.READ_SET}, launched=launched)
    assert serials(found.withheld) == [1, 2]
    assert [(node.start, node.end) for node in found.nodes] == [(8, 12)]
    assert first.last_node is not None and second.last_node is not None


def test_a_request_that_has_ended_leaves_nothing_wrong(scene: Scene) -> None:
    first = scene.add(STEM, shares=True)
    launched = scene.launched()
    launched.starts[0] = 8
    scene.cache.let_go(first)
    first.is_finished = True
    found = scene.blame(verdicts={1: Reason.READ_SET}, launched=launched)
    assert not found.withheld
    assert [(node.start, node.end) for node in found.nodes] == [(8, 12)]
    # One that was dropped before has left nothing.
    first.is_finished, launched.dropped = False, {1}
    assert scene.blame(verdicts={1: Reason.READ_SET}, launched=launched).is_empty


def test_bytes_that_went_nowhere_known_touch_everybody_in_the_step(
    scene: Scene,
) -> None:
    first = scene.add([1] * 9)
    scene.add([2] * 9)
    launched = scene.launched()
    waiting = scene.add([3] * 9)
    fact = Fact(TARGET, Reason.WRITE_MISSING, first.serial, scene.slot(first, 8))
    launched.reqs = scene.reqs[:2]
    assert serials(scene.blame(fact, launched=launched).withheld) == [1, 2]
    phase = Fact(TARGET, Reason.PHASE, 0, -1)
    assert serials(scene.blame(phase, launched=launched).withheld) == [1, 2]
    assert waiting.req_pool_idx


def test_an_overflow_blames_all_slots_of_the_flagged(scene: Scene) -> None:
    scene.add([*STEM, 50, 51], shares=True)
    scene.add([*STEM, 60], shares=True)
    third = scene.add([9] * 9)
    found = scene.blame(verdicts={3: Reason.VERIFY_FREED}, overflow=True)
    assert serials(found.withheld) == [3]
    assert found.pages.tolist() == sorted(
        {scene.slot(third, position) // PAGE for position in range(9)}
    )
    shared = scene.blame(verdicts={1: Reason.VERIFY_FREED}, overflow=True)
    assert serials(shared.withheld) == [1, 2]
    lost = scene.blame(verdicts={3: Reason.WRITE_FOREIGN}, overflow=True)
    assert serials(lost.withheld) == [1, 2, 3]
    assert len(lost.nodes) == len(list(scene.cache.iter_nodes()))


def test_a_page_with_two_holders_touches_both(scene: Scene) -> None:
    """The host's own records are damaged: a page was given twice."""
    first, second = scene.add([1] * 9), scene.add([2] * 9)
    pool = scene.cache.req_to_token_pool
    pool.write(second.req_pool_idx, 4, pool.row_slots(first.req_pool_idx, 4, 8))
    found = scene.blame(verdicts={1: Reason.VERIFY_TOKEN})
    assert serials(found.withheld) == [1, 2]


def test_healed_in_vain_takes_the_cached_prefix_too(scene: Scene) -> None:
    first = scene.add([*STEM, 50], shares=True)
    scene.add([*STEM, 60])
    assert not scene.blame(verdicts={1: Reason.VERIFY_TOKEN}).nodes
    first.is_healed_in_vain = True
    found = scene.blame(verdicts={1: Reason.VERIFY_TOKEN})
    assert serials(found.withheld) == [1, 2]
    assert [node.start for node in found.nodes] == [0]


# -- what a damaged step must not have done --------------------------------------------


def check_step(
    scene: Scene,
    *facts: Fact,
    verdicts: Sequence[Sequence[int]] = (),
    gains: Sequence[Req] = (),
    withheld: Sequence[Req] = (),
    lost: Sequence[Req] = (),
) -> None:
    """Check a step of all requests in which `gains` gain a token; all but `withheld`
    and `lost` are sent."""
    launched: Any = scene.launched()
    before = StepStart(
        live=frozenset(launched.live_rows()),
        lengths=[len(req.tokens) for req in scene.reqs],
    )
    check = StepCheck(launched, before, scene.cache)
    for req in gains:
        req.tokens.append(7)
    sent: Any = [req for req in scene.reqs if req not in (*withheld, *lost)]
    damage = StepDamage(facts=facts, verdicts=verdicts)
    check.check(damage, sent, {req.serial for req in withheld})


def test_a_flagged_row_must_not_gain_a_token(scene: Scene) -> None:
    first, second = scene.add([1] * 9), scene.add([2] * 9)
    flagged = [[0, int(Reason.VERIFY_LINEAGE)]]
    check_step(scene, verdicts=flagged, gains=[first], withheld=[second])
    with pytest.raises(HealingError, match="q2 gained a token that is in doubt"):
        check_step(scene, verdicts=flagged, gains=[first, second])


def test_a_request_of_a_finding_must_not_gain_a_token(scene: Scene) -> None:
    first, second = scene.add([1] * 9), scene.add([2] * 9)
    fact = Fact(TARGET, Reason.RESULT_TOKEN, first.serial, -1)
    check_step(scene, fact, gains=[second], withheld=[first])
    with pytest.raises(HealingError, match="q1 gained"):
        check_step(scene, fact, gains=[first])


def test_damage_of_drafts_leaves_tokens_alone(scene: Scene) -> None:
    first = scene.add([1] * 9)
    reason = Reason.VERIFY_LINEAGE
    fact = Fact(DRAFT, reason, first.serial, scene.slot(first, 2))
    check_step(scene, fact, verdicts=[[0], [int(reason)]], gains=[first])


def test_whoever_reads_an_overwritten_page_must_not_gain_a_token(scene: Scene) -> None:
    writer = scene.add([1] * 9)
    holder, sharer = scene.add([*STEM, 3], shares=True), scene.add([*STEM, 4])
    other = scene.add([5] * 9)
    slot = scene.slot(sharer, 2)
    assert slot == scene.slot(holder, 2)
    fact = Fact(TARGET, Reason.WRITE_FOREIGN, writer.serial, slot)
    everybody = [writer, holder, sharer]
    check_step(scene, fact, gains=[other], withheld=everybody)
    for forgotten in everybody:
        withheld = [req for req in everybody if req is not forgotten]
        with pytest.raises(HealingError, match=f"{forgotten.rid} gained"):
            check_step(scene, fact, gains=[forgotten], withheld=withheld)
    # The page itself is intact.
    fact = Fact(TARGET, Reason.READ_SET, writer.serial, slot)
    check_step(scene, fact, gains=[holder, sharer], withheld=[writer])


def test_a_finding_about_a_whole_forward_puts_all_of_it_in_doubt(scene: Scene) -> None:
    reqs = [scene.add([i] * 9) for i in range(3)]
    reason = next(c.reason for c in CHECKS if c.blames is Blames.FORWARD)
    fact = Fact(TARGET, reason, 0, -1)
    check_step(scene, fact, withheld=reqs)
    with pytest.raises(HealingError, match="q3 gained"):
        check_step(scene, fact, gains=reqs[2:], withheld=reqs[:2])


def test_nobody_misses_its_part_of_a_step(scene: Scene) -> None:
    first, second = scene.add([1] * 9), scene.add([2] * 9)
    with pytest.raises(HealingError, match="q2 would miss its part of the step"):
        check_step(scene, gains=[first, second], lost=[second])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
