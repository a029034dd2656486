"""KV of 8 bits: the store kernels, and every attention kernel that reads it.

The references read the same bytes, so results differ by the rounding of sums alone.
Without a GPU the kernels run in the interpreter, which forgets to carry where it rounds
up to 8 bits; there, stored values are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from attention_problem import (
    DEVICE,
    DTYPES,
    NAN,
    ON_GPU,
    make_problem,
    make_sinks,
    random_trees,
)
from test_triton_latent import SHAPES, LatentProblem, latent_problem

from sglang.srt.layers.ops.attention.extend import table as extend_table
from sglang.srt.layers.ops.latent_store.op import latent_store_ref
from sglang.srt.layers.ops.latent_store.triton import latent_store
from sglang.srt.layers.ops.rope.op import rope_store_kv_ref
from sglang.srt.layers.ops.rope.triton import rope_store_kv
from sglang.srt.layers.ops.stored_kv import read_value
from sglang.srt.mem_cache.kv_dtype import KVScales, to_stored
from sglang.srt.mem_cache.ops.move_kv.op import move_kv_cache_ref
from sglang.srt.mem_cache.ops.move_kv.triton import move_kv_cache
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=40, suite="cuda")

KV = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = KVScales(k=0.5, v=0.25)
# Share of rotated values that two kernels may store differently. Their float32 results
# are within about 8 steps of 2 ** -24, from the order of sums, the inverse root and
# fused products. A code of 8 bits is 2 ** -4 of a value wide or wider, and for small
# values not much of the products they come from; so an edge between two codes lies
# between the results for about 2 * 8 * 2 ** -24 / 2 ** -4 = 2 ** -16 of the values. A
# rounding to 16 bits before does not change that: it falls otherwise more often, but
# few of its steps are edges of codes. Two of the inputs, normalised, add as much each.
MOST_DIFFERENT = 2**-10


def bits(stored: Tensor) -> Tensor:
    return stored.view(torch.uint8)


@pytest.mark.parametrize("kv", KV, ids=str)
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:2], ids=str)
def test_decode(kv: torch.dtype, dtype: torch.dtype) -> None:
    problem = make_problem(
        prefix_lens=[0, 64, 149], new_lens=[1, 1, 1], page_size=4, dtype=dtype
    )
    for max_context, options in (
        (1, {}),
        (512, {"window": 70}),
        (128, {"logit_cap": 2.0, "sinks": make_sinks(4)}),
    ):
        problem.stored_as(kv).decode(max_context=max_context, **options)


@pytest.mark.parametrize("kv", KV, ids=str)
def test_extend_and_trees(kv: torch.dtype) -> None:
    """Whole tiles and masked ones, windows, and rows whose programs share them."""
    dtype = DTYPES[-1]
    wide: dict[str, Any] = {"heads": (6, 2), "head_dim": 80, "dtype": dtype}
    problem = make_problem(prefix_lens=[0, 130], new_lens=[40, 3], **wide)
    problem.stored_as(kv).extend()
    problem.stored_as(kv).extend(window=50, sinks=make_sinks(6))
    nodes = 7
    tree = make_problem(prefix_lens=[90, 5], new_lens=[nodes] * 2, page_size=4, **wide)
    mask = random_trees(2, nodes, seed=1)
    tree.stored_as(kv).extend(tree_mask=mask)
    tree.stored_as(kv).extend(tree_mask=mask, window=20, max_context=512)
    tile = extend_table.choose_tile(
        tree.stored_as(kv).extend_inputs(torch.empty_like(tree.q)).shape(),
        itemsize=tree.q.element_size(),
    )
    tree.stored_as(kv).split(tile, 3, tree_mask=mask)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter reads NaN of 8 bits as numbers")
@pytest.mark.parametrize("kv", KV, ids=str)
def test_nan_reaches_those_who_attend_it_and_nobody_else(kv: torch.dtype) -> None:
    problem = make_problem(prefix_lens=[40], new_lens=[9], dtype=DTYPES[-1])
    problem.v_cache[problem.slot(0, 44)] = NAN
    problem.stored_as(kv).extend(tree_mask=random_trees(1, 9, seed=1))


@pytest.mark.parametrize("kv", KV, ids=str)
def test_latents(kv: torch.dtype) -> None:
    shape = SHAPES[1]

    def problem(*lens: Any) -> LatentProblem:
        made = latent_problem(shape, *lens, dtype=DTYPES[-1])
        keys = to_stored(made.of_keys.k_cache, kv, 1.0)
        return replace(made, of_keys=replace(made.of_keys, k_cache=keys))

    problem([0, 71], [1, 1]).decode([0, 72])
    problem([0, 40], [6, 1]).extend()
    problem([30, 0], [5, 5]).extend(tree_mask=random_trees(2, 5, seed=2))


@triton.jit
def read_kernel(stored, values, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    value = read_value(tl.load(stored + at), values.dtype.element_ty)
    tl.store(values + at, value)


@pytest.mark.parametrize("kv", KV, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_read_exactly(kv: torch.dtype, dtype: torch.dtype) -> None:
    """NaN, infinity and subnormal numbers, too, which the interpreter gets wrong."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kv)
    values = torch.empty(256, dtype=dtype, device=DEVICE)
    read_kernel[(1,)](codes, values, COUNT=256)
    expected = codes.float()
    shown = torch.ones_like(values, dtype=torch.bool)
    if not ON_GPU:
        shown = expected.isfinite() & (expected.abs() >= torch.finfo(kv).tiny)
    found = values.float()[shown]
    assert torch.equal(found.isnan(), expected[shown].isnan())
    assert torch.equal(found.nan_to_num(0.0), expected[shown].nan_to_num(0.0))


