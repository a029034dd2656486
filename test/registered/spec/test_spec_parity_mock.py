"""The mock model: outputs and accept lengths are what its oracles say."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_world import (
    ModelFolders,
    References,
    matrix,
    run_configuration,
)

register_cpu_ci(est_time=12, suite="cpu", full_time=180)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    return References(folders)


@pytest.mark.parametrize("config", matrix("mock"), ids=str)
def test_same_output_with_and_without(folders, references, config):
    run_configuration(folders, references, config)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
