"""Overlap: a request turns out to have ended while its next step is in flight. The step
is wasted and nothing else: its token is not sent, its slots come back, others go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scheduler_world import check_answer, oracle, prompt_of, watched_engine

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.spec_parity import check_accounting, check_no_leak

register_cpu_ci(est_time=8, suite="cpu")

KINDS = ("overlap", "spec-overlap")
KEPT = 6  # output tokens before the end
BESIDE = prompt_of(20, start=3)


@dataclass(kw_only=True)
class Watch:
    """Checks the books before every step, and looks for wasted ones of "ends".

    Attributes:
        wasted: steps before which one was in flight.
    """

    harness: EngineHarness
    wasted: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def __call__(self, step: int) -> None:
        scheduler = self.harness.scheduler
        check_accounting(scheduler)
        launched = [req for batch, _ in scheduler.in_flight for req in batch.reqs]
        for req in launched:
            if req.rid == "ends" and req.is_finished:
                self.wasted.append(step)
                # It was released already.
                assert (req.allocated_len, req.last_node) == (0, None)
                if not self.late:
                    self._submit_late(step)

    def _submit_late(self, step: int) -> None:
        """Somebody takes the slots while the wasted step may still write to them."""
        self.late = prompt_of(41, start=500 + step)
        self.harness.submit(self.late, rid="late", max_new_tokens=9, ignore_eos=True)


def serve(
    models: Path,
    kind: str,
    prompt: list[int],
    *,
    page_size: int,
    aborts: bool = False,
    **params: object,
) -> tuple[Watch, dict[str, Finished]]:
    harness = watched_engine(models, kind, page_size=page_size, max_total_tokens=512)
    harness.submit(BESIDE, rid="beside", max_new_tokens=40, ignore_eos=True)
    harness.submit(prompt, rid="ends", stream=True, **params)
    watch = Watch(harness=harness)

    def on_step(step: int) -> None:
        watch(step)
        answer = harness.collect(keep=True).get("ends")
        if aborts and answer is not None and len(answer.output_ids) >= KEPT:
            harness.abort("ends")

    answers = harness.run(on_step=on_step)
    check_answer(BESIDE, answers["beside"].output_ids, 40)
    if watch.late:
        check_answer(watch.late, answers["late"].output_ids, 9)
    return watch, answers


def check_cached(watch: Watch, tokens: list[int], *, most: int, least: int) -> None:
    """Check how many of `tokens` are in the prefix cache, and with the right KV."""
    harness = watch.harness
    shared_len = harness.scheduler.cache.shared_len
    prompt = [*tokens, 1, 2]
    again = harness.generate(prompt, max_new_tokens=3, ignore_eos=True)
    assert shared_len(least) <= again.cached_tokens <= shared_len(most)
    check_answer(prompt, again.output_ids, 3)
    check_no_leak(harness)


# The wasted step's slot is the last of a page, the first of one, or the second.
@pytest.mark.parametrize("length", [25, 26, 27])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_by_a_token(
    models: Path, kind: str, page_size: int, length: int
) -> None:
    prompt = prompt_of(length)
    expected = oracle(prompt, KEPT)
    assert expected.index(expected[-1]) == KEPT - 1
    watch, answers = serve(
        models,
        kind,
        prompt,
        page_size=page_size,
        max_new_tokens=40,
        stop_token_ids=[expected[-1]],
    )
    answer = answers["ends"]
    assert answer.output_ids == expected
    assert answer.finish_reason is not None
    assert answer.finish_reason.matched == expected[-1]
    assert len(watch.wasted) == 1
    sent = sum(len(answer.output_ids) for answer in answers.values())
    stats = watch.harness.scheduler.stats_snapshot()
    assert stats.generation_tokens_total == sent
    tokens = prompt + expected
    # The wasted step is the one that computes the KV of the last token. A verification
    # that is wasted does not count, but the one before may have gone further.
    least = len(tokens) - kind.startswith("spec")
    check_cached(watch, tokens, most=len(tokens), least=least)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_by_the_token_of_its_prefill(
    models: Path, kind: str, page_size: int
) -> None:
    # Prefilled beside the other one, which is first to cache what both have computed.
    prompt = BESIDE + prompt_of(13, start=900)
    stop = oracle(prompt, 1)
    watch, answers = serve(
        models,
        kind,
        prompt,
        page_size=page_size,
        max_new_tokens=40,
        stop_token_ids=stop,
    )
    assert answers["ends"].output_ids == stop
    assert len(watch.wasted) == 1
    check_cached(watch, prompt + stop, most=len(prompt) + 1, least=len(prompt))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_aborted(models: Path, kind: str, page_size: int) -> None:
    prompt = prompt_of(26)
    watch, answers = serve(
        models,
        kind,
        prompt,
        page_size=page_size,
        aborts=True,
        max_new_tokens=40,
        ignore_eos=True,
    )
    output = answers["ends"].output_ids
    assert answers["ends"].finish_reason is not None
    assert answers["ends"].finish_reason.type == "abort"
    check_answer(prompt, output, len(output))
    assert KEPT <= len(output) < 40 and len(watch.wasted) == 1
    tokens = prompt + output
    check_cached(watch, tokens, most=len(tokens), least=len(tokens) - 1)


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_end_by_length_wastes_nothing(models: Path, page_size: int) -> None:
    prompt = prompt_of(26)
    watch, answers = serve(
        models,
        "overlap",
        prompt,
        page_size=page_size,
        max_new_tokens=KEPT,
        ignore_eos=True,
    )
    check_answer(prompt, answers["ends"].output_ids, KEPT)
    assert watch.wasted == []
    tokens = prompt + answers["ends"].output_ids
    check_cached(watch, tokens, most=len(tokens) - 1, least=len(tokens) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_alone(models: Path, kind: str) -> None:
    """The wasted step is all that is left, and the engine is idle after it."""
    prompt = prompt_of(26)
    expected = oracle(prompt, KEPT)
    harness = watched_engine(models, kind, max_total_tokens=128)
    answer = harness.generate(prompt, max_new_tokens=40, stop_token_ids=[expected[-1]])
    assert answer.output_ids == expected and answer.messages == 1
    check_no_leak(harness)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
