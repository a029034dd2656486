"""Paged attention on the CPU: NaN reaches the queries that read it, and no others."""

from __future__ import annotations

import pytest
import torch
from cpu_attention_problem import (
    NAN,
    TOLERANCE,
    make_problem,
    random_tree,
)

from kv_canary.op import native_available
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=5, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_nan_that_is_read_gives_nan(level: str, dtype: torch.dtype) -> None:
    """Every element of a long row in turn, in K and in V."""
    problem = make_problem(prefix=[599], new=[1], heads=(4, 2), dim=64, dtype=dtype)
    slots = problem.slots(0)
    lens = torch.tensor([600])
    for element in range(0, 600, count(ci=13, full=1)):
        for cache in (problem.k_cache, problem.v_cache):
            slot = slots[element]
            before = cache[slot, 1, 5].clone()
            cache[slot, 1, 5] = NAN
            for out in (
                problem.extend(),
                problem.decode(lens, problem.row_index, problem.q),
            ):
                # Query heads 2 and 3 read KV head 1; the others must not notice.
                bad = out[0].isnan()
                if cache is problem.k_cache:
                    assert bool(bad[2:].all())
                else:
                    assert bool(bad[2:, 5].all())
                    assert not bool(bad[2:, :5].any())
                assert not bool(bad[:2].any())
            cache[slot, 1, 5] = before


def test_nan_in_query_gives_nan(level: str) -> None:
    problem = make_problem(prefix=[40], new=[3])
    problem.q[1, 2, 3] = NAN
    bad = problem.extend().isnan()
    assert bool(bad[1, 2].all())
    bad[1, 2] = False
    assert not bool(bad.any())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [-1, 40, 290])
def test_nan_outside_the_attended_set_changes_nothing(
    level: str, dtype: torch.dtype, window: int
) -> None:
    prefix, new = 200, 150
    problem = make_problem(
        prefix=[prefix], new=[new], heads=(4, 2), dim=64, dtype=dtype
    )
    clean = problem.extend(window=window)
    slots = problem.slots(0)
    for element in (0, 100, 161, 199, 200, 255, 256, 300, 349):
        k, v = problem.k_cache.clone(), problem.v_cache.clone()
        problem.k_cache[slots[element]] = NAN
        problem.v_cache[slots[element]] = NAN
        dirty = problem.extend(window=window)
        own = prefix + torch.arange(new)
        reads = (own >= element) & ((own < element + window) | (window < 0))
        assert bool(dirty[reads].isnan().all())
        assert torch.equal(dirty[~reads], clean[~reads])
        problem.k_cache.copy_(k)
        problem.v_cache.copy_(v)


@pytest.mark.parametrize("prefix", [0, 250])
@pytest.mark.parametrize("window", [-1, 2, 20])
def test_nan_outside_the_tree_mask_changes_nothing(
    level: str, prefix: int, window: int
) -> None:
    """Of every node, and of the last elements of the prefix."""
    nodes = 16
    problem = make_problem(prefix=[prefix], new=[nodes])
    mask = random_tree(1, nodes, seed=3)
    position = torch.cat((torch.arange(prefix), problem.tree_positions(mask)))
    attends = torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), mask[0]), dim=1)
    if window > 0:
        attends &= position > position[prefix:, None] - window
    clean = problem.extend(tree_mask=mask, window=window)
    slots = problem.slots(0)
    for element in range(max(prefix - 22, 0), prefix + nodes):
        k, v = problem.k_cache.clone(), problem.v_cache.clone()
        problem.k_cache[slots[element]] = NAN
        problem.v_cache[slots[element]] = NAN
        dirty = problem.extend(tree_mask=mask, window=window)
        reads = attends[:, element]
        assert bool(dirty[reads].isnan().all())
        assert torch.equal(dirty[~reads], clean[~reads])
        problem.k_cache.copy_(k)
        problem.v_cache.copy_(v)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
