"""On a GPU: overlap, graphs and the backend change speed, never a token.

float32 without TF32, so that a difference in rounding is far smaller than the gap
between the best two tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.hybrid_models import HYBRIDS, write_text_model
from sglang.test.tiny_models import FAMILIES

register_cuda_ci(est_time=60, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONTEXT = 256
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "sampling_seed": 7},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "sampling_seed": 3},
    {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.05, "sampling_seed": 11},
    {"logit_bias": {5: 2.0}, "min_new_tokens": 4},
]


def answers(model: Path, **server_args: Any) -> dict[str, Finished]:
    """Two waves of mixed requests; the second one finds prefixes of the first."""
    harness = EngineHarness(
        model,
        device="cuda",
        dtype="float32",
        max_total_tokens=1600,
        max_running_requests=12,
        chunked_prefill_size=96,
        **server_args,
    )
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(40)]
    found: dict[str, Finished] = {}
    for wave in range(2):
        for i in range(14):
            head = shared if i % 3 == 0 else []
            tail = [rng.randrange(256) for _ in range(rng.randrange(1, 120))]
            harness.submit(
                head + tail,
                rid=f"{wave}-{i}",
                max_new_tokens=rng.randrange(1, 60),
                ignore_eos=i % 2 == 0,
                **SAMPLING[i % len(SAMPLING)],
            )
        found |= harness.run()
    runner = harness.scheduler.worker.model_runner.graph_runner
    has_graphs = not server_args.get("disable_cuda_graph", False)
    assert (runner is not None and runner.num_replays > 0) == has_graphs
    return found


def assert_same(found: dict[str, Finished], expected: dict[str, Finished]) -> None:
    assert found.keys() == expected.keys()
    for rid, answer in expected.items():
        assert found[rid].output_ids == answer.output_ids, rid
        assert found[rid].finish_reason == answer.finish_reason, rid


@pytest.mark.parametrize("architecture", sorted({*FAMILIES, *HYBRIDS}))
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_way_to_run_gives_the_same_tokens(tmp_path, architecture, page_size):
    model = write_text_model(
        tmp_path, architecture, seed=1, max_position_embeddings=CONTEXT
    )
    plain = answers(
        model,
        page_size=page_size,
        attention_backend="torch_native",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
    )
    for overlap in (False, True):
        for graphs in (False, True):
            found = answers(
                model,
                page_size=page_size,
                disable_overlap_schedule=not overlap,
                disable_cuda_graph=not graphs,
            )
            assert_same(found, plain)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
