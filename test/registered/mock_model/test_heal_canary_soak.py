"""Random traffic with a planted fault every 50 forwards, healed: every answer is the
oracle's, nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kv_canary.faults.catalogue import DRAFT_FAULTS, POOL_FAULTS
from sglang.srt.kv_canary.perturb import drivers_of
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.heal_traffic import check_books
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count
from sglang.test.spec_adaptive import InTurn
from sglang.test.spec_canary_traffic import (
    VOCAB,
    speculating,
    write_mock_models,
)

register_cpu_ci(est_time=15, suite="cpu", full_time=700)
register_cuda_ci(est_time=300, suite="cuda")

REQUESTS = count(ci=20, full=2000)
FORWARDS_BETWEEN = count(ci=15, full=50)
# Faults in what the prefix cache holds.
NEED_CACHE = {"phantom_prefix", "real_kv_unused_cache"}
DRAFT_NAMES = sorted(
    {*DRAFT_FAULTS, "real_kv_used", "real_kv_post_forward", "record", "early_free"}
)
# (page size, slots, chunk, policy, radix cache, overlap): small enough to retract.
PLAIN = [
    (1, 600, 64, "fcfs", True, True),
    (4, 640, 16, "lpm", True, False),
    (16, 800, 32, "lpm", True, True),
    (4, 600, 128, "fcfs", False, True),
]
# (kind of the draft, tree, page size, slots, overlap)
SPECULATIVE = [
    ("EAGLE", (1, 4, 5), 4, 1600, True),
    ("EAGLE", (4, 4, 12), 4, 2400, False),
    ("EAGLE", (8, 5, 24), 64, 12288, True),
    ("STANDALONE", (4, 4, 12), 4, 2400, True),
]
IN_CI = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_mock_models(tmp_path_factory.mktemp("mock"))


@pytest.fixture(scope="module")
def with_language_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("standalone")
    return write_mock_models(folder, kind="STANDALONE", source=None)


HEALING: dict[str, Any] = {
    "kv_canary": "heal",
    "kv_canary_heal_limit": 0,
    "schedule_conservativeness": 0.1,
}


def serve(harness: EngineHarness, *, seed: int) -> None:
    """Serve random requests and plant faults in either pool."""
    rng, scheduler = random.Random(seed), harness.scheduler
    traffic = Traffic(harness, random.Random(seed), REQUESTS, longest_output=120)
    drivers = drivers_of(scheduler)
    has_cache = not harness.server_args.disable_radix_cache
    target_names = sorted(set(POOL_FAULTS) - (set() if has_cache else NEED_CACHE))
    answers: dict[str, Finished] = {}
    last = 0

    def on_step(step: int) -> None:
        nonlocal last
        traffic.on_step(step)
        if scheduler._stats.num_forwards >= last + FORWARDS_BETWEEN:
            last = scheduler._stats.num_forwards
            pool = rng.randrange(len(drivers))
            names = DRAFT_NAMES if pool else target_names
            # One that has found no opportunity makes room.
            drivers[pool]._armed.clear()
            drivers[pool].arm(rng.choice(names), seed=rng.randrange(1000))
            check_books(harness)

    while traffic.left:
        answers |= harness.run(on_step=on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    heals = sum(scheduler.stats_snapshot().kv_canary_heals_total.values())
    planted = sum(len(driver.planted) for driver in drivers)
    assert planted > 0 and (REQUESTS < 2000 or heals >= planted / 2), (planted, heals)


@pytest.mark.parametrize("configuration", PLAIN, ids=lambda c: "-".join(map(str, c)))
def test_plain(
    models: dict[str, Path], configuration: tuple[int, int, int, str, bool, bool]
) -> None:
    page_size, slots, chunk, policy, has_radix, overlap = configuration
    harness = EngineHarness(
        models["model"],
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
        disable_radix_cache=not has_radix,
        max_running_requests=24,
        skip_tokenizer_init=True,
        kv_canary_sweep_interval=8 if has_radix else 0,
        **HEALING,
    )
    serve(harness, seed=PLAIN.index(configuration))


@pytest.mark.parametrize(
    "configuration",
    SPECULATIVE[: count(ci=IN_CI, full=len(SPECULATIVE))],
    ids=lambda c: str(c).replace(" ", ""),
)
def test_speculation(
    models: dict[str, Path],
    with_language_model: dict[str, Path],
    configuration: tuple[str, tuple[int, int, int], int, int, bool],
) -> None:
    kind, tree, page_size, slots, overlap = configuration
    harness = speculating(
        **(models if kind == "EAGLE" else with_language_model),
        speculative_algorithm=kind,
        tree=tree,
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=64,
        max_running_requests=12,
        overlap=overlap,
        kv_canary_sweep_interval=8,
        **HEALING,
    )
    serve(harness, seed=SPECULATIVE.index(configuration))


@pytest.mark.parametrize("kind", ["EAGLE", "STANDALONE"])
def test_shapes_that_change(
    models: dict[str, Path], with_language_model: dict[str, Path], kind: str
) -> None:
    """Also where the draft's KV lacks tokens, which are then recomputed."""
    harness = speculating(
        **(models if kind == "EAGLE" else with_language_model),
        speculative_algorithm=kind,
        tree=(4, 4, 12),
        page_size=4,
        max_total_tokens=2400,
        chunked_prefill_size=64,
        max_running_requests=12,
        overlap=kind == "EAGLE",
        kv_canary_sweep_interval=8,
        speculative_adaptive=True,
        skip_server_warmup=True,
        **HEALING,
    )
    shapes = harness.scheduler.shapes
    shapes.policy = InTurn(shapes, 5)
    serve(harness, seed=count(ci=1, full=2))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
