"""Prompts from text that is on any machine with Python: the docstrings and sources of
the standard library and of installed packages, split by package.

Knows files and text; refuses to know tokens or models. Makes no network requests.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELDOUT_ONE_IN = 20
MIN_TEXT_CHARS = 160
MAX_TEXT_CHARS = 1200
MAX_FILE_CHARS = 200_000
# Maximum pieces taken from a long file.
TEXTS_PER_FILE = 6
SKIP_PARTS = frozenset({"test", "tests", "__pycache__", "_vendor", "encodings"})
QUESTIONS = (
    "Explain in plain words what this documentation says.\n\n{}",
    "Write a Python function with this docstring.\n\n{}",
    "Give a short example that uses what is described here.\n\n{}",
    "Summarize the following text in two sentences.\n\n{}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """`kind` is chat (a request to answer), docs or code (a piece to continue)."""

    path: str
    kind: str
    text: str


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def package_of(path: str) -> str:
    """Return the package or single module of a path below its root."""
    return path.split("/")[0].removesuffix(".py")


def is_heldout(path: str) -> bool:
    """Whether a file is never trained on. Files of one package resemble each other, so
    this is decided by package.
    """
    return digest(package_of(path)) % HELDOUT_ONE_IN == 0


def source_files() -> list[tuple[str, Path]]:
    """Return (path below its root, file), in an order that depends only on the
    paths.
    """
    paths = sysconfig.get_paths()
    found: dict[str, Path] = {}
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for file in root.rglob("*.py"):
            relative = file.relative_to(root)
            if not SKIP_PARTS & set(relative.parts) and (
                "site-packages" not in relative.parts
            ):
                found.setdefault(str(relative), file)
    return sorted(found.items(), key=lambda item: digest(f"order {item[0]}"))


def docstrings(source: str) -> list[str]:
    """Return the docstrings that are long enough, or none for a broken module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return []
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, nodes))
    return [text for text in found if text and len(text) >= MIN_TEXT_CHARS]


def iter_texts(path: str, source: str) -> Iterator[SourceText]:
    """Yield requests about docstrings, docstrings and pieces of code, in turn."""
    docs = sorted(set(docstrings(source)), key=digest)[: TEXTS_PER_FILE - 1]
    for doc in docs:
        text = doc[:MAX_TEXT_CHARS]
        if digest(doc) % 2:
            question = QUESTIONS[digest(doc) // 2 % len(QUESTIONS)]
            yield SourceText(path=path, kind="chat", text=question.format(text))
        else:
            yield SourceText(path=path, kind="docs", text=text)
    lines = source.splitlines(keepends=True)
    start = digest(path) % max(1, len(lines) // 2)
    code = "".join(lines[start:])[:MAX_TEXT_CHARS]
    if len(code) >= MIN_TEXT_CHARS:
        yield SourceText(path=path, kind="code", text=code)


def read_texts(*, heldout: bool) -> Iterator[SourceText]:
    """Yield the texts of one split, each once."""
    seen: set[int] = set()
    for path, file in source_files():
        if is_heldout(path) is not heldout:
            continue
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(source) > MAX_FILE_CHARS:
            continue
        for text in iter_texts(path, source):
            mark = digest(text.text)
            if mark not in seen:
                seen.add(mark)
                yield text
