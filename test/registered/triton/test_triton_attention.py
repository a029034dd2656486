"""Triton attention against the torch references: interpreted, or compiled on a GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attention_problem import (
    DEVICE,
    DTYPES,
    NAN,
    ON_GPU,
    Problem,
    assert_same,
    head_cases,
    make_problem,
    make_sinks,
    random_trees,
)

from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.layers.attention.cpu_backends import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.ops.attention.decode.launch import (
    TARGET_PROGRAMS,
    decode_attention,
    decode_splits,
    decode_workspace,
)
from sglang.srt.layers.ops.attention.extend import table as extend_table
from sglang.srt.layers.ops.attention.op import decode_attention_ref
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import sampled

register_cpu_ci(est_time=32, suite="cpu")
register_cuda_ci(est_time=70, suite="cuda")


def cases(
    page_sizes: list[int], windows: list[int]
) -> list[tuple[torch.dtype, int, int]]:
    """Dtype, page size, window; of the interpreter two windows for each of the others
    at most."""
    return sampled(
        itertools.product(DTYPES, page_sizes, windows),
        key=lambda case: case[:2],
        ci=len(windows) if ON_GPU else len(windows) - 1,
    )


@pytest.mark.parametrize(("dtype", "page_size", "window"), cases([1, 4, 16], [-1, 70]))
def test_decode(dtype: torch.dtype, page_size: int, window: int) -> None:
    problem = make_problem(
        prefix_lens=[0, 64, 199, 16, 149],
        new_lens=[1, 1, 1, 1, 1],
        page_size=page_size,
        dtype=dtype,
    )
    # Few splits with several tiles each; then more splits than tiles; then one split.
    problem.decode(window=window, max_context=128)
    problem.decode(window=window, max_context=512)
    problem.decode(window=window, max_context=1)


@pytest.mark.parametrize(("heads", "head_dim"), head_cases(64, 80, 96, 128, 192, 256))
def test_decode_heads(heads: tuple[int, int], head_dim: int) -> None:
    for dtype in DTYPES:
        make_problem(
            prefix_lens=[69, 2],
            new_lens=[1, 1],
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            page_size=4,
            has_row_index=False,
        ).decode(max_context=256)


def test_decode_rows_that_read_nothing_yield_zeros() -> None:
    problem = make_problem(prefix_lens=[0, 70, 0], new_lens=[0, 1, 0])
    for max_context in (1, 256):
        problem.decode(max_context=max_context)
        problem.decode(max_context=max_context, sinks=make_sinks(4), logit_cap=2.0)


@pytest.mark.parametrize(
    ("dtype", "logit_cap", "has_sinks", "window"),
    [
        (torch.float32, 50.0, True, 50),
        (torch.float16, 2.0, False, -1),
        (DTYPES[-1], 0.0, True, -1),
    ],
)
def test_sinks_and_caps(
    dtype: torch.dtype, logit_cap: float, has_sinks: bool, window: int
) -> None:
    """In one split and in several; full tiles and masked ones; sinks of both dtypes."""
    problem = make_problem(
        prefix_lens=[0, 90],
        new_lens=[37, 3],
        heads=(6, 2),
        head_dim=64,
        page_size=4,
        dtype=dtype,
    )
    for sink_dtype in (torch.float32, dtype):
        sinks = make_sinks(6, dtype=sink_dtype) if has_sinks else None
        options = {"logit_cap": logit_cap, "sinks": sinks, "window": window}
        problem.extend(**options)
    for max_context in (1, 512):
        problem.decode(max_context=max_context, **options)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_sinks_far_from_the_scores_do_not_overflow(score: float) -> None:
    problem = make_problem(prefix_lens=[70], new_lens=[3])
    sinks = torch.full((4,), score, device=DEVICE)
    for max_context in (1, 512):
        problem.decode(max_context=max_context, sinks=sinks)
    problem.extend(sinks=sinks)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_nan_shows_where_it_is_attended_and_nowhere_else(cache: str) -> None:
    problem = make_problem(
        prefix_lens=[100, 90], new_lens=[9, 12], heads=(4, 2), dtype=torch.float16
    )
    bad = getattr(problem, cache)
    for element in (3, 104):
        bad[problem.slot(0, element), 1, 5] = NAN
    problem.decode(max_context=128)
    problem.decode(window=60, max_context=128)
    problem.extend()
    problem.extend(window=6)
    problem.extend(window=100)
    bad[problem.slot(0, 3), 1, 5] = 0.0
    problem.extend()
    bad[problem.slot(0, 104), 1, 5] = 0.0
    nodes = 9
    tree = make_problem(
        prefix_lens=[70, 33], new_lens=[nodes, nodes], dtype=torch.float16
    )
    getattr(tree, cache)[tree.slot(1, 33 + 2), 0, 7] = NAN
    tree.extend(tree_mask=random_trees(2, nodes, seed=3))


@pytest.mark.parametrize(
    ("dtype", "page_size", "window"), cases([1, 4, 16], [-1, 1, 50])
)
def test_extend(dtype: torch.dtype, page_size: int, window: int) -> None:
    make_problem(
        prefix_lens=[0, 130, 64, 5, 17],
        new_lens=[37, 3, 64, 0, 1],
        page_size=page_size,
        dtype=dtype,
    ).extend(window=window)


@pytest.mark.parametrize(("heads", "head_dim"), head_cases(64, 80, 96, 128, 192, 256))
def test_extend_heads(heads: tuple[int, int], head_dim: int) -> None:
    for dtype in DTYPES:
        make_problem(
            prefix_lens=[67, 0],
            new_lens=[5, 19],
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            page_size=4,
            has_row_index=False,
        ).extend()


@pytest.mark.parametrize("is_v_late", [False, True])
@pytest.mark.parametrize("block_m", [64, 128])
def test_extend_in_every_form_of_the_main_loop(
    is_v_late: bool, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = extend_table.ExtendTile(block_m, 32, 4, 2, is_v_late)
    choice = extend_table.ExtendChoice(math.inf, math.inf, tile)
    monkeypatch.setattr(extend_table, "HALF_TILES", {64: (choice,)})
    for window in (-1, 90):
        make_problem(
            prefix_lens=[20, 70],
            new_lens=[173, 1],
            heads=(2, 1),
            dtype=torch.float16,
        ).extend(window=window)


def test_extend_chooses_tiles_for_long_rows() -> None:
    """Rows of more than 8192 queries; 128 channels, where the tiles are largest."""
    if not ON_GPU:
        pytest.skip("too long for the interpreter")
    for dtype in DTYPES:
        for head_dim in (64, 128, 256):
            make_problem(
                prefix_lens=[300, 0],
                new_lens=[2100, 2050],
                heads=(8, 2),
                head_dim=head_dim,
                dtype=dtype,
            ).extend()


def test_extend_finds_the_row_of_a_tile_among_many() -> None:
    new_lens = [(5 * row) % 4 for row in range(37)]
    make_problem(
        prefix_lens=[row % 7 for row in range(37)], new_lens=new_lens, heads=(1, 1)
    ).extend()


@pytest.mark.parametrize("nodes", [1, 7, 40])
@pytest.mark.parametrize("page_size", [1, 16])
def test_extend_with_a_tree_mask(nodes: int, page_size: int) -> None:
    for dtype in DTYPES:
        make_problem(
            prefix_lens=[0, 64, 131],
            new_lens=[nodes] * 3,
            heads=(4, 2),
            page_size=page_size,
            dtype=dtype,
        ).extend(tree_mask=random_trees(3, nodes, seed=nodes))


@pytest.mark.parametrize("window", [1, 3, 100, 500])
def test_extend_with_a_windowed_tree(window: int) -> None:
    """Windows that end among the nodes, in the prefix, and before it."""
    nodes = 24
    for dtype in DTYPES[: None if ON_GPU else 1]:
        make_problem(
            prefix_lens=[0, 131],
            new_lens=[nodes] * 2,
            heads=(2, 1),
            page_size=4,
            dtype=dtype,
        ).extend(tree_mask=random_trees(2, nodes, seed=5), window=window)


def test_a_token_that_attends_nothing_yields_zeros() -> None:
    mask = torch.zeros(1, 3, 3, dtype=torch.bool, device=DEVICE)
    mask[0, 1, 0] = True
    problem = make_problem(prefix_lens=[0], new_lens=[3])
    problem.extend(tree_mask=mask)
    problem.extend(tree_mask=mask, sinks=make_sinks(4), logit_cap=2.0)


@pytest.mark.parametrize("new, is_partial", [(70, True), (9, False)])
def test_the_backend_reads_what_its_view_says(new: int, is_partial: bool) -> None:
    """Rotated K reaches the kernel either way; the view tells the two apart."""
    prefix, rows = 20, 2
    rng = torch.Generator().manual_seed(5)
    pool = ReqToTokenPool(size=rows, row_width=128, device=DEVICE, context_len=128)
    slots = 1 + torch.randperm(rows * (prefix + new), generator=rng).view(rows, -1)
    pool.req_to_token[1:, : prefix + new] = slots.to(DEVICE, torch.int32)
    zeros = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    prefix_lens = zeros + prefix
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(rows * new, dtype=torch.long, device=DEVICE),
        positions=torch.arange(prefix, prefix + new, device=DEVICE).repeat(rows),
        out_cache_loc=slots[:, prefix:].reshape(-1).to(DEVICE),
        req_pool_indices=torch.tensor([1, 2], device=DEVICE),
        prefix_lens=prefix_lens,
        extend_lens=zeros + new,
        seq_lens=prefix_lens + new,
        req_serial=zeros,
        salt=zeros,
        rids_int=zeros,
        qo_indptr=torch.arange(rows + 1, device=DEVICE) * new,
    )
    layer = RadixAttention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        layer_id=0,
        scaling=0.125,
        logit_cap=5.0,
        sinks=make_sinks(4),
        cos_sin_cache=torch.randn(128, 64, generator=rng).to(DEVICE),
    )
    qkv = torch.randn(rows * new, 8, 64, generator=rng).to(DEVICE, torch.float16)
    cached = torch.randn(2, slots.numel() + 1, 2, 64, generator=rng)
    outs = []
    for kind in (TorchNativeAttnBackend, TritonAttnBackend):
        kv_pool = MHATokenToKVPool(
            size=slots.numel(),
            page_size=1,
            dtype=torch.float16,
            head_num=2,
            head_dim=64,
            layer_num=1,
            device=DEVICE,
        )
        for buffer, values in zip(kv_pool.get_kv_buffer(0), cached, strict=True):
            buffer[: len(values)] = values.to(DEVICE, torch.float16)
        backend = kind(req_to_token_pool=pool, kv_pool=kv_pool)
        q, k, v = qkv.clone().split([4, 2, 2], dim=1)
        outs.append(torch.empty(rows * new, 4, 64, dtype=q.dtype, device=DEVICE))
        backend.forward(q, k, v, layer, batch, out=outs[-1])
        (view,) = backend.read_view(batch)
        is_prefix = kind is TritonAttnBackend and is_partial
        assert view.read_lens is (batch.prefix_lens if is_prefix else batch.seq_lens)
    assert_same(outs[1], outs[0])


def test_int64_offsets() -> None:
    """A slot whose byte offset does not fit 32 bits (GPU only: it takes 9 GiB)."""
    if not ON_GPU:
        pytest.skip("needs the memory of a GPU")
    slots, dim = (1 << 31) // 128 + 300, 128
    cache = torch.zeros(slots, 1, dim, dtype=torch.float16, device=DEVICE)
    cache[-300:].normal_()
    Problem(
        q=torch.randn(90, 1, dim, device=DEVICE).half(),
        k_cache=cache,
        v_cache=cache,
        page_table=torch.arange(
            slots - 300, slots, device=DEVICE, dtype=torch.int32
        ).view(1, -1),
        row_index=None,
        prefix_lens=torch.tensor([200], device=DEVICE),
        new_lens=torch.tensor([90], device=DEVICE),
        page_size=1,
        sm_scale=dim**-0.5,
    ).extend()


def test_decode_splits_depend_on_shapes_alone() -> None:
    for rows in (1, 2, 16, 64, 256, 1000):
        splits = decode_splits(rows=rows, programs_per_row=8, max_context=1 << 17)
        assert splits & (splits - 1) == 0 and 1 <= splits <= 64
    assert decode_splits(rows=1, programs_per_row=8, max_context=64) == 1


def test_decode_splits_fill_the_gpu_and_no_more() -> None:
    for rows in range(1, 300):
        splits = decode_splits(rows=rows, programs_per_row=8, max_context=1 << 17)
        programs = rows * 8 * splits
        assert programs >= TARGET_PROGRAMS or splits == 64, rows
        assert splits == 1 or programs // 2 < TARGET_PROGRAMS, rows


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA graph")
def test_decode_in_a_cuda_graph_serves_other_lengths() -> None:
    problem = make_problem(
        prefix_lens=[700, 5, 0], new_lens=[1, 1, 1], heads=(8, 2), dtype=torch.float16
    )
    q = problem.q[:3]
    workspace = decode_workspace(
        rows=3, q_heads=8, kv_heads=2, head_dim=64, max_context=2048, device=DEVICE
    )
    read_lens = torch.tensor([1, 1, 1], device=DEVICE)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    common = {
        "page_table": problem.page_table,
        "row_index": problem.row_index,
        "read_lens": read_lens,
        "page_size": 1,
        "sm_scale": problem.sm_scale,
    }

    def launch() -> None:
        decode_attention(
            q, problem.k_cache, problem.v_cache, **common, out=out, workspace=workspace
        )

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lens in ([701, 6, 1], [0, 3, 1], [300, 6, 0]):
        read_lens.copy_(torch.tensor(lens))
        out.fill_(NAN)
        graph.replay()
        decode_attention_ref(
            q, problem.k_cache, problem.v_cache, **common, out=expected
        )
        assert_same(out, expected)


def test_errors_name_the_argument() -> None:
    problem = make_problem(prefix_lens=[4], new_lens=[2])
    with pytest.raises(ValueError, match="window=3 with a tree mask needs the pos"):
        problem.extend(window=3, tree_mask=random_trees(1, 2, seed=0), positions=None)
    with pytest.raises(ValueError, match=r"sinks is \(3,\)"):
        decode_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            page_table=problem.page_table,
            row_index=problem.row_index,
            read_lens=problem.prefix_lens,
            page_size=1,
            sm_scale=1.0,
            sinks=make_sinks(3),
            out=torch.empty_like(problem.q),
            workspace=decode_workspace(
                rows=1, q_heads=4, kv_heads=1, head_dim=64, max_context=9, device=DEVICE
            ),
        )
    odd = make_problem(prefix_lens=[4], new_lens=[2], page_size=3)
    with pytest.raises(ValueError, match="page_size=3"):
        odd.extend()
    with pytest.raises(ValueError, match="page_size=3"):
        odd.decode()
    wide = make_problem(prefix_lens=[4], new_lens=[2], head_dim=264)
    with pytest.raises(ValueError, match="head_dim=264"):
        wide.extend()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    problem = make_problem(prefix_lens=[90], new_lens=[1])
    small = decode_workspace(
        rows=1, q_heads=1, kv_heads=1, head_dim=64, max_context=512, device=DEVICE
    )
    with pytest.raises(ValueError, match="workspace holds"):
        decode_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            page_table=problem.page_table,
            row_index=problem.row_index,
            read_lens=problem.prefix_lens,
            page_size=1,
            sm_scale=1.0,
            out=torch.empty_like(problem.q),
            workspace=small,
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
