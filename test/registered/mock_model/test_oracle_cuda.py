"""The oracle on the GPU: graphs and overlap on, random traffic, no leak."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Traffic, check
from sglang.test.tiny_models import write_mock_model

register_cuda_ci(est_time=120, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 1000
CONTEXT = 512
CONFIGURATIONS = [
    (1, 900, 64, "float32"),
    (1, 4000, 512, "bfloat16"),
    (4, 1000, 128, "bfloat16"),
    (16, 1600, 32, "float16"),
    (64, 2048, 128, "bfloat16"),
]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize(
    "configuration", CONFIGURATIONS, ids=lambda c: "-".join(map(str, c))
)
def test_random_requests(tmp_path, configuration, overlap):
    page_size, slots, chunk, dtype = configuration
    write_mock_model(tmp_path, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    harness = EngineHarness(
        tmp_path,
        device="cuda",
        dtype=dtype,
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        max_running_requests=24,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
    )
    assert harness.scheduler.max_in_flight == int(overlap)
    seed = CONFIGURATIONS.index(configuration)
    traffic = Traffic(harness, random.Random(seed), 400 if overlap else 200)
    answers = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    runner = harness.scheduler.worker.model_runner.graph_runner
    assert runner is not None and runner.num_replays > 0
    harness.scheduler.cache.reset()
    assert harness.scheduler.cache.allocator.available_size() == slots


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
