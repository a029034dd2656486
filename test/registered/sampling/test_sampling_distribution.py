"""Frequencies of drawn tokens against their probabilities (chi-square, fixed seeds)."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.sampling.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")

VOCAB = 97
Z = 4.5  # one in 300,000: the seeds are fixed, so a pass stays a pass


def chi_square_limit(degrees: int) -> float:
    """Wilson and Hilferty's approximation of the upper quantile at `Z` sigma."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * float((1.0 - spread + Z * math.sqrt(spread)) ** 3)


def expected_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Renormalised distribution of one row, in float64, written out."""
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    values, order = probs.sort(descending=True, stable=True)
    rank = torch.arange(VOCAB)
    keep = values >= values[0] * params.min_p
    if params.top_k != -1:
        keep &= rank < params.top_k
    keep &= (values.cumsum(0) - values) < params.top_p
    kept = torch.zeros_like(probs)
    kept[order[keep]] = values[keep]
    return kept / kept.sum()


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; ids expected under 5 times form one class."""
    total = counts.sum()
    expected = probs * total
    large = expected >= 5
    observed = torch.cat((counts[large], counts[~large].sum()[None]))
    model = torch.cat((expected[large], expected[~large].sum()[None]))
    used = model > 0
    observed, model = observed[used], model[used]
    return float(((observed - model) ** 2 / model).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("varied", ["position", "seed"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=10),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=30, top_p=0.9, min_p=0.03),
    ],
    ids=str,
)
def test_frequencies(params: SamplingParams, varied: str) -> None:
    n_draws = count(ci=20_000, full=100_000)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 1.5
    chunk = 2000
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    sampler = Sampler()
    for start in range(0, n_draws, chunk):
        index = range(start, start + chunk)
        rows = [
            SamplingRow(params=params, seed=i if varied == "seed" else 42)
            for i in index
        ]
        info = SamplingBatchInfo.from_rows(rows, vocab_size=VOCAB, device="cpu")
        at = torch.tensor([0 if varied == "seed" else i for i in index])
        ids = sampler(logits.expand(chunk, -1), info, positions=at).token_ids
        counts += torch.bincount(ids, minlength=VOCAB)
    probs = expected_probs(logits, params)
    assert counts[probs == 0].sum() == 0
    statistic, degrees = chi_square(counts, probs)
    assert degrees >= 2
    assert statistic < chi_square_limit(degrees)


def test_the_statistic_can_fail() -> None:
    probs = torch.full((VOCAB,), 1.0 / VOCAB, dtype=torch.float64)
    counts = torch.full((VOCAB,), 200.0, dtype=torch.float64)
    counts[0] += 120
    statistic, degrees = chi_square(counts, probs)
    assert statistic > 50 and chi_square_limit(degrees) < 200
    counts[0] += 200
    statistic, degrees = chi_square(counts, probs)
    assert statistic > chi_square_limit(degrees)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
