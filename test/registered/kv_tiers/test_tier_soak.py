"""Random traffic whose prefixes do not fit the device: every answer equals the oracle,
prefixes do come back from host memory, and no slot is lost."""

from __future__ import annotations

import itertools

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, sampled
from sglang.test.tier_traffic import KINDS, serve, tiered, tiers_of

register_cpu_ci(est_time=20, suite="cpu", full_time=900)
register_cuda_ci(est_time=200, suite="cuda")

# (page size, write policy, overlap, canary).
CONFIGURATIONS = [
    (1, "write_through", True, "raise"),
    (1, "write_back", False, "raise"),
    (16, "write_through_selective", True, "none"),
    (4, "write_back", True, "log"),
    (64, "write_through", False, "raise"),
]


@pytest.mark.parametrize(
    ("kind", "configuration"),
    sampled(
        itertools.product(KINDS, CONFIGURATIONS), key=lambda variant: variant[0], ci=1
    ),
    ids=str,
)
def test_random_requests(tmp_path, kind, configuration):
    page_size, policy, overlap, canary = configuration
    harness = tiered(
        tmp_path,
        kind,
        overlap=overlap,
        page_size=page_size,
        hicache_write_policy=policy,
        kv_canary=canary,
    )
    serve(harness, kind, total=count(ci=60, full=2000), seed=page_size)
    tiers = tiers_of(harness)
    assert tiers.stats.loaded > 0, tiers.stats
    assert tiers.stats.damaged == 0
    assert not harness.scheduler.own_incidents()
    cache = harness.scheduler.cache
    cache.check()
    cache.reset()
    assert cache.allocator.available_size() == cache.allocator.size
    for runs in cache.groups:
        assert runs.slots.available_size() == runs.slots.size


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
