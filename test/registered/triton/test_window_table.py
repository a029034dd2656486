"""Tables of window slots: the reference against a plain loop, and the Triton kernel,
interpreted or compiled on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.attention.window_tables import (
    new_window_rows,
    window_columns,
    window_table_ref,
)
from sglang.srt.layers.ops.attention.tables.window_table import window_table
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTH = 9, 1200


class Problem:
    """Random page tables and a random mapping of their pages."""

    def __init__(self, page_size: int, window: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.page_size, self.window = page_size, window
        num_pages = ROWS * WIDTH
        pages = torch.randperm(num_pages, generator=rng) + 1
        table = (pages[: ROWS * WIDTH] * page_size).view(ROWS, WIDTH)
        # Every page_size-th column of a wider table, as `req_to_token` is read.
        wide = torch.zeros(ROWS, WIDTH * page_size, dtype=torch.int32)
        wide[:, ::page_size] = table.to(torch.int32)
        self.table = wide.to(DEVICE)[:, ::page_size]
        firsts = torch.randperm(num_pages + 1, generator=rng) * page_size
        mapping = firsts[:, None] + torch.arange(page_size)
        self.mapping = mapping.view(-1).to(DEVICE)
        lens = [0, 1, window - 1, window, window + 1, 3 * window + 5]
        self.prefix = torch.tensor([min(n, 600) for n in lens], device=DEVICE)
        self.row_index = torch.randperm(ROWS, generator=rng)[: len(lens)].to(DEVICE)

    def made(self, function, new_tokens: int, *, takes_new: bool = True, own=False):
        columns = window_columns(
            window=self.window, new_tokens=new_tokens, page_size=self.page_size
        )
        out = new_window_rows(len(self.prefix), columns, device=DEVICE)
        out.page_table.fill_(-7)
        function(
            self.table,
            None if own else self.row_index,
            prefix_lens=self.prefix,
            read_lens=self.prefix + new_tokens * takes_new,
            mapping=self.mapping,
            window=self.window,
            page_size=self.page_size,
            out=out,
        )
        return out


PROBLEMS = [(1, 1), (1, 7), (1, 300), (4, 7), (16, 16), (16, 40), (64, 10)]
each_problem = pytest.mark.parametrize(("page_size", "window"), PROBLEMS)


@each_problem
@pytest.mark.parametrize("new_tokens", [1, 5, 130])
def test_lists_what_the_first_new_token_reads(page_size, window, new_tokens):
    problem = Problem(page_size, window, seed=window)
    out = problem.made(window_table_ref, new_tokens)
    for row, prefix in enumerate(problem.prefix.tolist()):
        end, first = prefix + new_tokens, int(out.first_position[row])
        needed = max(prefix - window + 1, 0)
        assert needed - page_size < first <= needed and first % page_size == 0
        assert int(out.prefix_lens[row]) == prefix - first
        assert int(out.read_lens[row]) == end - first
        entries = out.page_table[row].tolist()
        used = -(-(end - first) // page_size)
        assert used <= len(entries)
        own = problem.table[problem.row_index[row]]
        for entry, slot in enumerate(entries):
            source = own[first // page_size + entry]
            assert slot == (int(problem.mapping[source]) if entry < used else 0)


@each_problem
@pytest.mark.parametrize("new_tokens", [1, 5, 130, 500])
@pytest.mark.parametrize("takes_new", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_the_kernel_equals_the_reference(page_size, window, new_tokens, takes_new, own):
    problem = Problem(page_size, window, seed=new_tokens)
    options = {"takes_new": takes_new, "own": own}
    expected = problem.made(window_table_ref, new_tokens, **options)
    actual = problem.made(window_table, new_tokens, **options)
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(theirs, ours)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
