"""The kernel package without its library, and the op layer without the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from kv_canary.op import force_reference, native_available
from sglang.srt.layers.ops.linear import op as linear
from sglang.srt.layers.ops.norm import op as norm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="cpu")

ROOT = Path(__file__).resolve().parents[3]
PROBE = """
import logging
logging.basicConfig(format="%(message)s")
import torch
from kv_canary.op import native_available
from sglang.srt.layers.ops.linear import op as linear
from sglang.srt.layers.ops.norm import op as norm
x = torch.randn(3, 8)
for _ in range(3):
    norm.rmsnorm(x, torch.ones(8), 1e-6)
weight = linear.pack_weight(torch.eye(8))
assert torch.equal(linear.linear(x, weight), x)
assert not native_available()
print("works")
"""


def run_probe(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel_without_compiler(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, str]:
    """The unpacked wheel of a build without a compiler, and the log of that build."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    result = subprocess.run(
        [sys.executable, "-m", "pip", *command, str(ROOT / "sgl-kernel")],
        env={**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("sglang_canary_kernels-")
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site", result.stdout + result.stderr


def test_a_missing_compiler_builds_the_package_without_its_library(
    wheel_without_compiler: tuple[Path, str],
) -> None:
    site, log = wheel_without_compiler
    assert "the native library was not built" in log
    assert "/nowhere/c++" in log
    assert (site / "sglang_kernels" / "ops.py").exists()
    assert not list(site.rglob("*.so"))


def test_the_build_leaves_the_source_tree_alone(
    wheel_without_compiler: tuple[Path, str],
) -> None:
    folder = ROOT / "sgl-kernel"
    assert not (folder / "build").exists()
    assert not list(folder.rglob("*.egg-info"))
    assert not list(folder.rglob("*.so"))


def test_the_op_layer_falls_back_and_says_so_once(
    wheel_without_compiler: tuple[Path, str],
) -> None:
    site, _ = wheel_without_compiler
    path = os.pathsep.join((str(site), str(ROOT / "python")))
    result = run_probe(PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert "works" in result.stdout
    assert result.stderr.count("Native CPU kernels are not used") == 1
    assert "installed without" in result.stderr
    assert "pip install --no-build-isolation ./sgl-kernel" in result.stderr


def test_the_environment_switches_the_kernels_off() -> None:
    result = run_probe(SGLANG_NATIVE_KERNELS="0", PYTHONPATH=str(ROOT / "python"))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("SGLANG_NATIVE_KERNELS=0") == 1


def test_force_reference_is_scoped() -> None:
    before = native_available()
    x = torch.randn(2, 8)
    with force_reference():
        assert not native_available()
        result = norm.rmsnorm(x, torch.ones(8), 1e-6)
        assert torch.equal(result, norm.rmsnorm_ref(x, torch.ones(8), 1e-6))
        assert linear.pack_weight(x).panel == 2
    assert native_available() == before


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
