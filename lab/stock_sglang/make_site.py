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
import sys
from fnmatch import fnmatch
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "stock_sites"))

from wheels import install, unpack

KERNELS = "sglang-kernel==0.4.5"
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
    install(folder, Path(__file__).with_name("packages.txt"), python)
    for pattern in _UNUSED:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_for_hopper(name: str) -> bool:
    """Return whether a file of `KERNELS` is of use on a Hopper GPU."""
    return not any(fnmatch(name, pattern) for pattern in _OTHER_KERNELS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    args = parser.parse_args()
    make_packages(args.folder / "packages", args.python)
    unpack(args.folder / "kernels", KERNELS, args.python, is_for_hopper)


if __name__ == "__main__":
    main()