# -- stores ------------------------------------------------------------------------


def exact(*shape: int, kv: torch.dtype, dtype: torch.dtype, scale: float) -> Tensor:
    """Values that are representable in both dtypes, some of them too large for 8 bits,
    and a NaN."""
    most = torch.finfo(kv).max
    values = to_stored(torch.randn(*shape) * 4, kv, 1.0).float() * scale
    values[0, 0, :3] = torch.tensor([min(most * scale * 2, 6e4), -6e4, NAN])
    return values.to(DEVICE, dtype)


@pytest.mark.parametrize("kv", KV, ids=str)
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:], ids=str)
def test_store_without_rotation(kv: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    q = torch.randn(3, 4, 24, device=DEVICE).to(dtype)
    k = exact(3, 2, 24, kv=kv, dtype=dtype, scale=SCALES.k)
    v = exact(3, 2, 24, kv=kv, dtype=dtype, scale=SCALES.v)
    if not ON_GPU and kv == torch.float8_e4m3fn:
        k[0, 0, 2] = v[0, 0, 2] = 0  # the interpreter writes no NaN of this type
    for scales in (SCALES, KVScales()):
        caches = compare_stores(rope_store_kv, rope_store_kv_ref, q, k, v, kv, scales)
        found = caches[1][2].float() * scales.v
        if scales is SCALES:
            kept = v[0, :, 3:].float()
            assert torch.equal(found[:, 3:], kept)
            assert torch.equal(found[0, 2].isnan(), v[0, 0, 2].isnan())


@pytest.mark.skipif(not ON_GPU, reason="the interpreter rounds otherwise")
@pytest.mark.parametrize("kv", KV, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotated_stores(kv: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    q, k, v = (torch.randn(33, h, 128, device=DEVICE).to(dtype) for h in (8, 2, 2))
    angles = torch.rand(64, 64, device=DEVICE) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    weight = torch.randn(128, device=DEVICE).to(dtype)
    rope: dict[str, Any] = {"cos_sin_cache": table, "k_norm_weight": weight}
    compare_stores(rope_store_kv, rope_store_kv_ref, q, k, v, kv, SCALES, **rope)
    latent = torch.randn(33, 1, 512 + 64, device=DEVICE).to(dtype)
    queries = torch.randn(33, 16, 512 + 64, device=DEVICE).to(dtype)
    rope = {"cos_sin_cache": table[:, 32:96].contiguous(), "eps": 1e-6}
    rope["k_norm_weight"] = torch.randn(512, device=DEVICE).to(dtype)
    args = (queries, latent, latent[..., :512], kv, SCALES)
    compare_stores(latent_store, latent_store_ref, *args, **rope)


def distinct_slots(tokens: int, slots: int) -> Tensor:
    """Return a slot for each token, 2 for the first. None twice, because then either of
    the rows may stay."""
    others = torch.randperm(slots - 3, device=DEVICE)[: tokens - 1] + 3
    return torch.cat((torch.full((1,), 2, device=DEVICE), others))


def compare_stores(
    op: Any,
    reference: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: torch.dtype,
    scales: KVScales,
    **rope: Any,
) -> tuple[Tensor, Tensor]:
    """Store with both. Bytes are the same, except where two roundings of a rotation
    fall to both sides of a tie; those are one code apart."""
    tokens, slots = len(q), 70
    options = {
        "positions": torch.arange(tokens, device=DEVICE),
        "out_cache_loc": distinct_slots(tokens, slots),
        "cos_sin_cache": None,
        "scales": scales,
        **rope,
    }
    made = []
    for run in (op, reference):
        caches = [
            torch.zeros(slots, *part.shape[1:], device=DEVICE).to(kv) for part in (k, v)
        ]
        if v.data_ptr() == k.data_ptr():
            caches[1] = caches[0][..., : v.shape[2]]
        run(
            q.clone(),
            k.clone(),
            v.clone(),
            k_cache=caches[0],
            v_cache=caches[1],
            **options,
        )
        made.append(caches)
    for found, expected in zip(*made, strict=True):
        differ = (bits(found) != bits(expected)) & ~(
            found.float().isnan() & expected.float().isnan()
        )
        if not rope:
            assert not bool(differ.any()), (found[differ], expected[differ])
        apart = (bits(found).int() - bits(expected).int()).abs()
        assert differ.float().mean() < MOST_DIFFERENT
        assert bool((apart[differ] == 1).all())
    return made[0][0], made[0][1]


@pytest.mark.parametrize("kv", KV, ids=str)
def test_moves_keep_every_byte(kv: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (2, 3, 20, 2, 8), dtype=torch.uint8, generator=generator)
    src = torch.tensor([3, 4, 5, 9], device=DEVICE)
    dst = torch.tensor([4, 5, 6, 1], device=DEVICE)
    moved = []
    for move in (move_kv_cache, move_kv_cache_ref):
        k, v = codes.clone().to(DEVICE)
        move(k.view(kv), v.view(kv), dst=dst, src=src)
        moved.append(torch.stack((k, v)).cpu())
    assert torch.equal(moved[0], moved[1])
    assert torch.equal(moved[0][:, :, dst.cpu()], codes[:, :, src.cpu()])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
