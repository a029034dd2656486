"""Runs an engine until a planted fault is reported, for the canary's tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.kv_canary.perturb.driver import Planted
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.kv_canary.runner.violation_reporter import CanaryViolation
from sglang.test.harness import EngineHarness

VOCAB = 1000
CONTEXT = 512
WARM_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Fields:
    planted: the fault.
    violations: of the incident that stopped the engine, as JSON objects.
    forward: which forward found it.
    text: the error of the mode `raise`.
    asked, said: prompts, and the tokens that clients had got, by request.
    """

    planted: Planted
    violations: list[dict[str, Any]]
    forward: int
    text: str
    asked: dict[str, list[int]]
    said: dict[str, list[int]]


def canary_of(harness: EngineHarness) -> CanaryManager:
    manager = harness.scheduler.worker.model_runner.canary_manager
    assert manager is not None
    return manager


def plant(model: Path, name: str, *, seed: int, **server_args: Any) -> Outcome:
    """Serve mock requests in mode `raise`, plant the fault, run until it stops.

    Some prompts share a prefix, and finished requests leave theirs in the cache, so
    that every injector finds an opportunity.
    """
    defaults: dict[str, Any] = {
        "page_size": 1,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_real_data": "partial",
    }
    harness = EngineHarness(model, **(defaults | server_args))
    manager = canary_of(harness)
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(32)]
    prompts: list[list[int]] = []
    asked: dict[str, list[int]] = {}

    def submit(i: int) -> None:
        head = shared if i % 3 == 0 else []
        tail = [rng.randrange(VOCAB) for _ in range(32)]
        prompts.append(head + tail)
        again = i % 2 == 1 and i > 6
        ids = (
            prompts[rng.randrange(max(i - 12, 0), i - 3)] + tail[:2]
            if again
            else prompts[-1]
        )
        asked[f"q{i}"] = ids
        harness.submit(
            ids, rid=f"q{i}", stream=True, max_new_tokens=rng.randrange(8, 40)
        )

    submitted, has_met = 0, False
    try:
        for step in range(400):
            if step % 3 == 0:
                submit(submitted)
                submitted += 1
            if step == WARM_STEPS:
                manager.perturb.arm(name, seed=seed)
            if manager.perturb.planted and not has_met:
                has_met = True
                prompt = manager.perturb.planted[0].damage.prompt
                if prompt is not None:
                    asked["meets"] = prompt
                    harness.submit(prompt, rid="meets", max_new_tokens=4)
            harness.scheduler.step()
    except CanaryViolation as error:
        text = str(error)
    else:
        raise AssertionError(
            f"{name}, seed {seed}: nothing was reported; planted "
            f"{manager.perturb.planted}"
        )
    incident = manager.reporter.incidents[-1]
    assert len(manager.perturb.planted) == 1, manager.perturb.planted
    answers = harness.collect()
    return Outcome(
        planted=manager.perturb.planted[0],
        violations=incident["violations"],
        forward=incident["forward"],
        text=text,
        asked=asked,
        said={rid: answer.output_ids for rid, answer in answers.items()},
    )
