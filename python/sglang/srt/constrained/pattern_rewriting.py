"""Rewrites JSON Schema patterns (ECMA-262) for a library without look-around.

A pattern becomes several patterns that a text must match together, one for each
look-ahead at its start. A pattern without an equal or narrower form is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

# A look-ahead with a longer text is rejected.
_MAX_LITERALS = 32
_MAX_DIGITS = 64
_MAX_PATTERNS = 32
_ANY = r"[\s\S]"
_TOKEN = re.compile(
    r"\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)"
    r"|\[\^?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]"
    r"|\{\d+(?:,\d*)?\}|\((?:\?(?:<?[=!]|:|P?<\w+>))?|.",
    re.DOTALL,
)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
# Pydantic's pattern for a Decimal with a number of digits: I before the point, M - 1 in
# total, and D after the point if that is also bounded.
_DECIMAL = re.compile(
    re.escape(r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,")
    + r"(?P<I>\d{1,9})"
    + re.escape(r"}|(?=[\d.]{1,")
    + r"(?P<M>\d{1,9})"
    + re.escape(r"}0*$)")
    + r"(?:\\d\{0,\d+\}\\\.\\d\{0,(?P<D>\d{1,9})\}|\\d\*\\\.\\d\*)"
    + re.escape("0*$)")
)


class LookAroundError(ValueError):
    """A pattern without an equal or narrower form without look-around."""


def rewrite_pattern(pattern: str) -> list[str]:
    """Return patterns without look-around that a text must match together.

    Raises:
        LookAroundError: says what cannot be rewritten.
    """
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is not None:
        return _decimal(decimal)
    tokens = list(map(_in_dialect, _tokens(pattern)))
    if not any(token in _LOOKS or token in _ASSERTIONS for token in tokens):
        return ["".join(tokens)]
    return _without_looks(tokens)


def _tokens(pattern: str) -> Iterator[str]:
    for found in _TOKEN.finditer(pattern):
        if found[0] == "[":
            # The end of every further one would also have to be searched.
            raise LookAroundError("a class that is not closed")
        yield found[0]


_ASSERTIONS = frozenset({r"\b", r"\B", *(rf"\{i}" for i in range(1, 10))})


def _in_dialect(token: str) -> str:
    """Convert a token of ECMA-262 or Python to the syntax of Rust's `regex`."""
    if token in _SAME:
        return _SAME[token]
    if len(token) > 1 and token[0] == "[":
        # Rust has nested classes, and operators on them.
        inner = re.sub(r"(\\.|\[:\^?\w+:\])|([\[&~])", _escape_in_class, token[1:-1])
        return f"[{inner}]"
    return token


_SAME = {"[^]": _ANY, "[]": r"[^\s\S]", r"\Z": r"\z", "{": r"\{", "}": r"\}"}


def _escape_in_class(found: re.Match[str]) -> str:
    return found[1] or "\\" + found[2]


def _without_looks(tokens: list[str]) -> list[str]:
    if tokens[:1] == ["^"]:
        del tokens[0]
    # Otherwise a match may begin anywhere, including at the start.
    found: list[str] = []
    while tokens[:1] in (["(?="], ["(?!"]):
        end = _group_end(tokens, 0)
        inner, is_wanted = tokens[1:end], tokens[0] == "(?="
        tokens = tokens[end + 1 :]
        if is_wanted:
            found += rewrite_pattern("^" + "".join(inner).removeprefix("^"))
        else:
            for one in _alternatives(inner):
                found += islice(_not_at_start(one), _MAX_PATTERNS + 1)
        if len(found) > _MAX_PATTERNS:
            raise LookAroundError(f"more than {_MAX_PATTERNS} look-aheads")
    if tokens[-3:-2] and tokens[-4:-3] == ["(?<!"] and tokens[-2:] == [")", "$"]:
        found.append(f"^(?:{_ANY}*{_other(tokens[-3])})?$")
        tokens = [*tokens[:-4], "$"]
    if len(_alternatives(tokens)) > 1:
        raise LookAroundError("look-around beside alternatives")
    for token in tokens:
        if token in _LOOKS:
            raise LookAroundError(f"look-around {token}...) in its middle")
        if token in _ASSERTIONS:
            what = "a word boundary" if token in (r"\b", r"\B") else "a backreference"
            raise LookAroundError(f"{what}, {token}")
    return ["^" + "".join(tokens), *found]


