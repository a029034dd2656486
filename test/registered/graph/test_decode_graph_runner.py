"""Decode graphs replay what eager forwards compute, for every batch size and order."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.cuda_graph_runner import (
    CudaGraphRunner,
    cuda_graph_backend,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.hybrid_models import write_text_model
from sglang.test.mock_oracle import next_tokens
from sglang.test.recording_backend import RecordingBackend
from sglang.test.tiny_models import MOCK_STATE, write_mock_model

register_cpu_ci(est_time=12, suite="cpu")
register_cuda_ci(est_time=40, suite="cuda")

VOCAB = 1000
SIZES = [1, 2, 4, 7]
ON_GPU = torch.cuda.is_available()
MAKE_BACKEND = cuda_graph_backend if ON_GPU else RecordingBackend


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return write_mock_model(tmp_path_factory.mktemp("mock"), vocab_size=VOCAB)


def rows_of(harness, rng, lengths):
    rows = []
    for length in lengths:
        row = harness.new_row([rng.randrange(VOCAB) for _ in range(length)])
        harness.extend([(row, length)])
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def mock_state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    return write_mock_model(folder, vocab_size=VOCAB, **MOCK_STATE)


@pytest.mark.parametrize("model", ["mock", "mock_state"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_batches_equal_the_oracle(request, model, page_size):
    """Sizes grow and shrink, so that padding and stale rows would show."""
    rng = random.Random(page_size)
    harness = ForwardHarness(request.getfixturevalue(model), page_size=page_size)
    graphs = CudaGraphRunner(
        harness.runner,
        batch_sizes=SIZES,
        make_backend=MAKE_BACKEND,
    )
    rows = rows_of(harness, rng, [3, 9, 20, 33, 5, 64, 17])
    for step in range(40):
        chosen = rng.sample(rows, rng.randrange(1, 8))
        for row in chosen:
            harness.append(row, rng.randrange(VOCAB))
        batch = harness.prepare(ForwardMode.DECODE, [(row, None) for row in chosen])
        assert graphs.can_run(batch)
        with torch.inference_mode():
            logits = graphs.replay(batch).next_token_logits
        assert logits.shape[0] == len(chosen)
        for row, token in zip(chosen, logits.argmax(-1).tolist(), strict=True):
            expected = next_tokens(harness.tokens(row), vocab_size=VOCAB)[-1]
            assert token == expected, (step, row)
    assert graphs.num_replays == 40


@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM"]
)
def test_replay_equals_eager_on_a_text_model(tmp_path, architecture):
    write_text_model(tmp_path, architecture)
    rng = random.Random(1)
    eager, graphed = (ForwardHarness(tmp_path, dtype="float32") for _ in range(2))
    graphs = CudaGraphRunner(
        graphed.runner,
        batch_sizes=[4],
        capture_hidden_mode=CaptureHiddenMode.LAST,
        make_backend=MAKE_BACKEND,
    )
    lengths = [4, 30, 11]
    tokens = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    rows = []
    for harness in (eager, graphed):
        rows = [harness.new_row(t) for t in tokens]
        harness.extend([(r, n) for r, n in zip(rows, lengths, strict=True)])
    for step in range(5):
        spans = [(row, None) for row in rows]
        for harness in (eager, graphed):
            for row in rows:
                harness.append(row, (step * 31 + row) % 256)
        expected = eager.forward(ForwardMode.DECODE, spans)
        batch = graphed.prepare(ForwardMode.DECODE, spans)
        assert not graphs.can_run(batch)  # another hidden-state mode
        with torch.inference_mode():
            output = graphs.replay(batch)
        torch.testing.assert_close(
            output.next_token_logits, expected, atol=1e-4, rtol=1e-4
        )
        assert output.hidden_states.shape == (3, 64)


def test_only_decode_batches_that_fit_can_run(mock):
    harness = ForwardHarness(mock)
    graphs = CudaGraphRunner(harness.runner, batch_sizes=[2], make_backend=MAKE_BACKEND)
    rows = [harness.new_row([1, 2]) for _ in range(3)]
    extend = harness.prepare(ForwardMode.EXTEND, [(row, 2) for row in rows])
    assert not graphs.can_run(extend)
    decode = harness.prepare(ForwardMode.DECODE, [(row, None) for row in rows])
    assert not graphs.can_run(decode)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
