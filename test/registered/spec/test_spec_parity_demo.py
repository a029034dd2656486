"""The demo model and its bundled heads: the same output with speculation as without."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_world import (
    ModelFolders,
    References,
    matrix,
    run_configuration,
)

register_cpu_ci(est_time=20, suite="cpu", full_time=720)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    return References(folders)


@pytest.mark.parametrize("config", matrix("demo"), ids=str)
def test_same_output_with_and_without(folders, references, config):
    run_configuration(folders, references, config)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
