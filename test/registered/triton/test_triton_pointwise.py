"""Triton norm, activation, rotary + KV store and slot moves against the references.

Without a GPU the kernels run in the interpreter, on a few odd shapes.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.layers.ops.activation import op as activation_ops
from sglang.srt.layers.ops.activation import triton as activation
from sglang.srt.layers.ops.norm import op as norm_ops
from sglang.srt.layers.ops.norm import triton as norm
from sglang.srt.layers.ops.rope import op as rope_ops
from sglang.srt.layers.ops.rope import triton as rope
from sglang.srt.mem_cache.ops.move_kv import triton as move_kv
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import sampled

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 off where the GPU rounds.
BFLOAT16 = 3e-2 if DEVICE == "cpu" else 8e-3
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: BFLOAT16}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 3, 17] if DEVICE == "cpu" else [1, 3, 17, 64, 1000]
# Query heads, KV heads, channels, rotated channels.
ROPE_HEADS = [
    (4, 2, 16, 16),
    (5, 1, 24, 12),
    (3, 3, 10, 6),
    (6, 2, 8, 0),
    (32, 8, 128, 128),
]
WIDTHS = [8, 24, 100] if DEVICE == "cpu" else [8, 24, 100, 1024, 4096, 14336]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)


def assert_close(actual: Tensor, expected: Tensor, *, cancels: float = 1.0) -> None:
    """`cancels`: how much larger than a result the terms are whose sum it is."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance * cancels
    )
    difference = (actual.double() - expected.double()).norm()
    assert float(difference) <= tolerance * float(expected.double().norm())


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rmsnorm(dtype: torch.dtype, width: int) -> None:
    weight = random(width, dtype=dtype)
    for rows in ROWS:
        x = random(rows, width, dtype=dtype)
        expected = norm_ops.rmsnorm_ref(x, weight, 1e-5)
        assert_close(norm.rmsnorm(x, weight, 1e-5, out=None), expected)
        assert norm.rmsnorm(x, weight, 1e-5, out=x) is x
        assert_close(x, expected)


def test_rmsnorm_takes_strided_heads() -> None:
    packed = random(5, 6 * 16, dtype=torch.float16)
    weight = random(16, dtype=torch.float16)
    heads = packed[:, 16 : 4 * 16].view(5, 3, 16)
    expected = norm_ops.rmsnorm_ref(heads, weight, 1e-6)
    assert_close(norm.rmsnorm(heads, weight, 1e-6, out=None), expected)
    rows = packed[:, 16:32]
    assert_close(
        norm.rmsnorm(rows, weight, 1e-6, out=None),
        norm_ops.rmsnorm_ref(rows, weight, 1e-6),
    )
    assert norm.rmsnorm(packed[:0, :16], weight, 1e-6, out=None).shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_fused_add_rmsnorm(dtype: torch.dtype, width: int) -> None:
    weight = random(width, dtype=dtype)
    for rows in ROWS:
        x, residual = (random(rows, width, dtype=dtype) for _ in range(2))
        x_ref, residual_ref = x.clone(), residual.clone()
        norm.fused_add_rmsnorm(x, residual, weight, 1e-5)
        norm_ops.fused_add_rmsnorm_ref(x_ref, residual_ref, weight, 1e-5)
        if DEVICE == "cuda" or dtype != torch.bfloat16:
            assert torch.equal(residual, residual_ref)
        assert_close(residual, residual_ref)
        assert_close(x, x_ref)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_add_rmsnorm(dtype: torch.dtype, width: int) -> None:
    """The two launches that it replaces; bit by bit where the norm is rounded, for in
    float32 a GPU multiplies and adds at once."""
    inner, weight = (random(width, dtype=dtype) for _ in range(2))
    for rows in ROWS:
        x, residual = (random(rows, width, dtype=dtype) for _ in range(2))
        expected, expected_residual = norm.rmsnorm(x, inner, 1e-5), residual.clone()
        norm.fused_add_rmsnorm(expected, expected_residual, weight, 1e-5)
        norm.norm_add_rmsnorm(x, residual, inner, weight, 1e-5)
        assert_close(residual, expected_residual)
        assert_close(x, expected)
        if DEVICE == "cpu" or dtype != torch.float32:
            assert torch.equal(residual, expected_residual)
            assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 1030] if DEVICE == "cpu" else [3, 1030, 14336])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activation(name: str, dtype: torch.dtype, width: int) -> None:
    kernel = getattr(activation, name)
    for rows in ROWS:
        x = random(rows, 2 * width + 5, dtype=dtype)[:, : 2 * width]
        expected = getattr(activation_ops, f"{name}_ref")(x)
        out = torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)
        assert kernel(x, out=out) is out
        assert_close(out, expected)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activation_saturates_without_nan(name: str) -> None:
    x = torch.tensor([[-300.0, 300.0, 2.0, 2.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 600.0]], device=DEVICE)
    kernel = getattr(activation, name)
    torch.testing.assert_close(kernel(x, out=None), expected)


