"""On a GPU: shapes of drafts that change in the middle of requests, with graphs and
without."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.spec_adaptive import run_in_turn
from sglang.test.spec_matrix import SAMPLE, most_covering
from sglang.test.spec_world import ModelFolders, References

register_cuda_ci(est_time=90, suite="cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    assert not torch.backends.cuda.matmul.allow_tf32
    return References(folders, requests=60)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("config", most_covering(SAMPLE, 4), ids=str)
def test_same_output_while_the_shape_changes(folders, references, config, graphs):
    options = {"cuda_graph_bs": [1, 2, 4, 8, 16]} if graphs else {}
    engine = run_in_turn(
        folders,
        references,
        config,
        iterations=3,
        disable_cuda_graph=not graphs,
        kv_canary="raise",
        **options,
    )
    runners = engine.scheduler.worker.model_runner.decode_graph_runners()
    replays = [runner.num_replays for runner in runners]
    if graphs:
        assert len(replays) == len(engine.scheduler.shapes.ladder)
        assert all(replays)
    else:
        assert not replays


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
