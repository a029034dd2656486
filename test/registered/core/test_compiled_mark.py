"""A mark is that of one configuration, and of the code that it was compiled from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.utils.kernels_ahead import PACKAGES, CompiledMark, digest_code
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

CONFIGURATION = {"args": {"page_size": 1}, "model": {"hidden_size": 64}}
OTHER = {"args": {"page_size": 16}, "model": {"hidden_size": 64}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    folder = tmp_path / "some_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernel.py").write_text("TILE = 16")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def is_set(configuration: dict[str, dict[str, int]]) -> bool:
    return CompiledMark(configuration, ["some_kernels"]).is_set()


def test_a_configuration_is_compiled_once(package: Path) -> None:
    assert not is_set(CONFIGURATION)
    CompiledMark(CONFIGURATION, ["some_kernels"]).set()
    assert is_set(CONFIGURATION)
    assert not is_set(OTHER)


def test_code_that_changes_is_compiled_anew(package: Path) -> None:
    CompiledMark(CONFIGURATION, ["some_kernels"]).set()
    (package / "kernel.py").write_text("TILE = 32")
    assert not is_set(CONFIGURATION)
    (package / "kernel.py").write_text("TILE = 16")
    assert is_set(CONFIGURATION)


def test_a_folder_that_cannot_be_written_keeps_none(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (package.parent / "cache").write_text("a file")
    CompiledMark(CONFIGURATION, ["some_kernels"]).set()
    assert not is_set(CONFIGURATION)
    assert "cannot be written" in caplog.text


def test_the_packages_have_code() -> None:
    assert digest_code(PACKAGES) != digest_code(PACKAGES[:1]) != digest_code([])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
