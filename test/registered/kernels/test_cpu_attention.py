"""Paged attention on the CPU: native kernels against the torch reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.layers.ops import attention
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=15, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows with a prefix and new tokens; every slot that no row owns holds NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_index: Tensor
    prefix_lens: Tensor
    new_lens: Tensor
    page_size: int
    sm_scale: float

    @property
    def qo_indptr(self) -> Tensor:
        return torch.cat((torch.zeros(1, dtype=torch.int64), self.new_lens.cumsum(0)))

    def slots(self, row: int) -> Tensor:
        total = int(self.prefix_lens[row] + self.new_lens[row])
        element = torch.arange(total)
        table_row = self.page_table[self.row_index[row]]
        return table_row[element // self.page_size].long() + element % self.page_size

    def extend(
        self, *, window: int = -1, tree_mask: Tensor | None = None, ref: bool = False
    ) -> Tensor:
        function = attention.extend_attention_ref if ref else attention.extend_attention
        out = torch.full_like(self.q, 7.0)
        function(
            self.q,
            self.k_cache,
            self.v_cache,
            page_table=self.page_table,
            row_index=self.row_index,
            qo_indptr=self.qo_indptr,
            prefix_lens=self.prefix_lens,
            page_size=self.page_size,
            sm_scale=self.sm_scale,
            window=window,
            tree_mask=tree_mask,
            out=out,
        )
        return out

    def decode(
        self,
        read_lens: Tensor,
        row_index: Tensor,
        q: Tensor,
        *,
        window: int = -1,
        ref: bool = False,
    ) -> Tensor:
        function = attention.decode_attention_ref if ref else attention.decode_attention
        out = torch.full_like(q, 7.0)
        function(
            q,
            self.k_cache,
            self.v_cache,
            page_table=self.page_table,
            row_index=row_index,
            read_lens=read_lens,
            page_size=self.page_size,
            sm_scale=self.sm_scale,
            window=window,
            out=out,
        )
        return out

    def token_by_token(self, *, window: int = -1) -> Tensor:
        """Decode each new token of `extend` as a row of its own."""
        rows = torch.repeat_interleave(self.row_index, self.new_lens)
        lens = torch.cat(
            [
                torch.arange(n) + prefix + 1
                for prefix, n in zip(
                    self.prefix_lens.tolist(), self.new_lens.tolist(), strict=True
                )
            ]
        )
        return self.decode(lens, rows, self.q, window=window)


def make_problem(
    *,
    prefix: list[int],
    new: list[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    rows = len(prefix)
    totals = [p + n for p, n in zip(prefix, new, strict=True)]
    pages = [-(-total // page_size) for total in totals]
    pool_pages = 1 + sum(pages) + 3
    order = torch.randperm(pool_pages - 1, generator=generator) + 1
    width = max(pages, default=1) + 2
    # A table as the engine has it: a strided view of one row per request.
    token_table = torch.zeros(rows + 2, width * page_size, dtype=torch.int32)
    page_table = token_table[:, ::page_size]
    row_index = torch.randperm(rows + 2, generator=generator)[:rows]
    hq, hkv = heads
    shape = (pool_pages * page_size, hkv, dim)
    k_cache = torch.full(shape, NAN, dtype=dtype)
    v_cache = torch.full(shape, NAN, dtype=dtype)
    used = 0
    for row, total in enumerate(totals):
        own = order[used : used + pages[row]] * page_size
        used += pages[row]
        page_table[row_index[row], : pages[row]] = own.int()
        element = torch.arange(total)
        slots = own[element // page_size] + element % page_size
        for cache in (k_cache, v_cache):
            values = torch.randn(total, hkv, dim, generator=generator)
            cache[slots] = values.to(dtype)
    tokens = sum(new)
    # q is a view into a wider tensor, as after a fused q, k, v product.
    qkv = torch.randn(tokens, (hq + 2 * hkv) * dim, generator=generator).to(dtype)
    return Problem(
        q=qkv[:, : hq * dim].view(tokens, hq, dim),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        row_index=row_index,
        prefix_lens=torch.tensor(prefix, dtype=torch.int64),
        new_lens=torch.tensor(new, dtype=torch.int64),
        page_size=page_size,
        sm_scale=dim**-0.5,
    )


def random_tree(rows: int, nodes: int, seed: int) -> Tensor:
    """Ancestor masks of random trees: [rows, nodes, nodes] bool."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    for row in range(rows):
        for node in range(nodes):
            if node > 0:
                parent = int(torch.randint(0, node, (1,), generator=generator))
                mask[row, node] = mask[row, parent]
            mask[row, node, node] = True
    return mask


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance
    )


