"""Triton attention over latents and their store against the torch references."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention_problem import (
    DEVICE,
    DTYPES,
    NAN,
    ON_GPU,
    Problem,
    assert_same,
    make_problem,
    random_trees,
)

from sglang.srt.configs.latent_config import LatentConfig
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.layers.attention.cpu_backends import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.latent_attention import LatentAttention
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.ops.attention.extend_split.launch import extend_workspace
from sglang.srt.layers.ops.attention.latent.launch import (
    latent_decode_attention,
    latent_extend_attention,
)
from sglang.srt.layers.ops.attention.op import (
    decode_attention_ref,
    extend_attention_ref,
)
from sglang.srt.layers.ops.latent_store.op import latent_store_ref
from sglang.srt.layers.ops.latent_store.triton import latent_store
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.mla_memory_pool import MLATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

# Query heads, channels of the latent, of the rotated key, elements of a page.
SHAPES = [(4, 32, 8, 1), (12, 40, 16, 4), (20, 64, 8, 16), (3, 24, 8, 64)]
SHAPES += [(128, 512, 64, 1)] * ON_GPU
CASES = [*itertools.product(SHAPES, DTYPES)]
if not ON_GPU:
    CASES = [(shape, DTYPES[1 - i // 3]) for i, shape in enumerate(SHAPES)]
# Of workspaces: one split, some, more than a row has tiles. The interpreter is slow.
CONTEXTS = (1, 256, 4096) if ON_GPU else (1, 192)
LENS = [0, 64, 199, 31, 90] if ON_GPU else [0, 71]
NEW = [37, 1, 6] if ON_GPU else [6, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProblem:
    """A problem of one KV head, with values among the channels of its keys."""

    of_keys: Problem
    rank: int

    def compare(self, op: Any, reference: Any, q: Tensor, **args: Any) -> None:
        """Compare launches of one split and of several."""
        problem = self.of_keys
        k_cache = problem.k_cache
        v_cache = k_cache[..., : self.rank]
        common = {
            "page_table": problem.page_table,
            "row_index": problem.row_index,
            "page_size": problem.page_size,
            "sm_scale": problem.sm_scale,
            **args,
        }
        expected = q.new_full((*q.shape[:2], self.rank), 7.0)
        reference(q, k_cache, v_cache, **common, out=expected)
        for max_context in CONTEXTS:
            workspace = extend_workspace(
                head_dim=self.rank, max_context=max_context, device=DEVICE
            )
            workspace.partial.fill_(NAN)
            workspace.lse.fill_(NAN)
            out = torch.full_like(expected, 7.0)
            op(q, k_cache, v_cache, **common, out=out, workspace=workspace)
            assert_same(out, expected)

    def decode(self, read_lens: list[int]) -> None:
        lens = torch.tensor(read_lens, device=DEVICE)
        q = self.of_keys.q[: len(read_lens)]
        self.compare(latent_decode_attention, decode_attention_ref, q, read_lens=lens)

    def extend(self, tree_mask: Tensor | None = None) -> None:
        problem = self.of_keys
        self.compare(
            latent_extend_attention,
            extend_attention_ref,
            problem.q,
            qo_indptr=problem.qo_indptr,
            prefix_lens=problem.prefix_lens,
            tree_mask=tree_mask,
        )


def latent_problem(
    shape: tuple[int, int, int, int],
    prefix: list[int],
    new: list[int],
    **options: Any,
) -> LatentProblem:
    heads, rank, rope, page_size = shape
    problem = make_problem(
        prefix_lens=prefix,
        new_lens=new,
        heads=(heads, 1),
        head_dim=rank + rope,
        page_size=page_size,
        **options,
    )
    return LatentProblem(of_keys=problem, rank=rank)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_decode_and_extend(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    problem = latent_problem(shape, LENS, [1] * len(LENS), dtype=dtype)
    problem.decode([0] + [n + 1 for n in LENS[1:]])
    prefix = [0, 40, 130][: len(NEW)]
    latent_problem(shape, prefix, NEW, dtype=dtype).extend()


@pytest.mark.parametrize("shape", SHAPES if ON_GPU else SHAPES[:1], ids=str)
def test_trees(shape: tuple[int, int, int, int]) -> None:
    for nodes in (5, 33) if ON_GPU else (7,):
        prefix = [0, 3, 63, 64, 120] if ON_GPU else [0, 30]
        new = [nodes] * len(prefix)
        problem = latent_problem(shape, prefix, new, has_row_index=False)
        problem.extend(tree_mask=random_trees(len(new), nodes, seed=nodes))


def test_nan_reaches_those_who_attend_it_and_nobody_else() -> None:
    nodes, prefix = 9, 40
    problem = latent_problem(SHAPES[0], [prefix], [nodes])
    problem.of_keys.k_cache[problem.of_keys.slot(0, prefix + 4)] = NAN
    mask = random_trees(1, nodes, seed=1)
    problem.extend(tree_mask=mask)
    problem.extend()


def test_needs_that_the_kernels_lack_are_refused() -> None:
    problem = latent_problem(SHAPES[0], [3], [1])
    lens = torch.tensor([4], device=DEVICE)
    for option in (
        {"window": 3},
        {"logit_cap": 1.0},
        {"sinks": torch.zeros(4, device=DEVICE)},
    ):
        with pytest.raises(ValueError, match="has none of them"):
            problem.compare(
                latent_decode_attention,
                decode_attention_ref,
                problem.of_keys.q[:1],
                read_lens=lens,
                **option,
            )
    keys = problem.of_keys.k_cache
    with pytest.raises(ValueError, match="their first channels"):
        latent_decode_attention(
            problem.of_keys.q[:1],
            keys,
            keys.clone()[..., : problem.rank],
            page_table=problem.of_keys.page_table,
            row_index=None,
            read_lens=lens,
            page_size=1,
            sm_scale=1.0,
            out=keys.new_empty(1, 4, problem.rank),
            workspace=extend_workspace(head_dim=32, max_context=1, device=DEVICE),
        )


# Tokens, query heads, channels of latents, rotated ones, a query's others.
STORES = [(0, 4, 32, 8, 32), (5, 20, 40, 12, 40), (3, 1, 512, 64, 128)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for tokens, heads, rank, rope, plain in STORES:
        width = rank + rope
        queries = torch.randn(tokens, heads + 1, plain + rope, device=DEVICE).to(dtype)
        keys = torch.randn(tokens, 2, width, device=DEVICE).to(dtype)
        cache = torch.randn(9, 1, width, device=DEVICE).to(dtype)
        args = {
            "positions": torch.arange(tokens, device=DEVICE) + 2,
            "cos_sin_cache": torch.randn(20, rope, device=DEVICE),
            "out_cache_loc": torch.randperm(9)[:tokens].to(DEVICE),
            "k_norm_weight": torch.rand(rank, device=DEVICE).to(dtype),
            "eps": 1e-6,
        }
        results = []
        for op in (latent_store, latent_store_ref):
            own, k, pool = queries.clone(), keys.clone()[:, 1:], cache.clone()
            q = own[:, :heads]
            views = {"k_cache": pool, "v_cache": pool[..., :rank]}
            op(q, k, k[..., :rank], **args, **views)
            results.append((own, k, pool))
        for found, expected in zip(*results, strict=True):
            assert_same(found, expected)
        assert torch.equal(results[0][0][:, heads], queries[:, heads])
        assert torch.equal(results[0][1], keys[:, 1:])
    with pytest.raises(ValueError, match="k is not updated"):
        latent_store(q, k, k, **args, **views, update_k=True)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_the_backend_serves_a_pool_of_latents(mode: ForwardMode) -> None:
    """Store and attention through the backend, as through the references."""
    latent = LatentConfig(rank=32, rope_dim=8, nope_dim=8, value_dim=8, query_rank=None)
    prefix, new, rows = 37, 1 if mode.is_decode else 5, 2
    torch.manual_seed(5)
    pool = ReqToTokenPool(size=rows, row_width=128, device=DEVICE, context_len=128)
    slots = 1 + torch.randperm(rows * (prefix + new)).view(rows, -1)
    pool.req_to_token[1:, : prefix + new] = slots.to(DEVICE, torch.int32)
    zeros = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    batch = ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros(rows * new, dtype=torch.long, device=DEVICE),
        positions=torch.arange(prefix, prefix + new, device=DEVICE).repeat(rows),
        out_cache_loc=slots[:, prefix:].flatten().contiguous().to(DEVICE),
        req_pool_indices=torch.tensor([1, 2], device=DEVICE),
        prefix_lens=zeros + prefix,
        extend_lens=zeros + new,
        seq_lens=zeros + prefix + new,
        req_serial=zeros,
        salt=zeros,
        rids_int=zeros,
        qo_indptr=torch.arange(rows + 1, device=DEVICE) * new,
    )
    norm = RMSNorm(latent.rank, 1e-6).to(DEVICE)
    norm.weight.data.normal_()
    layer = LatentAttention(
        latent=latent,
        num_heads=4,
        layer_id=0,
        scaling=0.2,
        cos_sin_cache=torch.randn(128, latent.rope_dim, device=DEVICE),
        norm=norm,
    )
    qkv = torch.randn(rows * new, layer.qkv_width, device=DEVICE)
    cached = torch.randn(slots.numel() + 1, 1, latent.width, device=DEVICE)
    found = []
    for kind in (TorchNativeAttnBackend, TritonAttnBackend):
        kv_pool = MLATokenToKVPool(
            size=slots.numel(),
            page_size=1,
            dtype=torch.float32,
            layer_num=1,
            kv_lora_rank=latent.rank,
            rope_dim=latent.rope_dim,
            device=DEVICE,
        )
        kv_pool.get_kv_buffer(0)[0].copy_(cached)
        backend = kind(req_to_token_pool=pool, kv_pool=kv_pool)
        out = torch.empty(rows * new, 4, latent.rank, device=DEVICE)
        backend.forward(*layer.split(qkv.clone()), layer, batch, out=out)
        found.append((out, kv_pool.kv_buffer))
        (view,) = backend.read_view(batch)
        assert view.read_lens is batch.seq_lens
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_same(actual, expected)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA graph")
def test_decode_in_a_cuda_graph_serves_other_lengths() -> None:
    problem = latent_problem(SHAPES[2], [700, 5, 90], [1, 1, 1], dtype=torch.float16)
    keys, q = problem.of_keys.k_cache, problem.of_keys.q[:3]
    workspace = extend_workspace(head_dim=problem.rank, max_context=2048, device=DEVICE)
    read_lens = torch.tensor([1, 1, 1], device=DEVICE)
    out = q.new_empty(*q.shape[:2], problem.rank)
    expected = torch.empty_like(out)
    caches = (keys, keys[..., : problem.rank])
    common = {
        "page_table": problem.of_keys.page_table,
        "row_index": problem.of_keys.row_index,
        "read_lens": read_lens,
        "page_size": problem.of_keys.page_size,
        "sm_scale": problem.of_keys.sm_scale,
    }

    def launch() -> None:
        latent_decode_attention(q, *caches, **common, out=out, workspace=workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lens in ([1, 0, 91], [701, 6, 40], [300, 3, 0]):
        read_lens.copy_(torch.tensor(lens))
        graph.replay()
        decode_attention_ref(q, *caches, **common, out=expected)
        assert_same(out, expected)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
