"""The int64 vectors of every forward begin at multiples of 16 bytes: Triton compiles a
kernel anew for each pattern of addresses that do and that do not."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary import sweep
from sglang.srt.forward.batch import ForwardBatch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=10, suite="cpu")

ALIGNMENT = 16


def misaligned(tensors: Iterator[tuple[str, Any]]) -> list[str]:
    return [
        name
        for name, tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() % ALIGNMENT
    ]


def fields_of(batch: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(batch):
        yield field.name, getattr(batch, field.name)


# With windows the slots are uploaded beside the window slots, as on a GPU always.
@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Gemma3ForCausalLM"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_vector_of_a_forward(
    tiny: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineHarness(
        tiny,
        skip_tokenizer_init=True,
        max_running_requests=9,
        max_total_tokens=2048,
        chunked_prefill_size=64,
        page_size=page_size,
        kv_canary="raise",
        kv_canary_sweep_interval=2,
    )
    seen: dict[str, set[int]] = {"rows": set(), "tokens": set(), "swept": set()}
    runner = engine.scheduler.worker.model_runner
    forward, verify = runner.forward, sweep.verify

    def watched(batch: ForwardBatch) -> Any:
        assert misaligned(fields_of(batch)) == [], batch.forward_mode
        seen["rows"].add(batch.batch_size % 2)
        seen["tokens"].add(batch.num_tokens % 2)
        return forward(batch)

    def swept(state: Any, view: Any, checks: Any, table: Any) -> None:
        assert misaligned(fields_of(view)) == []
        assert misaligned(fields_of(table)) == []
        seen["swept"].add(view.num_rows % 2)
        verify(state, view, checks, table)

    monkeypatch.setattr(runner, "forward", watched)
    monkeypatch.setattr(sweep, "verify", swept)
    rng = random.Random(page_size)
    prefix = [rng.randrange(100) for _ in range(11)]
    for _ in range(12):
        for _ in range(rng.randint(1, 9)):
            tail = [rng.randrange(100) for _ in range(rng.randint(1, 30))]
            has_prefix = rng.random() < 0.5
            engine.submit(
                [*prefix, *tail] if has_prefix else tail,
                max_new_tokens=rng.randint(1, 9),
                temperature=rng.choice([0.0, 0.8]),
            )
        engine.run()
    assert all(parities == {0, 1} for parities in seen.values()), seen


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
