"""Decode graphs replay the adapters of any batch, and graphs without any are kept."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from sglang.srt.forward.adapter_tiles import AdapterTiles, plan_tiles
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.model_executor.adapter_inputs import AdapterInputs
from sglang.srt.model_executor.cuda_graph_runner import (
    CudaGraphRunner,
    cuda_graph_backend,
)
from sglang.srt.model_executor.input_buffers import GraphInputBuffers
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


def test_replays_equal_eager_forwards(folder):
    rng = random.Random(0)
    eager, graphed = harness_of(folder), harness_of(folder)
    for harness in (eager, graphed):
        adapters = harness.runner.adapters
        adapters.pool.hold([ref.revision for ref in adapters.loaded])
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
    for harness in (eager, graphed):
        rows = [harness.new_row(t) for t in tokens]
        harness.extend([(r, n) for r, n in zip(rows, lengths, strict=True)])
    seen = set()
    for step in range(count(ci=8, full=60)):
        chosen = rng.sample(rows, rng.randrange(1, 7))
        words = plan_tiles(np.array([rng.randrange(3) for _ in chosen]), 1)
        outputs = []
        for harness in (eager, graphed):
            for row in chosen:
                harness.append(row, (step * 31 + row) % 256)
            batch = harness.prepare(ForwardMode.DECODE, [(r, None) for r in chosen])
            if words is not None:
                on_cpu = AdapterTiles.on_cpu(words)
                tiles = AdapterTiles(words=on_cpu.words.to(DEVICE), groups=None)
                batch = dataclasses.replace(batch, adapters=tiles)
            with torch.inference_mode():
                if harness is graphed and words is not None:
                    outputs.append(graphs.replay(batch).next_token_logits.clone())
                else:
                    outputs.append(harness.run(batch).next_token_logits)
        torch.testing.assert_close(outputs[0], outputs[1], atol=2e-2, rtol=2e-2)
        seen.add(0 if words is None else len(set(words[:, 0].tolist()) - {0}))
    assert seen >= {1, 2}, "batches with one adapter, and with both"
    assert graphs.num_replays > 5


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
