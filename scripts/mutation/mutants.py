"""All faults of a module."""

from __future__ import annotations

import ast
import re
from collections import Counter

from scripts.mutation.operators import OPERATORS
from scripts.mutation.sites import Module, Mutant, sites

MAX_BEFORE = 110
# How tables show edits that are longer than they mean.
MOVED = re.compile(r"^\((.+)(\.flip\(0\)|\.roll\(1, 0\)) if hasattr.*$", re.DOTALL)
EARLIER = re.compile(r"^__import__.*\.earlier\('[\d:]+', (.+)\)$", re.DOTALL)
SHOWN = ((MOVED, r"\1\2"), (EARLIER, r"earlier \1"))


def mutants(name: str, source: str) -> list[Mutant]:
    """All faults of a module, in source order."""
    module = Module.parse(name, source)
    found: list[Mutant] = []
    seen: set[str] = set()
    numbers: Counter[tuple[int, str]] = Counter()
    for site in sites(module.tree):
        for label, operator in OPERATORS.items():
            for node, replacement in operator(site):
                mutated = module.edited(node, replacement)
                if mutated in seen or not _is_known(node, replacement, source):
                    continue
                seen.add(mutated)
                found.append(
                    Mutant(
                        module=name,
                        qualname=site.qualname,
                        line=node.lineno,
                        operator=label,
                        before=_short(ast.unparse(node)),
                        after=_short(_shown(replacement)),
                        source=mutated,
                        number=numbers[node.lineno, label],
                    )
                )
                numbers[node.lineno, label] += 1
    return found


def _is_known(node: ast.AST, replacement: str, source: str) -> bool:
    """Whether a replacement field exists, as far as the module shows."""
    owner, _, name = replacement.rpartition(".")
    if not isinstance(node, ast.Attribute) or not (owner and name.isidentifier()):
        return True
    used = replacement if owner == "self" else f".{name}"
    return re.search(re.escape(used) + r"\b", source) is not None


def _shown(replacement: str) -> str:
    for pattern, form in SHOWN:
        replacement = pattern.sub(form, replacement)
    return replacement


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_BEFORE else line[: MAX_BEFORE - 3] + "..."
