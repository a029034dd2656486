"""When a waiting request is admitted: exact to one page of slots.

A request needs, until its end, slots for its known tokens and those that it may still
sample but the last, plus the reserve of speculation, in whole pages, less its cached
prefix. It is admitted where these, and what others are expected to need, are free or
evictable once its own prefix is locked.
"""

from __future__ import annotations

from array import array

import pytest
from scheduler_world import pages, prompt_of

from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.schedule_policy import (
    CLIP_MAX_NEW_TOKENS,
    Admission,
    PrefillAdder,
    PrefillBudget,
)
from sglang.srt.mem_cache.allocator import create_allocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.logprobs import HostLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

PAGE_SIZES = [1, 16]


def make_cache(
    num_pages: int, page_size: int, *, bigram: bool = False
) -> BasePrefixCache:
    rows = ReqToTokenPool(size=8, row_width=512, device="cpu", context_len=512)
    size = max(num_pages, 1) * page_size
    return RadixCache(
        req_to_token_pool=rows,
        allocator=create_allocator(size=size, page_size=page_size),
        bigram=bigram,
    )


def make_req(tokens: list[int], *, new: int = 8, most: int = 100_000) -> Req:
    params = SamplingParams(temperature=0.0, max_new_tokens=new)
    return Req(
        GenerateReq(rid="r", input_ids=tokens, sampling_params=params),
        tokens=array("q", tokens),
        stop_ids=frozenset(),
        seed=0,
        max_total_len=most,
        stop_matcher=None,
    )


def make_adder(
    cache: BasePrefixCache,
    *,
    running: tuple[Req, ...] = (),
    ratio: float = 1.0,
    tokens: int = 10_000,
    chunk: int | None = None,
    reqs: int = 8,
    reserve: int = 0,
) -> PrefillAdder:
    return PrefillAdder(
        cache=cache,
        running=running,
        new_token_ratio=ratio,
        budget=PrefillBudget(
            max_prefill_tokens=tokens,
            chunk_tokens=chunk,
            max_new_reqs=reqs,
            decode_reserve=reserve,
        ),
    )


def store(cache: BasePrefixCache, tokens: list[int]) -> None:
    """Leave the whole pages of an ended request in the cache."""
    length = cache.shared_len(len(tokens))
    slots = cache.allocator.alloc(length)
    assert slots is not None
    assert cache.insert(cache.key(tokens), slots) == 0


def lock(cache: BasePrefixCache, tokens: list[int]) -> None:
    cache.inc_lock_ref(cache.match_prefix(cache.key(tokens)).last_node)


# -- slots of one request ----------------------------------------------------------


@pytest.mark.parametrize("spare", [-1, 0, 1])
@pytest.mark.parametrize("reserve", [0, 8, 14])
@pytest.mark.parametrize("new", [0, 1, 2, 8, 33])
@pytest.mark.parametrize("length", [15, 16, 17, 40])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_empty_pool(
    page_size: int, length: int, new: int, reserve: int, spare: int
) -> None:
    needed = pages(length + max(new - 1, 0) + reserve, page_size)
    cache = make_cache(needed + spare, page_size)
    if needed + spare < 1:
        return
    req = make_req(prompt_of(length), new=new)
    adder = make_adder(cache, reserve=reserve)
    need = adder.slot_need(req)
    assert (need.slots, need.reserved) == (needed * page_size, 0)
    assert need.usable == (needed + spare) * page_size
    outcome = adder.add(req)
    assert outcome is (Admission.ADDED if spare >= 0 else Admission.NO_BUDGET)
    if spare < 0:
        assert adder.reqs == [] and req.last_node is None
    else:
        assert (adder.reqs, adder.extend_lens) == ([req], [length])


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_length_limit_and_the_clip(page_size: int, spare: int) -> None:
    limited = pages(20 + 12 - 1, page_size)
    adder = make_adder(make_cache(limited + spare, page_size))
    is_added = adder.add(make_req(prompt_of(20), new=500, most=32)) is Admission.ADDED
    assert is_added == (spare == 0)
    clipped = pages(20 + CLIP_MAX_NEW_TOKENS - 1, page_size)
    adder = make_adder(make_cache(clipped + spare, page_size))
    is_added = adder.add(make_req(prompt_of(20), new=50_000)) is Admission.ADDED
    assert is_added == (spare == 0)


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_request_after_its_retraction(page_size: int, spare: int) -> None:
    """Its output so far is prefilled, and cannot be sampled again."""
    req = make_req(prompt_of(20), new=30)
    req.append(prompt_of(11, start=90))
    req.prepare_again()
    cache = make_cache(pages(20 + 30 - 1, page_size) + spare, page_size)
    adder = make_adder(cache)
    assert (adder.add(req) is Admission.ADDED) == (spare == 0)
    assert adder.extend_lens == [31][: spare + 1]


