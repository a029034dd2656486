"""Gathering of pages against its torch reference: interpreted, or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.ops.attention.tables.page_indices import (
    page_indices,
    page_indices_ref,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pages", [[1], [3, 1, 1024, 1025], [2300, 7]])
def test_equals_the_reference(page_size: int, pages: list[int]) -> None:
    rng = torch.Generator().manual_seed(page_size)
    width = max(pages) * page_size + 3
    slots = torch.randint(0, 1 << 20, (9, width), generator=rng) * page_size
    table = slots.to(DEVICE, torch.int32)[:, ::page_size]
    row_index = torch.randperm(9, generator=rng)[: len(pages)].to(DEVICE)
    bounds = torch.tensor([0, *pages]).cumsum(0)
    results = []
    for function in (page_indices_ref, page_indices):
        out = torch.full((sum(pages) + 5,), -7, dtype=torch.int32, device=DEVICE)
        function(
            table,
            row_index=row_index,
            indptr=bounds.to(DEVICE, torch.int32),
            out=out,
            max_pages=max(pages),
            page_size=page_size,
        )
        assert bool((out[sum(pages) :] == -7).all())
        results.append(out)
    assert torch.equal(results[0], results[1])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
