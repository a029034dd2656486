"""The blocks of rows on the device equal lists of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_canary.engines.block_table import BlockTable, NewBlocks
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=5, suite="cuda")

ROWS, BLOCKS = 3, 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Per step, for some rows, whether the row begins anew, and the blocks it gets.
STEPS = st.lists(
    st.dictionaries(
        st.integers(0, ROWS - 1),
        st.tuples(st.booleans(), st.lists(st.integers(1, 90), max_size=BLOCKS + 1)),
    ),
    max_size=6,
)


@given(steps=STEPS, size=st.sampled_from([1, 2, 16]), empty=st.sampled_from([0, -1]))
def test_rows_get_and_lose_blocks(
    steps: list[dict[int, tuple[bool, list[int]]]], size: int, empty: int
) -> None:
    table = BlockTable(ROWS, BLOCKS, size=size, empty=empty, device=DEVICE)
    model: list[list[int]] = [[] for _ in range(ROWS)]
    for step in steps:
        changes = []
        for row, (is_new, blocks) in step.items():
            begin = 0 if is_new else len(model[row])
            model[row] = model[row][:begin] + blocks
            changes.append(NewBlocks(row, begin, blocks))
        table.set(changes)
    due = torch.full((ROWS, BLOCKS * size), empty, dtype=torch.int32)
    for row, blocks in enumerate(model):
        for index, block in enumerate(blocks[:BLOCKS]):
            for offset in range(size):
                due[row, index * size + offset] = block * size + offset
    assert torch.equal(table.entries.cpu(), due)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
