"""Checkpoints of recurrent state over whole requests: a request goes on from the state
of exactly its prefix, and no slot is lost. A dict models the states: which tokens are
folded into a slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from request_world import Req, RequestMachine, admit, make_cache

from sglang.srt.managers.batch.state_plans import PrefillSpan, StatePlanner
from sglang.srt.mem_cache.common import check_idle, extend_rows, release_req
from sglang.srt.mem_cache.groups.saved_states import HeldCheckpoint
from sglang.srt.mem_cache.groups.state_slots import StateSlots
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu", full_time=300)

ROWS = 4
BASES = ([1] * 40, [1, 2] * 20, [1] * 9 + [2] * 31)
Fold = tuple[str | None, tuple[int, ...]]


class StateMachine(RequestMachine):
    """The requests of `RequestMachine` over a cache with checkpoints."""

    def build_states(
        self,
        *,
        page_size: int,
        tokens_in_pool: int,
        bigram: bool,
        checkpoints: int,
        chunk: int,
        interval: int,
        tracks_inside: bool,
    ) -> None:
        super().build(page_size, tokens_in_pool, True, bigram)
        self.slots = StateSlots(rows=ROWS, size=checkpoints)
        self.cache = make_cache(
            pages=tokens_in_pool // page_size,
            page_size=page_size,
            bigram=bigram,
            states=self.slots,
        )
        self.cache.allocator.register_on_free(
            lambda slots: [self.content.pop(slot, None) for slot in slots.tolist()]
        )
        # Tokens that a verification accepts at most; another one may be in flight.
        self.width = min(interval // 2, 4)
        self.planner = StatePlanner(
            self.cache.checkpoints,
            page_size=page_size,
            interval=interval,
            tracks_inside=tracks_inside,
            ahead=2 * self.width,
            chunk=chunk,
        )
        self.states: dict[int, Fold] = {}
        self.restored = self.reached = 0
        # What verifications in flight accepted, by request.
        self.flying: dict[int, list[int]] = {}

    def fold(self, req: Req, length: int) -> Fold:
        return req.namespace, tuple(req.tokens[:length])

    def copy(self, copies) -> None:
        if copies is not None:
            pairs = zip(copies.dst.tolist(), copies.src.tolist(), strict=True)
            found = {dst: self.states[src] for dst, src in pairs}
            assert len(found) == len(copies.dst), "two states for one slot"
            self.states |= found

    def run_prefill(self, req: Req, end: int, *, is_new: bool) -> None:
        start = req.committed_len
        plan = self.planner.for_prefill(
            [
                PrefillSpan(
                    req=req,
                    start=start,
                    end=end,
                    is_new=is_new,
                    is_last=end == len(req.tokens) - 1,
                )
            ],
            torch.from_numpy,
        )
        row = req.req_pool_idx
        if plan is not None:
            self.copy(plan.restore)
            self.restored += plan.restore is not None
        if start:
            assert self.states[row] == self.fold(req, start)
        self.states[row] = self.fold(req, end)
        if plan is not None and plan.track_lens is not None:
            lens, slots = plan.track_lens[0].tolist(), plan.track_slots[0].tolist()
            for length, slot in zip(lens, slots, strict=True):
                if length:
                    assert 0 < length <= end - start
                    assert slot > ROWS
                    self.states[slot] = self.fold(req, start + length)
        self.write_kv(req, start, end)
        req.committed_len = end

    def start_request(
        self, tokens: list[int], namespace: str | None, amount: int
    ) -> None:
        """Admit a request and prefill its first chunk, as one launch does."""
        req = admit(self.cache, tokens, namespace)
        end = min(req.committed_len + amount, len(tokens) - 1)
        if end == req.committed_len or not self.grow([req], [end]):
            self.cache.dec_lock_ref(req.last_node)
            self.cache.mark_released(req)
            self.cache.req_to_token_pool.free([req.req_pool_idx])
            return
        self.run_prefill(req, end, is_new=True)
        self.requests.append(req)

    def prefill_more(self, req: Req, amount: int, *, share: bool) -> None:
        end = min(req.committed_len + amount, len(req.tokens) - 1)
        if end <= req.committed_len:
            return
        if end > req.allocated_len and not self.grow([req], [end]):
            return
        self.run_prefill(req, end, is_new=False)
        if share:
            self.cache.cache_unfinished_req(req)

    def verify_ready(self, accepted: list[int], *, overlap: bool) -> None:
        """Verify drafts of every request whose prompt is done. The results arrive after
        the next launch, or at once."""
        ready = [r for r in self.requests if r.committed_len == len(r.tokens) - 1]
        ready = [r for r in ready if r.committed_len + 2 * self.width <= 48]
        ends = [max(r.allocated_len, r.committed_len + 2 * self.width) for r in ready]
        if not ready or not self.grow(ready, ends):
            return
        known = np.array([req.committed_len for req in ready])
        plan = self.planner.for_verification(ready, known, torch.from_numpy)
        due = {}
        if plan is not None:
            parts = (plan.due.rows, plan.due.ends, plan.due.slots)
            rows = zip(*(part.tolist() for part in parts), strict=True)
            due = {row: found for row, *found in rows}
        for row, req in enumerate(ready):
            before = self.flying.pop(id(req), [])
            start, end = (
                req.committed_len + len(t) for t in (before, before + accepted)
            )
            tokens = req.tokens + before + accepted
            assert self.states[req.req_pool_idx] == (
                req.namespace,
                tuple(tokens[:start]),
            )
            self.states[req.req_pool_idx] = req.namespace, tuple(tokens[:end])
            position, slot = due.get(row, (0, 0))
            if start < position <= end:
                self.states[slot] = req.namespace, tuple(tokens[:position])
                self.reached += 1
            self.land(req, before)
            self.flying[id(req)] = list(accepted)
        if not overlap:
            self.land_all()

    def land(self, req: Req, tokens: list[int]) -> None:
        """The result of a verification arrives."""
        req.tokens = [*req.tokens, *tokens]
        start, req.committed_len = req.committed_len, req.committed_len + len(tokens)
        self.write_kv(req, start, req.committed_len)
        self.cache.checkpoints.on_verified(req.holds, req.committed_len)

    def land_all(self) -> None:
        for req in self.requests:
            self.land(req, self.flying.pop(id(req), []))

    def decode_ready(self, token: int) -> None:
        ready = [r for r in self.requests if r.committed_len == len(r.tokens) - 1]
        ready = [r for r in ready if r.committed_len + 1 <= 48]
        if not ready:
            return
        ends = [r.committed_len + 1 for r in ready]
        held = [r.allocated_len for r in ready]
        if not self.grow(ready, np.maximum(held, ends).tolist()):
            return
        plan = self.planner.for_decode(ready, np.array(ends), torch.from_numpy)
        for req in ready:
            row, length = req.req_pool_idx, req.committed_len
            assert self.states[row] == self.fold(req, length)
            self.states[row] = self.fold(req, length + 1)
            req.tokens = [*req.tokens, token]
            self.write_kv(req, length, length + 1)
            req.committed_len += 1
        self.copy(None if plan is None else plan.save)

    def forget_tail(self, req: Req, dropped: int) -> None:
        """End a request whose last tokens do not count."""
        self.requests.remove(req)
        # What is in flight for it is not looked at.
        self.flying.pop(id(req), None)
        req.committed_len = max(req.committed_len - dropped, req.cache_protected_len)
        release_req(req, cache=self.cache)

    def checkpoints_hold_their_prefix(self) -> None:
        runs, found = self.cache.checkpoints, set()
        for node in self.cache.iter_nodes():
            slot = runs._mark(node).slot
            if not slot:
                continue
            path, above = [], node
            while above.parent is not None:
                path.append(above.elements)
                above = above.parent
            elements = np.concatenate(path[::-1])
            tokens = elements >> 32 if self.bigram else elements
            assert self.states[slot] == (node.namespace, tuple(tokens.tolist()))
            found.add(slot)
        for req in self.requests:
            for held in runs.hold_of(req.holds).checkpoints():
                assert held.slot not in found
                assert self.states[held.slot] == self.fold(req, held.position)
                found.add(held.slot)
            due = runs.hold_of(req.holds).due
            if due is not None and due.slot:
                assert due.slot not in found and due.position > req.committed_len
                found.add(due.slot)
        assert len(found) + self.slots.available_size() == self.slots.size


def walk(seed: int, steps: int) -> StateMachine:
    rng = np.random.default_rng(seed)

    def one_of(*options):
        return options[rng.integers(len(options))]

    world = StateMachine()
    page_size = one_of(1, 2, 4)
    world.build_states(
        page_size=page_size,
        tokens_in_pool=int(rng.integers(40, 160)),
        bigram=bool(rng.integers(2)),
        checkpoints=int(rng.integers(1, 9)),
        chunk=one_of(1, 3, 4, 8),
        interval=one_of(0, 1, 4, 8) * page_size,
        tracks_inside=rng.random() < 0.8,
    )

    def start() -> None:
        cut, tail = int(rng.integers(8, 38)), rng.integers(1, 3, 4).tolist()
        namespace = one_of(None, None, None, "x")
        world.start_request(
            one_of(*BASES)[:cut] + tail, namespace, one_of(3, 7, 50, 50)
        )

    def chosen() -> Req:
        return one_of(*world.requests)

    def drafts() -> list[int]:
        return rng.integers(1, 3, rng.integers(1, world.width + 1)).tolist()

    live = {
        lambda: world.prefill_more(chosen(), one_of(3, 7, 50), share=one_of(0, 1)): 5,
        lambda: world.forget_tail(chosen(), one_of(0, 0, 1, 3)): 3,
    }
    # An engine drafts always, or never.
    if world.width and rng.random() < 0.6:
        live[lambda: world.verify_ready(drafts(), overlap=one_of(0, 1, 1))] = 6
    else:
        live[lambda: world.decode_ready(one_of(1, 2))] = 6
    idle = {
        lambda: world.cache.evict(one_of(1, 5, 30)): 1,
        lambda: world.cache.checkpoints.evict(one_of(1, 3)): 1,
    }
    for _ in range(steps):
        actions = dict(idle)
        if len(world.requests) < ROWS:
            actions[start] = 4
        if world.requests:
            actions |= live
        weights = np.array([*actions.values()], dtype=float)
        list(actions)[rng.choice(len(actions), p=weights / weights.sum())]()
        world.every_row_reads_what_it_should()
        world.checkpoints_hold_their_prefix()
        world.books_balance()
    world.teardown()
    assert world.slots.available_size() == world.slots.size
    return world


@pytest.mark.timeout(1800)
def test_a_request_goes_on_from_the_state_of_its_prefix() -> None:
    restored = reached = 0
    for seed in range(count(ci=24, full=2000)):
        try:
            world = walk(seed, steps=100)
            restored += world.restored
            reached += world.reached
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert restored > 40 and reached > 40


def test_a_checkpoint_is_evicted_alone() -> None:
    """The run that it belongs to stays, and leads to a checkpoint further on."""
    slots = StateSlots(rows=ROWS, size=2)
    cache = make_cache(pages=64, page_size=1, states=slots)
    req = admit(cache, list(range(20)))
    assert cache.checkpoints is not None
    hold = cache.checkpoints.hold_of(req.holds)
    for position in (8, 16):
        hold.tracked.append(HeldCheckpoint(position, cache.checkpoints.take()))
    grow(cache, req, 19)
    release_req(req, cache=cache)
    key = cache.key(list(range(20)))
    assert cache.match_length(key) == len(cache.match_prefix(key)) == 16
    assert cache.match_length(cache.key(list(range(15)))) == 8
    cache.match_prefix(cache.key(list(range(8))))  # the one at 16 is older now
    assert cache.checkpoints.evict(1) == 1
    match = cache.match_prefix(key)
    assert (len(match), match.cached_len) == (8, 19)
    check_idle(cache)
    cache.check()


def grow(cache, req: Req, end: int) -> None:
    slots = extend_rows(
        cache,
        rows=[req.req_pool_idx],
        prefix_lens=[req.committed_len],
        seq_lens=[end],
    )
    assert slots is not None
    req.committed_len = req.allocated_len = end


def test_checkpoints_of_a_forward_in_flight_outlive_the_result_before_it() -> None:
    slots = StateSlots(rows=ROWS, size=4)
    hold = slots.hold(0)
    hold.tracked = [HeldCheckpoint(p, slots.take()) for p in (8, 16, 24)]
    hold.saved = HeldCheckpoint(32, slots.take())
    later = slots.renew(hold, 16)
    assert [held.position for held in later.checkpoints()] == [24, 32]
    assert slots.available_size() == 2 and later.kept_from == 16
    slots.release(later)
    assert slots.available_size() == 4 and not later.checkpoints()


def test_a_checkpoint_that_is_due_keeps_its_slot_until_it_is_reached() -> None:
    slots = StateSlots(rows=ROWS, size=2)
    cache = make_cache(pages=64, page_size=1, states=slots)
    runs, holds = cache.checkpoints, (slots.hold(0),)
    assert runs is not None
    (hold,) = holds
    first = runs.reserve(hold, 8)
    assert first and runs.reserve(hold, 8) == first
    runs.on_verified(holds, 7)
    assert hold.saved is None and not hold.cuts()
    runs.on_verified(holds, 9)
    assert hold.saved == HeldCheckpoint(8, first) and hold.due is None
    second = runs.reserve(hold, 16)
    runs.on_verified(holds, 16)
    assert hold.saved == HeldCheckpoint(16, second) and slots.available_size() == 1
    # Without a free slot the last checkpoint's is used again.
    slots.take()
    assert runs.reserve(hold, 24) == second and hold.saved is None
    runs.on_verified(holds, 24)
    other = slots.hold(0)
    assert runs.reserve(other, 8) == 0
    # A slot that is freed now comes too late: the checkpoint may be behind.
    slots.release(hold)
    assert slots.available_size() == 1
    assert runs.reserve(other, 8) == 0
    runs.on_verified((other,), 8)
    assert other.saved is None and runs.reserve(other, 16)
    slots.release(other)
    assert slots.available_size() == 1


def test_slots_that_are_set_aside_stay_so_until_they_are_freed() -> None:
    slots = StateSlots(rows=ROWS, size=3)
    freed: list[int] = []
    slots.register_on_free(lambda found: freed.extend(found.tolist()))
    taken, aside = slots.take(), np.array([ROWS + 2])
    assert slots.owns(np.array([taken, ROWS + 2])).tolist() == [True, False]
    with pytest.raises(RuntimeError, match=f"state slot {taken} is set aside but in"):
        slots.set_aside(np.array([taken]))
    slots.set_aside(aside)
    slots.clear()
    assert freed == [taken] and slots.available_size() == 2
    slots.set_aside(aside)
    slots.free(torch.from_numpy(aside))
    assert freed == [taken, ROWS + 2] and slots.available_size() == 3


def test_a_tree_is_read_back_in_its_order() -> None:
    """Sweeps, and faults that are planted, go through it."""
    cache, twin = (make_cache(pages=64, page_size=1) for _ in range(2))
    for tokens in ([1, 2, 3], [1, 2, 4, 5], [6, 7], [1, 8], [6, 9]):
        key, slots = cache.key(tokens), cache.allocator.alloc(len(tokens))
        cache.allocator.free(slots[: cache.insert(key, slots)])
    saved, _ = cache.save()
    twin.load(saved)
    ours, theirs = (
        [(node.start, node.elements.tolist()) for node in each.iter_nodes()]
        for each in (cache, twin)
    )
    assert len(ours) == 8 and ours == theirs


def test_saved_slots_must_exist() -> None:
    slots = StateSlots(rows=ROWS, size=3)
    slots.load([ROWS + 3, ROWS + 1])
    assert slots.save() == [ROWS + 3, ROWS + 1] and slots.is_used(ROWS + 2)
    for wrong in ([ROWS], [ROWS + 4], [ROWS + 1, ROWS + 1]):
        with pytest.raises(ValueError, match="free state slots"):
            slots.load(wrong)


def test_a_slot_is_freed_once() -> None:
    slots = StateSlots(rows=ROWS, size=2)
    taken = slots.take()
    assert taken == ROWS + 1
    slots.give(taken)
    with pytest.raises(RuntimeError, match=f"state slot {taken} is freed but not in"):
        slots.give(taken)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
