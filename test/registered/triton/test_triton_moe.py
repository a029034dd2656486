"""Triton routing, lists of rows and experts against the references.

Without a GPU the kernels run in the interpreter, on a few odd shapes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.layers.ops.moe import op as moe_ops
from sglang.srt.layers.ops.moe import triton as moe
from sglang.srt.layers.ops.moe import triton_sort as moe_sort
from sglang.srt.layers.ops.moe.triton_table import lookup, max_blocks
from sglang.srt.layers.ops.moe_routing import op as routing_ops
from sglang.srt.layers.ops.moe_routing import triton as moe_routing
from sglang.srt.layers.ops.moe_routing.op import RoutingRule
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.moe_problem import oracle, random_choice, random_experts

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
CLAMP = moe_ops.SwiGLUClamp()
RULES = [
    RoutingRule(top_k=4, renormalise=True),
    RoutingRule(top_k=3),
    RoutingRule(
        top_k=3,
        is_sigmoid=True,
        renormalise=True,
        scale=2.5,
        groups=3,
        top_groups=2,
        group_best=2,
    ),
    RoutingRule(top_k=2, scale=16.0, groups=6, top_groups=2),
]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(3)


# -- routing -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.top_k}of{r.groups}")
def test_routing(rule: RoutingRule) -> None:
    logits = torch.randn(7, 12, device=DEVICE) * 2
    logits[3] = 0.0
    correction = torch.randn(12, device=DEVICE) / 8 if rule.is_sigmoid else None
    weights, ids = moe_routing.route(logits, rule, correction)
    expected, expected_ids = routing_ops.route_ref(logits, rule, correction)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=3e-6, atol=1e-12)
    assert moe_routing.route(logits[:0], rule)[1].shape == (0, rule.top_k)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.top_k}of{r.groups}")
def test_ids_are_valid_whatever_the_logits_are(rule: RoutingRule) -> None:
    bad = [float("nan"), float("inf"), float("-inf"), 0.0]
    logits = torch.tensor(bad, device=DEVICE)[torch.randint(4, (9, 12), device=DEVICE)]
    logits[0], logits[1] = float("nan"), float("-inf")
    ids = moe_routing.route(logits, rule)[1]
    assert ids[0].tolist() == list(range(rule.top_k))
    for row in ids.tolist():
        assert len(set(row)) == rule.top_k and set(row) <= set(range(12))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.top_k}of{r.groups}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_token_is_routed_in_one_launch(
    rule: RoutingRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, as the first launch leaves the counter to the second; inputs of several
    blocks, the last of them not full."""
    monkeypatch.setattr(moe_routing, "CHOICE_BLOCK", 32)
    weight = torch.randn(12, 74, device=DEVICE).to(dtype)
    bias = torch.randn(12, device=DEVICE)
    correction = torch.randn(12, device=DEVICE) / 8 if rule.is_sigmoid else None
    for given in (bias, None):
        x = torch.randn(1, 74, device=DEVICE).to(dtype) / 4
        options = {"bias": given, "correction": correction}
        weights, ids = moe_routing.choose_experts(x, weight, rule, **options)
        expected, expected_ids = routing_ops.choose_experts_ref(
            x, weight, rule, **options
        )
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-5, atol=1e-9)


