"""The FlashInfer backend against torch_native and the mock model's oracle, on a GPU.

The first run compiles FlashInfer's kernels, which takes minutes.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from attention_world import HEAD_DIM, PAGE_SIZES, make_problem

from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model, write_tiny_model

register_cuda_ci(est_time=180, suite="cuda")

pytest.importorskip("flashinfer")
if not torch.cuda.is_available():
    pytest.skip("FlashInfer needs a GPU", allow_module_level=True)

from sglang.srt.layers.attention.flashinfer_backend import (  # noqa: E402
    FlashInferAttnBackend,
)

VOCAB = 1000
NEW_LENS = [1, 70, 5, 33]
PREFIX_LENS = [0, 130, 64, 17]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extend(page_size):
    make_problem(
        page_size=page_size, prefix_lens=PREFIX_LENS, new_lens=NEW_LENS
    ).compare(FlashInferAttnBackend)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("page_size", [1, 16])
def test_long_prompts_without_a_prefix(page_size, window):
    make_problem(
        page_size=page_size,
        prefix_lens=[0, 0, 0],
        new_lens=[700, 1, 130],
        window=window,
    ).compare(FlashInferAttnBackend)


@pytest.mark.parametrize("heads", [(8, 2), (4, 2), (2, 2), (6, 1)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode(page_size, heads):
    make_problem(
        page_size=page_size, prefix_lens=[0, 200, 63, 64, 15], heads=heads
    ).compare(FlashInferAttnBackend)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tree_mask(page_size):
    make_problem(page_size=page_size, prefix_lens=[3, 130, 0], tree_nodes=9).compare(
        FlashInferAttnBackend
    )


@pytest.mark.parametrize("window", [1, 50])
@pytest.mark.parametrize("page_size", [1, 16])
def test_window(page_size, window):
    make_problem(
        page_size=page_size, prefix_lens=PREFIX_LENS, new_lens=NEW_LENS, window=window
    ).compare(FlashInferAttnBackend)
    make_problem(
        page_size=page_size, prefix_lens=[0, 200, 49, 50], window=window
    ).compare(FlashInferAttnBackend)


def test_float16():
    for page_size in (1, 16):
        make_problem(
            page_size=page_size,
            prefix_lens=PREFIX_LENS,
            new_lens=NEW_LENS,
            dtype=torch.float16,
        ).compare(FlashInferAttnBackend)
        make_problem(
            page_size=page_size, prefix_lens=[0, 99], dtype=torch.float16
        ).compare(FlashInferAttnBackend)


def test_window_with_a_tree_is_refused():
    problem = make_problem(page_size=1, prefix_lens=[4], tree_nodes=3, window=2)
    backend = problem.make(FlashInferAttnBackend)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="--attention-backend flashinfer"),
    ):
        problem.outputs(backend)


def test_lengths_must_be_on_the_host():
    problem = make_problem(page_size=1, prefix_lens=[4])
    blind = dataclasses.replace(problem.batch, lens_cpu=None)
    with pytest.raises(RuntimeError, match="needs_cpu_seq_lens"):
        dataclasses.replace(problem, batch=blind).compare(FlashInferAttnBackend)


@pytest.mark.parametrize(
    ("model", "options"),
    [("head_dim", {"dtype": "bfloat16"}), ("dtype", {"dtype": "float32"})],
)
def test_what_it_has_no_kernels_for_is_refused(tmp_path, model, options):
    head_dim = 24 if model == "head_dim" else HEAD_DIM
    write_tiny_model(tmp_path, "LlamaForCausalLM", head_dim=head_dim)
    with pytest.raises(ValueError, match="--attention-backend flashinfer"):
        ForwardHarness(
            tmp_path, device="cuda", attention_backend="flashinfer", **options
        )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_text_model_equals_torch_native(tmp_path, page_size):
    """Chunks, a borrowed prefix, decode as graphs; logits of a Qwen3 model."""
    write_tiny_model(tmp_path, "Qwen3ForCausalLM", head_dim=HEAD_DIM)
    rng = random.Random(page_size)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (100, 37, 150)]
    both = {}
    for backend in ("torch_native", "flashinfer"):
        harness = ForwardHarness(
            tmp_path,
            device="cuda",
            dtype="bfloat16",
            attention_backend=backend,
            page_size=page_size,
        )
        first = harness.new_row(prompts[0])
        logits = [harness.extend([(first, 64)]), harness.extend([(first, 100)])]
        shared = harness.new_row(prompts[0][:64] + prompts[1], borrow=(first, 64))
        third = harness.new_row(prompts[2])
        logits.append(harness.extend([(shared, 101), (third, 150)]))
        if backend == "flashinfer":
            graphs = CudaGraphRunner(harness.runner, batch_sizes=[4])
            harness.runner.graph_runner = graphs
        for step in range(6):
            rows = [first, shared, third][: 3 - step % 2]
            for row in rows:
                harness.append(row, (7 * step + row) % 256)
            spans = [(row, None) for row in rows]
            logits.append(harness.forward(ForwardMode.DECODE, spans).clone())
        both[backend] = logits
    assert graphs.num_replays == 6
    for expected, actual in zip(*both.values(), strict=True):
        scale = expected.float().abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.03 * scale)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_replay_equals_eager_and_the_oracle(tmp_path, page_size):
    """Sizes grow and shrink; the view shows the very slots of the rows."""
    write_mock_model(tmp_path, vocab_size=VOCAB)
    rng = random.Random(page_size)
    harness = ForwardHarness(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        attention_backend="flashinfer",
        page_size=page_size,
    )
    graphs = CudaGraphRunner(harness.runner, batch_sizes=[1, 2, 4, 7])
    rows = []
    for length in (3, 9, 20, 33, 5, 64, 17):
        row = harness.new_row([rng.randrange(VOCAB) for _ in range(length)])
        harness.extend([(row, length)])
        rows.append(row)
    for step in range(40):
        chosen = rng.sample(rows, rng.randrange(1, 8))
        for row in chosen:
            harness.append(row, rng.randrange(VOCAB))
        batch = harness.prepare(ForwardMode.DECODE, [(row, None) for row in chosen])
        with torch.inference_mode():
            replayed = graphs.replay(batch).next_token_logits.clone()
            show_slots(harness, batch, chosen)
            harness.runner.attn_backend.init_eager(batch)
            eager = harness.runner.run_model(batch).next_token_logits
            show_slots(harness, batch, chosen)
        assert torch.equal(replayed, eager)
        for row, token in zip(chosen, eager.argmax(-1).tolist(), strict=True):
            expected = next_tokens(harness.tokens(row), vocab_size=VOCAB)[-1]
            assert token == expected, (step, row)


def show_slots(harness: ForwardHarness, batch: ForwardBatch, rows: list[int]) -> None:
    (view,) = harness.runner.attn_backend.read_view(batch)
    assert view.indptr is not None and view.page_indices is not None
    bounds, indices = view.indptr.tolist(), view.page_indices.cpu()
    for i, row in enumerate(rows):
        element = torch.arange(int(view.read_lens[i]))
        pages = indices[bounds[i] + element // view.page_size].long()
        slots = pages * view.page_size + element % view.page_size
        assert torch.equal(slots, harness.pool.row_slots(row, 0, len(element)))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize(
    ("page_size", "slots", "chunk"),
    [(1, 900, 64), (4, 1000, 128), (16, 1600, 32), (64, 2048, 128)],
)
def test_random_requests(tmp_path, page_size, slots, chunk, overlap):
    write_mock_model(tmp_path, vocab_size=VOCAB)
    harness = EngineHarness(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        attention_backend="flashinfer",
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        max_running_requests=24,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
    )
    traffic = Traffic(harness, random.Random(page_size), count(ci=40, full=2000))
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
