"""A Jinja environment whose templates pay for their work.

Every iteration, macro call and character costs, and operations that make long texts or
walk through large values are rejected before they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang.srt.utils.template_costs import (
    COMPARING_TESTS,
    RESULT_SIZE,
    compared,
    formatted,
    limited_filter,
    limited_test,
    pay,
    searched,
)
from sglang.srt.utils.template_limits import (
    CONTAINERS,
    charge,
    grow,
    output,
    text_size,
)

_STEP = "__step"
_COMPARED = "__compared"
_SEARCHED = "__searched"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates pay from the budget of `limited_rendering`."""

    # Operators that use `call_binop`.
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        # The optimizer would run filters at compile time.
        super().__init__(optimized=False, finalize=output, **options)
        self.globals.pop("lipsum", None)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters |= {_STEP: charge, _COMPARED: compared, _SEARCHED: searched}
        for name in COMPARING_TESTS:
            self.tests[name] = limited_test(self.tests[name])

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Let templates use `function` as a filter that pays for its value."""
        self.filters[name] = limited_filter(function, name)

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        return _with_steps(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            grow(formatted(left, (right,)))
        elif operator in RESULT_SIZE:
            RESULT_SIZE[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        # A tuple is hashed.
        return super().getitem(obj, compared(argument))

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        charge(1)
        # The sandbox wraps `str.format`.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(owner, str):
            pay(getattr(called, "__name__", ""), owner, (*args, *kwargs.values()))
        elif owner is not None and any(isinstance(a, CONTAINERS) for a in args):
            # Methods that search, hash or compare.
            grow(text_size([owner, *args]))
        return super().call(context, called, *args, **kwargs)


def _with_steps(template: nodes.Template) -> nodes.Template:
    """Charge a step for every pass through the body of a loop or macro, and more if its
    fixed text is long.
    """
    repeated = (nodes.For, nodes.Macro, nodes.CallBlock)
    bodies: list[Any] = list(template.find_all(repeated))
    for node in bodies:
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, _step(1 + chars // 64, node.lineno))
    # `a ~ b` builds text without an operator or filter hook.
    for concat in list(template.find_all(nodes.Concat)):
        concat.nodes = [_filtered(part, "string", part.lineno) for part in concat.nodes]
    # Comparisons and dictionary keys also bypass the sandbox's hooks.
    for compare in list(template.find_all(nodes.Compare)):
        compare.expr = _watched(compare.expr, _COMPARED)
        for operand in compare.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = _watched(operand.expr, _SEARCHED if is_search else _COMPARED)
    for pair in list(template.find_all(nodes.Pair)):
        pair.key = _watched(pair.key, _COMPARED)
    return template


def _watched(value: nodes.Expr, name: str) -> nodes.Expr:
    if isinstance(value, nodes.Const):
        return value
    return _filtered(value, name, value.lineno)


def _step(cost: int, line: int) -> nodes.Node:
    paid = _filtered(nodes.Const(cost, lineno=line), _STEP, line)
    return nodes.ExprStmt(paid, lineno=line)


def _filtered(value: nodes.Expr, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=line)