def test_other_routers_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens, and more experts than fit."""
    rule = RoutingRule(top_k=2)
    weight = torch.randn(12, 20, device=DEVICE)
    monkeypatch.setattr(moe_routing, "CHOICE_EXPERTS", 11)
    for tokens in (0, 1, 3):
        x = torch.randn(tokens, 20, device=DEVICE)
        found = moe_routing.choose_experts(x, weight, rule)
        expected = routing_ops.choose_experts_ref(x, weight, rule)
        assert torch.equal(found[1], expected[1])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"x is torch.float16 \(1, 20\)"):
        moe_routing.choose_experts(x[:1].half(), weight, rule)


# -- lists of rows -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block_m"),
    [(2, 4, 1, 16), (5, 6, 2, 2), (40, 5, 3, 4), (200, 6, 3, 16), (700, 3, 3, 64)],
)
def test_lists_of_rows(tokens: int, experts: int, top_k: int, block_m: int) -> None:
    _, ids = random_choice(tokens, experts, top_k, device=DEVICE)
    for each in (ids, torch.zeros_like(ids), torch.full_like(ids, experts - 1)):
        found = moe_sort.sort_by_expert(each, experts=experts, block_m=block_m)
        expected = moe_sort.sort_by_expert_ref(each, experts=experts, block_m=block_m)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_more_chunks_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_sort, "CHUNKS", (32,))
    _, ids = random_choice(400, 6, 3, device=DEVICE)
    assert ids.numel() > 32 * moe_sort.TILE
    found = moe_sort.sort_by_expert(ids, experts=6, block_m=16)
    expected = moe_sort.sort_by_expert_ref(ids, experts=6, block_m=16)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_blocks_suffice_for_every_spread() -> None:
    for assignments, experts, block_m in ((1, 8, 16), (5, 3, 4), (64, 8, 16)):
        touched = min(assignments, experts)
        worst = (assignments - touched) // block_m + touched
        blocks = max_blocks(assignments=assignments, experts=experts, block_m=block_m)
        assert blocks >= worst


# -- experts -----------------------------------------------------------------------

SHAPES = [
    (1, 5, 40, 24),
    (1, 4, 200, 130),
    (3, 4, 33, 17),
    (19, 3, 70, 66),
    (4, 3, 64, 128),
]
if DEVICE == "cuda":
    SHAPES += [(1, 128, 2048, 768), (64, 128, 2048, 768), (700, 32, 2880, 2880)]
DTYPES = {torch.float32: 2e-5, torch.float16: 2e-3}
if DEVICE == "cuda":  # the interpreter multiplies no bfloat16
    DTYPES[torch.bfloat16] = 8e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clamp", [None, CLAMP], ids=["silu", "clamped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts(
    shape: tuple[int, int, int, int],
    clamp: moe_ops.SwiGLUClamp | None,
    dtype: torch.dtype,
) -> None:
    """Biases go with the clamp, as in gpt-oss."""
    tokens, experts, hidden, inner = shape
    weights_of = random_experts(
        experts,
        hidden,
        inner,
        bias=clamp is not None,
        clamp=clamp,
        dtype=dtype,
        device=DEVICE,
    )
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    weights, ids = random_choice(tokens, experts, min(3, experts), device=DEVICE)
    found = moe.moe_experts(x, weights, ids, weights_of)
    assert found.dtype == dtype
    assert_near(found, oracle(x, weights, ids, weights_of), DTYPES[dtype])
    reference = moe_ops.moe_experts_ref(x, weights, ids, weights_of)
    assert_near(found, reference.double().cpu(), DTYPES[dtype])


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double().cpu() - expected).norm() / expected.norm()
    assert float(error) < tolerance


def test_no_tokens() -> None:
    weights_of = random_experts(3, 8, 8, device=DEVICE)
    weights, ids = random_choice(0, 3, 2, device=DEVICE)
    x = torch.zeros(0, 8, device=DEVICE)
    assert moe.moe_experts(x, weights, ids, weights_of).shape == (0, 8)


def test_bad_arguments() -> None:
    plain = random_experts(3, 32, 32, device=DEVICE)
    weights, ids = random_choice(4, 3, 2, device=DEVICE)
    x = torch.randn(4, 32, device=DEVICE)
    for bad, match in (
        ((x[:, :31], weights, ids), r"x is \(4, 31\)"),
        ((x, weights[:, :1], ids), r"weights \(4, 1\)"),
        ((x.t().contiguous().t()[:, :32], weights, ids), "x must be contiguous"),
        ((x.half(), weights, ids), "the weights are torch.float32"),
    ):
        with pytest.raises(ValueError, match=match):
            moe.moe_experts(*bad, plain)


def test_tiles_follow_the_rows_of_an_expert() -> None:
    def rows(tokens: int) -> int:
        config = lookup(
            assignments=8 * tokens, experts=128, outputs=768, gated=True, itemsize=2
        )
        return config.block_m

    assert [rows(t) for t in (1, 256, 500, 1000, 8192)] == [16, 16, 32, 64, 128]


# -- on a GPU ----------------------------------------------------------------------


@needs_cuda
def test_a_token_does_not_depend_on_the_batch() -> None:
    """Bitwise, for every height of the tiles."""
    weights_of = random_experts(16, 512, 384, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(2000, 512, device=DEVICE).bfloat16()
    weights, ids = random_choice(2000, 16, 4, device=DEVICE)
    whole = moe.moe_experts(x, weights, ids, weights_of)
    for count in (1, 2, 17, 64, 120, 500, 1999):
        begin = 37 * count % (2001 - count)
        part = slice(begin, begin + count)
        found = moe.moe_experts(x[part], weights[part], ids[part], weights_of)
        assert torch.equal(found, whole[part])


@needs_cuda
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_graph_replays_another_choice(tokens: int) -> None:
    weights_of = random_experts(8, 256, 128, dtype=torch.bfloat16, device=DEVICE)
    rule = RoutingRule(top_k=2, renormalise=True)
    router = torch.randn(8, 256, device=DEVICE).bfloat16()
    x = torch.randn(tokens, 256, device=DEVICE).bfloat16()

    def run(inputs: Tensor) -> Tensor:
        choice = moe_routing.choose_experts(inputs, router, rule)
        return moe.moe_experts(inputs, *choice, weights_of)

    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, run(x))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
