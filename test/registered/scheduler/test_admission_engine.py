"""Admission in a whole engine: as many requests start as there are slots for, and an
admission that cannot be kept leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_world import (
    KINDS,
    check_answer,
    engine,
    pages,
    prompt_of,
    watched_engine,
)

from sglang.srt.arg_groups.draft_slots import decode_reserve
from sglang.srt.mem_cache.common import check_busy
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_parity import check_no_leak

register_cpu_ci(est_time=6, suite="cpu")

PAGE_SIZES = [1, 16]


@pytest.mark.parametrize("spare", [-1, 0])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_starts_as_many_as_fit(
    models: Path, kind: str, page_size: int, spare: int
) -> None:
    """Two requests, and slots for both or a page less; one more is never refused."""
    reserve = decode_reserve(engine(models, kind, page_size=page_size).server_args)
    lengths, new = (37, 70), 12
    needed = sum(pages(n + new - 1 + reserve, page_size) for n in lengths)
    harness = engine(
        models,
        kind,
        page_size=page_size,
        max_total_tokens=(needed + spare) * page_size,
    )
    prompts = [prompt_of(n, start=n) for n in lengths]
    rids = [harness.submit(p, max_new_tokens=new, ignore_eos=True) for p in prompts]
    harness.scheduler.step()
    assert len(harness.scheduler.waiting) == -spare
    answers = harness.run()
    for prompt, rid in zip(prompts, rids, strict=True):
        check_answer(prompt, answers[rid].output_ids, new)
    if spare == 0:  # who is admitted beside a running request may be too many
        assert harness.scheduler.stats_snapshot().num_retracted_reqs == 0
    check_no_leak(harness)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_admission_that_is_taken_back(
    models: Path, kind: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that were promised are not there, for one round: nothing stays locked."""
    harness = watched_engine(
        models,
        kind,
        page_size=page_size,
        max_total_tokens=320,
        chunked_prefill_size=256,
    )
    harness.generate(prompt_of(200), max_new_tokens=1, ignore_eos=True)
    cache = harness.scheduler.cache
    evict, asked, protected = RadixCache.evict, [], []

    def evict_once_too_little(cache: RadixCache, num_slots: int) -> int:
        asked.append(num_slots)
        return evict(cache, num_slots if len(asked) > 1 else num_slots - page_size)

    monkeypatch.setattr(RadixCache, "evict", evict_once_too_little)
    # The first one shares a prefix with what is cached.
    prompts = [
        prompt_of(70) + prompt_of(60, start=300),
        prompt_of(31, start=600) + prompt_of(61, start=400),
    ]
    rids = [harness.submit(p, max_new_tokens=3, ignore_eos=True) for p in prompts]

    def look(_: int) -> None:
        if len(asked) == 1:
            protected.append(cache.protected_size())
            check_busy(cache, [])

    answers = harness.run(on_step=look)
    assert protected == [0] and len(asked) > 1
    for prompt, rid in zip(prompts, rids, strict=True):
        check_answer(prompt, answers[rid].output_ids, 3)
    check_no_leak(harness)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
