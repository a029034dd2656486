"""Random weights: the same output with speculation as without."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_world import (
    ModelFolders,
    References,
    matrix,
    run_configuration,
)

register_cpu_ci(est_time=19, suite="cpu", full_time=270)


WINDOWED = [
    SpecConfig(
        algorithm="STANDALONE",
        topk=topk,
        page_size=page_size,
        num_steps=6,
        nodes="middle",
        backend=backend,
        overlap=backend == "cpu_native",
        model="mistral",
        variant=None,
    )
    for topk, page_size, backend in ((4, 4, "cpu_native"), (2, 1, "torch_native"))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    return References(folders)


@pytest.mark.parametrize("config", matrix("llama", "qwen3"), ids=str)
def test_same_output_with_and_without(folders, references, config):
    run_configuration(folders, references, config)


@pytest.mark.parametrize("config", WINDOWED, ids=str)
def test_windows_over_trees_and_branches(folders, references, config):
    """Paths of trees that are longer than the window; the draft has it, too."""
    run_configuration(folders, references, config)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
