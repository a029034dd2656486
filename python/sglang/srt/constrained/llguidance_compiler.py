"""Compilation of grammar sources to llguidance matchers, within fixed limits.

Run as a script, this file is the sandbox: a child process that compiles first and dies
if a source takes too much time or memory (some schemas keep llguidance busy for hours,
and a thread cannot be stopped). It therefore imports only llguidance and the standard
library. Knows nothing about tensors, requests or batches.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import llguidance

MAX_SOURCE_CHARS = {
    "json_schema": 256 * 1024,
    "regex": 16 * 1024,
    "ebnf": 64 * 1024,
    "structural_tag": 256 * 1024,
}
MAX_NESTING = 64
_SANDBOX_MEMORY_BYTES = 4 << 30
# Number of tokens the sandbox walks, so that a source that exceeds a limit in its first
# steps is rejected immediately instead of failing while it runs.
_TRIAL_TOKENS = 3

# Wall time allowed per second of CPU time: the machine may be busy, but a hung compiler
# must end.
_SECONDS_PER_CPU_SECOND = 6.0
# Limit of the search for the cause of an error.
_SEARCH_CPU_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLimits:
    """Limits for the growth of compiled state while outputs are followed.

    A lexer creates states as outputs need them, and keeps them. Once a step exceeds a
    limit, the lexer and all copies that share it fail.

    Fields:
        max_states: maximum states of a lexer, 0.1 to 2.7 kB each.
        step_fuel: maximum work in one step, at about 14,000 units per millisecond.
    """

    max_states: int = 100_000
    step_fuel: int = 200_000

    def of_parser(self) -> llguidance.LLParserLimits:
        # `initial_lexer_fuel` bounds the first mask: with llguidance's default of a
        # million, `(a{1000}){1000}` occupies a core for 0.6 s; with this value for tens
        # of milliseconds. Verbose errors report how far the lexer has grown.
        return llguidance.LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=self.step_fuel,
            step_max_items=100_000,
            max_items_in_row=10_000,
            max_lexer_states=self.max_states,
            max_grammar_size=200_000,
            verbose_errors=True,
        )


# Unbounded blanks between tokens would let a model emit them up to its token limit.
# `oneOf` is followed as `anyOf`: exclusive choice cannot be checked while generating.
JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \t\n\r]{1,32}",
    "coerce_one_of": True,
}


def make_tokenizer(
    tokenizer: str, *, vocab_size: int, eos_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """Build llguidance's tokenizer from the path or contents of a `tokenizer.json`.

    Ids from the tokenizer's size to `vocab_size` are padding without text.

    Raises:
        ValueError: the tokenizer has more ids than `vocab_size`, or cannot be read.
    """
    is_text = tokenizer.lstrip().startswith("{")
    text = tokenizer if is_text else Path(tokenizer).read_text(encoding="utf-8")
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))


def compile_matcher(
    tokenizer: llguidance.LLTokenizer,
    kind: str,
    source: str,
    *,
    limits: StateLimits,
) -> llguidance.LLMatcher:
    """Compile a source to a matcher in its initial state.

    The source must have passed `check_size` and `check_eos`; kinds other than JSON
    schemas and regular expressions must be in llguidance's dialect.

    Raises:
        ValueError: the source is invalid; quotes llguidance.
    """
    try:
        grammar = _CONVERTERS[kind](source)
    except ValueError as error:
        raise ValueError(f"invalid {kind}: {error}") from error
    matcher = llguidance.LLMatcher(
        tokenizer, grammar, log_level=0, limits=limits.of_parser()
    )
    if matcher.is_error():
        where = _faulty_definition(tokenizer, source) if kind == "json_schema" else ""
        raise ValueError(f"invalid {kind}: {where}{matcher_error(matcher)}")
    return matcher


def _faulty_definition(tokenizer: llguidance.LLTokenizer, source: str) -> str:
    """Return the path of a definition that fails on its own, and a colon, or "" if
    there is none or finding it takes too long.

    The library does not say where an error is. In a schema for a request's tools, each
    tool is one definition.
    """
    schema = json.loads(source)
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    deadline = time.process_time() + _SEARCH_CPU_SECONDS
    for name in definitions if isinstance(definitions, dict) else ():
        if time.process_time() > deadline:
            return ""
        step = name.replace("~", "~0").replace("/", "~1")
        one = {"$ref": f"#/$defs/{quote(step)}", "$defs": definitions}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(one), defaults=JSON_OPTIONS
        )
        if llguidance.LLMatcher(tokenizer, grammar, log_level=0).is_error():
            return f"$defs.{name}: "
    return ""


def matcher_error(matcher: llguidance.LLMatcher) -> str:
    """Return the error of a matcher without its state dump, or "" if there is none."""
    error: str = matcher.get_error()
    for marker in ("<state>", "<grammar>", "<non-verbose/>"):
        error = error.split(marker)[0]
    return error.strip()


def check_size(kind: str, source: str) -> None:
    """Reject a source that could exhaust a recursive parser's stack.

    Nesting counts all brackets, including quoted ones, so it may be overestimated.

    Raises:
        ValueError: `kind` is unknown, or the source exceeds this module's limits.
    """
    if kind not in MAX_SOURCE_CHARS:
        raise ValueError(
            f"unknown grammar kind {kind!r}; use one of {', '.join(MAX_SOURCE_CHARS)}"
        )
    limit = MAX_SOURCE_CHARS[kind]
    if len(source) > limit:
        raise ValueError(
            f"{kind} has {len(source)} characters; at most {limit} are accepted"
        )
    depth = deepest = 0
    for char in source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    if deepest > MAX_NESTING:
        raise ValueError(
            f"{kind} is nested {deepest} levels deep; "
            f"at most {MAX_NESTING} are accepted"
        )


def check_eos(tokenizer: llguidance.LLTokenizer, kind: str, source: str) -> None:
    """Reject a regex or EBNF that names an EOS token: nothing can follow it, and an
    output ends with one anyway once the grammar is complete.

    Raises:
        ValueError: names the token.
    """
    if kind in ("json_schema", "structural_tag"):
        return  # a description may name it
    plain = source.replace("\\", "")
    for eos_id in tokenizer.eos_tokens:
        text = tokenizer.decode_str([eos_id])
        if text and text in plain:
            raise ValueError(
                f"invalid {kind}: it holds {text!r}, a token that ends an output and "
                "cannot be a part of it; leave it out: a complete output ends by itself"
            )


def try_out(matcher: llguidance.LLMatcher, kind: str) -> None:
    """Walk a few tokens with a copy of `matcher`.

    Raises:
        ValueError: no output can satisfy the grammar, or a resource limit was met.
    """
    walker = matcher.deep_copy()
    for _ in range(_TRIAL_TOKENS):
        mask: bytes = walker.compute_bitmask()
        if walker.is_error() or walker.is_stopped():
            break
        token_id = next(
            (8 * i + bit for i, byte in enumerate(mask) for bit in BITS[byte]), None
        )
        if token_id is None or walker.try_consume_tokens([token_id]) != 1:
            break
    if walker.is_error():
        reason = matcher_error(walker)
        raise ValueError(f"{kind} cannot be followed: {reason}")


# Indices of the bits set in each byte.
BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


def _convert_json_schema(source: str) -> str:
    schema = json.loads(source)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a schema must be an object, got {type(schema).__name__}")
    return str(
        llguidance.LLMatcher.grammar_from_json_schema(source, defaults=JSON_OPTIONS)
    )


def _convert_regex(source: str) -> str:
    if not source:
        raise ValueError("a regex must not be empty")
    # `\d` means 0 to 9; without this it would match every Unicode decimal digit.
    pattern = llguidance.regex_to_lark(source, "d")
    return str(llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/"))


def _convert_lark(source: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_lark(source))


_CONVERTERS: dict[str, Callable[[str], str]] = {
    "json_schema": _convert_json_schema,
    "regex": _convert_regex,
    "ebnf": _convert_lark,
    "structural_tag": _convert_lark,
}


def _serve_sandbox() -> None:
    """Answer one JSON line per request line until standard input ends.

    The first line is {"tokenizer", "vocab_size", "eos_ids", "cpu_seconds"}, the others
    are {"kind", "source"}; each answer is {"error": text or null}.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_SANDBOX_MEMORY_BYTES,) * 2)
    setup = json.loads(sys.stdin.readline())
    cpu_seconds = float(setup.pop("cpu_seconds"))
    timers = {
        signal.ITIMER_PROF: cpu_seconds,
        signal.ITIMER_REAL: cpu_seconds * _SECONDS_PER_CPU_SECOND,
    }
    tokenizer = make_tokenizer(setup.pop("tokenizer"), **setup)
    print(json.dumps({"error": None}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        # The default action of SIGPROF and SIGALRM ends the process, even in native
        # code and even if the parent has died.
        for timer, seconds in timers.items():
            signal.setitimer(timer, seconds)
        try:
            matcher = compile_matcher(tokenizer, **request, limits=StateLimits())
            try_out(matcher, request["kind"])
        except ValueError as problem:
            error = str(problem)
        for timer in timers:
            signal.setitimer(timer, 0)
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    _serve_sandbox()
