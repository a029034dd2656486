"""Decode and prefill graphs replay the adapters of any batch."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from sglang.srt.forward.adapter_tiles import AdapterTiles, plan_tiles
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.lora import stacked_pool
from sglang.srt.model_executor.adapter_inputs import AdapterInputs
from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.cuda_graph_runner import (
    CudaGraphRunner,
    cuda_graph_backend,
)
from sglang.srt.model_executor.input_buffers import GraphInputBuffers
from sglang.srt.model_executor.memory_plan import MAX_ADAPTED_TOKENS
from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.recording_backend import RecordingBackend
from sglang.test.scale import count
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

SIZES = [2, 6]
ON_GPU = torch.cuda.is_available()
MAKE_BACKEND = cuda_graph_backend if ON_GPU else RecordingBackend
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("m")
    write_tiny_model(made / "model", "LlamaForCausalLM")
    for seed, rank in enumerate((4, 9)):
        write_adapter(made / str(seed), made / "model", rank=rank, seed=seed)
    return made


def harness_of(folder):
    # In half precision the CPU has the layout of a GPU.
    return ForwardHarness(
        folder / "model",
        dtype="bfloat16",
        lora_paths=[f"{name}={folder / name}" for name in "01"],
        max_loras_per_batch=2,
    )


@pytest.fixture(params=["apart", "joined"])
def both(request, folder, monkeypatch):
    """A harness for eager forwards, and one for graphs, in which A may be behind the
    rows of the layer's weight."""
    both = []
    for form in ("apart", request.param):
        most = 0 if form == "joined" else 1 << 20
        monkeypatch.setattr(stacked_pool, "MOST_JOINED", most)
        both.append(harness_of(folder))
    for harness in both:
        adapters = harness.runner.adapters
        adapters.pool.hold([ref.revision for ref in adapters.loaded])
    return both


def are_close(one, other):
    """As bfloat16 rounds, whose step is 0.4 %. With another adapter the difference is
    as large as they are."""
    difference = (one.float() - other.float()).norm()
    return difference < 0.01 * other.float().norm()


def with_adapters(batch, slots, lens):
    """The batch, its rows with adapters in these slots."""
    words = plan_tiles(np.array(slots), np.array(lens))
    if words is None:
        return batch
    words = torch.from_numpy(words).to(DEVICE)
    return dataclasses.replace(batch, adapters=AdapterTiles(words=words))


def test_replays_equal_eager_forwards(both):
    rng = random.Random(0)
    _, graphed = both
    inputs = GraphInputBuffers(max_rows=max(SIZES), device=DEVICE)
    graphs = CudaGraphRunner(
        graphed.runner,
        inputs=AdapterInputs(inputs, max_rows=max(SIZES), num_slots=2, device=DEVICE),
        batch_sizes=SIZES,
        make_backend=MAKE_BACKEND,
    )
    lengths = [4, 30, 11, 7, 9, 16]
    tokens = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    rows = []
    for harness in both:
        rows = [harness.new_row(t) for t in tokens]
        harness.extend([(r, n) for r, n in zip(rows, lengths, strict=True)])
    seen = set()
    for step in range(count(ci=8, full=60)):
        chosen = rng.sample(rows, rng.randrange(1, 7))
        slots = [rng.randrange(3) for _ in chosen]
        outputs = []
        for harness in both:
            for row in chosen:
                harness.append(row, (step * 31 + row) % 256)
            batch = harness.prepare(ForwardMode.DECODE, [(r, None) for r in chosen])
            batch = with_adapters(batch, slots, [1] * len(chosen))
            with torch.inference_mode():
                if harness is graphed and any(slots):
                    outputs.append(graphs.replay(batch).next_token_logits.clone())
                else:
                    outputs.append(harness.run(batch).next_token_logits)
        assert are_close(*outputs)
        seen.add(len(set(slots) - {0}))
    assert seen >= {1, 2}, "batches with one adapter, and with both"
    assert graphs.num_replays > 5


def test_prefills_replay_with_adapters(both):
    """One request and several, of any length, with padding, behind a prefix."""
    rng = random.Random(1)
    eager, graphed = both
    graphs = graphed.runner.prefill_graph_runner = BreakableCudaGraphRunner(
        graphed.runner,
        token_counts=[4, 16, 40, MAX_ADAPTED_TOKENS + 8],
        adapter_slots=2,
        make_backend=MAKE_BACKEND,
    )
    lengths = [[3], [16], [33], [1, 2], [5, 30], [9, 1, 1, 20]]
    for step in range(count(ci=12, full=60)):
        parts = lengths[step % len(lengths)]
        slots = [rng.randrange(3) for _ in parts]
        prefix = rng.choice((0, 7))
        prompts = [[rng.randrange(256) for _ in range(prefix + n)] for n in parts]
        outputs = []
        for harness in both:
            rows = [harness.new_row(prompt) for prompt in prompts]
            if prefix:
                harness.extend([(row, prefix) for row in rows])
            ends = [(r, len(p)) for r, p in zip(rows, prompts, strict=True)]
            batch = harness.prepare(ForwardMode.EXTEND, ends)
            batch = with_adapters(batch, slots, parts)
            outputs.append(harness.run(batch).next_token_logits.clone())
            for row in rows:
                harness.release(row)
        assert are_close(*outputs)
    adapted = graphs.adapted
    assert adapted.segmented.num_replays > 2
    assert adapted.segmented.largest == 40, "longer ones are not bound by the host"
    has_whole = graphed.runner.attn_backend.capabilities.captures_prefill
    assert (adapted.whole.num_replays > 1) == has_whole
    assert not graphs.fallbacks
    row = graphed.new_row([1] * 41)
    batch = with_adapters(graphed.prepare(ForwardMode.EXTEND, [(row, 41)]), [1], [41])
    assert graphs.refusal(batch) == "too_many_tokens"
    assert graphs.refusal(dataclasses.replace(batch, adapters=None)) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
