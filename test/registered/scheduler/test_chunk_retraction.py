"""A prompt that is retracted between two chunks of its prefill.

Its own answer is exact, and so are those of requests that run beside it or find its KV
in the prefix cache; no slot, row or lock is lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chunk_scene import HALF, PROMPT, STEM, make_scene
from scheduler_world import KINDS

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="cpu")

# By a decode step that needs its slots, or because its next chunk finds none.
TURNS = ("decode", "prefill")


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers(models: Path, kind: str, page_size: int, turn: str) -> None:
    """It goes on where it was: its chunks are in the prefix cache."""
    scene = make_scene(models, kind, page_size)
    answers = scene.run(lambda: scene.starve(turn))
    assert scene.long is not None and scene.long.num_restarts == 1
    stats = scene.harness.scheduler.stats_snapshot()
    assert stats.num_retracted_reqs == (turn == "decode")
    shared_len = scene.harness.scheduler.cache.shared_len
    assert scene.resumed is not None and scene.committed >= HALF
    # The decode step that comes first takes what it needs from the end of it.
    lost = shared_len(scene.committed) - scene.resumed
    assert 0 <= lost <= max(2 * page_size, 16)
    # That of the first admission.
    assert answers["long"].cached_tokens == shared_len(STEM)
    scene.check(answers)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_alone(models: Path, kind: str, page_size: int) -> None:
    """With overlap its last chunk is in flight when the next one finds no slot."""
    scene = make_scene(models, kind, page_size, num_beside=0)
    answers = scene.run(lambda: scene.starve("prefill"))
    shared_len = scene.harness.scheduler.cache.shared_len
    assert scene.resumed == shared_len(scene.committed) >= HALF - page_size
    scene.check(answers)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_overtakes_it(models: Path, kind: str, turn: str) -> None:
    scene = make_scene(models, kind, 1)
    queues: list[list[str]] = []

    def act() -> None:
        if scene.starve(turn):
            scene.ask("next", PROMPT[:30], 5)
        elif scene.was_retracted:
            queues.append([req.rid for req in scene.harness.scheduler.waiting])

    answers = scene.run(act)
    assert queues[0] == ["long", "next"]
    scene.check(answers)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_prefix_cache(models: Path, kind: str, turn: str) -> None:
    scene = make_scene(models, kind, 16, has_radix=False)
    answers = scene.run(lambda: scene.starve(turn))
    assert scene.was_retracted and scene.resumed == 0
    scene.check(answers)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evicted_meanwhile(models: Path, kind: str, page_size: int) -> None:
    """It is prefilled again from what those that run share with it."""
    scene = make_scene(models, kind, page_size)
    evicted: list[bool] = []

    def act() -> None:
        if not scene.starve("prefill") and scene.was_retracted and not evicted:
            scene.shortage.leave(64)  # enough for those that run
            evicted.append(True)

    answers = scene.run(act)
    assert scene.resumed == scene.harness.scheduler.cache.shared_len(STEM)
    scene.check(answers)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores(models: Path, kind: str, turn: str) -> None:
    """Every token of the prompt is scored once, as without a retraction."""
    options = {"return_logprob": True, "logprob_start_len": 20, "top_logprobs_num": 2}
    undisturbed = make_scene(models, kind, 1, **options)
    expected = undisturbed.run(lambda: None)["long"].logprobs
    assert [len(part.input_token or []) for part in expected] == [len(PROMPT) - 20]
    scene = make_scene(models, kind, 1, **options)
    answers = scene.run(lambda: scene.starve(turn))
    assert scene.was_retracted
    assert answers["long"].logprobs == expected
    scene.check(answers)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
