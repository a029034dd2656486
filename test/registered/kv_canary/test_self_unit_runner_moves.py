"""Records of slots whose bytes move."""

from __future__ import annotations

import pytest
from forward_world import (
    canary_of,
    decode_batch,
    findings,
    prefilled,
    reasons,
)

from sglang.srt.forward.batch import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=5, suite="cuda")

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


class TestRecordsFollowTheBytes:
    def test_moved_slots_stay_true(self, harness: ForwardHarness) -> None:
        (row,) = prefilled(harness, 12)
        pool = harness.runner.token_to_kv_pool
        fresh = harness.runner.allocator.alloc(4)
        assert fresh is not None
        src = harness.pool.row_slots(row, 5, 9)
        pool.move_kv_cache(fresh.to(pool.device), src.to(pool.device))
        harness.pool.write(row, 5, fresh)
        harness.runner.allocator.free(src)
        assert findings(harness, decode_batch(harness, row)) == []

    @pytest.mark.parametrize("left_behind", ["records", "bytes"])
    def test_half_a_move_is_found(
        self, harness: ForwardHarness, left_behind: str
    ) -> None:
        (row,) = prefilled(harness, 12)
        pool = harness.runner.token_to_kv_pool
        fresh = harness.runner.allocator.alloc(1)
        assert fresh is not None
        dst = fresh.to(pool.device)
        src = harness.pool.row_slots(row, 5, 6).to(pool.device)
        if left_behind == "records":
            pool._move(dst, src)
        else:
            for hook in pool._on_move:
                hook(dst, src)
        harness.pool.write(row, 5, fresh)
        found = reasons(harness, decode_batch(harness, row))
        expected = "verify_freed" if left_behind == "records" else "verify_real_kv"
        assert expected in found

    def test_a_copy_that_stops_halfway_is_torn(self, harness: ForwardHarness) -> None:
        """A slot that was used before receives the head of a record and one layer."""
        (row, source) = prefilled(harness, 8, 8)
        slots = harness.pool.row_slots(row, 0, 8).tolist()
        others = harness.pool.row_slots(source, 0, 8).tolist()
        head = canary_of(harness).target.buffers.state.head
        k, _ = harness.runner.token_to_kv_pool.get_kv_buffer(0)
        for buffer in (head, k):
            buffer[slots[3]] = buffer[others[3]]
        (found,) = findings(harness, decode_batch(harness, row))
        assert "verify_torn" in found["reasons"]
        assert (found["slot"], found["position"]) == (slots[3], 3)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
