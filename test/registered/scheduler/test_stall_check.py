"""An engine whose requests would wait for ever stops and shows its memory; one that
only waits long, or is short of memory, does not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scheduler_world import KINDS, VOCAB, engine, prompt_of

from kv_canary.reporter import CanaryViolation
from sglang.srt.constrained.base_grammar import Grammar
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.managers.messages.io_struct import GetStateReq
from sglang.srt.managers.scheduler import stall_check
from sglang.srt.managers.scheduler.stall_check import MAX_EMPTY_ROUNDS, SchedulerStalled
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=15, suite="cpu", full_time=640)

SLOTS = 320

Build = Callable[..., EngineHarness]


@pytest.fixture
def build(models: Path) -> Build:
    def build(kind: str = "plain", **options: Any) -> EngineHarness:
        return engine(models, kind, **{"max_total_tokens": SLOTS} | options)

    return build


def fill_cache(harness: EngineHarness) -> None:
    """Leave 200 tokens of an ended request in the prefix cache."""
    harness.generate(prompt_of(200, start=500), max_new_tokens=1, ignore_eos=True)


def rounds_to_stall(
    harness: EngineHarness, *, match: str, error: type[Exception] = SchedulerStalled
) -> tuple[int, str]:
    """Return how many rounds passed after the last launch, and the message."""
    launches = rounds = 0
    with pytest.raises(error, match=match) as failure:
        for _ in range(1000):
            rounds += 1
            harness.scheduler.step()
            now = harness.scheduler.stats_snapshot().forward_passes_total
            if now != launches:
                launches, rounds = now, 0
    return rounds, str(failure.value)


# -- what stops it -----------------------------------------------------------------


def evict_too_little(patch: pytest.MonkeyPatch) -> None:
    evict = RadixCache.evict
    patch.setattr(
        RadixCache,
        "evict",
        lambda cache, num_slots: evict(cache, num_slots - cache.page_size),
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("canary", ["none", "raise"])
def test_an_eviction_of_one_page_too_few(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    page_size: int,
    canary: str,
) -> None:
    harness = build(kind, page_size=page_size, kv_canary=canary)
    fill_cache(harness)
    evict_too_little(monkeypatch)
    harness.submit(prompt_of(150), rid="waits", max_new_tokens=3, ignore_eos=True)
    rounds, message = rounds_to_stall(harness, match="has stalled: 1 request")
    assert rounds <= MAX_EMPTY_ROUNDS + 2
    assert '"waits": 150 tokens and up to 3 new ones, 0 cached' in message
    assert "it fits, and yet its slots could not be taken" in message
    cache = harness.scheduler.cache
    assert (
        f"KV slots: {SLOTS} in pages of {page_size}, "
        f"{cache.allocator.available_size()} free, {cache.evictable_size()} evictable, "
        "0 protected, 0 neither free nor cached"
    ) in message
    assert "request rows: 0 of " in message


@pytest.mark.parametrize("kind", KINDS)
def test_between_two_chunks_of_a_prompt(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    harness = build(kind, chunked_prefill_size=32)
    fill_cache(harness)
    evict_too_little(monkeypatch)
    harness.submit(prompt_of(200), rid="half", max_new_tokens=3, ignore_eos=True)
    rounds, message = rounds_to_stall(harness, match="1 request")
    # The cache keeps the tokens prefilled so far: they are found again.
    assert '"half": 200 tokens and up to 3 new ones, 0 cached' not in message
    assert rounds <= MAX_EMPTY_ROUNDS + 2


def lose_slots(harness: EngineHarness) -> None:
    assert harness.scheduler.cache.allocator.alloc(300) is not None


def lose_rows(harness: EngineHarness) -> None:
    rows = harness.scheduler.cache.req_to_token_pool
    rows.alloc(rows.available_size())


def keep_lock(harness: EngineHarness) -> None:
    fill_cache(harness)
    cache = harness.scheduler.cache
    match = cache.match_prefix(cache.key(prompt_of(200, start=500)))
    cache.inc_lock_ref(match.last_node)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_slots, ["20 free, 0 evictable, 0 protected, 300 neither", "20 are usa"]),
        (lose_rows, ["request rows: 4 of 4 in use", "320 free"]),
        (keep_lock, ["120 free, 0 evictable, 200 protected, 0 neither"]),
    ],
)
def test_books_that_never_let_anybody_in(
    build: Build, damage: Callable[[EngineHarness], None], words: Sequence[str]
) -> None:
    harness = build(max_running_requests=4)
    damage(harness)
    for i in range(10):
        prompt = prompt_of(149, start=i)
        harness.submit(prompt, rid=f"w{i}", max_new_tokens=2, ignore_eos=True)
    rounds, message = rounds_to_stall(harness, match="has stalled: 10 request")
    assert rounds <= MAX_EMPTY_ROUNDS + 2
    assert '"w7": 149 tokens' in message and '"w8"' not in message
    assert "asks for 150 slots beside 0 reserved" in message
    assert "and 2 more" in message
    for word in words:
        assert word in message


def test_who_runs_is_served_first(build: Build) -> None:
    """The alarm is not for a request that waits while another one runs."""
    harness = build()
    running = harness.submit([1, 2], max_new_tokens=200, ignore_eos=True, stream=True)
    harness.scheduler.step()
    assert harness.scheduler.cache.allocator.alloc(110) is not None
    harness.submit(prompt_of(280), rid="w", max_new_tokens=3, ignore_eos=True)
    rounds_to_stall(harness, match='"w": 280 tokens')
    assert len(harness.collect()[running].output_ids) == 200


def test_messages_do_not_hide_it_for_ever(build: Build) -> None:
    """A message may change something, so that rounds with one do not count."""
    harness = build()
    lose_slots(harness)
    rid = harness.submit(prompt_of(150), max_new_tokens=2, ignore_eos=True)
    for i in range(5 * MAX_EMPTY_ROUNDS):
        if i % (MAX_EMPTY_ROUNDS - 1) == 0:
            harness.io.requests.append(GetStateReq(call_id=i))
        harness.scheduler.step()
    harness.abort(rid)
    harness.scheduler.step()
    rid = harness.submit(prompt_of(150), max_new_tokens=2, ignore_eos=True)
    rounds, _ = rounds_to_stall(harness, match=f'"{rid}"')
    assert rounds == MAX_EMPTY_ROUNDS + 1


def test_what_the_canary_found_comes_first(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding that no result has brought to the host yet is the better message."""
    harness = build(kv_canary="raise")
    (manager,) = harness.scheduler.worker.canary_managers()
    lose_slots(harness)
    harness.submit(prompt_of(150), max_new_tokens=2, ignore_eos=True)
    asked = []
    monkeypatch.setattr(manager, "drain", lambda **_: asked.append(1) or [])
    rounds_to_stall(harness, match="has stalled")
    assert asked == [1]
    assert not issubclass(SchedulerStalled, CanaryViolation)


