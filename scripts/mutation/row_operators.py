"""One-line faults in rows of a batch: which row, of which step, or none at all."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from scripts.mutation.roles import OPTIONAL, ROW_INDICES, ROWS, STEP_VALUES
from scripts.mutation.sites import Edit, Site


def passed_name(site: Site) -> str:
    """Return the name of a variable or field where it is passed on: as an argument, an
    index, or an element of a tuple. Returns an empty string for other nodes.
    """
    node, parent = site.node, site.parent
    if not isinstance(node, ast.Name | ast.Attribute):
        return ""
    if not isinstance(node.ctx, ast.Load):
        return ""
    is_argument = isinstance(parent, ast.keyword | ast.Subscript | ast.Tuple) or (
        isinstance(parent, ast.Call) and parent.func is not node
    )
    is_owner = isinstance(parent, ast.Subscript) and parent.value is node
    if not is_argument or is_owner:
        return ""
    return node.id if isinstance(node, ast.Name) else node.attr


def permuted(site: Site) -> Iterator[Edit]:
    """Rows of a batch in reverse order, where a tensor is passed on."""
    yield from _moved(site, "flip(0)", "[::-1]")


def rolled(site: Site) -> Iterator[Edit]:
    """Rows of a batch one later, the last one first, where a tensor is passed on."""
    yield from _moved(site, "roll(1, 0)", "[-1:] + {0}[:-1]")


def _moved(site: Site, method: str, of_list: str) -> Iterator[Edit]:
    # A length is the same in any order.
    if passed_name(site) in ROWS and not _is_measured(site):
        text = ast.unparse(site.node)
        name = method.partition("(")[0]
        other = f"{text}{of_list.format(text)}"
        yield _edit(
            site, f"({text}.{method} if hasattr({text}, {name!r}) else {other})"
        )


def _is_measured(site: Site) -> bool:
    parent = site.parent
    if not isinstance(parent, ast.Call) or not isinstance(parent.func, ast.Name):
        return False
    return parent.func.id == "len"


def neighbours(site: Site) -> Iterator[Edit]:
    """The value of the row before."""
    node, parent = site.node, site.parent
    is_index = isinstance(parent, ast.Subscript) and parent.slice is node
    if is_index and isinstance(node, ast.Name) and node.id in ROW_INDICES:
        yield node, f"{node.id} - 1"


def repeated(site: Site) -> Iterator[Edit]:
    """Each row several times in succession, or all rows several times."""
    node = site.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    changed = copy.copy(node)
    if node.func.attr == "repeat_interleave" and len(node.args) == 1:
        times = ast.unparse(node.args[0])
        dim = next((ast.unparse(k.value) for k in node.keywords if k.arg == "dim"), "")
        # Of a matrix, or of a vector if no dimension is named.
        counts = {"0": f"{times}, 1", "1": f"1, {times}"}.get(dim, times)
        yield node, f"{ast.unparse(node.func.value)}.repeat({counts})"
    elif node.func.attr == "repeat" and len(node.args) == 1:
        changed.func = ast.Attribute(node.func.value, "repeat_interleave", ast.Load())
        yield node, ast.unparse(changed)


def spans(site: Site) -> Iterator[Edit]:
    """A slice that begins and ends one element early."""
    node = site.node
    if isinstance(node, ast.Slice) and node.lower and node.upper:
        lower, upper = (f"{ast.unparse(b)} - 1" for b in (node.lower, node.upper))
        yield node, f"{lower}:{upper}"


def stale(site: Site) -> Iterator[Edit]:
    """The value that the same line passed on in the step before."""
    if passed_name(site) in STEP_VALUES:
        text = ast.unparse(site.node)
        place = f"{site.node.lineno}:{site.node.col_offset}"  # type: ignore[attr-defined]
        helper = "__import__('scripts.mutation.stale', fromlist=['earlier']).earlier"
        yield _edit(site, f"{helper}('{place}', {text})")


def missing(site: Site) -> Iterator[Edit]:
    """None instead of something that may be None."""
    if passed_name(site) in OPTIONAL and not isinstance(site.parent, ast.Subscript):
        yield _edit(site, "None")


def _edit(site: Site, text: str) -> Edit:
    assert isinstance(site.node, ast.expr)
    return site.node, text