@pytest.mark.parametrize(
    ("heads", "dtype", "with_norm", "update_k"),
    sampled(
        itertools.product(ROPE_HEADS, DTYPES, (False, True), (False, True)),
        key=lambda case: case[0],
        ci=12 if DEVICE == "cuda" else 5,
    ),
)
def test_rope_store_kv(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    with_norm: bool,
    update_k: bool,
) -> None:
    q_heads, kv_heads, dim, rot = heads
    for tokens in (1, 5) if DEVICE == "cpu" else (1, 5, 64, 300):
        slots = 2 * tokens + 3
        packed = random(tokens, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
        copy = packed.clone()
        caches = [random(slots, kv_heads, dim, dtype=dtype) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        arguments = {
            "positions": torch.randint(0, 40, (tokens,), device=DEVICE),
            "cos_sin_cache": torch.randn(40, rot, device=DEVICE) if rot else None,
            "out_cache_loc": torch.randperm(slots, device=DEVICE)[:tokens],
            "q_norm_weight": random(dim, dtype=dtype) if with_norm else None,
            "k_norm_weight": random(dim, dtype=dtype) if with_norm else None,
            "eps": 1e-6,
            "update_k": update_k,
        }

        def parts(tensor: Tensor) -> list[Tensor]:
            return [
                part.unflatten(1, (-1, dim))
                for part in tensor.split(
                    [q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1
                )
            ]

        rope.rope_store_kv(
            *parts(packed), k_cache=caches[0], v_cache=caches[1], **arguments
        )
        rope_ops.rope_store_kv_ref(
            *parts(copy), k_cache=expected[0], v_cache=expected[1], **arguments
        )
        assert torch.equal(parts(packed)[2], parts(copy)[2])
        # A norm that is rounded the other way shows in full where the rotation cancels.
        cancels = 10.0 if with_norm else 1.0
        assert_close(parts(packed)[0], parts(copy)[0], cancels=cancels)
        assert_close(caches[0], expected[0], cancels=cancels)
        assert torch.equal(caches[1], expected[1])
        if update_k:
            stored = caches[0][arguments["out_cache_loc"]]
            assert torch.equal(parts(packed)[1], stored)
        else:
            assert torch.equal(parts(packed)[1], parts(copy)[1])


def test_rope_store_kv_refuses_gaps_between_heads() -> None:
    q = random(2, 2, 32, dtype=torch.float32)[..., :16]
    k = random(2, 2, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        rope.rope_store_kv(
            q,
            k,
            k,
            positions=torch.zeros(2, dtype=torch.int64, device=DEVICE),
            cos_sin_cache=None,
            k_cache=k,
            v_cache=k,
            out_cache_loc=torch.zeros(2, dtype=torch.int64, device=DEVICE),
            q_norm_weight=None,
            k_norm_weight=None,
            eps=1e-6,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("moves", [1, 5, 40])
def test_move_kv_cache_overlapping(dtype: torch.dtype, moves: int) -> None:
    layers, slots = (2, 50) if DEVICE == "cpu" else (32, 5000)
    buffers = [random(layers, slots, 3, 20, dtype=dtype) for _ in range(2)]
    before = [buffer.clone() for buffer in buffers]
    source = torch.randperm(slots, device=DEVICE)[:moves]
    # Shifting by one overlaps as much as is possible: a target is the next source.
    target = source.roll(1)
    move_kv.move_kv_cache(*buffers, dst=target, src=source)
    for buffer, old in zip(buffers, before, strict=True):
        old[:, target] = old[:, source].clone()
        assert torch.equal(buffer, old)


@pytest.mark.parametrize("moves", [0, move_kv.MAX_MOVES + 1])
def test_move_kv_cache_without_a_launch(moves: int) -> None:
    buffers = [random(1, 2 * moves + 1, 1, 8, dtype=torch.float16) for _ in range(2)]
    before = buffers[0].clone()
    source = torch.arange(moves, device=DEVICE)
    move_kv.move_kv_cache(*buffers, dst=source + 1, src=source)
    assert torch.equal(buffers[0][:, 1 : moves + 1], before[:, :moves])


def test_move_kv_cache_refuses_unlike_buffers() -> None:
    k = random(1, 4, 2, 8, dtype=torch.float16)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="differ"):
        move_kv.move_kv_cache(k, k[..., :4], dst=slots, src=slots)
    with pytest.raises(ValueError, match="contiguous"):
        move_kv.move_kv_cache(k[..., :4], k[..., :4], dst=slots, src=slots)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