SHAPES = [
    # heads, dim, page size
    ((1, 1), 8, 1),
    ((2, 1), 64, 4),
    ((4, 1), 96, 16),
    ((8, 1), 128, 1),
    ((6, 2), 24, 4),
    ((3, 3), 40, 16),
    ((16, 2), 256, 1),
    ((5, 1), 80, 4),
]
LENGTHS = [
    ([0], [1]),
    ([0, 5, 300], [3, 1, 17]),
    ([255, 256, 257, 0], [1, 2, 3, 70]),
    ([1000, 17], [1, 1]),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extend_and_decode_match_reference(
    level: str, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int]
) -> None:
    heads, dim, page_size = shape
    for seed, (prefix, new) in enumerate(LENGTHS):
        problem = make_problem(
            prefix=prefix,
            new=new,
            heads=heads,
            dim=dim,
            page_size=page_size,
            dtype=dtype,
            seed=seed,
        )
        for window in (-1, 1, 16, 300):
            result = problem.extend(window=window)
            assert_close(result, problem.extend(window=window, ref=True))
            assert torch.equal(result, problem.token_by_token(window=window))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tree_mask_matches_reference(
    level: str, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int]
) -> None:
    heads, dim, page_size = shape
    for nodes in (1, 8, 33):
        prefix = [0, 3, 250, 256, 511]
        problem = make_problem(
            prefix=prefix,
            new=[nodes] * len(prefix),
            heads=heads,
            dim=dim,
            page_size=page_size,
            dtype=dtype,
            seed=nodes,
        )
        mask = random_tree(len(prefix), nodes, seed=nodes)
        assert_close(
            problem.extend(tree_mask=mask),
            problem.extend(tree_mask=mask, ref=True),
        )


def test_random_problems_match_reference() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for seed in range(count(ci=30, full=600)):
        rows = draw(1, 5)
        hkv = draw(1, 3)
        problem = make_problem(
            prefix=[draw(0, 1) * draw(0, 700) for _ in range(rows)],
            new=[draw(0, 1) * draw(0, 90) for _ in range(rows)],
            heads=(hkv * draw(1, 8), hkv),
            dim=8 * draw(1, 32),
            page_size=[1, 2, 4, 16, 64][draw(0, 4)],
            dtype=list(TOLERANCE)[draw(0, 2)],
            seed=seed,
        )
        window = [-1, draw(1, 20), draw(1, 600)][draw(0, 2)]
        result = problem.extend(window=window)
        assert_close(result, problem.extend(window=window, ref=True))
        if len(problem.q):
            assert torch.equal(result, problem.token_by_token(window=window))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_result_depends_on_nothing_but_the_query_and_its_elements(threads: int) -> None:
    """Bitwise the same alone, in any batch, with any number of threads."""
    problem = make_problem(
        prefix=[3000, 0, 700, 40, 255], new=[1, 200, 64, 1, 2], heads=(8, 2), dim=64
    )
    expected = problem.extend()
    bounds = problem.qo_indptr.tolist()
    torch.set_num_threads(threads)
    assert torch.equal(problem.extend(), expected)
    for row in range(len(problem.prefix_lens)):
        begin, end = bounds[row], bounds[row + 1]
        out = torch.empty_like(problem.q[begin:end])
        attention.extend_attention(
            problem.q[begin:end],
            problem.k_cache,
            problem.v_cache,
            page_table=problem.page_table,
            row_index=problem.row_index[row : row + 1],
            qo_indptr=torch.tensor([0, end - begin]),
            prefix_lens=problem.prefix_lens[row : row + 1],
            page_size=1,
            sm_scale=problem.sm_scale,
            out=out,
        )
        assert torch.equal(out, expected[begin:end])
    assert torch.equal(problem.token_by_token(), expected)


def test_tokens_behind_the_last_row_are_left_alone() -> None:
    """What pads a captured prefill."""
    problem = make_problem(prefix=[0, 40], new=[3, 70], heads=(4, 2), dim=64)
    expected = problem.extend()
    q = torch.cat((problem.q, torch.full_like(problem.q[:5], torch.nan)))
    out = replace(problem, q=q).extend()
    assert torch.equal(out[:-5], expected)
    assert bool((out[-5:] == 7.0).all())


def test_chunked_prefill_equals_whole_prefill_bitwise() -> None:
    problem = make_problem(prefix=[0], new=[600], heads=(4, 2), dim=64, page_size=4)
    whole = problem.extend()
    for cut in (1, 255, 256, 300, 599):
        for begin, end in ((0, cut), (cut, 600)):
            out = torch.empty_like(whole[begin:end])
            attention.extend_attention(
                problem.q[begin:end],
                problem.k_cache,
                problem.v_cache,
                page_table=problem.page_table,
                row_index=problem.row_index,
                qo_indptr=torch.tensor([0, end - begin]),
                prefix_lens=torch.tensor([begin]),
                page_size=4,
                sm_scale=problem.sm_scale,
                out=out,
            )
            assert torch.equal(out, whole[begin:end])


