"""Copies of adapters wait for the forwards that read their slot, and others do not."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.lora.slot_copies import SlotCopies
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=10, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CYCLES = 100_000_000
SIZE = 1 << 20


def test_neither_overtakes_the_other() -> None:
    slots = torch.zeros(3, SIZE, device="cuda")
    copies = SlotCopies("cuda")
    seen = []
    for step in range(1, 9):
        slot = 1 + step % 2
        host = torch.full((SIZE,), float(step), pin_memory=True)
        with copies.writing(slot):
            torch.cuda._sleep(CYCLES // 10)
            slots[slot].copy_(host, non_blocking=True)
        with copies.reading({slot}):
            # The next copy to this slot is enqueued long before the read runs.
            torch.cuda._sleep(CYCLES // 10)
            seen.append((step, slots[slot].clone()))
    for step, found in seen:
        assert found.eq(step).all(), step


def test_a_copy_runs_beside_forwards_of_other_slots() -> None:
    slots = torch.zeros(3, SIZE, device="cuda")
    slots[0].fill_(1.0)  # loading this kernel would wait for the device
    copies = SlotCopies("cuda")
    torch.cuda.synchronize()
    with copies.reading({1}):
        torch.cuda._sleep(20 * CYCLES)
        done = torch.cuda.current_stream().record_event()
    with copies.writing(2):
        slots[2].fill_(1.0)
    copies._stream.synchronize()
    assert not done.query(), "the forward still runs"
    with copies.writing(1):
        slots[1].fill_(1.0)
    copies._stream.synchronize()
    assert done.query(), "this copy waited for it"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
