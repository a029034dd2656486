"""Counts how well the parts of the tree are kept apart: `--root DIR` for another tree.

Two checkouts can be compared so; layers are those of the tree's own
`scripts/check_layers.py`. Product code is `python/`, `kv-canary/` and
`sgl-kernel/python/`. Prints a table and, as the last line, one JSON object.

* **Back-running imports.** A room is a package directly below `sglang/srt`; the
  distribution `kv_canary` is one as well. Two rooms that import each other at run time
  have a back-running direction, the one with fewer importing modules.
  `back_running.modules` counts pairs (importing module, room reached) in the
  back-running directions; `.imports` the module imports, `.pairs` the pairs of rooms.
* **Circles.** Strongly connected components of two or more modules of the import graph,
  imports under `TYPE_CHECKING` included.
* **Functions.** From `def` to the last line, without decorators, nested ones included.
  A Triton function is decorated with `jit`; all its parameters count.
* **Dispatch.** Definitions of `_import_triton`, and modules that call `use_native` or
  `use_triton` outside the module that defines them.
* **Walk of `EAGLEWorkerV2.verify`.** The files of `call_walk.py` in the order of their
  first visit; a climb is a step to a file of a higher layer than the one before it.
* **Words.** In docstrings and comments of Python: lines that open with "What ", and the
  words listed in `WORDS`; classes whose docstring opens with "Args:".
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import call_walk
import check_layers

LONG_FUNCTION = 100
MANY_PARAMETERS = 20
PRODUCT = ("python", "kv-canary", "sgl-kernel/python")
# Source roots of the packages whose imports count.
PACKAGES = (("python", "sglang"), ("kv-canary/python", "kv_canary"))
WALK = ("sglang.srt.speculative.eagle_worker_v2", "EAGLEWorkerV2.verify")
WORDS = {
    "what_opens_a_line": re.compile(r"^What "),
    "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
    "books": re.compile(r"\bbooks?\b", re.IGNORECASE),
    "stands": re.compile(r"\bstands?\b(?!-)", re.IGNORECASE),
    "foretold": re.compile(r"\bforetold\b", re.IGNORECASE),
    "as_its_last_deed": re.compile(r"\bdeeds?\b", re.IGNORECASE),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Graph = dict[str, set[str]]


class Tree:
    """The parsed product code of one checkout.

    Attributes:
        modules: dotted name -> file, of the packages in `PACKAGES`.
        sources: path below the root -> text, of all product code.
        parsed: the same paths -> syntax tree.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Path] = {}
        for folder, package in PACKAGES:
            self.modules.update(check_layers.modules_of(root / folder, package))
        self.sources = {
            str(path.relative_to(root)): path.read_text(encoding="utf-8")
            for folder in PRODUCT
            for path in sorted((root / folder).rglob("*.py"))
        }
        self.parsed = {name: ast.parse(text) for name, text in self.sources.items()}
        self._nodes = [
            (name, node)
            for name, tree in self.parsed.items()
            for node in ast.walk(tree)
        ]

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        yield from self._nodes


def room_of(module: str) -> str | None:
    """The first name of a module below `sglang.srt`; None outside of it."""
    parts = module.split(".")
    if parts[0] == "kv_canary":
        return "kv_canary (core)"
    if parts[:2] == ["sglang", "srt"] and len(parts) > 2:
        return parts[2]
    return None


def back_running(graph: Graph, rooms: set[str]) -> dict[str, Any]:
    """Imports in the weaker direction of each pair of rooms that import each other.

    Args:
        rooms: rooms that count, as `room_of` names them.
    """
    edges: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for module, others in graph.items():
        for other in sorted(others):
            source, target = room_of(module), room_of(other)
            if {source, target} <= rooms and source != target:
                edges[str(source), str(target)].append((module, other))
    found: dict[str, list[str]] = {}
    modules = 0
    for source, target in sorted(edges):
        if source > target or (target, source) not in edges:
            continue
        directions = ((source, target), (target, source))
        weaker = min(directions, key=lambda d: (importers(edges[d]), len(edges[d])))
        modules += importers(edges[weaker])
        arrows = [f"{module} -> {other}" for module, other in edges[weaker]]
        found[" -> ".join(weaker)] = arrows
    return {
        "modules": modules,
        "imports": sum(map(len, found.values())),
        "pairs": len(found),
        "list": found,
    }


def importers(edges: list[tuple[str, str]]) -> int:
    return len({module for module, _ in edges})


def functions(tree: Tree) -> dict[str, Any]:
    """Lengths of all functions, and numbers of parameters of Triton's."""
    lengths: dict[str, dict[str, int]] = {"python": {}, "triton": {}}
    parameters: dict[str, int] = {}
    for name, node in tree.nodes():
        if not isinstance(node, FUNCTIONS) or node.end_lineno is None:
            continue
        label = f"{name}:{node.name}"
        is_triton = any(
            re.search(r"\bjit\b", ast.unparse(d)) for d in node.decorator_list
        )
        kind = "triton" if is_triton else "python"
        lengths[kind][label] = node.end_lineno - node.lineno + 1
        if is_triton:
            given = node.args
            parameters[label] = len(given.posonlyargs + given.args + given.kwonlyargs)
    report: dict[str, Any] = {}
    for kind, of in lengths.items():
        report[f"longest_{kind}"] = max(of.values(), default=0)
        report[f"long_{kind}"] = above(of, LONG_FUNCTION)
    report["triton_many_parameters"] = above(parameters, MANY_PARAMETERS)
    return report


