"""Draft trees at page sizes above one: parity, accept length, no leak."""

from __future__ import annotations

import pytest
from eagle_world import EagleCase

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_parity import answer_all

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")


class TreeCase(EagleCase):
    def test_a_tree_accepts_more_than_a_chain(self):
        """The same prompts, the same steps."""
        means = []
        chain = {"speculative_eagle_topk": 1}
        chain["speculative_num_draft_tokens"] = self.num_steps + 1
        for options in ({}, chain):
            engine = self.make(**options)
            recorder = AcceptRecorder(engine.scheduler)
            answer_all(engine, self.asks())
            means.append(recorder.mean())
        assert means[0] > means[1] + 0.6, means


class TestEagle3Page64Topk8(TreeCase):
    algorithm = "EAGLE3"
    topk, num_steps, num_draft_tokens = 8, 5, 32
    page_size = 64
    overlap = True
    least_accept_length = 3.5


class TestEagleLlama2Page4Topk8(TreeCase):
    algorithm = "EAGLE"
    topk, num_steps, num_draft_tokens = 8, 5, 64
    page_size = 4
    overlap = False
    least_accept_length = 3.4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