def test_no_row_index_means_row_r() -> None:
    problem = make_problem(prefix=[9, 20, 0], new=[1, 1, 1])
    table = problem.page_table[problem.row_index]
    lens = problem.prefix_lens + 1
    expected = problem.decode(lens, problem.row_index, problem.q)
    out = torch.empty_like(problem.q)
    attention.decode_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        page_table=table,
        row_index=None,
        read_lens=lens,
        page_size=1,
        sm_scale=problem.sm_scale,
        out=out,
    )
    assert torch.equal(out, expected)


def test_no_rows_and_empty_rows() -> None:
    problem = make_problem(prefix=[5], new=[0])
    assert problem.extend().shape == (0, 4, 64)
    none = torch.empty(0, dtype=torch.int64)
    assert problem.decode(none, none, problem.q).shape == (0, 4, 64)
    problem = make_problem(prefix=[5, 7], new=[1, 1])
    for ref in (False, True):
        out = problem.decode(
            torch.tensor([0, 8]), problem.row_index, problem.q, ref=ref
        )
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert bool(out[1].abs().sum() > 0)


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
def test_nan_outside_the_tree_mask_changes_nothing(level: str, prefix: int) -> None:
    nodes = 16
    problem = make_problem(prefix=[prefix], new=[nodes])
    mask = random_tree(1, nodes, seed=3)
    clean = problem.extend(tree_mask=mask)
    slots = problem.slots(0)
    for node in range(nodes):
        k, v = problem.k_cache.clone(), problem.v_cache.clone()
        problem.k_cache[slots[prefix + node]] = NAN
        problem.v_cache[slots[prefix + node]] = NAN
        dirty = problem.extend(tree_mask=mask)
        reads = mask[0, :, node]
        assert bool(dirty[reads].isnan().all())
        assert torch.equal(dirty[~reads], clean[~reads])
        problem.k_cache.copy_(k)
        problem.v_cache.copy_(v)


def test_chain_mask_equals_causal() -> None:
    problem = make_problem(prefix=[100, 255], new=[6, 6])
    chain = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 6, 6).contiguous()
    torch.testing.assert_close(problem.extend(tree_mask=chain), problem.extend())


def test_empty_mask_rows_attend_the_prefix_only() -> None:
    problem = make_problem(prefix=[0, 4], new=[2, 2])
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    out = problem.extend(tree_mask=mask)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert_close(out, problem.extend(tree_mask=mask, ref=True))


def test_large_scores_do_not_overflow() -> None:
    problem = make_problem(prefix=[500], new=[1])
    problem.q.mul_(1e3)
    assert_close(problem.extend(), problem.extend(ref=True))


def test_window_with_tree_mask_is_refused() -> None:
    problem = make_problem(prefix=[4], new=[2])
    with pytest.raises(ValueError, match="window=3 with a tree mask"):
        problem.extend(window=3, tree_mask=torch.ones(1, 2, 2, dtype=torch.bool))


def test_bad_arguments_raise() -> None:
    problem = make_problem(prefix=[9, 20], new=[1, 1])
    lens = problem.prefix_lens + 1
    rows = problem.row_index

    def decode(**changes: object) -> None:
        arguments: dict[str, object] = {
            "page_table": problem.page_table,
            "row_index": rows,
            "read_lens": lens,
            "page_size": 1,
            "sm_scale": 1.0,
            "out": torch.empty_like(problem.q),
        }
        arguments.update(changes)
        caches = (problem.k_cache, problem.v_cache)
        attention.decode_attention(problem.q, *caches, **arguments)  # type: ignore[arg-type]

    decode()
    with pytest.raises(RuntimeError, match="page_table is"):
        decode(page_table=problem.page_table.long())
    with pytest.raises(RuntimeError, match="read_lens is"):
        decode(read_lens=lens.int())
    with pytest.raises(RuntimeError, match="read_lens is"):
        decode(read_lens=lens[:1])
    with pytest.raises(RuntimeError, match=r"read_lens\[1\] is -1"):
        decode(read_lens=torch.tensor([3, -1]))
    with pytest.raises(
        RuntimeError, match="row 1 has 99 KV elements, expected 0 .. 23"
    ):
        decode(read_lens=torch.tensor([3, 99]))
    with pytest.raises(RuntimeError, match="row 0 names row 4 of the page table"):
        decode(row_index=torch.tensor([4, 0]))
    with pytest.raises(RuntimeError, match="page_size is 0"):
        decode(page_size=0)
    with pytest.raises(RuntimeError, match="out is"):
        decode(out=torch.empty(2, 4, 32))
    for slot in (-1, problem.k_cache.shape[0]):
        table = problem.page_table.clone()
        table[rows[1], 4] = slot
        with pytest.raises(RuntimeError, match=f"KV element 4 in slot {slot}"):
            decode(page_table=table)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="row 0 has 1 new tokens, expected 3"):
        problem.extend(tree_mask=mask)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
