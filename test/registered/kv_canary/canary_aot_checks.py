"""Checks of compiled kernels: threads of a program that may part ways.

Warps run apart. Where they do not agree on a branch, they meet each other at the wrong
barriers from then on, and what they exchange through shared memory is garbage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_LOC = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_NAMES = re.compile(r"%[\w]+")
_RESULT = re.compile(r"(%\w+)(?::\d+)? = ")
_BLOCKED = re.compile(
    r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], "
    r"threadsPerWarp = \[([\d, ]+)\], warpsPerCTA = \[([\d, ]+)\]"
)
_REDUCED = re.compile(r"\}\) : \(tensor<([\dx]+)x\w+, (?P<layout>#.*?)>\) ->")
_SLICE = re.compile(r"#ttg\.slice<\{dim = (\d), parent = (#\w+)\}>")


_LINEAR = re.compile(r"(#\w+) = #ttg\.linear<\{.*warp = (\[.*\]), block = ")

# Where a tensor's elements lie, as Triton's linear layouts say it: per bit of the
# number of the warp, by how much that bit moves an element along each dimension.
_Layout = list[list[int]]


def unguarded_stores(ttir: str) -> list[str]:
    """Stores to what the same program has loaded without a barrier in between.

    A warp that runs late would load what another one has stored already.
    """
    loaded: dict[str, int] = {}
    last_barrier, found = -1, []
    for number, line in enumerate(ttir.splitlines()):
        if "barrier" in line:
            last_barrier = number
        elif (load := re.search(r"= tt\.load (%\w+)", line)) is not None:
            loaded[load[1]] = number
        store = re.search(r"tt\.store (%\w+),", line)
        if store is not None and loaded.get(store[1], -1) > last_barrier:
            found.append(line.strip())
    return found


def lonely_branches(ttgir: str, volatile: tuple[str, ...]) -> list[str]:
    """Branches and loops that hang on what a single warp has loaded.

    `volatile` names the pointers to which other programs write meanwhile: warps
    that load the same word may see different ones. They agree on a value when it came
    out of a reduction over all of them, or of an atomic operation.
    """
    ops = list(_ops_of(ttgir))
    pointers = {f"%{name}" for name in volatile}
    seen_alone: set[str] = set()
    known = -1
    while known != len(pointers) + len(seen_alone):  # loops carry values backwards
        known = len(pointers) + len(seen_alone)
        for op in ops:
            if op.is_agreed:
                continue
            if op.used & seen_alone or (op.is_load and op.used & pointers):
                seen_alone |= op.targets
            elif op.used & pointers:
                pointers |= op.targets
    return [op.text for op in ops if op.decides & seen_alone]


class _Op(NamedTuple):
    """A line of the kernel; names are of one value each (MLIR's are, per region)."""

    text: str
    used: set[str]
    targets: set[str]
    decides: set[str]
    """Values that decide whether, or how often, a region runs."""
    is_load: bool
    is_agreed: bool


def _ops_of(ttgir: str) -> Iterator[_Op]:
    layouts = dict(_layouts_of(ttgir))
    lines = [_LOC.sub("", line) for line in ttgir.splitlines()]
    scopes: list[dict[str, str]] = [{}]
    owners: list[str | None] = []

    def resolve(names: str) -> set[str]:
        found = set()
        for name in _NAMES.findall(names):
            scope = next((s for s in reversed(scopes) if name in s), {})
            found.add(scope.get(name, name))
        return found

    def define(name: str, line: int) -> str:
        scopes[-1][name] = f"{name}@{line}"
        return scopes[-1][name]

    for number, line in enumerate(lines):
        text = line.strip()
        if text.startswith("}"):
            scopes.pop()
            owner = owners.pop()
        result = _RESULT.match(text)
        right = text[result.end() :] if result is not None else text
        head, _, carried = right.partition("iter_args")
        used = resolve(head)
        region = re.match(r"scf\.(if|for|while|condition)\b", right)
        decides = used if region is not None else set()
        targets = {define(result[1], number)} if result is not None else set()
        if text.startswith("scf.yield") and owners[-1] is not None:
            targets.add(owners[-1])
        begins = re.findall(r"(%\w+) = (%\w+)", carried)
        used = used | {name for _, begin in begins for name in resolve(begin)}
        if text.endswith("{"):
            is_else = text.startswith("}")
            opened = next(iter(targets)) if result is not None else None
            owners.append(owner if is_else else opened)
            scopes.append({})
        targets |= {define(name, number) for name, _ in begins}
        is_agreed = _is_agreed(text, lines[number : number + 8], layouts)
        yield _Op(text, used, targets, decides, right.startswith("tt.load"), is_agreed)


def _is_agreed(text: str, following: list[str], layouts: Mapping[str, _Layout]) -> bool:
    if "tt.atomic" in text:
        return True
    reduced = re.search(r'"tt\.reduce"\(.*axis = (\d)', text)
    if reduced is None:
        return False
    kind = next(m for m in map(_REDUCED.search, following) if m is not None)
    shape = [int(size) for size in kind[1].split("x")]
    axis = int(reduced[1])
    size, layout = shape[axis], kind["layout"]
    if (slice_of := _SLICE.match(layout)) is not None:
        # The dimension that is left of two; warps along the other one hold copies.
        layout, axis = slice_of[2], 1 - int(slice_of[1])
    # Warps hold copies, too, where a step leads past the end.
    steps = layouts[layout]
    return all(0 < step[axis] == sum(step) < size for step in steps)


def _layouts_of(ttgir: str) -> Iterator[tuple[str, _Layout]]:
    for name, *numbers in _BLOCKED.findall(ttgir):
        sizes, threads, warps = ([int(n) for n in text.split(",")] for text in numbers)
        yield name, list(_steps_of_warps(sizes, threads, warps))
    for name, steps in _LINEAR.findall(ttgir):
        yield name, json.loads(steps)


def _steps_of_warps(
    sizes: list[int], threads: list[int], warps: list[int]
) -> Iterator[list[int]]:
    """Steps of a blocked layout, one per factor of two among the warps."""
    for axis, count in enumerate(warps):
        step = [0] * len(warps)
        step[axis] = sizes[axis] * threads[axis]
        for bit in range(count.bit_length() - 1):
            yield [s << bit for s in step]
