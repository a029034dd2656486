"""Check of the layer table: a module imports modules of its own or of lower layers.

Reads the imports of every file of `sglang` and of `kv_canary` with `ast` (type-only
imports are exempt, except through a wall), reports upward edges, import cycles and
imports through walls, and prints the longest files. Exit code 1 on a breach.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
# Where statements, and so imports, lie in others.
PARTS = ("body", "orelse", "handlers", "finalbody", "cases")
# Source root -> package in it.
PACKAGES = (("python", "sglang"), ("kv-canary/python", "kv_canary"))
MAX_FILE_LINES = 800
USUAL_FILE_LINES = 300

# First match wins; prefixes are module names below `sglang`.
LAYERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (12, ("test",)),
    # They wrap methods of all layers below.
    (
        10,
        (
            "srt.kv_canary.perturb.fault_points",
            "srt.kv_canary.perturb.historical_faults",
            "srt.kv_canary.perturb.token_faults",
        ),
    ),
    (0, ("srt.environ", "srt.utils", "version")),
    (
        1,
        (
            "srt.server_args",
            "srt.arg_groups",
            "srt.configs",
            "srt.function_call",
            "srt.parser",
            "srt.sampling.sampling_params",
            "srt.managers.messages.io_struct",
            "srt.managers.messages.pool_snapshot",
            "srt.managers.messages.scheduler_addresses",
            "srt.managers.batch.forward_result",
            "srt.forward.batch",
            "srt.forward.context",
            "srt.configs.draft_layout",
            "srt.forward.spec_input",
        ),
    ),
    (
        2,
        (
            "srt.layers.ops",
            "srt.layers.ops",
            "srt.layers.ops.attention",
            "srt.mem_cache.ops.branch_slots.op",
            "srt.mem_cache.ops.branch_slots.native",
            "srt.mem_cache.ops.move_kv.op",
            "srt.mem_cache.ops",
            "srt.sampling.ops.noise",
            "srt.sampling.ops.choose_tokens.op",
            "srt.sampling.ops.row_ops",
            "srt.sampling.ops",
            "srt.draft_trees.ops",
            "srt.draft_trees.ops",
            "srt.forward.graph_capture",
            "srt.forward.graph_backends",
        ),
    ),
    (3, ("srt.mem_cache", "srt.disaggregation", "srt.distributed", "srt.metrics")),
    (4, ("srt.layers", "srt.sampling", "srt.constrained")),
    (
        5,
        (
            "srt.draft_trees.draft_input",
            "srt.speculative.eagle_utils",
            "srt.draft_trees.relay",
            "srt.draft_trees.workspace",
        ),
    ),
    (6, ("srt.models", "srt.model_loader", "srt.kv_canary")),
    (7, ("srt.model_executor",)),
    (
        8,
        (
            "srt.managers.batch.grammar_masks",
            "srt.managers.batch.req",
            "srt.managers.batch.saved_req",
            "srt.managers.batch.schedule_batch",
            "srt.utils.stop_matcher",
            "srt.managers.worker.tp_worker",
            "srt.managers.worker.interface",
        ),
    ),
    (9, ("srt.speculative",)),
    (10, ("srt.managers",)),
    (
        11,
        (
            "srt.ray",
            "srt.replay",
            "srt.entrypoints",
            "cli",
            "launch_server",
            "bench_",
            "__main__",
            "",
        ),
    ),
)
# Below all layers of the engine.
CORE = "kv_canary"
CORE_LAYER = -1
# Plugins of other engines: they stand on the core, and nothing stands on them.
PLUGINS = "kv_canary.engines"
PLUGINS_LAYER = 0
# Packages of one layer that must not know each other.
STRANGERS = (("srt.kv_canary", "srt.models"), ("srt.kv_canary", "srt.model_loader"))


class Wall(NamedTuple):
    """Modules below `inside` import nothing below `outside`, not even for types, but
    what is in `doors`."""

    inside: str
    outside: str
    doors: tuple[str, ...] = ()


# `Op` and `mix64` are tools that happen to live in the core.
TOOLS = ("kv_canary.op", "kv_canary.hashing")
WALLS = (
    Wall("kv_canary", "sglang"),
    Wall("sglang", PLUGINS),
    *(
        Wall(inside, canary, TOOLS)
        for inside in (
            "sglang.srt.model_executor",
            "sglang.srt.mem_cache",
            "sglang.srt.managers.batch.req",
            "sglang.srt.managers.batch.schedule_batch",
        )
        for canary in ("kv_canary", "sglang.srt.kv_canary")
    ),
)


def is_below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def goes_through_wall(module: str, other: str) -> bool:
    """Whether `module` may not import `other`, whatever their layers."""
    return any(
        is_below(module, wall.inside)
        and is_below(other, wall.outside)
        and other not in wall.doors
        for wall in WALLS
    )


def layer_of(module: str) -> int:
    """Layer of `module`, a dotted name of the engine or of the core."""
    if is_below(module, PLUGINS):
        return PLUGINS_LAYER
    if is_below(module, CORE):
        return CORE_LAYER
    name = module.removeprefix("sglang").removeprefix(".")
    for layer, prefixes in LAYERS:
        for prefix in prefixes:
            if name == prefix or name.startswith(prefix + "."):
                return layer
            if prefix.endswith("_") and name.startswith(prefix):
                return layer
    raise SystemExit(f"{module}: no layer; add it to LAYERS in scripts/check_layers.py")


def modules_of(root: Path, package: str = "sglang") -> dict[str, Path]:
    """Dotted name -> file of every module of `package`, which lies below `root`."""
    return {
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
        for p in sorted((root / package).rglob("*.py"))
    }


def import_graph(
    files: dict[str, Path], *, with_type_only: bool = False
) -> dict[str, set[str]]:
    """Module -> the others of `files` that it imports."""
    known = set(files)
    return {
        name: imports_of(path, known, with_type_only=with_type_only) - {name}
        for name, path in files.items()
    }


def imports_of(
    path: Path, known: set[str], *, with_type_only: bool = False
) -> set[str]:
    """Modules of this tree that `path` imports at run time, at any depth of nesting.

    Args:
        with_type_only: those under `if TYPE_CHECKING` as well.
    """
    found: set[str] = set()
    for node, is_type_only in _import_statements(path):
        if is_type_only and not with_type_only:
            continue
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name in known)
        elif node.module:
            children = {f"{node.module}.{a.name}" for a in node.names}
            found.update(children & known)
            if node.module in known and children - known:
                found.add(node.module)
    return found


@cache
def _import_statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """All of them, with whether they are under `if TYPE_CHECKING`."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, is_type_only = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append((node, is_type_only))
        for part in PARTS:
            is_guarded = (
                isinstance(node, ast.If)
                and part == "body"
                and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            for statement in getattr(node, part, ()):
                pending.append((statement, is_type_only or is_guarded))
    return found


def is_stranger(module: str, other: str) -> bool:
    names = (module.removeprefix("sglang."), other.removeprefix("sglang."))
    for pair in STRANGERS:
        for left, right in (pair, pair[::-1]):
            if names[0].startswith(left) and names[1].startswith(right):
                return True
    return False


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return some import cycle as a list of modules, or an empty list."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> list[str]:
        state[module] = 1
        path.append(module)
        for other in sorted(graph[module]):
            if state.get(other) == 1:
                return [*path[path.index(other) :], other]
            if other not in state:
                cycle = visit(other)
                if cycle:
                    return cycle
        path.pop()
        state[module] = 2
        return []

    for module in sorted(graph):
        if module not in state:
            cycle = visit(module)
            if cycle:
                return cycle
    return []


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of two or more modules."""
    reach = {module: reachable(graph, module) for module in graph}
    found, done = [], set()
    for module in sorted(graph):
        if module in done or module not in reach[module]:
            continue
        circle = sorted(other for other in reach[module] if module in reach[other])
        done.update(circle)
        found.append(circle)
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that `start` reaches by one import or more."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        for other in graph[pending.pop()] - seen:
            seen.add(other)
            pending.append(other)
    return seen


def main() -> int:
    files: dict[str, Path] = {}
    for root, package in PACKAGES:
        files |= modules_of(REPO / root, package)
    graph = import_graph(files)
    problems = []
    for module, others in import_graph(files, with_type_only=True).items():
        problems += [
            f"{module} must not import {other}, nor its types"
            for other in sorted(others)
            if goes_through_wall(module, other)
        ]
    for module, others in graph.items():
        for other in sorted(others):
            if layer_of(other) > layer_of(module):
                problems.append(
                    f"{module} (L{layer_of(module)}) imports "
                    f"{other} (L{layer_of(other)})"
                )
            if is_stranger(module, other):
                problems.append(f"{module} must not import {other}")
    cycle = find_cycle(graph)
    if cycle:
        problems.append("import cycle: " + " -> ".join(cycle))
    lengths = {
        n: len(p.read_text(encoding="utf-8").splitlines()) for n, p in files.items()
    }
    longest = sorted(lengths.items(), key=lambda item: -item[1])[:5]
    for name, length in longest:
        if length > MAX_FILE_LINES:
            problems.append(f"{name} has {length} lines, more than {MAX_FILE_LINES}")
    above = sum(length > USUAL_FILE_LINES for length in lengths.values())
    print(
        f"layers: {len(files)} modules, {sum(map(len, graph.values()))} imports, "
        f"{above} files over {USUAL_FILE_LINES} lines; longest: "
        + ", ".join(f"{name} {length}" for name, length in longest)
    )
    for problem in problems:
        print("  " + problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
