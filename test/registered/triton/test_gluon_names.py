"""Names that the Gluon kernels take from Triton exist in the installed version. The
kernels compile ahead with the lowest version alone, and names change."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang
from sglang.test.ci.ci_register import register_cpu_ci

pytest.importorskip("triton")
register_cpu_ci(est_time=3, suite="cpu")

SOURCES = Path(sglang.__file__).parent / "srt"


def names_from_triton(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of Triton, and the names that a file takes from them."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            for alias in node.names if source.startswith("triton") else ():
                yield source, alias.name
                modules[alias.asname or alias.name] = f"{source}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith("triton"):
                    modules[alias.asname] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None:
                yield module, node.attr


def exists(module: str, name: str) -> bool:
    """Whether a module has a member or a submodule of this name. A module may be known
    by where another one imports it from."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        parent, _, last = module.rpartition(".")
        found = getattr(importlib.import_module(parent), last)
    is_module = hasattr(found, "__path__")
    return hasattr(found, name) or (
        is_module and importlib.util.find_spec(f"{module}.{name}") is not None
    )


def test_all_names_exist() -> None:
    checked, missing = 0, []
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "gluon" not in text:
            continue
        for module, name in names_from_triton(ast.parse(text)):
            checked += 1
            if not exists(module, name):
                missing.append(f"{path.relative_to(SOURCES)}: {module}.{name}")
    assert checked > 100
    assert not missing
