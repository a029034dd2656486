"""The wheel of kv-canary: what a registry shows, and what an environment gets."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import torch

from kv_canary.version import __version__
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

REPO = Path(__file__).resolve().parents[3]
PACKAGE = REPO / "kv-canary"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: setuptools leaves a build folder beside what it builds.
    source = folder / "source"
    names = subprocess.check_output(["git", "ls-files"], cwd=PACKAGE, text=True)
    for name in names.split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((PACKAGE / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.whl")
    assert path.name == f"kv_canary-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_a_wheel_has_what_the_package_reads(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = PACKAGE / "python"
    due = {
        str(path.relative_to(sources))
        for path in sources.glob("kv_canary/**/*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert due <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_its_metadata_say_what_it_is(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["License-File"] == "LICENSE"
    assert found["Description-Content-Type"] == "text/markdown"
    classifiers = found.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    # A licence is an expression or a classifier, never both.
    assert not any(text.startswith("License ::") for text in classifiers)
    needed = found.get_all("Requires-Dist") or []
    assert "torch>=2.11" in needed


def test_hosts_find_its_plugins_and_its_command(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    for group in (
        "vllm.general_plugins",
        "vllm.endpoint_plugins",
        "sglang.srt.plugins",
        "console_scripts",
    ):
        assert f"[{group}]" in text


def test_it_runs_from_the_wheel_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Without this checkout: `-S` leaves editable installations out."""
    site = tmp_path / "site"
    wheel.extractall(site)
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    where = "\nimport kv_canary; print(kv_canary.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", example + where],
        env={"PYTHONPATH": f"{site}:{Path(torch.__file__).parents[1]}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    named, file = done.stdout.splitlines()
    assert named == "request A 20 3 bytes changed in place"
    assert Path(file).is_relative_to(site)
