"""Every `Op` of the tree: each implementation takes what its reference takes."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kv_canary
import sglang
from kv_canary.op import Op, all_ops, native_available
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="cpu")

Parameters = list[tuple[str, Any, Any]]


def modules_with_ops() -> Iterator[str]:
    """Names of the modules whose text makes an `Op`."""
    for package in (sglang, kv_canary):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            if " Op(\n" in path.read_text(encoding="utf-8"):
                parts = path.relative_to(root.parent).with_suffix("").parts
                yield ".".join(parts)


def named_ops() -> Iterator[tuple[str, Op[..., Any]]]:
    for module in modules_with_ops():
        for name, value in vars(importlib.import_module(module)).items():
            if any(value is op for op in all_ops()):
                yield f"{module}:{name}", value


OPS = dict(named_ops())


def parameters_of(function: Callable[..., Any]) -> Parameters:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def with_path(kind: str) -> list[Any]:
    return [
        pytest.param(op, path, id=name)
        for name, op in OPS.items()
        for path in [getattr(op, kind)]
        if path is not None
    ]


def test_the_ops_are_found() -> None:
    assert "sglang.srt.layers.ops.norm.op:rmsnorm" in OPS
    assert "sglang.srt.draft_trees.ops.tree.op:build_tree" in OPS
    assert "kv_canary.launches:verify" in OPS


@pytest.mark.parametrize(("op", "path"), with_path("native"))
def test_native_takes_what_the_reference_takes(op: Op[..., Any], path: str) -> None:
    if not native_available():
        pytest.skip("the native CPU kernels are not installed")
    assert parameters_of(pkgutil.resolve_name(path)) == parameters_of(op.reference)


@pytest.mark.parametrize(("op", "path"), with_path("triton"))
def test_triton_takes_what_the_reference_takes(op: Op[..., Any], path: str) -> None:
    pytest.importorskip("triton")
    assert parameters_of(pkgutil.resolve_name(path)) == parameters_of(op.reference)


@pytest.mark.parametrize("name", OPS)
def test_an_op_shows_the_signature_and_words_of_its_reference(name: str) -> None:
    op = OPS[name]
    assert inspect.signature(op) == inspect.signature(op.reference)
    assert op.__doc__ == op.reference.__doc__


def test_importing_the_ops_imports_neither_triton_nor_native_kernels() -> None:
    modules = sorted({name.partition(":")[0] for name in OPS})
    lines = [
        "import sys",
        *(f"import {module}" for module in modules),
        "assert not {'triton', 'sglang_kernels'} & set(sys.modules)",
    ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
