"""Draft chains (top-k 1) at page sizes above one: parity, accept length, no leak."""

from __future__ import annotations

import pytest
from eagle_world import EagleCase

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=12, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")


class TestEagle3Page64(EagleCase):
    algorithm = "EAGLE3"
    topk, num_steps, num_draft_tokens = 1, 5, 6
    page_size = 64
    overlap = True
    least_accept_length = 2.5


class TestEagleLlama2Page4Topk1(EagleCase):
    algorithm = "EAGLE"
    topk, num_steps, num_draft_tokens = 1, 5, 6
    page_size = 4
    overlap = False
    least_accept_length = 2.0


class TestStandalonePage16(EagleCase):
    algorithm = "STANDALONE"
    topk, num_steps, num_draft_tokens = 1, 3, 4
    page_size = 16
    overlap = True
    least_accept_length = 1.8


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
