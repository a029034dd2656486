"""Bounds on the work and the text of one rendering of a chat template.

A template comes with a checkpoint and its variables from clients; jinja's sandbox keeps
both from the interpreter, but not from looping for hours or from doubling a text until
memory ends. Here every iteration, every call of a macro and every character costs, and
operations that make long texts are refused before they run.
"""

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 500_000
# More than the largest request body, of one text and of all output.
MAX_CHARS = 64 << 20
# Of processor time: neither a busy machine nor other threads use it up.
MAX_SECONDS = 10.0
STEPS_PER_CLOCK = 1024
CHARS_PER_STEP = 16384
# Of an integer that a product or a power makes.
MAX_BITS = 1 << 16
# Of a field in a format: a number of six digits is refused.
WIDTH_DIGITS = 6

_STEP = "__step"
_COMPARED = "__compared"
_SEARCHED = "__searched"
# Each entry of a container counts as so many characters: visiting it takes time.
_ENTRY_CHARS = 64
# Of containers within containers. Hashing and printing recurse on the C stack.
MAX_DEPTH = 500
_CONTAINERS = (list, tuple, Mapping, Set, ValuesView, Namespace)
# What a template can turn into work that its text does not show.
_COMPARING_TESTS = (
    *("eq", "equalto", "==", "ne", "!=", "in"),
    *("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
)
# Filters that look at no entry, or only at their own; all others go through values.
_SHALLOW_FILTERS = frozenset(
    (
        *("length", "count", "first", "last", "reverse", "random", "items", "list"),
        *("default", "d", "attr", "map", "select", "reject", "selectattr"),
        "rejectattr",
    )
)
# Of these, the ones that read a generator as they go.
_LAZY_FILTERS = _SHALLOW_FILTERS - {"length", "count", "last", "reverse", "list"}


class TemplateTooExpensive(jinja2.TemplateError):
    """A rendering that exceeds a bound."""


class Budget:
    """Steps and characters of output that one rendering may still take."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self, count: int) -> None:
        before = self._steps // STEPS_PER_CLOCK
        self._steps -= count
        if self._steps < 0:
            raise TemplateTooExpensive(f"it takes more than {MAX_STEPS} steps")
        has_turned = self._steps // STEPS_PER_CLOCK != before
        if has_turned and time.thread_time() > self._deadline:
            raise TemplateTooExpensive(f"it takes more than {MAX_SECONDS:g} s")

    def output(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise _too_long()


_BUDGET: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Scope of one rendering.

    Raises:
        TemplateTooExpensive: inside it a template exceeded a bound.
    """
    token = _BUDGET.set(Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates pay from the budget of `limited_rendering`."""

    # Operators that go through `call_binop`.
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        # The optimizer would run filters at compile time.
        super().__init__(optimized=False, finalize=_output, **options)
        self.globals.pop("lipsum", None)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters |= {_STEP: _charge, _COMPARED: _compared, _SEARCHED: _searched}
        for name in _COMPARING_TESTS:
            self.tests[name] = _limited_test(self.tests[name])

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Let templates use `function`, which then pays for its value."""
        self.filters[name] = _limited(function, name)

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        return _with_steps(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _grow(_formatted(left, (right,)))
        elif operator in _RESULT_SIZE:
            _RESULT_SIZE[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        # A tuple is hashed.
        return super().getitem(obj, _compared(argument))

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        _charge(1)
        # The sandbox wraps `str.format`.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(owner, str):
            _pay(getattr(called, "__name__", ""), owner, (*args, *kwargs.values()))
        elif owner is not None and any(isinstance(a, _CONTAINERS) for a in args):
            # Methods that search, hash or compare.
            _grow(_text_size([owner, *args]))
        return super().call(context, called, *args, **kwargs)


def _with_steps(template: nodes.Template) -> nodes.Template:
    """Let every pass through the body of a loop or of a macro cost a step, and more
    where its fixed text is long."""
    repeated = (nodes.For, nodes.Macro, nodes.CallBlock)
    bodies: list[Any] = list(template.find_all(repeated))
    for node in bodies:
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, _step(1 + chars // 64, node.lineno))
    # `a ~ b` makes its text without passing through an operator or a filter.
    for concat in list(template.find_all(nodes.Concat)):
        concat.nodes = [_filtered(part, "string", part.lineno) for part in concat.nodes]
    # Comparisons and keys of dictionaries reach no hook of the sandbox either.
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


def _charge(steps: int) -> None:
    budget = _BUDGET.get()
    if budget is not None:
        budget.step(steps)


def _output(value: Any) -> Any:
    """Account for a value that is about to become output."""
    size = _text_size(value)
    budget = _BUDGET.get()
    if budget is not None:
        budget.output(size)
    _grow(size)
    return value


def _grow(chars: int) -> None:
    """Account for one text before it is made."""
    if chars > MAX_CHARS:
        raise _too_long()
    _charge(1 + chars // CHARS_PER_STEP)


def _too_long() -> TemplateTooExpensive:
    return TemplateTooExpensive(f"it makes more than {MAX_CHARS} characters of text")


def _text_size(value: Any) -> int:
    """About the characters of a value as text; visits each object once.

    Raises:
        TemplateTooExpensive: there are too many, or values are nested too deeply.
    """
    if not isinstance(value, _CONTAINERS):
        return len(value) if isinstance(value, str) else _ENTRY_CHARS
    known: dict[int, int] = {}
    # Containers on the way to the current one: entries left, size of the others.
    path: list[tuple[Any, Iterator[Any]]] = [(value, iter(_entries(value)))]
    sizes = [_ENTRY_CHARS]
    while True:
        container, left = path[-1]
        for entry in left:
            if isinstance(entry, str):
                sizes[-1] += len(entry)
            elif not isinstance(entry, _CONTAINERS):
                sizes[-1] += _ENTRY_CHARS
            elif id(entry) in known:
                sizes[-1] += known[id(entry)]
            else:
                path.append((entry, iter(_entries(entry))))
                sizes.append(_ENTRY_CHARS)
                break
        else:
            path.pop()
            size = known[id(container)] = sizes.pop()
            if size > MAX_CHARS:
                raise _too_long()
            if not path:
                return size
            sizes[-1] += size
        if len(path) > MAX_DEPTH:
            raise TemplateTooExpensive(f"it nests values more than {MAX_DEPTH} deep")


def _entries(container: Any) -> Iterable[Any]:
    if isinstance(container, Mapping):
        return (part for pair in container.items() for part in pair)
    if isinstance(container, Namespace):
        return _entries(container._Namespace__attrs)
    return container  # type: ignore[no-any-return]


# -- comparisons -------------------------------------------------------------------


def _compared(value: Any) -> Any:
    """Account for a value that is about to be compared or hashed."""
    if isinstance(value, _CONTAINERS):
        _grow(_text_size(value))
    elif isinstance(value, str) and len(value) > CHARS_PER_STEP:
        _grow(len(value))
    return value


def _searched(value: Any) -> Any:
    """Account for a value that is about to be searched; keys are found by hash."""
    return value if isinstance(value, Mapping) else _compared(value)


def _limited_test(function: Any) -> Any:
    """A test that pays for the values that it compares."""

    @wraps(function)
    def run(*values: Any) -> Any:
        for value in values:
            _compared(value)
        return function(*values)

    return run


# -- operators ---------------------------------------------------------------------


def _added(left: Any, right: Any) -> None:
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        _grow(len(left) + len(right))


def _multiplied(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, Sequence) and isinstance(times, int):
            _grow(len(many) * max(times, 0))


def _raised(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateTooExpensive(f"it makes a number of more than {MAX_BITS} bits")


_RESULT_SIZE: dict[str, Callable[[Any, Any], None]] = {
    "+": _added,
    "*": _multiplied,
    "**": _raised,
}

# -- filters and methods of str ----------------------------------------------------


def _limited(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter that pays for the value that it looks at."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, *options = args[first:]
        if isinstance(value, Iterator) and name not in _LAZY_FILTERS:
            value = list(value)
        _pay(name, value, (*options, *kwargs.values()))
        return function(*args[:first], value, *options, **kwargs)

    return run


def _pay(name: str, value: Any, options: Sequence[Any]) -> None:
    """Account for a filter, or a method of str, before it runs on `value`."""
    estimate = _GROWTH.get(name)
    if estimate is not None:
        _grow(estimate(value, options))
        return
    if isinstance(value, _CONTAINERS) and name not in _SHALLOW_FILTERS:
        _grow(_text_size([value, *options]))
    _charge(1 + _len(value) // 64)


def _padded(value: Any, options: Sequence[Any]) -> int:
    return _text_size(value) + _largest(options)


def _multiplied_text(value: Any, options: Sequence[Any]) -> int:
    return _text_size(value) * (1 + _largest(options))


def _replaced(value: Any, options: Sequence[Any]) -> int:
    size = _text_size(value)
    if len(options) < 2:
        return size
    old, new = str(options[0]), str(options[1])
    return size + str(value).count(old) * len(new)


def _joined(value: Any, options: Sequence[Any]) -> int:
    # `" ".join(parts)` and `parts | join(" ")`: as many separators as parts.
    other = options[0] if options else ""
    return _text_size([value, other]) + _len(value) * _len(other)


def _sorted(value: Any, options: Sequence[Any]) -> int:
    return _text_size([value, *options]) * max(_len(value).bit_length(), 1)


def _summed(value: Any, options: Sequence[Any]) -> int:
    # Lists are added one by one, each time to a new one.
    return _text_size([value, *options]) * (_len(value) if options else 1)


def _len(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _formatted(value: Any, options: Sequence[Any]) -> int:
    digits = 0
    for char in value if isinstance(value, str) else "":
        digits = digits + 1 if char.isdigit() else 0
        if digits >= WIDTH_DIGITS:
            raise TemplateTooExpensive("a format has a field that is too wide")
    size = _text_size(value)
    return size + size * (_text_size(options) + _largest(_flat(options)))


def _flat(options: Sequence[Any]) -> list[Any]:
    return [
        inner
        for option in options
        for inner in (option if isinstance(option, tuple | list) else [option])
    ]


def _largest(options: Sequence[Any]) -> int:
    return max([abs(option) for option in options if isinstance(option, int)] or [4])


# Name -> about the characters (or entries) that it makes of a value with options.
_GROWTH: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "slice", "batch"), _padded),
    **dict.fromkeys(("indent", "tojson", "expandtabs", "wordwrap"), _multiplied_text),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("string", "pprint", "urlencode", "xmlattr"), _padded),
    "replace": _replaced,
    "translate": lambda value, options: len(value) * (1 + _text_size(options)),
    "join": _joined,
    **dict.fromkeys(("sort", "dictsort", "groupby", "unique"), _sorted),
    "sum": _summed,
}
