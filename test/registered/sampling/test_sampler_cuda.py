"""The sampler on a GPU chooses what it chooses on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.sampling.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS: dict[str, list[dict[str, float]]] = {
    "greedy": [{"temperature": 0.0}],
    "drawn": [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.7}],
    "filtered": [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.02},
        {"temperature": 1.0},
    ],
}


def rows_of(kind: str, rows: int) -> list[SamplingRow]:
    made = []
    for i in range(rows):
        params = SamplingParams(**KINDS[kind][i % len(KINDS[kind])])
        made.append(SamplingRow(params=params, seed=100 + i))
    return made


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("vocab", [97, 4096, 128256])
def test_the_gpu_chooses_what_the_cpu_chooses(kind: str, rows: int, vocab: int) -> None:
    rng = torch.Generator().manual_seed(rows * vocab)
    logits = torch.randn(rows, vocab, generator=rng) * 3
    positions = torch.randint(0, 9999, (rows,), generator=rng)
    chosen = []
    for device in ("cpu", "cuda"):
        info = SamplingBatchInfo.from_rows(
            rows_of(kind, rows), vocab_size=vocab, device=torch.device(device)
        )
        output = Sampler()(logits.to(device), info, positions=positions.to(device))
        chosen.append(output.token_ids.cpu())
    assert chosen[0].tolist() == chosen[1].tolist()


def test_bfloat16_logits_with_ties_take_the_first_best_id() -> None:
    rng = random.Random(0)
    logits = torch.zeros(9, 5000, dtype=torch.bfloat16)
    first = []
    for row in logits:
        best = sorted(rng.sample(range(5000), 3))
        row[best] = 4.0
        first.append(best[0])
    info = SamplingBatchInfo.from_rows(
        rows_of("greedy", 9), vocab_size=5000, device=torch.device("cuda")
    )
    positions = torch.zeros(9, dtype=torch.int64, device="cuda")
    output = Sampler()(logits.cuda(), info, positions=positions)
    assert output.token_ids.tolist() == first


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
