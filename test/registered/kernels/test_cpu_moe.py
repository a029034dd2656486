"""Routing and experts on the CPU: against oracles, and batch invariance bit by bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kv_canary.op import force_reference, native_available
from sglang.srt.layers.ops.linear.op import linear, pack_weight
from sglang.srt.layers.ops.moe import native as native_moe
from sglang.srt.layers.ops.moe import op as moe
from sglang.srt.layers.ops.moe_routing.op import (
    RoutingRule,
    route,
    route_ref,
    router_logits,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.moe_problem import oracle, random_choice, random_experts

register_cpu_ci(est_time=8, suite="cpu")

needs_native = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
# Experts, hidden size, inner size.
SHAPES = [(1, 1, 1), (3, 31, 7), (5, 64, 16), (7, 33, 48), (4, 96, 50), (16, 40, 33)]
ROWS = [0, 1, 2, 3, 13, 40]
CLAMP = moe.SwiGLUClamp()
# Of Qwen3-MoE and gpt-oss, Qwen2-MoE, DeepSeek-V3, DeepSeek-V2.
RULES = [
    RoutingRule(top_k=4, renormalise=True),
    RoutingRule(top_k=3),
    RoutingRule(
        top_k=4,
        is_sigmoid=True,
        renormalise=True,
        scale=2.5,
        groups=4,
        top_groups=2,
        group_best=2,
    ),
    RoutingRule(top_k=3, scale=16.0, groups=4, top_groups=2),
    RoutingRule(top_k=16, groups=4, top_groups=4),
]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(5)


# -- experts -----------------------------------------------------------------------


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)


@needs_native
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("clamp", [None, CLAMP], ids=["silu", "clamped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_match_float64(
    level: str, shape: tuple[int, int, int], clamp: moe.SwiGLUClamp | None, bias: bool
) -> None:
    experts, hidden, inner = shape
    plain = random_experts(
        experts, hidden, inner, exact=inner % 2 == 0, bias=bias, clamp=clamp
    )
    packed = moe.pack_experts(plain)
    assert packed.is_packed
    for rows in ROWS:
        x = torch.randn(rows, hidden)
        weights, ids = random_choice(rows, experts, min(experts, 3))
        expected = oracle(x, weights, ids, plain)
        assert_close(moe.moe_experts(x, weights, ids, packed), expected)


@pytest.mark.parametrize("clamp", [None, CLAMP], ids=["silu", "clamped"])
def test_the_reference_takes_plain_and_packed_weights(
    clamp: moe.SwiGLUClamp | None,
) -> None:
    plain = random_experts(5, 31, 18, bias=True, clamp=clamp)
    x = torch.randn(9, 31)
    weights, ids = random_choice(9, 5, 2)
    expected = oracle(x, weights, ids, plain)
    for each in (plain, moe.pack_experts(plain)):
        assert_close(moe.moe_experts_ref(x, weights, ids, each), expected)
    # Not packed: without a compiler, or for other devices.
    assert_close(moe.moe_experts(x, weights, ids, plain), expected)
    with force_reference():
        assert moe.pack_experts(plain) is plain


@needs_native
@pytest.mark.parametrize("exact", [True, False])
def test_packing_loses_nothing(exact: bool) -> None:
    plain = random_experts(3, 40, 21, exact=exact, bias=True)
    packed = moe.pack_experts(plain)
    assert packed.gate_up.dtype == (torch.bfloat16 if exact else torch.float32)
    for expert in range(3):
        for a, b in zip(
            moe.expert_matrices(packed, expert),
            moe.expert_matrices(plain, expert),
            strict=True,
        ):
            assert a is not None and b is not None and torch.equal(a, b)


@needs_native
@pytest.mark.parametrize("exact", [True, False])
def test_a_token_does_not_depend_on_the_batch(
    level: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, for every count of tokens, of threads, and of tokens per turn."""
    packed = moe.pack_experts(random_experts(8, 96, 200, exact=exact))
    x = torch.randn(200, 96)
    weights, ids = random_choice(200, 8, 3)
    ids[:90, 0] = 2  # one expert with many rows
    ids[:90, 1:] = ids[:90, 1:].clamp(max=1)
    whole = moe.moe_experts(x, weights, ids, packed)
    for threads, counts in ((1, (1, 2, 5, 31, 199)), (2, (1, 16)), (5, (200,))):
        torch.set_num_threads(threads)
        for rows in counts:
            begin = 37 * rows % (201 - rows)
            part = slice(begin, begin + rows)
            out = moe.moe_experts(x[part], weights[part], ids[part], packed)
            assert torch.equal(out, whole[part])
    monkeypatch.setattr(native_moe, "SCRATCH_BYTES", 50_000)
    assert torch.equal(moe.moe_experts(x, weights, ids, packed), whole)


@needs_native
def test_experts_equal_the_packed_products_bitwise(level: str) -> None:
    """Each product is one float32 sum in ascending k, as that of `linear`."""
    plain = random_experts(4, 70, 40)
    x = torch.randn(6, 70)
    weights, ids = torch.ones(6, 1), torch.arange(6).int()[:, None] % 4
    inner = torch.stack(
        [
            moe.swiglu(linear(x[t : t + 1], pack_weight(plain.gate_up[t % 4])), None)[0]
            for t in range(6)
        ]
    )
    silent = dataclasses.replace(plain, down=torch.eye(40)[None].expand(4, -1, -1))
    found = moe.moe_experts(
        x, weights, ids, moe.pack_experts(_with_square_down(silent, hidden=70))
    )
    torch.testing.assert_close(found[:, :40], inner, rtol=3e-7, atol=1e-7)