# -- what others hold --------------------------------------------------------------


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_evictable_slots_count_and_locked_ones_do_not(
    page_size: int, spare: int
) -> None:
    others = prompt_of(32, start=5)
    needed = pages(40 + 7, page_size)
    for is_locked in (False, True):
        held = pages(32, page_size)
        cache = make_cache(needed + held * is_locked + spare, page_size)
        store(cache, others)
        if is_locked:
            lock(cache, others)
        protected = cache.protected_size()
        req = make_req(prompt_of(40))
        assert (make_adder(cache).add(req) is Admission.ADDED) == (spare == 0)
        assert cache.protected_size() == protected == 32 * is_locked
        assert req.cache_protected_len == 0


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("cached", [31, 32, 33, 40])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_its_own_prefix_is_neither_needed_nor_evictable(
    page_size: int, cached: int, spare: int, bigram: bool
) -> None:
    tokens = prompt_of(40)
    # The last token's logits are needed, so that it is never taken from the cache.
    found = min(cached, 39) - bigram
    found -= found % page_size
    needed = pages(40 + 7, page_size)
    cache = make_cache(needed + spare, page_size, bigram=bigram)
    store(cache, tokens[:cached])
    evictable = cache.evictable_size()
    req = make_req(tokens)
    adder = make_adder(cache)
    need = adder.slot_need(req)
    assert (need.cached, need.slots) == (found, needed * page_size - found)
    assert cache.protected_size() == 0
    assert (adder.add(req) is Admission.ADDED) == (spare == 0)
    if spare == 0:
        assert cache.protected_size() == req.cache_protected_len == found
        assert len(req.prefix_slots) == req.cached_tokens == found
        assert adder.extend_lens == [40 - found]
    else:
        assert (cache.evictable_size(), cache.protected_size()) == (evictable, 0)
        assert req.cache_protected_len == 0 and req.last_node is None


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("ratio", [0.07, 0.5, 1.0])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_running_requests_are_expected_to_need_slots(
    page_size: int, ratio: float, spare: int
) -> None:
    running = (make_req([1], new=50), make_req([2], new=9))
    # Each a page more than the share of its remaining tokens.
    reserved = int(50 * ratio) + int(9 * ratio) + 2 * page_size
    needed = pages(40 + 7, page_size) * page_size
    total = pages(needed + reserved, page_size)
    adder = make_adder(
        make_cache(total + spare, page_size), running=running, ratio=ratio
    )
    req = make_req(prompt_of(40))
    assert adder.slot_need(req).reserved == reserved
    assert (adder.add(req) is Admission.ADDED) == (spare == 0)


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("reserve", [0, 14])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_added_requests_need_theirs(page_size: int, reserve: int, spare: int) -> None:
    first, second = 23, 38
    needed = sum(pages(n + 7 + reserve, page_size) for n in (first, second))
    adder = make_adder(make_cache(needed + spare, page_size), reserve=reserve)
    assert adder.add(make_req(prompt_of(first))) is Admission.ADDED
    outcome = adder.add(make_req(prompt_of(second, start=400)))
    assert (outcome is Admission.ADDED) == (spare == 0)
    assert adder.extend_lens == [first, second][: 2 + spare]


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_rest_of_a_prompt_that_was_begun(page_size: int, spare: int) -> None:
    """It holds its first chunk, and is continued whatever is free."""
    begun = make_req(prompt_of(100))
    begun.req_pool_idx, begun.committed_len = 1, 48
    own = pages(100 + 7, page_size) - pages(48, page_size)
    other = pages(30 + 7, page_size)
    cache = make_cache(own + other + spare, page_size)
    adder = make_adder(cache, chunk=64)
    adder.add_chunked(begun)
    assert adder.extend_lens == [52] and adder.chunked is None
    req = make_req(prompt_of(30, start=400))
    assert adder.slot_need(req).reserved == own * page_size
    small = make_req(prompt_of(8, start=400))  # no page of the chunk is left for more
    assert (adder.add(small) is Admission.ADDED) == (page_size == 1)
    roomy = make_adder(cache, chunk=128)
    roomy.add_chunked(begun)
    assert (roomy.add(req) is Admission.ADDED) == (spare == 0)


