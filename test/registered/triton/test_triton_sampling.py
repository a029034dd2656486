"""The kernels that divide logits, choose tokens and draw from weights, against the
torch sampler's rules."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from sglang.srt.sampling.ops import noise, row_ops
from sglang.srt.sampling.ops.choose_tokens.triton import choose_tokens
from sglang.srt.sampling.ops.divide_rows.op import divide_rows_ref
from sglang.srt.sampling.ops.divide_rows.triton import divide_rows
from sglang.srt.sampling.ops.draw import triton as draw_kernels
from sglang.srt.sampling.ops.draw.op import draw_ref
from sglang.srt.sampling.ops.keep_prefix import triton as cuts
from sglang.srt.sampling.ops.keep_prefix.op import Filters, keep_prefix_ref
from sglang.srt.sampling.ops.softmax_rows import op as softmax_op
from sglang.srt.sampling.ops.softmax_rows import triton as softmaxes
from sglang.srt.sampling.ops.softmax_rows.op import softmax_rows_ref
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABS = [5, 2048, 5000] if DEVICE == "cpu" else [5, 2048, 5000, 128256, 600000]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)


def keys(rows: int) -> torch.Tensor:
    mixed = [noise.mix_seed(seed) for seed in range(rows)]
    return torch.tensor(mixed, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_the_first_largest(vocab: int, dtype: torch.dtype) -> None:
    for rows in (1, 11):
        logits = torch.randn(rows, vocab, device=DEVICE).to(dtype)
        expected = logits.cpu().float().numpy().argmax(axis=1)
        assert choose_tokens(logits).tolist() == expected.tolist()


def test_greedy_corner_cases() -> None:
    rows = [
        [0.0, -0.0, 0.0, -1.0],
        [-0.0, 0.0, 0.0, -1.0],
        [-INF, -INF, -INF, -INF],
        [1.0, INF, NAN, NAN],
        [-3.0, -2.0, -2.0, -INF],
    ]
    logits = torch.tensor(rows, device=DEVICE)
    assert choose_tokens(logits).tolist() == [0, 0, 0, 2, 1]
    # A wider tensor: rows with a stride, and ids after the end are never chosen.
    wide = torch.full((5, 9), 7.0, device=DEVICE)
    wide[:, :4] = logits
    assert choose_tokens(wide[:, :4]).tolist() == [0, 0, 0, 2, 1]


@pytest.mark.parametrize("vocab", VOCABS)
def test_draw_is_the_inverse_cdf(vocab: int) -> None:
    rows = 6
    logits = torch.randn(rows, vocab, device=DEVICE) * 3
    logits[0, ::2] = -INF
    if vocab > 2048:
        logits[1, :2048] = -INF
    temperatures = torch.linspace(0.5, 2.0, rows, device=DEVICE)
    greedy = torch.tensor([False] * (rows - 1) + [True], device=DEVICE)
    probs = torch.softmax(logits.double() / temperatures[:, None].double(), dim=-1)
    ends = probs.cumsum(dim=-1)
    for position in range(3 if DEVICE == "cpu" else 50):
        positions = torch.full((rows,), position, device=DEVICE)
        tokens = choose_tokens(
            logits,
            temperatures=temperatures,
            seeds=keys(rows),
            positions=positions,
            greedy_rows=greedy,
        )
        assert tokens[-1] == logits[-1].argmax()
        # The draw lies in the token's interval of the CDF, but for float32 rounding.
        drawn = tokens[:-1, None]
        wanted = noise.uniform(keys(rows), positions)[:-1, None]
        end = ends[:-1].gather(1, drawn)
        width = probs[:-1].gather(1, drawn)
        assert bool((width > 0).all())
        assert bool((wanted <= end + 1e-5).all())
        assert bool((wanted >= end - width - 1e-5).all())


def test_draw_agrees_with_the_torch_sampler() -> None:
    rows, vocab = (8, 700) if DEVICE == "cpu" else (64, 32000)
    logits = torch.randn(rows, vocab, device=DEVICE)
    greedy = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    agreed = total = 0
    for position in range(3):
        positions = torch.full((rows,), position, device=DEVICE)
        uniform = noise.uniform(keys(rows), positions)
        expected = row_ops.inverse_cdf(torch.softmax(logits, dim=-1), uniform)
        tokens = choose_tokens(
            logits, seeds=keys(rows), positions=positions, greedy_rows=greedy
        )
        agreed += int((tokens == expected).sum())
        total += rows
    # A draw within rounding of a boundary may fall to either side.
    assert agreed >= 0.98 * total


def test_draw_from_nan_or_nothing_stays_in_range() -> None:
    logits = torch.full((3, 40), -INF, device=DEVICE)
    logits[1] = NAN
    logits[2, 7] = NAN
    tokens = choose_tokens(
        logits,
        seeds=keys(3),
        positions=torch.arange(3, device=DEVICE),
        greedy_rows=torch.zeros(3, dtype=torch.bool, device=DEVICE),
    )
    assert all(0 <= token < 40 for token in tokens.tolist())


def draw(
    weights: torch.Tensor,
    *,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    form: Any = draw_kernels.draw,
    top_p: float = 1.0,
) -> torch.Tensor:
    rows, vocab = weights.shape
    filters = Filters(
        rows=None if top_p == 1.0 else torch.arange(rows, device=DEVICE),
        top_ks=torch.full((rows,), vocab, device=DEVICE),
        top_ps=torch.full((rows,), top_p, device=DEVICE),
        max_top_k=vocab,
        min_ps=None,
    )
    tokens, kept = form(weights, filters, seeds=seeds, positions=positions)
    assert top_p < 1.0 or kept is weights
    return cast(torch.Tensor, tokens)


@pytest.mark.parametrize("vocab", VOCABS)
def test_draw_from_weights(vocab: int) -> None:
    """Float64 sums tell which id the noise falls on; the reference may only differ
    within the rounding of its float32 sums."""
    rows = 12
    weights = torch.softmax(torch.randn(rows, vocab, device=DEVICE) * 3, dim=-1)
    weights[torch.rand_like(weights) < 0.5] = 0.0
    weights[0] = 0.0
    weights[0, vocab - 1] = 0.25
    weights[1:3, : vocab // 2] = 0.0
    weights[1:3, vocab // 2] = 0.5
    ends = weights.double().cumsum(dim=-1)
    for position in range(3 if DEVICE == "cpu" else 50):
        positions = torch.full((rows,), position, device=DEVICE)
        tokens = draw(weights, seeds=keys(rows), positions=positions)
        uniform = noise.uniform(keys(rows), positions)
        target = uniform[:, None] * ends[:, -1:]
        end = ends.gather(1, tokens[:, None])
        assert (end > target * (1 - 1e-12)).all()
        width = weights.double().gather(1, tokens[:, None])
        assert (width > 0).all()
        assert (end - width <= target * (1 + 1e-12)).all()
        expected = draw(weights, seeds=keys(rows), positions=positions, form=draw_ref)
        is_close = ((end - target).abs() < 1e-6) | ((end - width - target).abs() < 1e-6)
        assert ((tokens == expected) | is_close[:, 0]).all()


def test_draw_for_more_rows_than_a_launch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draw_kernels, cuts):
        monkeypatch.setattr(module, "MAX_ROWS", 4)
    probs = torch.softmax(torch.randn(11, 50, device=DEVICE), dim=-1)
    at = {"seeds": keys(11), "positions": torch.arange(11, device=DEVICE)}
    expected = draw(probs.clone(), **at, top_p=0.7, form=draw_ref)
    assert torch.equal(draw(probs.clone(), **at, top_p=0.7), expected)
    filters = Filters(
        rows=torch.arange(11, device=DEVICE),
        top_ks=torch.full((11,), 3, device=DEVICE),
        top_ps=torch.ones(11, device=DEVICE),
        max_top_k=3,
        min_ps=torch.full((11,), 0.5, device=DEVICE),
    )
    expected = keep_prefix_ref(probs.clone(), filters)
    assert torch.equal(cuts.keep_prefix(probs, filters), expected)


@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_draw_from_what_are_no_weights_stays_in_range(bad: float) -> None:
    weights = torch.full((3, 40), bad, device=DEVICE)
    weights[1, 20:] = 0.5
    weights[2, 39] = NAN
    positions = torch.arange(3, device=DEVICE)
    tokens = draw(weights, seeds=keys(3), positions=positions)
    assert all(0 <= token < 40 for token in tokens.tolist())
    assert bad != 0.0 or tokens[1] >= 20


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_division_rounds_like_torch(vocab: int, dtype: torch.dtype) -> None:
    rows = 5
    wide = (torch.randn(rows, vocab + 3, device=DEVICE) * 9).to(dtype)
    logits = wide[:, :vocab]
    logits[0, 0], logits[1, 0] = -INF, NAN
    temperatures = torch.tensor([0.1, 0.8, 1.0, 1.3, 1e-3], device=DEVICE)
    expected = divide_rows_ref(logits, temperatures)
    got = divide_rows(logits, temperatures)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "vocab",
    [5128] if DEVICE == "cpu" else [16384, 32000, 50260, 128256, 151936, 262144],
)
def test_softmax_has_the_bits_of_torchs(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU. The interpreter has another exponential function and other sums."""
    if DEVICE == "cpu":
        monkeypatch.setattr(softmax_op, "LEAST_VOCAB", 0)
    for rows in (7,) if DEVICE == "cpu" else (1, 9, 70, 300):
        wide = (torch.randn(rows, vocab + 4, device=DEVICE) * 3).to(dtype)
        wide[1:2] *= 10
        wide[2:3, 9:] = -INF
        wide[3:4] = 0
        wide[4:5, 7] = NAN
        wide[5:6, vocab - 1] = INF
        wide[6:7] = -INF
        logits = wide[:, :vocab]
        temperatures = torch.rand(rows, device=DEVICE) * 2 + 0.05
        expected = softmax_rows_ref(logits, temperatures)
        got = softmaxes.softmax_rows(logits, temperatures)
        # Numbers below those that are normal may be 0.
        expected, got = (torch.where(x.abs() < 2e-38, 0.0, x) for x in (expected, got))
        exact = {"rtol": 0, "atol": 0}
        close = {"rtol": 1e-5, "atol": 1e-12}
        torch.testing.assert_close(
            got,
            expected,
            **(close if DEVICE == "cpu" else exact),
            equal_nan=True,
        )


def test_refusals() -> None:
    logits = torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="together"):
        choose_tokens(logits, seeds=keys(2))
    with pytest.raises(ValueError, match="exceed"):
        choose_tokens(logits[:1].expand(5000, 4))
    assert choose_tokens(logits[:0]).shape == (0,)
    two = {"seeds": keys(2), "positions": torch.arange(2, device=DEVICE)}
    with pytest.raises(ValueError, match="probs"):
        draw(logits[:, :3], **two)
    with pytest.raises(ValueError, match="seeds"):
        draw(logits[:1], **two)
    with pytest.raises(ValueError, match="exceed"):
        draw(torch.zeros(2, 1 << 21, device=DEVICE), **two)
    none = torch.arange(0, device=DEVICE)
    assert draw(logits[:0], seeds=none, positions=none).shape == (0,)
    with pytest.raises(ValueError, match="temperatures"):
        divide_rows(logits, torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="strides"):
        divide_rows(logits.T.contiguous().T, torch.ones(2, device=DEVICE))
    assert divide_rows(logits[:0], torch.ones(0, device=DEVICE)).shape == (0, 4)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
