"""A long prompt that is prefilled in chunks while other requests decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_world import Shortage, check_answer, prompt_of, watched_engine

from sglang.srt.managers.batch.req import Req
from sglang.test.harness import EngineHarness, Finished
from sglang.test.spec_parity import check_accounting, check_no_leak

CHUNK = 16
PROMPT = prompt_of(200)
STEM = 52  # shared with those that decode; ends inside a page
HALF = 80
NEW_TOKENS = 9


@dataclass(kw_only=True)
class Scene:
    """Serves "long" in chunks beside "beside 0", "beside 1", ...

    Attributes:
        shortage: of slots; ends before every step.
        long: the long request once its prefill has begun.
        committed: its tokens with KV when it was seen between two chunks before a
            retraction.
        resumed: those that it still had when it was prefilled again.
        asked: prompt and output length of each request.
    """

    harness: EngineHarness
    shortage: Shortage
    long: Req | None = None
    committed: int = 0
    resumed: int | None = None
    asked: dict[str, tuple[list[int], int]] = field(default_factory=dict)

    def start(self, *, num_beside: int, **options: Any) -> None:
        """Begin to decode, and submit "long" with `options`."""
        self.harness.generate(PROMPT[:STEM], max_new_tokens=1, ignore_eos=True)
        for i in range(num_beside):
            # One of them enters a page of 16 slots soon, the other later.
            prompt = PROMPT[: STEM - i] + prompt_of(1 + 8 * i, start=700 + i)
            self.ask(f"beside {i}", prompt, 44, stream=True)
        for _ in range(4):
            self.harness.scheduler.step()
        self.ask("long", PROMPT, NEW_TOKENS, **options)

    def ask(self, rid: str, prompt: list[int], count: int, **options: Any) -> None:
        self.asked[rid] = (prompt, count)
        self.harness.submit(
            prompt, rid=rid, max_new_tokens=count, ignore_eos=True, **options
        )

    @property
    def is_half_done(self) -> bool:
        """Whether "long" is between two chunks, and far enough."""
        chunked = self.harness.scheduler.batches.chunked
        return chunked is not None and self.committed >= HALF

    @property
    def next_turn(self) -> str:
        batches = self.harness.scheduler.batches
        decodes = batches.last_prefill is not None and batches.running is not None
        return "decode" if decodes else "prefill"

    @property
    def was_retracted(self) -> bool:
        return self.long is not None and self.long.num_restarts > 0

    @property
    def is_answered(self) -> bool:
        """Whether the client of "long" has its whole answer."""
        answer = self.harness.collect(keep=True).get("long")
        return answer is not None and answer.finish_reason is not None

    def starve(self, turn: str) -> bool:
        """Leave no slot in the next turn of this kind, once "long" is half done."""
        is_due = self.is_half_done and self.next_turn == turn
        if is_due and not self.was_retracted:
            self.shortage.leave(0)
            return True
        return False

    def run(self, act: Callable[[], object]) -> dict[str, Finished]:
        """Run to the end; `act` is called before every step, with checked books."""

        def on_step(_: int) -> None:
            self.shortage.end()
            check_accounting(self.harness.scheduler)
            self._look()
            act()

        return self.harness.run(on_step=on_step)

    def _look(self) -> None:
        chunked = self.harness.scheduler.batches.chunked
        if chunked is None or chunked.rid != "long":
            return
        self.long = chunked
        if not self.was_retracted:
            self.committed = chunked.committed_len
        elif self.resumed is None:
            self.resumed = chunked.committed_len - CHUNK

    def check(self, answers: dict[str, Finished], *, but: str | None = None) -> None:
        """Check all answers, then what the prefix cache gives to later requests."""
        assert set(answers) == set(self.asked)
        for rid, (prompt, length) in self.asked.items():
            if rid != but:
                check_answer(prompt, answers[rid].output_ids, length)
        for cut in (self.committed + 3, len(PROMPT)):
            prompt = [*PROMPT[:cut], 1]
            again = self.harness.generate(prompt, max_new_tokens=2, ignore_eos=True)
            check_answer(prompt, again.output_ids, 2)
        counts = self.harness.scheduler.stats_snapshot().kv_canary_violations_total
        assert not any(counts.values())
        check_no_leak(self.harness)


def make_scene(
    models: Path,
    kind: str,
    page_size: int,
    *,
    has_radix: bool = True,
    num_beside: int = 2,
    **options: Any,
) -> Scene:
    """A scene in which everything but the first chunk has happened.

    Args:
        num_beside: requests that decode.
        options: of "long".
    """
    harness = watched_engine(
        models,
        kind,
        page_size=page_size,
        max_total_tokens=1024,
        chunked_prefill_size=CHUNK,
        disable_radix_cache=not has_radix,
    )
    scene = Scene(harness=harness, shortage=Shortage(harness))
    scene.start(num_beside=num_beside, **options)
    return scene
