"""Sums over ranks through shared memory: the kernels, two ranks in turns on one device,
and on two GPUs against NCCL."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.distributed import peer_triton
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    Unsummed,
    init_tensor_parallel,
    summed,
)
from sglang.srt.distributed.peer_memory import PROGRAMS, PeerMemory, region_bytes
from sglang.srt.layers.ops.norm import triton_ranks
from sglang.srt.layers.ops.norm.op import fused_add_rmsnorm_ref, norm_add_rmsnorm_ref
from sglang.srt.utils.devices import cuda_device_count
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda-serial")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARRIVED = 1 << 40


class TwoRanks:
    """Both ranks' memory on one device, where only one can run at a time."""

    def __init__(self) -> None:
        words = region_bytes(2) // 8
        self.flags = [self._zeros(PROGRAMS * 2) for _ in range(2)]
        self._regions = [self._zeros(words) for _ in range(2)]
        every = [[t.data_ptr() for t in ts] for ts in (self._regions, self.flags)]
        self.ranks = [
            PeerMemory(
                rank=rank,
                size=2,
                addresses=torch.tensor(every, device=DEVICE),
                counts=self._zeros(PROGRAMS),
            )
            for rank in range(2)
        ]

    @staticmethod
    def _zeros(words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64, device=DEVICE)

    def send_only(self, rank: int, x: Tensor) -> None:
        """Let a rank send without waiting; what it makes of `x` is void."""
        self.flags[rank].fill_(ARRIVED)
        peer_triton.sum_rows(x.clone(), self.ranks[rank])


def shapes(number: int) -> list[tuple[int, int, torch.dtype]]:
    rng = random.Random(4)
    widths = (1, 7, 64, 100, 1000) if DEVICE == "cpu" else (1, 100, 4096, 5120, 7168)
    rows = (1, 2, 3, 9) if DEVICE == "cpu" else (1, 3, 64, 255, 256, 257, 700, 1024)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    memory = PeerMemory(rank=0, size=2, addresses=torch.zeros(0), counts=torch.zeros(0))
    found: list[tuple[int, int, torch.dtype]] = []
    while len(found) < number:
        shape = rng.choice(rows), rng.choice(widths), rng.choice(dtypes)
        if memory.can_send(shape[0], shape[1], shape[2].itemsize):
            found.append(shape)
    return found


@pytest.mark.parametrize("norm", ["none", "norm", "two norms"])
def test_a_rank_adds_what_the_other_sent(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        # Several rows a program, too.
        monkeypatch.setattr(peer_triton, "PROGRAMS", 3)
        monkeypatch.setattr(triton_ranks, "PROGRAMS", 3)
    torch.manual_seed(3)
    both, rng = TwoRanks(), random.Random(norm)
    for rows, width, dtype in shapes(12):
        parts = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2)]
        first = rng.randrange(2)
        both.send_only(first, parts[first])
        x = parts[1 - first].clone()
        expected = (parts[0].float() + parts[1].float()).to(dtype)
        memory = both.ranks[1 - first]
        if norm == "none":
            peer_triton.sum_rows(x, memory)
            # The interpreter truncates to bfloat16.
            rtol = 2**-7 if DEVICE == "cpu" and dtype is torch.bfloat16 else 0.0
            torch.testing.assert_close(x, expected, rtol=rtol, atol=0.0)
            continue
        residual = torch.randn(rows, width, device=DEVICE).to(dtype)
        weight, inner = torch.randn(2, width, device=DEVICE).to(dtype)
        stream = residual.clone()
        if norm == "norm":
            fused_add_rmsnorm_ref(expected, stream, weight, 1e-5)
            triton_ranks.sum_add_rmsnorm(x, residual, None, weight, 1e-5, memory)
        else:
            norm_add_rmsnorm_ref(expected, stream, inner, weight, 1e-5)
            triton_ranks.sum_add_rmsnorm(x, residual, inner, weight, 1e-5, memory)
        rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(residual, stream, rtol=rtol, atol=rtol)
        torch.testing.assert_close(x, expected, rtol=rtol, atol=rtol)


def test_a_flag_names_the_launch_and_regions_alternate() -> None:
    both = TwoRanks()
    for launch in range(1, 5):
        x = torch.full((2, 8), float(launch), device=DEVICE)
        both.send_only(0, x)
        flags = both.flags[1].view(PROGRAMS, 2)
        assert flags[:2, 0].tolist() == [launch, launch]
        assert not flags[2:, 0].any()
    words = region_bytes(2) // 8
    turns = both._regions[1].view(2, words // 2).view(torch.float32)
    assert turns[0, 0] == 4.0 and turns[1, 0] == 3.0


def test_only_few_rows_are_sent() -> None:
    memory = PeerMemory(rank=0, size=2, addresses=torch.zeros(0), counts=torch.zeros(0))
    assert memory.can_send(1024, 4096, 2)
    assert not memory.can_send(1025, 4096, 2)
    assert not memory.can_send(257, 16384, 2)
    assert not memory.can_send(0, 4096, 2)
    many = PeerMemory(rank=0, size=8, addresses=torch.zeros(0), counts=torch.zeros(0))
    assert many.can_send(146, 4096, 2) and not many.can_send(147, 4096, 2)
    # Without shared memory the sum is made at once.
    x = torch.ones(2, 3)
    assert TensorParallelGroup().sum_later(x) is x
    assert summed(x) is x


# -- two GPUs ----------------------------------------------------------------------


def _sums(rank: int, store: Path) -> None:
    """Random shapes in turn with NCCL, then graphs of an odd number of sums."""
    group = init_tensor_parallel(rank=rank, size=2, device="cuda", store=store)
    assert group.peers is not None
    generator = torch.Generator("cuda").manual_seed(11)
    for rows, width, dtype in shapes(300):
        parts = torch.randn(2, rows, width, device="cuda", generator=generator)
        parts = parts.to(dtype)
        later = group.sum_later(parts[rank].clone())
        assert isinstance(later, Unsummed)
        got = summed(later)
        assert torch.equal(got, (parts[0].float() + parts[1].float()).to(dtype))
        if rows == 1:
            large = torch.full((3000, 4096), rank + 1.0, device="cuda")
            assert not isinstance(group.sum_later(large), Unsummed)
            assert (large == 3.0).all()
    x = torch.zeros(5, 512, device="cuda")
    one = torch.full_like(x, 1.0 + rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(7):
            x.add_(one)
            group.all_reduce(x)
    for _ in range(40):
        x.zero_()
        for _ in range(3):
            graph.replay()
        # x := 2 x + 3, 21 times.
        assert (x == 3.0 * (2.0**21 - 1)).all()
    torch.cuda.synchronize()


@pytest.mark.skipif(cuda_device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_sums, (tmp_path / "store",), nprocs=2)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
