"""A prompt that is aborted between two chunks of its prefill: it ends at once, its
chunks serve later requests, and nobody beside it notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from chunk_scene import CHUNK, HALF, NEW_TOKENS, PROMPT, make_scene
from scheduler_world import KINDS, check_answer

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import Finished

register_cpu_ci(est_time=10, suite="cpu")


def assert_aborted(answer: Finished) -> None:
    reason = answer.finish_reason
    assert reason is not None and (reason.type, reason.status_code) == ("abort", 499)
    assert answer.output_ids == [] and answer.messages == 1


@pytest.mark.parametrize("turn", ["decode", "prefill"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_between_two_chunks(models: Path, kind: str, page_size: int, turn: str) -> None:
    scene = make_scene(models, kind, page_size)
    # Tokens with KV, and whether the client had its answer, before each later step.
    committed: list[int] = []
    answered: list[bool] = []

    def act() -> None:
        if committed:
            answered.append(scene.is_answered)
        elif scene.is_half_done and scene.next_turn == turn:
            scene.harness.abort("long")
            committed.append(scene.committed)
            # Others find all chunks whose results are there.
            cache = scene.harness.scheduler.cache
            done = scene.committed - len(scene.harness.scheduler.in_flight) * CHUNK
            assert cache.match_length(cache.key(PROMPT)) >= cache.shared_len(done)

    answers = scene.run(act)
    assert_aborted(answers["long"])
    # In its own next turn.
    assert answered[:2] == ([True, True] if turn == "prefill" else [False, True])
    assert committed == [scene.committed], "another chunk was launched"
    again = scene.harness.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    check_answer(PROMPT, again.output_ids, NEW_TOKENS)
    shared = scene.harness.scheduler.cache.shared_len(scene.committed)
    assert again.cached_tokens == shared >= HALF - page_size
    scene.check(answers, but="long")


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_round_that_retracts_it(models: Path, kind: str) -> None:
    """It does not wait for slots only to end."""
    scene = make_scene(models, kind, 1)
    asked: list[bool] = []

    def act() -> None:
        if scene.was_retracted:
            assert scene.is_answered
        elif scene.starve("decode"):
            scene.harness.abort("long")
            asked.append(True)

    answers = scene.run(act)
    assert asked and scene.was_retracted
    assert_aborted(answers["long"])
    scene.check(answers, but="long")


@pytest.mark.parametrize("kind", KINDS)
def test_while_it_waits_again(models: Path, kind: str) -> None:
    scene = make_scene(models, kind, 1)
    asked: list[bool] = []

    def act() -> None:
        if not scene.starve("prefill") and scene.was_retracted and not asked:
            scene.shortage.leave(64)  # enough for those that run
            scene.harness.abort("long")
            asked.append(True)
        elif asked:
            assert scene.is_answered

    answers = scene.run(act)
    assert asked
    assert_aborted(answers["long"])
    scene.check(answers, but="long")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
