"""A pattern in slots that nobody holds: every write to bytes or records is seen."""

from __future__ import annotations

import pytest
import torch

from kv_canary.state import create_state
from sglang.srt.kv_canary.runner.slot_pattern import SLOTS_AT_ONCE, PoolPattern
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=5, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 3 * SLOTS_AT_ONCE
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_write_is_seen(dtype: torch.dtype) -> None:
    pool = MHATokenToKVPool(
        size=SLOTS,
        page_size=4,
        dtype=dtype,
        layer_num=3,
        head_num=2,
        head_dim=8,
        device=DEVICE,
    )
    state = create_state(
        num_slots=SLOTS + 4,
        req_rows=2,
        ring_capacity=4,
        num_managers=1,
        device=DEVICE,
    )
    pattern = PoolPattern.of(state, pool)
    watched = torch.arange(4, SLOTS, 2)
    pattern.fill(watched)
    assert pattern.is_intact(watched).all()
    # Finite: attention that masks what it reads past a row must not meet a NaN.
    assert pool.k_buffer[:, watched].isfinite().all()
    assert not pool.v_buffer[:, 5].any()
    written = [4, 10, 300, SLOTS - 2]
    pool.k_buffer[0, written[0], 0, 0] = 1.0
    pool.v_buffer[2, written[1], 1, 7] = 0.0
    state.head[written[2], 0] = 7
    state.tail[written[3], 0] = 7
    changed = watched[~pattern.is_intact(watched)]
    assert changed.tolist() == written
    pattern.fill(changed)
    assert pattern.is_intact(watched).all()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
