"""Collection of the training text: Python sources under permissive licences, one JSON
line per file, de-duplicated and split into train and held-out by a content hash.

Knows files and hashes; refuses to know tokens or models. Makes no network requests.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import sysconfig
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.demo_model.paths import CORPUS

STDLIB_VERSION = (3, 11)
HELDOUT_ONE_IN = 50
MIN_CHARS = 64
MAX_LINE_CHARS = 1000
MAX_DIGIT_SHARE = 0.12
# Tests are left out by name; the rest of the table is generated code and data tables
# that happen to be spelled as Python.
SKIP_PARTS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "test-examples",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_antlr",
        "encodings",
        "pydoc_data",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A pinned wheel whose Python files are taken, and the licence they are under."""

    package: str
    version: str
    licence: str


WHEELS = (
    WheelSource(
        package="sympy",
        version="1.14.0",
        licence="BSD-3-Clause (sympy/parsing/latex: MIT)",
    ),
    WheelSource(package="networkx", version="3.6.1", licence="BSD-3-Clause"),
    WheelSource(package="numpy", version="2.3.5", licence="BSD-3-Clause"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One document: `path` starts with the name of the package it comes from."""

    package: str
    path: str
    sha256: str
    text: str


def is_skipped(path: str) -> bool:
    """Whether a part of the slash-separated `path` is in `SKIP_PARTS`."""
    return not SKIP_PARTS.isdisjoint(path.split("/"))


def iter_stdlib() -> Iterator[tuple[str, bytes]]:
    """Yield (relative path, bytes) of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if not is_skipped(relative):
            yield relative, path.read_bytes()


def iter_wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path inside the wheel, bytes) of its Python files."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and not is_skipped(name):
                yield name, archive.read(name)


def clean(data: bytes) -> str | None:
    """Return the text to train on, or None if it is not useful Python source."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    text = "\n".join(lines).strip("\n") + "\n"
    if len(text) < MIN_CHARS or max(map(len, lines)) > MAX_LINE_CHARS:
        return None
    if sum(char.isdigit() for char in text) > MAX_DIGIT_SHARE * len(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            ast.parse(text)
    except SyntaxError:
        return None
    return text


def is_heldout(sha256: str) -> bool:
    """Whether a file is held out: depends on its content alone, not on any order."""
    return int(sha256[:8], 16) % HELDOUT_ONE_IN == 0


def find_wheel(folder: Path, source: WheelSource) -> Path:
    """Return the one wheel of `source` in `folder`; ValueError when it is missing."""
    found = sorted(folder.glob(f"{source.package}-{source.version}-*.whl"))
    if not found:
        raise ValueError(
            f"--wheels {folder} holds no {source.package} {source.version}; fetch it "
            "with: pip download --no-deps --only-binary=:all: -d DIR "
            f"{source.package}=={source.version}"
        )
    return found[0]


def collect(wheels: Path) -> Iterator[SourceFile]:
    """Yield every usable file once; the first of two equal files wins."""
    seen: set[str] = set()
    groups = [("cpython", iter_stdlib())]
    groups += [(s.package, iter_wheel(find_wheel(wheels, s))) for s in WHEELS]
    for package, files in groups:
        for path, data in files:
            text = clean(data)
            if text is None:
                continue
            sha256 = hashlib.sha256(text.encode()).hexdigest()
            if sha256 not in seen:
                seen.add(sha256)
                name = path if path.startswith(package) else f"{package}/{path}"
                yield SourceFile(package=package, path=name, sha256=sha256, text=text)


def write_split(out: Path, files: list[SourceFile]) -> dict[str, object]:
    """Write `files` as JSON lines to `out` and return their totals."""
    with out.open("w", encoding="utf-8") as stream:
        for item in files:
            stream.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
    size: Counter[str] = Counter()
    for item in files:
        size[item.package] += len(item.text.encode())
    return {
        "files": len(files),
        "bytes": sum(size.values()),
        "bytes_by_package": dict(size),
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=CORPUS)
    args = parser.parse_args()
    if sys.version_info[:2] != STDLIB_VERSION:
        wanted = ".".join(map(str, STDLIB_VERSION))
        raise ValueError(f"run this with Python {wanted}: its own library is the text")
    args.out.mkdir(parents=True, exist_ok=True)
    files = list(collect(args.wheels))
    sources = [
        {
            "package": "cpython",
            "version": sys.version.split()[0],
            "licence": "PSF-2.0",
        }
    ] + [asdict(source) for source in WHEELS]
    summary = {
        "sources": sources,
        "train": write_split(
            args.out / "train.jsonl", [f for f in files if not is_heldout(f.sha256)]
        ),
        "heldout": write_split(
            args.out / "heldout.jsonl", [f for f in files if is_heldout(f.sha256)]
        ),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
