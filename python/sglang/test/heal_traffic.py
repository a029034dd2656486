"""Runs an engine in mode `heal` with planted faults, and the same traffic undamaged."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_canary.faults.catalogue import STEP_FAULTS
from kv_canary.op import native_available
from sglang.faults.steps.planters import PLANTERS
from sglang.faults.steps.site import planted
from sglang.srt.kv_canary.perturb import drivers_of
from sglang.srt.mem_cache.common import check_busy
from sglang.test.harness import EngineHarness, Finished
from sglang.test.hole_traffic import Engine
from sglang.test.mock_oracle import NO_WINDOWS, Windows, next_tokens
from sglang.test.spec_canary_traffic import (
    POOLS,
    SHORTEST_PROMPT,
    VOCAB,
    longer_for,
)

REQUESTS = 9
# Steps between two submissions, and steps before a fault.
EVERY, WARM_STEPS, MOMENTS = 2, 10, 10
SAMPLED = {"temperature": 1.0, "top_k": 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of the traffic."""

    input_ids: list[int]
    options: dict[str, Any]


class HealTraffic:
    """Mixed requests: some share a prefix, sample, get logprobs, or do not stream."""

    def __init__(self, *, seed: int, longer_by: int = 0) -> None:
        rng = random.Random(seed)
        shared = [rng.randrange(VOCAB) for _ in range(32 + longer_by)]
        self.asks: dict[str, Ask] = {}
        for i in range(REQUESTS):
            ids = list(shared) if i % 3 == 0 else []
            length = SHORTEST_PROMPT + longer_by + rng.randrange(6)
            ids += [rng.randrange(VOCAB) for _ in range(length)]
            if i % 5 == 4:
                ids = next(iter(self.asks.values())).input_ids + ids[:3]
            options: dict[str, Any] = {
                "max_new_tokens": rng.randrange(20, 40)
                if i % 4
                else rng.randrange(1, 9),
                "stream": i % 3 != 1,
                "ignore_eos": True,
                "return_logprob": i % 4 == 1,
            }
            if i % 4 == 1:
                options["top_logprobs_num"] = 2
                options["logprob_start_len"] = 0 if i % 8 == 1 else -1
            if i % 2:
                options |= SAMPLED | {"sampling_seed": seed + i}
            self.asks[f"q{i}"] = Ask(input_ids=ids, options=options)

    def submit(self, harness: EngineHarness, step: int) -> None:
        """Submit the request that is due at a step, if any."""
        number, rest = divmod(step, EVERY)
        rid = f"q{number}"
        if not rest and rid in self.asks:
            ask = self.asks[rid]
            harness.submit(ask.input_ids, rid=rid, **ask.options)


@dataclass(kw_only=True)
class Healed:
    """A completed run.

    Fields:
        harmed: whether the fault was done.
        answers: answers by request.
    """

    harness: EngineHarness
    asks: dict[str, Ask]
    harmed: bool = False
    answers: dict[str, Finished] = field(default_factory=dict)

    @property
    def stats(self) -> Any:
        return self.harness.scheduler.stats_snapshot()

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return self.harness.scheduler.own_incidents()


def run_healing(
    name: str | None,
    engine: Engine,
    models: dict[str, Path],
    *,
    seed: int,
    pool: str = "target",
    group: str = "full",
    checks_steps: bool = True,
    **options: Any,
) -> Healed:
    """Serve the traffic to its end.

    Args:
        name: name of the fault, or None for no fault. group: group of slots that it
            damages.
        checks_steps: whether every page must have one holder after every step, which
            does not hold for faults in the host's own records.
    """
    settings: dict[str, Any] = {
        "kv_canary": "heal",
        "kv_canary_heal_limit": 0,
        "kv_canary_sweep_interval": 2,
    }
    hole = None if name is None else STEP_FAULTS.get(name)
    if hole is not None and hole.needs_all:
        settings["kv_canary_real_data"] = "all"
    harness = engine.build(models, **(settings | options))
    scheduler = harness.scheduler
    traffic = HealTraffic(seed=seed, longer_by=longer_for(engine.page_size))
    run = Healed(harness=harness, asks=traffic.asks)
    rng = random.Random(seed)
    moment = WARM_STEPS + rng.randrange(MOMENTS)
    faults = dict(zip(POOLS, drivers_of(scheduler), strict=False))[pool]
    step = 0
    while step < REQUESTS * EVERY or scheduler.has_work() or harness.io.requests:
        traffic.submit(harness, step)
        if step == moment and name is not None and hole is None:
            faults.arm(name, seed=seed, group=group)
        if hole is not None and step >= moment and not run.harmed:
            with planted(PLANTERS[hole.name], scheduler, rng=rng) as site:
                scheduler.step()
            run.harmed = bool(site.harmed)
        else:
            scheduler.step()
        run.harmed = run.harmed or bool(faults.planted)
        if checks_steps:
            check_books(harness)
        step += 1
        assert step < 3000, f"{name}, seed {seed}: the engine does not end"
    while scheduler.step():
        pass
    run.answers = harness.collect()
    return run


def check_books(harness: EngineHarness) -> None:
    """Check that every page has one holder."""
    scheduler = harness.scheduler
    live = [req for req in scheduler._unfinished.values() if req.req_pool_idx]
    healer = scheduler._healer
    assert healer is not None
    check_busy(scheduler.cache, live, aside=healer.quarantine.pages)
    scheduler.cache.check()


def joined(answer: Finished) -> dict[str, list[Any]]:
    """Return the logprobs of all messages of an answer."""
    found: dict[str, list[Any]] = {}
    for delta in answer.logprobs:
        for name in ("input_token", "input_top", "output_token", "output_top"):
            found.setdefault(name, []).extend(getattr(delta, name) or [])
    return found


def _undamaged(
    engine: Engine, models: dict[str, Path], seed: int
) -> dict[str, Finished]:
    """Return only the answers, because keeping the run would keep the engine in memory.

    They are cached in a file next to the models' folder, where all workers of a test
    run find them; this saves half the time of a healing test.
    """
    configs = [(models[name] / "config.json").read_text() for name in sorted(models)]
    about = repr((engine, seed, configs, native_available()))
    file = models["model"].parents[1] / hashlib.sha256(about.encode()).hexdigest()
    if not file.exists():
        run = run_healing(None, engine, models, seed=seed)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(run.answers))
        part.replace(file)
    answers: dict[str, Finished] = pickle.loads(file.read_bytes())
    return answers


def check_exact(
    run: Healed,
    engine: Engine,
    models: dict[str, Path],
    *,
    seed: int,
    windows: Windows = NO_WINDOWS,
) -> None:
    """Check that all answers equal the undamaged engine's and nothing is lost."""
    due = _undamaged(engine, models, seed)
    assert set(run.answers) == set(due) == set(run.asks)
    for rid, want in due.items():
        got = run.answers[rid]
        assert got.output_ids == want.output_ids, rid
        assert got.finish_reason == want.finish_reason, rid
        assert joined(got) == joined(want), rid
        ask = run.asks[rid]
        if "top_k" not in ask.options:
            predicted = next_tokens(
                ask.input_ids + got.output_ids, vocab_size=VOCAB, windows=windows
            )
            assert got.output_ids == predicted[len(ask.input_ids) - 1 : -1], rid
    stats = run.stats
    assert stats.num_used_tokens == stats.kv_canary_quarantined_pages * engine.page_size
