"""The sandbox: hostile sources, its death, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from grammar_world import wait_for

from sglang.srt.constrained.base_grammar import (
    Cancellation,
    CompilationCancelledError,
    CompilerUnavailableError,
    GrammarTooComplexError,
)
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

VOCAB_SIZE = 421


@pytest.fixture(scope="module")
def hasty(tokenizer_json: str) -> Iterator[LLGuidanceBackend]:
    result = LLGuidanceBackend(
        tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0], compile_cpu_seconds=1.0
    )
    yield result
    result.close()


ALL_OF = {"allOf": [{"type": "string", "pattern": f".*{i}.{{50}}"} for i in range(50)]}
NESTED = '{"items":' * 90 + "true" + "}" * 90
DOUBLING = (
    "root ::= a0\n"
    + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(40))
    + 'a40 ::= "x"'
)
HOSTILE = [
    ("json_schema", '{"type": "integer", "multipleOf": 99999989}', "too complex"),
    ("json_schema", json.dumps(ALL_OF), "too complex"),
    ("json_schema", NESTED, "nested 90 levels"),
    ("json_schema", "[" * 200_000, "nested 200000 levels"),
    ("json_schema", json.dumps({"enum": ["x" * 300_000]}), "characters; at most"),
    ("regex", "(a{1000}){1000}", "too many expressions"),
    ("regex", "((a{100}){100}){100}", "too many expressions"),
    ("regex", "(" * 5000 + ")" * 5000, "nested 5000 levels"),
    ("regex", "a" * 20_000, "20000 characters; at most"),
    ("ebnf", "root ::= " + "(" * 500 + '"a"' + ")" * 500, "nested 500 levels"),
    ("ebnf", 'root ::= "" root | root ""', "cannot be followed"),
]


@pytest.mark.parametrize(
    ("kind", "source", "message"), HOSTILE, ids=[f"{h[0]}-{h[2]}" for h in HOSTILE]
)
def test_hostile_sources_end_in_time(
    kind: str, source: str, message: str, hasty: LLGuidanceBackend
) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=message):
        hasty.compile(kind, source)
    assert time.monotonic() - started < 15.0
    # The backend goes on.
    assert not hasty.compile("regex", "ab").is_terminated()


def test_doubling_rules_compile_or_are_refused(hasty: LLGuidanceBackend) -> None:
    """2 ** 40 letters: nothing may expand them."""
    started = time.monotonic()
    try:
        grammar = hasty.compile("ebnf", DOUBLING)
    except ValueError:
        pass
    else:
        mask = allocate_vocab_mask(1, VOCAB_SIZE)
        grammar.fill_mask(mask[0])
    assert time.monotonic() - started < 15.0


SLOW = json.dumps(ALL_OF)


@pytest.fixture
def backend_of_its_own(tokenizer_json: str) -> Iterator[LLGuidanceBackend]:
    result = LLGuidanceBackend(
        tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0], compile_cpu_seconds=60.0
    )
    yield result
    result.close()


def in_the_middle(action: str, backend: LLGuidanceBackend) -> Exception:
    """The error of a long compilation to which `action` happens: it is cancelled, or
    its sandbox gets a signal."""
    before = child_processes()
    cancellation, errors = Cancellation(), list[Exception]()

    def compile_slowly() -> None:
        try:
            backend.compile("json_schema", SLOW, cancellation=cancellation)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    wait_for(lambda: bool(child_processes() - before))
    (sandbox,) = child_processes() - before
    # It has read the tokenizer and works.
    wait_for(lambda: cpu_seconds(sandbox) > 0.5)
    if action == "cancel":
        cancellation.cancel()
    else:
        os.kill(sandbox, signal.Signals[action])
    thread.join(30)
    assert not thread.is_alive()
    assert sandbox not in child_processes()
    return errors[0]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("cancel", CompilationCancelledError),
        ("SIGKILL", CompilerUnavailableError),
        ("SIGALRM", CompilerUnavailableError),
        ("SIGPROF", GrammarTooComplexError),
    ],
)
def test_a_sandbox_that_is_ended(
    action: str, expected: type[Exception], backend_of_its_own: LLGuidanceBackend
) -> None:
    error = in_the_middle(action, backend_of_its_own)
    assert type(error) is expected, error
    # The next source gets another one.
    assert not backend_of_its_own.compile("regex", "ab").is_terminated()


def test_a_missing_sandbox_is_reported(
    tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No interpreter starts with it.
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    broken = LLGuidanceBackend(tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0])
    with pytest.raises(RuntimeError, match="sandbox did not start"):
        broken.compile("regex", "ab")
    broken.close()


def test_sandbox_ends_when_closed(tokenizer_json: str) -> None:
    before = child_processes()
    short_lived = LLGuidanceBackend(tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0])
    short_lived.compile("regex", "ab")
    (sandbox,) = child_processes() - before
    short_lived.close()
    assert sandbox not in child_processes()


def cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def child_processes() -> set[int]:
    """Process ids of the children of this process that run or were not waited for."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, then the parent's id.
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if folder.name.isdigit() and int(stat[1]) == os.getpid():
                found.add(int(folder.name))
    return found


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
