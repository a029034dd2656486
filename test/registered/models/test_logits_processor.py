"""From hidden states to logits: which rows, and each through the cap alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")


@pytest.mark.parametrize("cap", [0.0, 2.5])
@pytest.mark.parametrize("rows", [None, [3, 1, 4]])
def test_each_row_has_its_own_logits(cap: float, rows: list[int] | None) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(6, 8), torch.randn(8, 11)
    batch = SimpleNamespace(
        logits_rows=None if rows is None else torch.tensor(rows),
        forward_mode=ForwardMode.EXTEND,
        batch_size=3,
        num_tokens=6,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        input_logprobs=[],
    )
    output = LogitsProcessor(logit_cap=cap)(hidden, lambda x: x @ weight, batch)
    expected = (hidden if rows is None else hidden[rows]) @ weight
    if cap:
        expected = cap * torch.tanh(expected / cap)
    torch.testing.assert_close(output.next_token_logits, expected)
    assert output.head.logits is output.next_token_logits


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
