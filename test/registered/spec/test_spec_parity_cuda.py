"""On a GPU: twelve configurations, float32 without TF32, with graphs and without."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.scale import is_full
from sglang.test.spec_matrix import SAMPLE, most_covering
from sglang.test.spec_world import ModelFolders, References, run_configuration

register_cuda_ci(est_time=240, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIGURATIONS = SAMPLE if is_full() else most_covering(SAMPLE, 12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    assert not torch.backends.cuda.matmul.allow_tf32
    return References(folders, requests=100)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_same_output_with_and_without(folders, references, config, graphs):
    options = {"cuda_graph_bs": [1, 2, 4, 8, 16]} if graphs else {}
    engine = run_configuration(
        folders, references, config, disable_cuda_graph=not graphs, **options
    )
    assert engine.scheduler.max_in_flight == int(config.overlap)
    worker = engine.scheduler.worker
    runner = worker.model_runner.graph_runner
    assert (runner is not None and runner.num_replays > 0) == graphs


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
