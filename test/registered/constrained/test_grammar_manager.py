"""GrammarManager: results off the loop, cache, cancel, limits, hostile sources."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.constrained.base_grammar import Grammar, GrammarTimeoutError
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="cpu")

VOCAB_SIZE = 421


class SlowBackend:
    """Compiles when told to; counts its calls."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[str] = []
        self.closed = False

    def compile(self, kind: str, source: str) -> Grammar:
        assert self.go.wait(30)
        self.compiled.append(source)
        if source == "crash":
            raise KeyError("boom")
        if source == "late":
            raise GrammarTimeoutError("late")
        if source.startswith("bad"):
            raise ValueError(f"invalid {kind}: {source}")
        return FakeGrammar(source)

    def fill_eos_mask(self, bitmask_row: torch.Tensor) -> None:
        bitmask_row.fill_(1)

    def close(self) -> None:
        self.closed = True


class FakeGrammar:
    def __init__(self, source: str) -> None:
        self.source = source

    def accept(self, token_id: int) -> None:
        raise RuntimeError("not allowed")

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        if self.source == "tired":
            raise RuntimeError("the grammar stopped: fuel")
        bitmask_row.fill_(len(self.source))

    def is_terminated(self) -> bool:
        return False

    def rollback(self, n_tokens: int) -> None:
        raise ValueError("nothing to roll back")

    def fork(self) -> Grammar:
        return FakeGrammar(self.source)


def poll_until(
    manager: GrammarManager, n: int, timeout_s: float = 30.0
) -> dict[str, Grammar | ValueError]:
    """Poll until `n` requests have come back."""
    found: dict[str, Grammar | ValueError] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < n:
        assert time.monotonic() < deadline, f"only {sorted(found)} came back"
        found.update(manager.poll())
        time.sleep(0.002)
    return found


@pytest.fixture(scope="module")
def hasty(tokenizer_json: str) -> Iterator[LLGuidanceBackend]:
    result = LLGuidanceBackend(
        tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0], compile_timeout_s=2.0
    )
    yield result
    result.close()


@pytest.fixture
def slow() -> SlowBackend:
    return SlowBackend()


def test_poll_never_waits(slow: SlowBackend) -> None:
    manager = GrammarManager(slow)
    manager.submit("r", "regex", "x")
    started = time.monotonic()
    assert manager.poll() == []
    assert time.monotonic() - started < 1.0
    assert manager.num_waiting() == 1
    slow.go.set()
    assert isinstance(poll_until(manager, 1)["r"], FakeGrammar)
    assert manager.num_waiting() == 0
    manager.shutdown()
    assert slow.closed


def test_equal_sources_compile_once_and_do_not_share_state(slow: SlowBackend) -> None:
    manager = GrammarManager(slow)
    for rid in "abc":
        manager.submit(rid, "regex", "same")
    slow.go.set()
    found = poll_until(manager, 3)
    manager.submit("d", "regex", "same")
    found.update(manager.poll())
    assert slow.compiled == ["same"]
    assert len({id(g) for g in found.values()}) == 4
    manager.submit("e", "ebnf", "same")
    poll_until(manager, 1)
    assert slow.compiled == ["same", "same"]
    manager.shutdown()


def test_errors_reach_every_request_and_are_cached(slow: SlowBackend) -> None:
    slow.go.set()
    manager = GrammarManager(slow)
    for rid, source in (("a", "bad"), ("b", "crash"), ("c", "fine")):
        manager.submit(rid, "regex", source)
    found = poll_until(manager, 3)
    assert "invalid regex: bad" in str(found["a"])
    assert "could not be compiled" in str(found["b"]) and "boom" in str(found["b"])
    assert isinstance(found["c"], FakeGrammar)
    manager.submit("d", "regex", "bad")
    assert isinstance(dict(manager.poll())["d"], ValueError)
    assert slow.compiled.count("bad") == 1
    manager.shutdown()


def test_a_timeout_is_not_cached(slow: SlowBackend) -> None:
    slow.go.set()
    manager = GrammarManager(slow)
    for rid in ("a", "b"):
        manager.submit(rid, "regex", "late")
        assert isinstance(poll_until(manager, 1)[rid], GrammarTimeoutError)
    assert slow.compiled == ["late", "late"]
    manager.shutdown()


def test_cache_is_bounded_and_keeps_the_recent(slow: SlowBackend) -> None:
    slow.go.set()
    manager = GrammarManager(slow, max_cached=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        manager.submit("r", "regex", source)
        poll_until(manager, 1)
    assert slow.compiled == ["a", "b", "c", "b"]
    manager.shutdown()


def test_cancel(slow: SlowBackend) -> None:
    manager = GrammarManager(slow)
    manager.submit("gone", "regex", "x")
    manager.submit("stays", "regex", "x")
    manager.cancel("gone")
    manager.cancel("never seen")
    slow.go.set()
    assert set(poll_until(manager, 1)) == {"stays"}
    manager.submit("gone too", "regex", "x")
    manager.cancel("gone too")
    assert manager.poll() == [] and manager.num_waiting() == 0
    manager.shutdown()


def test_waiting_is_bounded(slow: SlowBackend) -> None:
    manager = GrammarManager(slow, timeout_s=0.05, n_threads=1)
    manager.submit("a", "regex", "x")
    manager.submit("b", "json_schema", "y")
    found = poll_until(manager, 2)
    assert str(found["a"]) == "regex was not compiled within 0.05 seconds"
    assert isinstance(found["b"], ValueError)
    # A grammar that was compiled too late serves the next request.
    slow.go.set()
    deadline = time.monotonic() + 30
    while len(slow.compiled) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    manager.submit("c", "regex", "x")
    assert isinstance(poll_until(manager, 1)["c"], FakeGrammar)
    manager.shutdown()


def test_fill_batch_mask(slow: SlowBackend) -> None:
    slow.go.set()
    manager = GrammarManager(slow)
    out = allocate_vocab_mask(6, VOCAB_SIZE)
    out[:] = 77
    failed = manager.fill_batch_mask(
        [None, FakeGrammar("four"), FakeGrammar("tired"), None], out
    )
    assert failed == {2: "the grammar stopped: fuel"}
    assert out[:, 0].tolist() == [-1, 4, 1, -1, 77, 77]
    assert bool((out == out[:, :1]).all())
    manager.shutdown()


def test_with_llguidance(backend: LLGuidanceBackend) -> None:
    manager = GrammarManager(backend)
    manager.submit("a", "json_schema", '{"type": "object"}')
    manager.submit("b", "regex", "(")
    found = poll_until(manager, 2)
    assert isinstance(found["b"], ValueError)
    grammar = found["a"]
    assert not isinstance(grammar, ValueError)
    out = allocate_vocab_mask(3, VOCAB_SIZE)
    assert manager.fill_batch_mask([None, grammar, None], out) == {}
    assert out[0, 0] == -1 and out[1, 0] != -1 and out[2, 0] == -1


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


def test_a_missing_sandbox_is_reported(
    tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No interpreter starts with it.
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    broken = LLGuidanceBackend(tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0])
    manager = GrammarManager(broken)
    manager.submit("r", "regex", "ab")
    assert "sandbox did not start" in str(poll_until(manager, 1)["r"])
    manager.shutdown()


def test_sandbox_ends_when_closed(tokenizer_json: str) -> None:
    before = child_processes()
    short_lived = LLGuidanceBackend(tokenizer_json, vocab_size=VOCAB_SIZE, eos_ids=[0])
    short_lived.compile("regex", "ab")
    (sandbox,) = child_processes() - before
    short_lived.close()
    assert sandbox not in child_processes()


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