def above(sizes: dict[str, int], limit: int) -> dict[str, int]:
    """The entries above a limit, largest first."""
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return {name: size for name, size in largest if size > limit}


def dispatch(tree: Tree) -> dict[str, list[str]]:
    """Where ops are chosen by device without the one module that does it for all."""
    imports, calls, own = set(), set(), set()
    for name, node in tree.nodes():
        if isinstance(node, FUNCTIONS):
            if node.name == "_import_triton":
                imports.add(name)
            if node.name in ("use_native", "use_triton"):
                own.add(name)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("use_native", "use_triton"):
                calls.add(name)
    return {"import_triton": sorted(imports), "callers": sorted(calls - own)}


def class_lines(tree: Tree, name: str) -> int:
    """Lines of the class `name` of the product; 0 where there is none."""
    for _, node in tree.nodes():
        if isinstance(node, ast.ClassDef) and node.name == name and node.end_lineno:
            return node.end_lineno - node.lineno + 1
    return 0


def verify_walk(tree: Tree, layer_of: Callable[[str], int]) -> dict[str, Any]:
    """Stays and climbs of the walk through one decode's verification."""
    stays = call_walk.walk(call_walk.Sources(tree.modules), *WALK)
    layers = [layer_of(module) for module in stays]
    climbs = sum(b > a for a, b in zip(layers, layers[1:], strict=False))
    files = [f"L{n} {m}" for n, m in zip(layers, stays, strict=True)]
    return {"stays": len(stays), "climbs": climbs, "files": files}


def prose_of(text: str, tree: ast.Module) -> Iterator[str]:
    """The lines of all docstrings and comments, stripped."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            docstring = ast.get_docstring(node)
            yield from (line.strip() for line in (docstring or "").splitlines())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#").strip()


def words(tree: Tree) -> dict[str, int]:
    """Occurrences of the words in `WORDS`, and classes that open with "Args:"."""
    counts = dict.fromkeys((*WORDS, "class_opens_with_args"), 0)
    for name, text in tree.sources.items():
        for line in prose_of(text, tree.parsed[name]):
            for word, pattern in WORDS.items():
                counts[word] += len(pattern.findall(line))
    for _, node in tree.nodes():
        if isinstance(node, ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            counts["class_opens_with_args"] += docstring.startswith("Args:")
    return counts


def layer_table(root: Path) -> ModuleType:
    """`scripts/check_layers.py` of a checkout; this one's where it has none."""
    path = root / "scripts" / "check_layers.py"
    if not path.is_file():
        return check_layers
    spec = importlib.util.spec_from_file_location("layers_of_root", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(root: Path) -> dict[str, Any]:
    """All measures of the checkout at `root`, by name."""
    tree = Tree(root)
    packages = (n for n, path in tree.modules.items() if path.stem == "__init__")
    rooms = {room for name in packages if (room := room_of(name))}
    with_types = check_layers.import_graph(tree.modules, with_type_only=True)
    return {
        "back_running": back_running(check_layers.import_graph(tree.modules), rooms),
        "circles": check_layers.find_circles(with_types),
        **functions(tree),
        "dispatch": dispatch(tree),
        "scheduler_lines": class_lines(tree, "Scheduler"),
        "verify_walk": verify_walk(tree, layer_table(root).layer_of),
        "words": words(tree),
    }


def table(found: dict[str, Any]) -> Iterator[str]:
    """The measures, one per line, each followed by what it counted."""
    back = found["back_running"]
    yield f"back-running imports (module to room)    {back['modules']:4}"
    yield f"  module imports                         {back['imports']:4}"
    yield f"  pairs of rooms                         {back['pairs']:4}"
    yield from (f"    {pair}: {len(of)}" for pair, of in back["list"].items())
    yield f"circles, type-only imports included      {len(found['circles']):4}"
    yield from (f"    {' '.join(circle)}" for circle in found["circles"])
    for kind in ("python", "triton"):
        label = f"longest {kind.capitalize()} function"
        yield f"{label:40} {found[f'longest_{kind}']:4}"
        long = found[f"long_{kind}"]
        yield f"  over {LONG_FUNCTION} lines                         {len(long):4}"
        yield from (f"    {name} {size}" for name, size in long.items())
    many = found["triton_many_parameters"]
    yield f"Triton functions over {MANY_PARAMETERS} parameters      {len(many):4}"
    yield from (f"    {name} {size}" for name, size in many.items())
    for key, label in (
        ("import_triton", "definitions of _import_triton"),
        ("callers", "modules that call use_native/use_triton"),
    ):
        yield f"{label:40} {len(found['dispatch'][key]):4}"
        yield from (f"    {name}" for name in found["dispatch"][key])
    yield f"lines of class Scheduler                 {found['scheduler_lines']:4}"
    walk = found["verify_walk"]
    yield f"files of verify's walk                   {walk['stays']:4}"
    yield f"  climbs                                 {walk['climbs']:4}"
    yield from (f"    {file}" for file in walk["files"])
    for word, count in found["words"].items():
        yield f"words: {word:33} {count:4}"


def main() -> int:
    gc.disable()  # Syntax trees are a million objects, and all stay.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="checkout to measure (default: this one)",
    )
    found = measure(parser.parse_args().root.resolve())
    print("\n".join(table(found)))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
