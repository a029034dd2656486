"""Runs an engine with one of `STEP_FAULTS` planted until the canary stops it, or
without the canary to see what clients would have received.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kv_canary.checks import reason_labels
from kv_canary.faults.catalogue import STEP_FAULTS
from kv_canary.faults.fault import Bound, Harm
from kv_canary.reporter import CanaryViolation
from sglang.faults.steps.planters import PLANTERS
from sglang.faults.steps.site import planted
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_oracle import next_tokens
from sglang.test.spec_canary_traffic import (
    POOLS,
    VOCAB,
    WARM_STEPS,
    SpecTraffic,
    longer_for,
    speculating,
)

# A fault happens at most this many steps after the first ones.
MOMENTS = 12
# Steps within which an opportunity, or its report, must come.
PATIENCE = 40
STEPS_UNSEEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Configuration of an engine.

    Fields:
        tree: top-k, steps and nodes, or None without speculation.
        draft_layout: of the slots of a draft's branches; by default the product's.
    """

    page_size: int
    overlap: bool = False
    tree: tuple[int, int, int] | None = None
    draft_layout: str | None = None

    def __str__(self) -> str:
        tree = "" if self.tree is None else f"tree{'x'.join(map(str, self.tree))}-"
        return f"{tree}page{self.page_size}{'-overlap' * self.overlap}"

    def traffic(self, harness: EngineHarness, *, seed: int) -> SpecTraffic:
        """Requests whose prompts are longer than a page."""
        return SpecTraffic(harness, seed=seed, longer_by=longer_for(self.page_size))

    def build(self, models: dict[str, Path], **options: Any) -> EngineHarness:
        options |= {
            "page_size": self.page_size,
            "overlap": self.overlap,
            "max_total_tokens": 256 * self.page_size + 4096,
        }
        if self.draft_layout is not None:
            options["speculative_draft_layout"] = self.draft_layout
        if self.tree is not None:
            return speculating(**models, tree=self.tree, **options)
        return EngineHarness(
            models["model"],
            max_running_requests=8,
            skip_tokenizer_init=True,
            **options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launched batch.

    Fields:
        forwards: numbers of its forwards on the device by pool.
    """

    rids: frozenset[str]
    forwards: dict[str, range]


@dataclass(kw_only=True)
class LaunchLog:
    """Records what an engine launches."""

    harness: EngineHarness
    launches: list[Launch] = field(default_factory=list)

    def clocks(self) -> dict[str, int]:
        managers = self.harness.scheduler.worker.canary_managers()
        return {
            pool: int(manager.target.buffers.state.clock)
            for pool, manager in zip(POOLS, managers, strict=False)
        }

    @contextmanager
    def opened(self) -> Iterator[None]:
        worker = self.harness.scheduler.worker
        launch: Callable[..., GenerationBatchResult] = worker.forward_batch_generation

        def noted(batch: ScheduleBatch, *rest: Any) -> GenerationBatchResult:
            rids, before = frozenset(req.rid for req in batch.reqs), self.clocks()
            try:
                return launch(batch, *rest)
            finally:
                forwards = {
                    pool: range(before[pool], clock)
                    for pool, clock in self.clocks().items()
                }
                self.launches.append(Launch(rids=rids, forwards=forwards))

        with patch.object(worker, "forward_batch_generation", noted):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A run that the canary stopped.

    Fields:
        harmed: requests that the fault was done to.
        launches: all launches; `planted` is the index of the one with the fault.
        violations: violations of all incidents, as JSON objects.
        asked, said: prompts, and tokens that clients had received.
        last_messages: number of messages that the last step sent.
    """

    harmed: tuple[str, ...]
    launches: Sequence[Launch]
    planted: int
    violations: list[dict[str, Any]]
    text: str
    asked: dict[str, list[int]]
    said: dict[str, Finished]
    last_messages: int

    def find_launch(self, violation: dict[str, Any]) -> int:
        """Return the index of the launch with a violation's forward."""
        forward, pool = violation["forward"], violation["worker"]
        places = range(len(self.launches))
        return next(i for i in places if forward in self.launches[i].forwards[pool])

    def next_launch(self) -> int:
        """Return the index of the first launch after the fault with a harmed
        request.
        """
        places = range(self.planted + 1, len(self.launches))
        return next(i for i in places if self.launches[i].rids & set(self.harmed))


def wrong_tokens(asked: dict[str, list[int]], said: dict[str, Finished]) -> int:
    """Count the tokens received by clients that differ from the oracle's."""
    wrong = 0
    for rid, answer in said.items():
        prompt, output = asked[rid], answer.output_ids
        due = next_tokens(prompt + output, vocab_size=VOCAB)[len(prompt) - 1 : -1]
        wrong += sum(a != b for a, b in zip(output, due, strict=True))
    return wrong


def stop_by(
    name: str, engine: Engine, models: dict[str, Path], *, seed: int
) -> Stopped:
    """Serve mock requests in mode `raise`, plant the fault, run to the report."""
    fault, rng = STEP_FAULTS[name], random.Random(seed)
    harness = engine.build(
        models,
        kv_canary="raise",
        kv_canary_real_data="all" if fault.needs_all else "partial",
    )
    traffic, moment = engine.traffic(harness, seed=seed), _moment(rng)
    log = LaunchLog(harness=harness)
    harmed: tuple[str, ...] = ()
    place = -1

    def step() -> None:
        nonlocal harmed, place
        if harmed or number < moment:
            harness.scheduler.step()
            return
        with planted(PLANTERS[name], harness.scheduler, rng=rng) as site:
            try:
                harness.scheduler.step()
            finally:
                harmed, place = site.harmed, len(log.launches) - 1

    with log.opened():
        for number in range(moment + PATIENCE):
            traffic.on_step(number)
            messages = len(harness.io.responses)
            try:
                step()
            except CanaryViolation as error:
                last_messages = len(harness.io.responses) - messages
                manager = harness.scheduler.worker.canary_managers()[0]
                incidents = manager.reporter.incidents
                return Stopped(
                    harmed=harmed,
                    launches=log.launches,
                    planted=place,
                    violations=[v for i in incidents for v in i["violations"]],
                    text=str(error),
                    asked=traffic.asked,
                    said=harness.collect(),
                    last_messages=last_messages,
                )
    wrong = wrong_tokens(traffic.asked, harness.collect())
    raise AssertionError(
        f"{name}, {engine}, seed {seed}: not reported; done to {harmed or 'nobody'}; "
        f"{wrong} wrong tokens were sent"
    )


def _moment(rng: random.Random) -> int:
    return WARM_STEPS + rng.randrange(MOMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """The answers of an engine without the canary.

    Fields:
        sent, wrong: number of tokens, and how many of them differ from the oracle's.
    """

    sent: int
    wrong: int


def run_unseen(
    name: str | None, engine: Engine, models: dict[str, Path], *, seed: int
) -> Unseen:
    """Serve the same requests without the canary, with the fault in every step from its
    moment, or with no fault if it is None.
    """
    rng = random.Random(seed)
    harness = engine.build(models, kv_canary="none")
    traffic, moment = engine.traffic(harness, seed=seed), _moment(rng)
    for number in range(moment + STEPS_UNSEEN):
        traffic.on_step(number)
        if name is None or number < moment:
            harness.scheduler.step()
            continue
        with planted(PLANTERS[name], harness.scheduler, rng=rng):
            harness.scheduler.step()
    said = harness.collect()
    return Unseen(
        sent=sum(len(answer.output_ids) for answer in said.values()),
        wrong=wrong_tokens(traffic.asked, said),
    )


@cache
def _sent_unharmed(engine: Engine, model: Path, draft: Path, seed: int) -> int:
    unharmed = run_unseen(None, engine, {"model": model, "draft": draft}, seed=seed)
    assert unharmed.wrong == 0
    return unharmed.sent


def does_damage(
    name: str, engine: Engine, models: dict[str, Path], *, seed: int
) -> bool:
    """Whether clients notice the fault as its table says, without the canary."""
    harm = STEP_FAULTS[name].harm
    unseen = run_unseen(name, engine, models, seed=seed)
    if harm is Harm.TOKENS:
        return unseen.wrong > 0
    # The target decides the output: worse drafts only take more steps.
    assert unseen.wrong == 0
    sent = _sent_unharmed(engine, **models, seed=seed)
    return unseen.sent != sent if harm is Harm.DRAFTS else unseen.sent == sent


def check_named(name: str, stopped: Stopped) -> None:
    """A harmed request is named with an expected reason, first by the launch that the
    fault belongs to; nothing of the step that failed was sent, and nothing wrong."""
    fault = STEP_FAULTS[name]
    allowed = set(reason_labels(fault.reasons))
    found = [
        violation
        for violation in stopped.violations
        if allowed & set(violation["reasons"]) and violation["rid"] in stopped.harmed
    ]
    assert found, stopped.text
    if fault.bound is Bound.HOST:
        assert {v["launch"] for v in found} == {"result"}
    is_next = fault.bound is Bound.NEXT
    due = stopped.next_launch() if is_next else stopped.planted
    # With overlap the host processes a result after the next batch was launched.
    earliest = due - (fault.bound is Bound.HOST)
    assert earliest <= min(map(stopped.find_launch, found)) <= due, stopped.text
    assert stopped.last_messages == 0
    assert wrong_tokens(stopped.asked, stopped.said) == 0
