"""Costs of the operators, comparisons, filters and methods in a chat template.

Each is charged by the sizes of its operands before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from sglang.srt.utils.template_limits import (
    CHARS_PER_STEP,
    CONTAINERS,
    TemplateTooExpensive,
    charge,
    grow,
    text_size,
)

# Maximum bits of an integer from a product or a power.
MAX_BITS = 1 << 16
# Digits of a field width in a format: six digits are rejected.
WIDTH_DIGITS = 6
# Tests that can do more work than their text shows.
COMPARING_TESTS = (
    *("eq", "equalto", "==", "ne", "!=", "in"),
    *("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
)
# Filters that visit no entries, or only their own; all others walk through values.
_SHALLOW_FILTERS = frozenset(
    (
        *("length", "count", "first", "last", "reverse", "random", "items", "list"),
        *("default", "d", "attr", "map", "select", "reject", "selectattr"),
        "rejectattr",
    )
)
# The ones among them that read a generator lazily.
_LAZY_FILTERS = _SHALLOW_FILTERS - {"length", "count", "last", "reverse", "list"}

# -- comparisons -------------------------------------------------------------------


def compared(value: Any) -> Any:
    """Charge for a value that is about to be compared or hashed."""
    if isinstance(value, CONTAINERS):
        grow(text_size(value))
    elif isinstance(value, str) and len(value) > CHARS_PER_STEP:
        grow(len(value))
    return value


def searched(value: Any) -> Any:
    """Charge for a value that is about to be searched; keys are found by hash."""
    return value if isinstance(value, Mapping) else compared(value)


def limited_test(function: Any) -> Any:
    """Return a test that pays for the values it compares."""

    @wraps(function)
    def run(*values: Any) -> Any:
        for value in values:
            compared(value)
        return function(*values)

    return run


# -- operators ---------------------------------------------------------------------


def _added(left: Any, right: Any) -> None:
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        grow(len(left) + len(right))


def _multiplied(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, Sequence) and isinstance(times, int):
            grow(len(many) * max(times, 0))


def _raised(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateTooExpensive(f"it makes a number of more than {MAX_BITS} bits")


RESULT_SIZE: dict[str, Callable[[Any, Any], None]] = {
    "+": _added,
    "*": _multiplied,
    "**": _raised,
}

# -- filters and methods of str ----------------------------------------------------


def limited_filter(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a filter that pays for its value."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, *options = args[first:]
        if isinstance(value, Iterator) and name not in _LAZY_FILTERS:
            value = list(value)
        pay(name, value, (*options, *kwargs.values()))
        return function(*args[:first], value, *options, **kwargs)

    return run


def pay(name: str, value: Any, options: Sequence[Any]) -> None:
    """Charge for a filter or str method before it runs on `value`."""
    estimate = _GROWTH.get(name)
    if estimate is not None:
        grow(estimate(value, options))
        return
    if isinstance(value, CONTAINERS) and name not in _SHALLOW_FILTERS:
        grow(text_size([value, *options]))
    charge(1 + _len(value) // 64)


def _padded(value: Any, options: Sequence[Any]) -> int:
    return text_size(value) + _largest(options)


def _multiplied_text(value: Any, options: Sequence[Any]) -> int:
    return text_size(value) * (1 + _largest(options))


def _replaced(value: Any, options: Sequence[Any]) -> int:
    size = text_size(value)
    if len(options) < 2:
        return size
    old, new = str(options[0]), str(options[1])
    return size + str(value).count(old) * len(new)


def _joined(value: Any, options: Sequence[Any]) -> int:
    # `" ".join(parts)` and `parts | join(" ")`: as many separators as parts.
    other = options[0] if options else ""
    return text_size([value, other]) + _len(value) * _len(other)


def _sorted(value: Any, options: Sequence[Any]) -> int:
    return text_size([value, *options]) * max(_len(value).bit_length(), 1)


def _summed(value: Any, options: Sequence[Any]) -> int:
    # Lists are added one by one, creating a new list each time.
    return text_size([value, *options]) * (_len(value) if options else 1)


def _len(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def formatted(value: Any, options: Sequence[Any]) -> int:
    digits = 0
    for char in value if isinstance(value, str) else "":
        digits = digits + 1 if char.isdigit() else 0
        if digits >= WIDTH_DIGITS:
            raise TemplateTooExpensive("a format has a field that is too wide")
    size = text_size(value)
    return size + size * (text_size(options) + _largest(_flat(options)))


def _flat(options: Sequence[Any]) -> list[Any]:
    return [
        inner
        for option in options
        for inner in (option if isinstance(option, tuple | list) else [option])
    ]


def _largest(options: Sequence[Any]) -> int:
    return max([abs(option) for option in options if isinstance(option, int)] or [4])


# Name -> approximate number of characters (or entries) it makes from a value with
# options.
_GROWTH: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "slice", "batch"), _padded),
    **dict.fromkeys(("indent", "tojson", "expandtabs", "wordwrap"), _multiplied_text),
    **dict.fromkeys(("format", "format_map"), formatted),
    **dict.fromkeys(("string", "pprint", "urlencode", "xmlattr"), _padded),
    "replace": _replaced,
    "translate": lambda value, options: len(value) * (1 + text_size(options)),
    "join": _joined,
    **dict.fromkeys(("sort", "dictsort", "groupby", "unique"), _sorted),
    "sum": _summed,
}
