"""Native kernels of latent attention: values among the keys, store, heads' products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_attention_problem import TOLERANCE, assert_close, make_problem, random_tree
from torch import Tensor

from kv_canary.op import force_reference, native_available
from sglang.srt.layers.ops.attention import op as attention
from sglang.srt.layers.ops.head_linear import op as head_linear
from sglang.srt.layers.ops.latent_store import op as latent
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="cpu")

pytestmark = [
    pytest.mark.skipif(
        not native_available(), reason="the native CPU kernels are not installed"
    ),
    pytest.mark.usefixtures("level"),
]
# Query heads, channels of the latent, of the rotated key, elements of a page.
SHAPES = [(4, 32, 8, 1), (16, 512, 64, 64), (5, 40, 16, 4), (1, 24, 8, 16)]


def attend(problem: Any, rank: int, *, ref: bool = False, **rows: Any) -> Tensor:
    """Decode with `read_lens`, else extend, over latents of `rank` channels."""
    q = rows.pop("q", problem.q)
    name = "decode" if "read_lens" in rows else "extend"
    op = getattr(attention, f"{name}_attention{'_ref' if ref else ''}")
    out = torch.full((*q.shape[:2], rank), 7.0, dtype=q.dtype)
    common = {
        "page_table": problem.page_table,
        "row_index": problem.row_index,
        "page_size": problem.page_size,
        "sm_scale": problem.sm_scale,
    }
    v_cache = problem.k_cache[..., :rank]
    op(q, problem.k_cache, v_cache, **common | rows, out=out)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Like the references, and a token of an extend like its decode, bit by bit."""
    heads, rank, rope, page_size = shape
    cases = (([0, 255, 300], [3, 2, 17], None), ([0, 3, 256], [7] * 3, random_tree))
    for prefix, new, tree in cases:
        problem = make_problem(
            prefix=prefix,
            new=new,
            heads=(heads, 1),
            dim=rank + rope,
            page_size=page_size,
            dtype=dtype,
        )
        rows = {"qo_indptr": problem.qo_indptr, "prefix_lens": problem.prefix_lens}
        if tree is not None:
            rows["tree_mask"] = tree(3, 7, seed=1)
        found = attend(problem, rank, **rows)
        assert_close(found, attend(problem, rank, ref=True, **rows))
        if tree is not None:
            continue
        each = torch.repeat_interleave(problem.row_index, problem.new_lens)
        lens = [p + j + 1 for p, n in zip(prefix, new, strict=True) for j in range(n)]
        alone = replace(problem, row_index=each)
        assert torch.equal(found, attend(alone, rank, read_lens=torch.tensor(lens)))


def test_sizes_that_do_not_fit_are_named() -> None:
    problem = make_problem(prefix=[3], new=[1], heads=(4, 1), dim=40)
    lens = torch.tensor([4])
    with pytest.raises(RuntimeError, match="v_cache .*multiple of 8 from 8 to 1024"):
        attend(problem, 28, read_lens=lens)
    with pytest.raises(RuntimeError, match="out is .*expected Float"):
        attention.decode_attention(
            problem.q,
            problem.k_cache,
            problem.k_cache[..., :32],
            page_table=problem.page_table,
            row_index=problem.row_index,
            read_lens=lens,
            page_size=1,
            sm_scale=1.0,
            out=torch.empty(1, 4, 40),
        )


# Tokens, query heads, channels of latents, rotated ones, a query's others.
STORES = [(0, 4, 32, 8, 32), (70, 5, 40, 12, 40), (3, 1, 512, 64, 128)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_store(dtype: torch.dtype) -> None:
    for tokens, heads, rank, rope, plain in STORES:
        width = rank + rope
        queries = torch.randn(tokens, heads + 1, plain + rope).to(dtype)
        keys = torch.randn(tokens, 2, width).to(dtype)
        cache = torch.randn(90, 1, width).to(dtype)
        args = {
            "positions": torch.randint(0, 20, (tokens,)),
            "cos_sin_cache": torch.randn(20, rope),
            "out_cache_loc": torch.randperm(90)[:tokens],
            "k_norm_weight": torch.rand(rank).to(dtype),
            "eps": 1e-6,
        }
        results = []
        for op in (latent.latent_store, latent.latent_store_ref):
            own, k, pool = queries.clone(), keys.clone()[:, 1:], cache.clone()
            q = own[:, :heads]
            views = {"k_cache": pool, "v_cache": pool[..., :rank]}
            op(q, k, k[..., :rank], **args, **views)
            results.append((own, k, pool))
        for found, expected in zip(*results, strict=True):
            assert_close(found, expected)
        assert torch.equal(results[0][0][:, heads], queries[:, heads])
        assert torch.equal(results[0][1], keys[:, 1:])
    with pytest.raises(RuntimeError, match="latent_store: positions"):
        bad = args | {"positions": args["positions"] + 20}
        latent.latent_store(q, k, k, **bad, **views)


@pytest.mark.parametrize("is_exact", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(3, 40, 24), (16, 512, 128), (1, 33, 7)], ids=str)
def test_products_of_heads(shape: tuple[int, int, int], is_exact: bool) -> None:
    """Strided inputs and outputs; a row's result does not depend on the others."""
    heads, n, k = shape
    weight = torch.randn(heads, k, n).transpose(1, 2)
    if is_exact:
        weight = weight.bfloat16().float()
    packed = head_linear.pack_heads(weight)
    assert isinstance(packed, head_linear.PackedHeads)
    assert packed.data.dtype == (torch.bfloat16 if is_exact else torch.float32)
    wide = torch.randn(50, heads, k + 5)
    x = wide[..., :k]
    target = torch.full((50, heads, n + 3), 7.0)
    found = head_linear.head_linear(x, packed, out=target[..., :n])
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert bool((target[..., n:] == 7.0).all())
    with force_reference():
        again = head_linear.head_linear(x, packed)
    torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-4)
    for begin, end in ((0, 1), (7, 9), (3, 50)):
        part = head_linear.head_linear(x[begin:end], packed)
        assert torch.equal(part, found[begin:end])
    assert head_linear.head_linear(x[:0], packed).shape == (0, heads, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_in_half_precision(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 24, 40).to(dtype).transpose(1, 2)
    assert head_linear.pack_heads(weight) is weight
    x = torch.randn(5, 3, 30).to(dtype)[..., :24]
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert_close(head_linear.head_linear(x, weight), expected.to(dtype))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