def _group_end(tokens: Sequence[str], start: int) -> int:
    """Return the index of the bracket that closes the group at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i][0] == "(") - (tokens[i] == ")")
        if depth == 0:
            return i
    raise LookAroundError("a group that is not closed")


def _alternatives(tokens: Sequence[str]) -> list[list[str]]:
    """Split at each `|` outside groups."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token[0] == "(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _not_at_start(tokens: list[str]) -> Iterator[str]:
    """Yield patterns for texts that do not begin with a match of `tokens`."""
    if tokens[:1] == ["^"]:
        tokens = tokens[1:]
    if tokens[:1] and tokens[0] in ("(", "(?:"):
        end = _group_end(tokens, 0)
        parts = _alternatives(tokens[1:end])
        if len(parts) > 1 and tokens[end + 1 : end + 2] in (["*"], ["+"]):
            raise LookAroundError("a look-ahead with repeated alternatives")
        for one in parts:
            yield from _not_at_start([*one, *tokens[end + 1 :]])
        return
    is_whole = tokens[-1:] == ["$"]
    body = tokens[:-1] if is_whole else tokens
    if body[-2:] == [".", "*"] and not is_whole and len(body) > 2:
        body = body[:-2]
    if is_whole and body[1:] in (["*"], ["+"]):
        yield ("^$|" if body[1] == "+" else "") + _other(body[0])
    elif body[:2] == [".", "*"] and len(body) > 2:
        yield _never(body[2:], at_end=is_whole)
    elif is_whole and not body:
        yield _ANY
    elif 0 < len(body) <= _MAX_LITERALS:
        yield f"^{_not_begun(body, is_whole=is_whole)}$"
    else:
        raise LookAroundError(f"look-ahead (?!{''.join(tokens)[:80]})")


def _never(body: list[str], *, at_end: bool) -> str:
    """Return the pattern for texts that do not contain (or end with) `body`."""
    if at_end and len(body) == 1:
        return f"^(?:{_ANY}*{_other(body[0])})?$"
    if not at_end and len(body) == 1:
        return f"^{_other(body[0])}*$"
    if not at_end and len(body) == 2 and all(map(_literal, body)):
        a, b = (f"[{_literal(token)}]" for token in body)
        if a == b:
            return f"^(?:{a}?{_other(body[0])})*{a}?$"
        either = f"[^{_literal(body[0])}{_literal(body[1])}]"
        return f"^(?:{a}+{either}|{_other(body[0])})*{a}*$"
    raise LookAroundError(f"look-ahead (?!.*{''.join(body)[:80]})")


def _not_begun(body: list[str], *, is_whole: bool) -> str:
    """Return the pattern for texts that do not begin with `body` (or are not
    `body`).
    """
    last = f"|{body[-1]}{_ANY}+" if is_whole else ""
    pattern = f"(?:{_other(body[-1])}{_ANY}*{last})?"
    for token in reversed(body[:-1]):
        pattern = f"(?:{_other(token)}{_ANY}*|{token}{pattern})?"
    return pattern


def _other(token: str) -> str:
    """Return the class of characters that a one-character token does not match."""
    if token[0] == "[" and len(token) > 2:
        return f"[{token[2:]}" if token[1] == "^" else f"[^{token[1:]}"
    if token[0] == "\\" and token[1] in "dswDSWtnrf":
        return f"[^{token}]"
    literal = _literal(token)
    if not literal:
        raise LookAroundError(f"look-around with {token}")
    return f"[^{literal}]"


def _literal(token: str) -> str:
    """Return a one-character token as a class member, or ""."""
    if token[0] == "\\":
        return token if len(token) == 2 and not token[1].isalnum() else ""
    if len(token) > 1 or token in ".^$*+?()|{}":
        return ""
    return token if token.isalnum() else f"\\x{{{ord(token):x}}}"


def _decimal(found: re.Match[str]) -> list[str]:
    """Count digits instead of using look-ahead."""
    before, total = int(found["I"]), int(found["M"]) - 1
    if total > _MAX_DIGITS or before > _MAX_DIGITS:
        raise LookAroundError(f"a Decimal of more than {_MAX_DIGITS} digits")
    if found["D"] is not None:
        after = min(int(found["D"]), max(0, total - before))
        splits = [(min(before, total), after)]
    else:
        splits = [(i, total - i) for i in range(total + 1)]
    fractions = "|".join(rf"\d{{0,{i}}}\.\d{{0,{j}}}0*" for i, j in splits)
    return [rf"^[+-]?0*(?:\d{{0,{before}}}|{fractions})$", "[^-+.]"]
