"""The mock drafts on the GPU: every row proposes exactly what the tokens imply."""

from __future__ import annotations

import random

import pytest
import torch
from draft_world import HEADS, VOCAB, Pair, check_rows

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.tiny_models import write_mock_model

register_cuda_ci(est_time=60, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("dtype", "page_size"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 16)]
)
@pytest.mark.parametrize("head", HEADS)
def test_rows_propose_what_the_tokens_imply(tmp_path, head, dtype, page_size):
    target = write_mock_model(tmp_path / "target", vocab_size=VOCAB)
    pair = Pair(
        tmp_path / "draft",
        target,
        head,
        device="cuda",
        attention_backend="triton",
        dtype=dtype,
        page_size=page_size,
        max_running_requests=8,
    )
    check_rows(pair, random.Random(repr((head, dtype, page_size))), (3, 35, 300))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
