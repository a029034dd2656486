"""Norms, activation, rotary + KV store and the exponential on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.layers.ops.activation import op as activation
from sglang.srt.layers.ops.norm import op as norm
from sglang.srt.layers.ops.rope import op as rope
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

pytestmark = [
    pytest.mark.skipif(
        not native_available(),
        reason="the native CPU kernels are not installed",
    ),
    pytest.mark.usefixtures("level"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAN = float("nan")
GATED = ("silu_and_mul", "gelu_and_mul")


def assert_close(actual: Tensor, expected: Tensor, *, rounds: int = 1) -> None:
    tolerance = rounds * TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 8, 24, 64, 100, 320, 1027])
def test_rmsnorm(dtype: torch.dtype, width: int) -> None:
    for rows in (0, 1, 3, 17, 400):
        x = (torch.randn(rows, width) * 3).to(dtype)
        weight = torch.rand(width).to(dtype) + 0.5
        expected = norm.rmsnorm_ref(x, weight, 1e-5)
        assert_close(norm.rmsnorm(x, weight, 1e-5), expected)
        out = torch.empty_like(x)
        assert norm.rmsnorm(x, weight, 1e-5, out=out) is out
        assert_close(out, expected)
        strided = torch.cat((x, x), dim=1)[:, :width]
        assert torch.equal(norm.rmsnorm(strided, weight, 1e-5), out)
        batched = x.view(1, rows, width)
        assert torch.equal(norm.rmsnorm(batched, weight, 1e-5)[0], out)
        norm.rmsnorm(x, weight, 1e-5, out=x)
        assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 8, 24, 64, 100, 320, 1027])
def test_fused_add_rmsnorm(dtype: torch.dtype, width: int) -> None:
    for rows in (0, 1, 3, 17, 400):
        x, residual = torch.randn(2, rows, width).to(dtype)
        weight = torch.rand(width).to(dtype) + 0.5
        x_ref, residual_ref = x.clone(), residual.clone()
        norm.fused_add_rmsnorm_ref(x_ref, residual_ref, weight, 1e-5)
        norm.fused_add_rmsnorm(x, residual, weight, 1e-5)
        assert torch.equal(residual, residual_ref)
        assert_close(x, x_ref)


def test_norm_add_rmsnorm_is_its_two_parts() -> None:
    x, residual = torch.randn(2, 3, 100)
    inner, weight = torch.rand(2, 100)
    normed = norm.rmsnorm_ref(x, inner, 1e-5)
    expected_residual = residual + normed
    expected = norm.rmsnorm_ref(expected_residual, weight, 1e-5)
    norm.norm_add_rmsnorm(x, residual, inner, weight, 1e-5)
    assert_close(residual, expected_residual)
    assert_close(x, expected)


def test_a_norm_row_does_not_depend_on_the_batch() -> None:
    x = torch.randn(300, 320)
    weight = torch.rand(320)
    whole = norm.rmsnorm(x, weight, 1e-6)
    for begin, end in ((0, 1), (5, 8), (100, 300)):
        assert torch.equal(norm.rmsnorm(x[begin:end], weight, 1e-6), whole[begin:end])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 8, 24, 100, 1376])
@pytest.mark.parametrize("name", GATED)
def test_gated_activation(name: str, dtype: torch.dtype, width: int) -> None:
    op, reference = getattr(activation, name), getattr(activation, f"{name}_ref")
    for rows in (0, 1, 3, 17, 300):
        x = (torch.randn(rows, 2 * width) * 4).to(dtype)
        expected = reference(x)
        result = op(x)
        assert_close(result, expected)
        out = torch.empty_like(result)
        assert op(x, out=out) is out
        assert torch.equal(out, result)


@pytest.mark.parametrize("name", GATED)
def test_gated_activation_at_the_extremes(name: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 1e30, NAN]])
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    torch.testing.assert_close(
        getattr(activation, name)(x),
        getattr(activation, f"{name}_ref")(x),
        equal_nan=True,
        atol=1e-30,
        rtol=1e-6,
    )


def test_exponential_is_accurate() -> None:
    from sglang_kernels import ops

    x = torch.cat(
        (torch.linspace(-87.3, 88.7, 400_001), torch.linspace(-1, 1, 100_001))
    )
    out = torch.empty_like(x)
    ops.exp(x, out)
    expected = x.double().exp()
    error = ((out.double() - expected) / expected).abs().max()
    assert float(error) < 2e-7
    special = torch.tensor([NAN, float("inf"), -float("inf"), -100.0, 100.0, 0.0, -0.0])
    out = torch.empty_like(special)
    ops.exp(special, out)
    assert bool(out[0].isnan())
    assert out[1:].tolist() == [float("inf"), 0.0, 0.0, float("inf"), 1.0, 1.0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "rot"),
    [
        ((1, 1), 8, 8),
        ((4, 2), 64, 64),
        ((8, 1), 96, 48),
        ((5, 5), 24, 24),
        ((3, 1), 128, None),
        ((2, 2), 40, 2),
        ((4, 1), 80, 20),
    ],
)
def test_rope_store_kv(
    dtype: torch.dtype,
    norms: bool,
    heads: tuple[int, int],
    dim: int,
    rot: int | None,
) -> None:
    hq, hkv = heads
    for tokens in (0, 1, 3, 17, 130):
        qkv = torch.randn(tokens, (hq + 2 * hkv) * dim).to(dtype)
        cache = None if rot is None else torch.randn(500, rot)
        weights = (torch.rand(2, dim) + 0.5).to(dtype) if norms else (None, None)
        slots = torch.randperm(300)[:tokens]
        positions = torch.randint(0, 500, (tokens,))
        results = []
        for function in (rope.rope_store_kv, rope.rope_store_kv_ref):
            q, k, v = (
                part.unflatten(1, (-1, dim))
                for part in qkv.clone().split((hq * dim, hkv * dim, hkv * dim), dim=1)
            )
            k_cache, v_cache = torch.full((2, 300, hkv, dim), 9.0, dtype=dtype)
            function(
                q,
                k,
                v,
                positions=positions,
                cos_sin_cache=cache,
                k_cache=k_cache,
                v_cache=v_cache,
                out_cache_loc=slots,
                q_norm_weight=weights[0],
                k_norm_weight=weights[1],
                eps=1e-6,
                update_k=True,
            )
            assert torch.equal(k, k_cache[slots])
            results.append((q, k_cache, v_cache))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected, rounds=4)
        untouched = torch.ones(300, dtype=torch.bool)
        untouched[slots] = False
        assert bool((results[0][1][untouched] == 9.0).all())
        assert torch.equal(results[0][2], results[1][2])


def test_padding_rows_may_share_slot_zero() -> None:
    k_cache, v_cache = torch.zeros(2, 8, 1, 8)
    q, k, v = torch.randn(3, 64, 1, 8)
    slots = torch.zeros(64, dtype=torch.int64)
    slots[0] = 5
    rope.rope_store_kv(
        q,
        k,
        v,
        positions=slots,
        cos_sin_cache=None,
        k_cache=k_cache,
        v_cache=v_cache,
        out_cache_loc=slots,
    )
    assert torch.equal(k_cache[5], k[0]) and torch.equal(v_cache[5], v[0])
    assert bool((k_cache[[1, 2, 3, 4, 6, 7]] == 0).all())


def test_rounding_of_narrow_types_matches_torch() -> None:
    """The store path of each level rounds every value as torch does."""
    values = torch.cat(
        (
            torch.randn(4000) * 10.0 ** torch.randint(-12, 8, (4000,)),
            torch.tensor(
                [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30, 6e-8, 2.9e-8, NAN]
            ),
            torch.tensor([float("inf"), -float("inf"), 5.9604645e-08, 6.1e-05]),
        )
    )
    for dtype in (torch.float16, torch.bfloat16):
        # x + residual is one addition and one rounding.
        x = values.to(dtype)
        residual = (values.flip(0)).to(dtype)
        expected = (residual.float() + x.float()).to(dtype)
        norm.fused_add_rmsnorm(x, residual, torch.ones_like(x), 1e-6)
        assert torch.equal(residual.isnan(), expected.isnan())
        finite = ~expected.isnan()
        assert torch.equal(residual[finite], expected[finite])


def test_bad_arguments_raise() -> None:
    x = torch.randn(3, 16)
    with pytest.raises(RuntimeError, match="rmsnorm: weight is"):
        norm.rmsnorm(x, torch.ones(15), 1e-6)
    with pytest.raises(RuntimeError, match="rmsnorm: x is"):
        norm.rmsnorm(x.long(), torch.ones(16), 1e-6)
    with pytest.raises(RuntimeError, match="rmsnorm: x is"):
        norm.rmsnorm(x.t(), torch.ones(3), 1e-6)
    with pytest.raises(RuntimeError, match="residual is"):
        norm.fused_add_rmsnorm(x, torch.zeros(3, 15), torch.ones(16), 1e-6)
    with pytest.raises(RuntimeError, match="an even last dimension"):
        activation.silu_and_mul(torch.randn(3, 5))
    with pytest.raises(RuntimeError, match="gelu_and_mul"):
        activation.gelu_and_mul(torch.randn(3, 5))

    def store(**changes: Tensor) -> None:
        arguments = {
            "positions": torch.tensor([0, 4]),
            "cos_sin_cache": torch.randn(5, 8),
            "k_cache": torch.zeros(6, 1, 8),
            "out_cache_loc": torch.tensor([1, 5]),
        } | changes
        rope.rope_store_kv(
            *torch.randn(3, 2, 1, 8),
            positions=arguments["positions"],
            cos_sin_cache=arguments["cos_sin_cache"],
            k_cache=arguments["k_cache"],
            v_cache=torch.zeros(6, 1, 8),
            out_cache_loc=arguments["out_cache_loc"],
        )

    store()
    with pytest.raises(RuntimeError, match=r"positions\[1\] is 5, expected 0 .. 4"):
        store(positions=torch.tensor([0, 5]))
    with pytest.raises(
        RuntimeError, match=r"out_cache_loc\[0\] is -1, expected 0 .. 5"
    ):
        store(out_cache_loc=torch.tensor([-1, 5]))
    with pytest.raises(RuntimeError, match="out_cache_loc is Int"):
        store(out_cache_loc=torch.tensor([1, 5], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="k_cache is"):
        store(k_cache=torch.zeros(6, 2, 8))
    with pytest.raises(RuntimeError, match="cos_sin_cache is"):
        store(cos_sin_cache=torch.randn(5, 10))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
