"""Builds a folder from which a stock vLLM runs, small enough to be copied around.

    python make_site.py FOLDER

It contains vLLM's Python and the other imports in `packages.txt`, and `compiled_ops.py`
in place of its compiled package. Archived with xz it is 18 MB. For Linux and the Python
that is named; torch, Triton and transformers must be where the folder is used.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "stock_sites"))

from wheels import install, unpack

_UNUSED = (
    "*.so",
    "vllm/vllm-rs*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
)
"""Compiled code, and sources that it compiles: 0.7 GB."""
_STUBS = {
    "_C_stable_libtorch.py": "compiled_ops.py",
    "vllm_flash_attn/_vllm_fa2_C.py": None,
}
"""Modules in place of compiled ones, and their source. None: an empty one, which is
imported and not called."""


def make_site(folder: Path, version: str, python: str) -> None:
    here = Path(__file__).parent
    install(folder, here / "packages.txt", python)
    unpack(folder, f"vllm=={version}", python, is_used)
    for name, source in _STUBS.items():
        stub = folder / "vllm" / name
        stub.write_text("") if source is None else shutil.copy(here / source, stub)


def is_used(name: str) -> bool:
    """Return whether a file of the wheel is of use without compiled code."""
    return not any(fnmatch(name, pattern) for pattern in _UNUSED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default="0.33.0", help="of vLLM")
    parser.add_argument("--python", default="3.12")
    args = parser.parse_args()
    make_site(args.folder, args.version, args.python)


if __name__ == "__main__":
    main()