# -- what does not -----------------------------------------------------------------


def test_a_grammar_that_compiles_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    compile_now = LLGuidanceBackend.compile

    def compile_late(
        backend: LLGuidanceBackend, kind: str, source: str, **options: Any
    ) -> Grammar:
        assert go.wait(60)
        return compile_now(backend, kind, source, **options)

    monkeypatch.setattr(LLGuidanceBackend, "compile", compile_late)
    model = write_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    harness = EngineHarness(model, max_total_tokens=SLOTS)
    bound = harness.submit([65], max_new_tokens=8, regex="[ab]{8}")
    free = harness.submit([65], max_new_tokens=8, ignore_eos=True)
    leaked = None
    for i in range(20 * MAX_EMPTY_ROUNDS):
        harness.scheduler.step()
        if i == 4 * MAX_EMPTY_ROUNDS:
            assert len(harness.collect()[free].output_ids) == 8
            # While a grammar compiles, others may wait, too.
            allocator = harness.scheduler.cache.allocator
            leaked = allocator.alloc(allocator.available_size())
            late = harness.submit(range(60), max_new_tokens=4, ignore_eos=True)
    assert leaked is not None
    allocator.free(leaked)
    go.set()
    answers = harness.run()
    assert set(bytes(answers[bound].output_ids)) <= set(b"ab")
    assert len(answers[late].output_ids) == 4


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_pools_that_are_always_short(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: str, page_size: int
) -> None:
    """Random traffic that evicts, retracts and aborts has no more than two rounds in
    succession that launch nothing."""
    monkeypatch.setattr(stall_check, "MAX_EMPTY_ROUNDS", 3)
    harness = build(
        kind,
        page_size=page_size,
        max_total_tokens=288,
        context_length=240,
        chunked_prefill_size=32,
        schedule_conservativeness=0.1,
        max_running_requests=6,
    )
    for seed in range(count(ci=2, full=20)):
        traffic = Traffic(
            harness, random.Random(f"{kind} {page_size} {seed}"), count(ci=12, full=100)
        )
        answers: dict[str, Finished] = {}
        while traffic.left:
            answers |= harness.run(on_step=traffic.on_step)
        check(traffic.expected, answers, vocab_size=VOCAB)
    if page_size == 1:  # a page per request is kept back, which is plenty of 16 slots
        assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
