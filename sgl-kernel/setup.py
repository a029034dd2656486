"""Builds the kernel library: one object file per source, the SIMD levels with their own
flags. Without a working compiler the package is installed without the library, with a
message; the engine then runs on its torch references.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "libsglang_kernels.so"
TORCH_TARGET_VERSION = "0x020b000000000000ULL"  # 2.11

COMMON_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wall",
    "-Wno-psabi",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [
    *AVX2_FLAGS,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
    # GCC's own AVX-512 headers raise it.
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
# Flags of sources that are compiled for a SIMD level; x86 only.
LEVEL_FLAGS = {"level_avx512": AVX512_FLAGS, "level_avx2": AVX2_FLAGS}


def compiler_command() -> list[str]:
    """Return CXX, CC, or the first C++ compiler on the path, as a list of words."""
    for variable in ("CXX", "CC"):
        if os.environ.get(variable):
            return shlex.split(os.environ[variable])
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("no g++, c++ or clang++ on the PATH, and CXX is not set")


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


class BuildLibrary(build_ext):
    """Compiles and links the library with plain compiler calls in a fresh folder."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._build(Path(folder), target)
        except (OSError, subprocess.CalledProcessError) as error:
            print(
                f"sglang_kernels: the native library was not built ({error}); the "
                "package is installed without it and the engine uses its torch "
                "references. "
                "Install g++ (C++17) and reinstall to get the native kernels.",
                file=sys.stderr,
            )

    def _build(self, folder: Path, target: Path) -> None:
        import torch

        compiler = compiler_command()
        torch_root = Path(torch.__file__).parent
        sources = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
        if not is_x86():
            sources = [s for s in sources if s.stem not in LEVEL_FLAGS]
        # The largest sources first, so that the pool ends evenly.
        sources.sort(key=lambda s: not s.stem.startswith("level"))

        def compile_one(source: Path) -> str:
            output = folder / f"{source.stem}.o"
            subprocess.run(
                [
                    *compiler,
                    *COMMON_FLAGS,
                    *LEVEL_FLAGS.get(source.stem, []),
                    f"-I{ROOT / 'include'}",
                    "-isystem",
                    str(torch_root / "include"),
                    "-c",
                    str(source),
                    "-o",
                    str(output),
                ],
                check=True,
            )
            return str(output)

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = folder / LIBRARY
        subprocess.run(
            [
                *compiler,
                "-shared",
                *objects,
                f"-L{torch_root / 'lib'}",
                "-ltorch_cpu",
                "-lstdc++",
                "-o",
                str(linked),
            ],
            check=True,
        )
        shutil.copy(linked, target)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class AnyPythonWheel(bdist_wheel):
    """The library uses no Python ABI: one wheel per platform serves every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def main() -> None:
    # Everything that setuptools writes goes to a folder of this run, so nothing stale
    # can reach a wheel, and the source tree stays clean.
    with tempfile.TemporaryDirectory(prefix="sglang_kernels_build_") as folder:
        setup(
            ext_modules=[Extension("sglang_kernels._library", sources=[])],
            cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
            options={
                "build": {"build_base": folder},
                "egg_info": {"egg_base": folder},
            },
        )


main()
