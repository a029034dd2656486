"""Bounds on the work and the text of one rendering of a chat template.

A template comes with a checkpoint and its variables from clients; jinja's sandbox keeps
both from the interpreter, but not from looping for hours or from doubling a text until
memory ends. Here every iteration, every call of a macro and every character costs, and
operations that make long texts are refused before they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
# Each entry of a container counts as so many characters: visiting it takes time.
_ENTRY_CHARS = 64
# Entries of a generator, which has no length: those of the longest range.
_UNKNOWN_LEN = 100_000


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
        self.filters[_STEP] = _charge

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

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        _charge(1)
        # The sandbox wraps `str.format`.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(owner, str):
            _pay(getattr(called, "__name__", ""), owner, (*args, *kwargs.values()))
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
    return template


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
    """About the characters of a value as text; stops counting where it is too much.

    A list that holds another one twice, and so on, is small in memory and endless as
    text.
    """
    size, pending = 0, [value]
    while pending:
        entry = pending.pop()
        size += _ENTRY_CHARS
        if isinstance(entry, str):
            size += len(entry) - _ENTRY_CHARS
        elif isinstance(entry, Mapping):
            pending += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list | tuple | Set):
            pending += entry
        if size + len(pending) > MAX_CHARS:
            raise _too_long()
    return size


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
        _pay(name, value, (*options, *kwargs.values()))
        return function(*args, **kwargs)

    return run


def _pay(name: str, value: Any, options: Sequence[Any]) -> None:
    """Account for a filter, or a method of str, before it runs on `value`."""
    estimate = _GROWTH.get(name)
    if estimate is not None:
        _grow(estimate(value, options))
    else:
        _charge(1 + _len(value) // 64 if hasattr(value, "__len__") else 1)


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


def _len(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else _UNKNOWN_LEN


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
}
