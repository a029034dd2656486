"""Packing of tree masks against its torch reference: interpreted, or compiled on a
GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.ops.attention.tables.tree_mask import (
    pack_tree_mask,
    pack_tree_mask_ref,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("nodes", [1, 2, 7, 32, 64])
@pytest.mark.parametrize("prefix_lens", [[0], [5, 0, 130], [64, 1]])
def test_equals_the_reference(nodes: int, prefix_lens: list[int]) -> None:
    rng = torch.Generator().manual_seed(nodes)
    tree = torch.rand(len(prefix_lens), nodes, nodes, generator=rng) > 0.5
    counts = [-(-nodes * (prefix + nodes) // 8) for prefix in prefix_lens]
    bounds = torch.tensor([0, *counts]).cumsum(0)
    results = []
    for function in (pack_tree_mask_ref, pack_tree_mask):
        out = torch.full((sum(counts) + 3,), 85, dtype=torch.uint8, device=DEVICE)
        function(
            tree.to(DEVICE),
            prefix_lens=torch.tensor(prefix_lens, device=DEVICE),
            indptr=bounds.to(DEVICE, torch.int32),
            out=out,
            max_bytes=max(counts),
        )
        assert bool((out[sum(counts) :] == 85).all())
        results.append(out)
    assert torch.equal(results[0], results[1])


def test_bits_say_who_attends_what() -> None:
    prefix, tree = 3, torch.tensor([[[True, False], [True, True]]])
    out = torch.zeros(2, dtype=torch.uint8, device=DEVICE)
    pack_tree_mask(
        tree.to(DEVICE),
        prefix_lens=torch.tensor([prefix], device=DEVICE),
        indptr=torch.tensor([0, 2], dtype=torch.int32, device=DEVICE),
        out=out,
        max_bytes=2,
    )
    # Node 0 sees the prefix and itself, node 1 everything; ten bits, lowest first.
    bits = [(int(out[i // 8]) >> (i % 8)) & 1 for i in range(16)]
    assert bits == [1, 1, 1, 1, 0] + [1, 1, 1, 1, 1] + [0] * 6


def test_a_mask_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="expected contiguous bool"):
        pack_tree_mask(
            torch.zeros(1, 2, 2, dtype=torch.uint8, device=DEVICE),
            prefix_lens=torch.zeros(1, dtype=torch.int64, device=DEVICE),
            indptr=torch.zeros(2, dtype=torch.int32, device=DEVICE),
            out=torch.zeros(1, dtype=torch.uint8, device=DEVICE),
            max_bytes=1,
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
