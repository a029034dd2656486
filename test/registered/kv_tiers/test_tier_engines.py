"""Tiers of whole engines: healing, flushing, aborts, several ranks' decisions."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from sglang.srt.kv_events.block_recorder import (
    BlockRecorder,
    hash_blocks,
)
from sglang.srt.kv_events.host_blocks import HostBlocks
from sglang.srt.kv_events.messages import MEDIUM_CPU, BlockStored
from sglang.srt.managers.messages.io_struct import (
    FlushCacheReq,
    FlushCacheRsp,
    GetTiersReq,
)
from sglang.srt.managers.messages.tier_snapshot import PlaceState
from sglang.srt.utils.salt_chain import event_seed
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tier_traffic import VOCAB, tiered, tiers_of

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")


def prompt_of(seed, length=300):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def generate(harness, tokens):
    return harness.generate(tokens, max_new_tokens=4, ignore_eos=True)


def test_a_hit_in_host_memory_counts_as_cached(tmp_path):
    harness = tiered(tmp_path, "plain")
    first = generate(harness, prompt_of(1))
    harness.scheduler.cache.reset()
    again = generate(harness, prompt_of(1))
    assert first.cached_tokens == 0
    assert again.cached_tokens == 256
    assert again.output_ids == first.output_ids
    stats = harness.scheduler.stats_snapshot()
    assert stats.hicache_loaded_tokens_total == 256
    assert stats.hicache_host_used_tokens == 256


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_that_was_loaded_is_used(tmp_path, overlap):
    """More requests load at once than the device holds: none evicts another one's
    prefix before that is admitted."""
    harness = tiered(tmp_path, "plain", overlap=overlap)
    prompts = [prompt_of(number) for number in range(8)]
    for prompt in prompts:
        generate(harness, prompt[:130])
    rids = [harness.submit(p, max_new_tokens=60, ignore_eos=True) for p in prompts]
    answers = harness.run()
    assert [answers[rid].cached_tokens for rid in rids] == [128] * len(rids)


def test_namespaces_do_not_share(tmp_path):
    harness = tiered(tmp_path, "plain")
    rid = harness.submit(prompt_of(1), max_new_tokens=2, extra_key="one")
    harness.run()
    harness.scheduler.cache.reset()
    rid = harness.submit(prompt_of(1), max_new_tokens=2, extra_key="other")
    assert harness.run()[rid].cached_tokens == 0
    harness.scheduler.cache.reset()
    rid = harness.submit(prompt_of(1), max_new_tokens=2, extra_key="one")
    assert harness.run()[rid].cached_tokens == 256


def test_what_a_healing_cuts_leaves_every_tier(tmp_path):
    harness = tiered(tmp_path, "plain", kv_canary="heal")
    tiers, cache = tiers_of(harness), harness.scheduler.cache
    first = generate(harness, prompt_of(1))
    # Another request goes on from the same prefix, and a third shares nothing.
    generate(harness, prompt_of(1)[:200] + prompt_of(2))
    generate(harness, prompt_of(3, 70))
    assert len(tiers.pools[0]) >= 8
    run = next(iter(cache.iter_cached_runs()))
    tensor = tiers.groups[0].layout.tensors[0]
    # The first slots of the shared prefix change after they were stored.
    tensor.words[:, run.slots[:8]] = (
        tensor.words[:, run.slots[:8]].flip(2).bitwise_not()
    )
    again = generate(harness, prompt_of(1))
    assert again.output_ids == first.output_ids
    assert harness.scheduler.own_incidents()
    cache.reset()
    # Only what was computed again may come back.
    third = generate(harness, prompt_of(3, 70))
    assert third.cached_tokens == 64
    generate(harness, prompt_of(1)[:200] + prompt_of(2))
    assert tiers.stats.damaged == 0


def test_flushing_chooses_tiers(tmp_path):
    harness = tiered(tmp_path, "plain")
    generate(harness, prompt_of(1))

    def flush(*names):
        harness.io.requests.append(FlushCacheReq(call_id=1, tiers=names))
        harness.run()
        (answer,) = [m for m in harness.io.responses if isinstance(m, FlushCacheRsp)]
        harness.io.responses.clear()
        assert answer.success

    harness.io.requests.append(FlushCacheReq(call_id=1, tiers=("device",)))
    harness.scheduler.step()
    assert generate(harness, prompt_of(1)).cached_tokens == 256
    harness.io.requests.append(FlushCacheReq(call_id=2, tiers=("host",)))
    harness.scheduler.step()
    assert len(tiers_of(harness).pools[0]) == 0
    assert generate(harness, prompt_of(1)).cached_tokens >= 256
    harness.io.requests.append(FlushCacheReq(call_id=3))
    harness.scheduler.step()
    assert generate(harness, prompt_of(1)).cached_tokens == 0


def test_an_aborted_request_leaves_its_prefix_in_the_tree(tmp_path):
    harness = tiered(tmp_path, "plain")
    generate(harness, prompt_of(1))
    harness.scheduler.cache.reset()
    rid = harness.submit(prompt_of(1), max_new_tokens=4)
    harness.scheduler.step()
    assert len(tiers_of(harness).loads) == 1
    harness.abort(rid)
    answer = harness.run()[rid]
    assert answer.finish_reason is not None
    assert answer.finish_reason.type == "abort"
    assert harness.scheduler.cache.total_size() == 256
    assert len(tiers_of(harness).loads) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only GPUs warm up")
def test_a_warm_up_leaves_nothing(tmp_path):
    """Its requests are made up, and those before the kernels are compiled have no KV
    at all: an engine on an H100 read their files and dropped them as damaged."""
    harness = tiered(
        tmp_path / "model",
        "plain",
        skip_server_warmup=False,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps({"dir": str(tmp_path / "kv")}),
    )
    tiers = tiers_of(harness)
    assert tiers.storage is not None
    assert len(tiers.pools[0]) == len(tiers.storage.stores[0]) == 0
    first = generate(harness, prompt_of(1))
    tiers.storage.wait_for_writes()
    harness.scheduler.cache.reset()
    tiers.flush(storage=False)
    again = generate(harness, prompt_of(1))
    assert (first.cached_tokens, again.cached_tokens) == (0, 256)
    assert not harness.scheduler.own_incidents()


def test_the_inspector_shows_every_place_and_file(tmp_path):
    harness = tiered(
        tmp_path / "model",
        "window",
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps({"dir": str(tmp_path / "kv")}),
    )
    tiers = tiers_of(harness)
    assert tiers.storage is not None
    generate(harness, prompt_of(1))
    tiers.storage.wait_for_writes()
    shown = harness.ask(GetTiersReq(call_id=1)).tiers
    assert [view.group for view in shown.host] == ["full", "swa"]
    for view, files, pool in zip(shown.host, shown.files, tiers.pools, strict=True):
        states = np.frombuffer(view.cells, np.uint8)
        assert len(states) == pool.size == view.free + view.holding
        held = np.flatnonzero(states == PlaceState.HOLDING).tolist()
        assert len(held) == len(pool) == files.units > 0
        assert files.bytes > files.units * view.unit_bytes
        assert (files.waiting, files.group) == (0, view.group)
        assert 0 <= files.oldest_seconds < 60
    harness.scheduler.cache.reset()
    harness.submit(prompt_of(1), max_new_tokens=2)
    for _ in range(2):  # In the first step it looks for files.
        harness.scheduler.step()
    assert harness.scheduler.tiers.snapshot().host[0].loading == 4
    harness.run()
    # Copies of both groups that have not ended.
    mark = tiers.mover.num_copied
    tiers.mover.num_copied = lambda: mark() - 2
    generate(harness, prompt_of(2))
    view = harness.ask(GetTiersReq(call_id=2)).tiers.host[0]
    assert view.writing > 0
    assert view.writing + view.holding == len(tiers.pools[0])
    harness.scheduler.tiers.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_events_name_the_blocks_in_host_memory(tmp_path, page_size):
    harness = tiered(tmp_path, "plain", page_size=page_size)
    tiers, cache = tiers_of(harness), harness.scheduler.cache
    recorder = BlockRecorder(page_size=page_size, bigram=False)
    cache.listeners.append(recorder)
    tiers.watch_host(HostBlocks(recorder.add, page_size=page_size, bigram=False))
    rid = harness.submit(prompt_of(1), max_new_tokens=2, extra_key="one")
    harness.run()
    due = hash_blocks(event_seed("one"), np.array(prompt_of(1)), page_size)
    due = due[: 256 // page_size].tolist()
    held: list[int] = []
    for event in recorder.take():
        if event.medium == MEDIUM_CPU:
            assert isinstance(event, BlockStored)
            assert event.parent_block_hash == (held[-1] if held else None)
            held += event.block_hashes
            assert (
                event.token_ids
                == prompt_of(1)[
                    (len(held) - len(event.block_hashes)) * page_size : len(held)
                    * page_size
                ]
            )
    assert held == due, rid
    # The first block of another sequence that begins alike is there already.
    harness.submit(prompt_of(1)[:150] + prompt_of(2), max_new_tokens=2, extra_key="one")
    harness.run()
    again = [e for e in recorder.take() if e.medium == MEDIUM_CPU]
    assert not set(due) & {h for event in again for h in event.block_hashes}
    tiers.flush()
    gone = {h for event in recorder.take() for h in event.block_hashes}
    assert set(due) <= gone


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_policies_store_later(tmp_path, policy):
    harness = tiered(tmp_path, "plain", hicache_write_policy=policy)
    tiers = tiers_of(harness)
    generate(harness, prompt_of(1))
    assert tiers.stats.stored == 0
    if policy == "write_back":
        harness.scheduler.cache.evict(1_000_000)
    else:
        generate(harness, prompt_of(1))
    assert tiers.stats.stored == 256


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
