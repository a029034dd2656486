"""The sweep: which cached slots a pass takes, and how soon it finds damage."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from kv_canary.reporter import CanaryViolation
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealData
from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
from sglang.srt.kv_canary.runner.sweep import Sweeper
from sglang.srt.mem_cache.allocator import create_allocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.canary_traffic import canary_of, faults_of
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=15, suite="cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("mock"))


def make_sweeper(
    *, budget: int, page_size: int = 1, pages: int = 1500
) -> tuple[RadixCache, Sweeper]:
    size = pages * page_size
    allocator = create_allocator(size=size, page_size=page_size)
    req_to_token_pool = ReqToTokenPool(
        size=4, row_width=512, device="cpu", context_len=512
    )
    cache = RadixCache(req_to_token_pool=req_to_token_pool, allocator=allocator)
    pool = MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=torch.float32,
        layer_num=1,
        head_num=1,
        head_dim=4,
        device="cpu",
    )
    (group,) = attach_canary_buffers(
        pool=pool,
        config=CanaryConfig(mode=CanaryMode.LOG, real_data=RealData.NONE),
        device="cpu",
        is_draft=False,
        kv_token_id_vs_position_offset=0,
        req_to_token_pool=req_to_token_pool,
        max_rows=4,
    )
    return cache, Sweeper(cache, group, budget=budget)


def put(cache: RadixCache, tokens: list[int], namespace: str | None = None) -> None:
    key = cache.key(tokens, namespace=namespace)
    slots = cache.allocator.alloc(len(tokens) // cache.page_size * cache.page_size)
    assert slots is not None
    cache.allocator.free(slots[: cache.insert(key, slots)])


def grow(cache: RadixCache, rng: random.Random, times: int) -> None:
    stems = [[rng.randrange(9) for _ in range(40)] for _ in range(3)]
    for _ in range(times):
        tail = [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
        stem = rng.choice(stems)
        tokens = stem[: rng.randrange(41)] + tail
        put(cache, tokens, rng.choice((None, "tenant")))


def swept_slots(sweeper: Sweeper, passes: int) -> list[int]:
    return [
        int(slot)
        for _ in range(passes)
        for run in sweeper.next_runs()
        for slot in run.slots
    ]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("budget", [1, 7, 64, 10_000])
def test_every_slot_within_the_bound(budget: int, page_size: int) -> None:
    """ceil(cached / budget) passes, whatever came before in a rotation."""
    rng = random.Random(budget)
    cache, sweeper = make_sweeper(budget=budget, page_size=page_size)
    grow(cache, rng, 20)
    for _ in range(4):
        cached = sorted(cache.cached_slots().tolist())
        bound = math.ceil(len(cached) / budget)
        # One rotation, then another: each visits every slot once.
        assert sorted(swept_slots(sweeper, bound)) == cached
        grow(cache, rng, 3)


def test_a_pass_stays_within_its_budget() -> None:
    cache, sweeper = make_sweeper(budget=7)
    grow(cache, random.Random(1), 20)
    for _ in range(50):
        assert sum(len(run.slots) for run in sweeper.next_runs()) <= 7


def test_runs_say_where_they_start() -> None:
    """Position and slot before it, in one node, across nodes, and at the root."""
    cache, sweeper = make_sweeper(budget=3)
    put(cache, [1, 2, 3, 4, 5])
    put(cache, [1, 2, 9, 9])
    put(cache, [7, 7], "tenant")
    slot_at: dict[tuple[str, int], int] = {}
    chains = {
        "a": cache.match_prefix(cache.key([1, 2, 3, 4, 5])).slots.tolist(),
        "b": cache.match_prefix(cache.key([1, 2, 9, 9])).slots.tolist(),
        "c": cache.match_prefix(cache.key([7, 7], namespace="tenant")).slots.tolist(),
    }
    for name, slots in chains.items():
        slot_at |= {(name, i): slot for i, slot in enumerate(slots)}
    visited = []
    for _ in range(3):
        for run in sweeper.next_runs():
            visited += run.slots.tolist()
            start = run.start
            (name,) = {
                name
                for name, slots in chains.items()
                if slots[start : start + len(run.slots)] == run.slots.tolist()
                and (start > 1 or name != "b")
            }
            assert run.prev_slot == (slot_at[name, start - 1] if start else -1)
            assert bool(run.salt) == (name == "c")
    assert sorted(visited) == sorted(set(cache.cached_slots().tolist()))


def test_locked_nodes_are_left_to_their_readers() -> None:
    cache, sweeper = make_sweeper(budget=100)
    put(cache, [1, 2, 3, 4])
    put(cache, [5, 6, 7])
    match = cache.match_prefix(cache.key([1, 2, 3, 4]))
    cache.inc_lock_ref(match.last_node)
    swept = swept_slots(sweeper, 1)
    assert sorted(swept + match.slots.tolist()) == sorted(cache.cached_slots().tolist())
    cache.dec_lock_ref(match.last_node)
    assert sorted(swept_slots(sweeper, 1)) == sorted(cache.cached_slots().tolist())


def test_evicted_nodes_are_skipped() -> None:
    cache, sweeper = make_sweeper(budget=2)
    put(cache, [1, 2, 3, 4])
    put(cache, [5, 6, 7, 8])
    first = swept_slots(sweeper, 1)
    assert len(first) == 2
    cache.evict(8)
    assert len(cache.cached_slots()) == 0
    assert sweeper.next_runs() == []
    put(cache, [9, 9])
    assert len(swept_slots(sweeper, 1)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_splits_during_a_rotation(seed: int) -> None:
    """Everything is reached within two rotations."""
    rng = random.Random(seed)
    cache, sweeper = make_sweeper(budget=5)
    grow(cache, rng, 6)
    before = set(cache.cached_slots().tolist())
    swept = swept_slots(sweeper, rng.randrange(1, 6))
    grow(cache, rng, 6)  # splits nodes that are half swept
    now = set(cache.cached_slots().tolist())
    assert before <= now
    swept += swept_slots(sweeper, 2 * math.ceil(len(now) / 5))
    assert set(swept) == now
    cache.check()


@pytest.mark.parametrize("seed", range(count(ci=3, full=20)))
def test_damage_in_the_cache_is_found_within_two_rotations(
    model: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """While one request decodes and nobody reads the slots that the others left."""
    budget = 20
    monkeypatch.setenv("SGLANG_KV_CANARY_SWEEP_BUDGET", str(budget))
    engine = EngineHarness(
        model,
        max_total_tokens=1024,
        skip_tokenizer_init=True,
        kv_canary="raise",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=1,
    )
    manager = canary_of(engine)
    rng = random.Random(seed)
    for _ in range(10):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(5, 60))]
        engine.submit(prompt, max_new_tokens=rng.randrange(1, 10))
    engine.run()
    cached = len(engine.scheduler.cache.cached_slots())
    engine.submit([7] * 5, max_new_tokens=200, ignore_eos=True)
    for _ in range(rng.randrange(1, 10)):
        engine.scheduler.step()
    faults = faults_of(engine)
    faults.arm("real_kv_unused_cache", seed=seed)
    before = manager.num_sweep_passes
    with pytest.raises(CanaryViolation, match="launch_tag=target.sweep"):
        engine.run()
    (planted,) = faults.planted
    (found,) = manager.reporter.incidents[-1]["violations"]
    place = (planted.damage.slot, planted.damage.position)
    assert (found["slot"], found["position"]) == place
    assert found["reasons"] == ["verify_real_kv"]
    assert (found["forward_mode"], found["branch"]) == ("sweep", -1)
    passes = manager.num_sweep_passes - before
    assert passes <= 2 * math.ceil(cached / budget) + engine.scheduler.max_in_flight


def test_a_pass_over_nothing_is_none() -> None:
    _, sweeper = make_sweeper(budget=5)
    assert sweeper.run() == 0
    assert sweeper.passes == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