# -- tokens and rows ---------------------------------------------------------------


def test_tokens_of_a_batch() -> None:
    """The first prompt may exceed them, the next may not."""
    adder = make_adder(make_cache(400, 1), tokens=40)
    assert adder.add(make_req(prompt_of(41))) is Admission.ADDED
    assert adder.add(make_req([9])) is Admission.NO_BUDGET
    for second, outcome in ((20, Admission.ADDED), (21, Admission.NO_BUDGET)):
        adder = make_adder(make_cache(400, 1), tokens=40)
        assert adder.add(make_req(prompt_of(20))) is Admission.ADDED
        assert adder.add(make_req(prompt_of(second, start=300))) is outcome


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_chunk_is_cut_at_a_page(page_size: int) -> None:
    adder = make_adder(make_cache(400, page_size), chunk=64)
    first, second = make_req(prompt_of(20)), make_req(prompt_of(64, start=300))
    assert adder.add(first) is Admission.ADDED
    assert adder.add(second) is Admission.ADDED
    assert adder.extend_lens == [20, 44 - 44 % page_size]
    assert adder.chunked is second and second.is_chunked and not first.is_chunked
    assert adder.add(make_req([7])) is Admission.NO_BUDGET
    whole = make_adder(make_cache(400, page_size), chunk=64)
    assert whole.add(make_req(prompt_of(64))) is Admission.ADDED
    assert whole.extend_lens == [64] and whole.chunked is None


def test_rows() -> None:
    adder = make_adder(make_cache(400, 1), reqs=2)
    outcomes = [adder.add(make_req(prompt_of(5, start=i))) for i in range(3)]
    assert outcomes == [Admission.ADDED, Admission.ADDED, Admission.NO_BUDGET]


@pytest.mark.parametrize(("more", "deferred"), [(31, False), (32, True)])
def test_a_prefix_that_is_being_prefilled(more: int, deferred: bool) -> None:
    """It is waited for where it saves enough."""
    tokens = prompt_of(80)
    adder = make_adder(make_cache(400, 1))
    assert adder.add(make_req(tokens)) is Admission.ADDED
    req = make_req([*tokens[:more], 999, 998])
    assert (adder.add(req) is Admission.DEFERRED) == deferred


def test_a_request_taken_back_keeps_the_logprobs_of_its_tokens() -> None:
    req = make_req([5, 6, 7])
    for token in range(10, 14):
        req.tokens.append(token)
        req.logprobs.output.append(HostLogprob(-float(token), []))
    req.rewind(5)
    assert req.tokens.tolist() == [5, 6, 7, 10, 11]
    assert [each.logprob for each in req.logprobs.output] == [-10.0, -11.0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