def _with_square_down(weights: moe.ExpertWeights, *, hidden: int) -> moe.ExpertWeights:
    """`down` that copies the inner channels to the first outputs."""
    down = torch.zeros(4, hidden, weights.inner)
    down[:, : weights.inner] = weights.down
    return dataclasses.replace(weights, down=down)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(dtype: torch.dtype) -> None:
    plain = random_experts(4, 64, 48, dtype=dtype)
    x = torch.randn(7, 64).to(dtype)
    weights, ids = random_choice(7, 4, 2)
    expected = oracle(x, weights, ids, plain)
    for each in (plain, moe.pack_experts(plain)):
        out = moe.moe_experts(x, weights, ids, each)
        assert out.dtype == dtype
        error = (out.double() - expected).norm() / expected.norm()
        assert float(error) < 1e-2


@needs_native
def test_nan_stays_in_its_token() -> None:
    packed = moe.pack_experts(random_experts(4, 32, 32, clamp=CLAMP))
    x = torch.randn(5, 32)
    x[2, 3] = float("nan")
    out = moe.moe_experts(x, *random_choice(5, 4, 2), packed)
    assert bool(out[2].isnan().all())
    assert bool(out[[0, 1, 3, 4]].isfinite().all())


@needs_native
def test_bad_arguments_raise() -> None:
    packed = moe.pack_experts(random_experts(4, 32, 32))
    x = torch.randn(5, 32)
    weights, ids = random_choice(5, 4, 2)
    for bad in (-1, 4, 1 << 30):
        broken = ids.clone()
        broken[3, 1] = bad
        with pytest.raises(RuntimeError, match=f"moe_experts: ids has {bad}, .* 4 exp"):
            moe.moe_experts(x, weights, broken, packed)
    with pytest.raises(RuntimeError, match="moe_experts: gate_up is"):
        moe.moe_experts(x[:, :31].contiguous(), weights, ids, packed)
    with pytest.raises(RuntimeError, match="moe_experts: x is"):
        moe.moe_experts(x[:, :0], weights, ids, packed)
    with pytest.raises(RuntimeError, match="moe_experts: inner is 0"):
        moe.moe_experts(x, weights, ids, dataclasses.replace(packed, inner=0))
    for name in ("gate_up", "down"):
        broken_weights = dataclasses.replace(packed, **{name: torch.zeros(())})
        with pytest.raises(RuntimeError, match=f"moe_experts: {name} is"):
            moe.moe_experts(x, weights, ids, broken_weights)
    with pytest.raises(RuntimeError, match="moe_experts: weights is"):
        moe.moe_experts(x, weights[:4], ids, packed)


# -- routing -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.top_k}of{r.groups}")
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(rule: RoutingRule, corrected: bool) -> None:
    """Native as in torch: weights to rounding, and the same ids."""
    correction = torch.randn(16) / 8 if corrected else None
    for tokens in (0, 1, 2, 37):
        logits = torch.randn(tokens, 16) * 2
        weights, ids = route(logits, rule, correction)
        expected, expected_ids = route_ref(logits, rule, correction)
        assert ids.dtype == torch.int32 and torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.top_k}of{r.groups}")
def test_of_equal_experts_the_lowest_ids_are_chosen(rule: RoutingRule) -> None:
    logits = torch.stack(
        [torch.zeros(16), torch.full((16,), float("nan")), torch.full((16,), 1e4)]
    )
    logits[2, 9] = float("nan")
    for choose in (route, route_ref):
        ids = choose(logits, rule)[1].tolist()
        assert ids[0] == list(range(rule.top_k))
        assert ids[1] == list(range(rule.top_k))
        assert ids[2][0] == 9 and sorted(set(ids[2])) == sorted(ids[2])


def test_a_rounded_softmax_does_not_change_the_choice() -> None:
    """Probabilities of these logits are equal, or zero."""
    logits = torch.full((1, 16), -200.0)
    logits[0, 3], logits[0, 11] = 0.0, 1e-8
    logits[0, 7] = -150.0
    for choose in (route, route_ref):
        weights, ids = choose(logits, RULES[0])
        assert ids.tolist() == [[11, 3, 7, 0]]
        assert weights.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_sigmoids_that_vanish_divide_by_no_zero() -> None:
    for choose in (route, route_ref):
        weights, _ = choose(torch.full((1, 16), -200.0), RULES[2])
        assert weights.tolist() == [[0.0] * 4]


def test_rules_that_do_not_fit() -> None:
    for bad in (
        RoutingRule(top_k=17),
        RoutingRule(top_k=0),
        RoutingRule(top_k=2, groups=3),
        RoutingRule(top_k=9, groups=4, top_groups=2),
        RoutingRule(top_k=2, groups=4, top_groups=5),
        RoutingRule(top_k=2, groups=4, top_groups=2, group_best=2),
    ):
        for choose in (route, route_ref):
            with pytest.raises(ValueError, match=r"RoutingRule.* 16 experts"):
                choose(torch.zeros(1, 16), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 64).to(dtype), torch.randn(10, 64).to(dtype)
    bias = torch.randn(10)
    expected = x.double() @ weight.double().t() + bias.double()
    for each in (weight, pack_weight(weight)):
        logits = router_logits(x, each, bias)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
