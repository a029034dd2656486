"""Grammars followed token by token: random walks, termination, rollback, errors."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from sglang.srt.constrained.llguidance_backend import (
    LLGuidanceBackend,
    LLGuidanceGrammar,
)
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask, apply_vocab_mask
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=2, suite="cpu")

VOCAB_SIZE = 421
EOS_IDS = [0, 2]


def allowed_ids(grammar: LLGuidanceGrammar) -> list[int]:
    """Tokens that `apply_vocab_mask` leaves of equal logits."""
    mask = torch.randint(-(2**31), 2**31 - 1, (1, 14), dtype=torch.int32)
    grammar.fill_mask(mask[0])
    logits = apply_vocab_mask(torch.zeros(1, VOCAB_SIZE), mask)
    assert set(logits.unique().tolist()) <= {0.0, float("-inf")}
    return (logits[0] == 0).nonzero()[:, 0].tolist()


def walk(
    grammar: LLGuidanceGrammar, rng: random.Random, max_tokens: int
) -> tuple[list[int], bool]:
    """Random allowed tokens until EOS; (tokens without EOS, EOS reached)."""
    tokens: list[int] = []
    for _ in range(max_tokens):
        choice = rng.choice(allowed_ids(grammar))
        grammar.accept(choice)
        if choice in EOS_IDS:
            assert grammar.is_terminated()
            return tokens, True
        tokens.append(choice)
    return tokens, False


REGEXES = [
    r"[a-c]{3,8}x?",
    r"(foo|bar)(, (foo|bar)){0,4}\.",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?",
    r"\d{4}-(0[1-9]|1[0-2])-\d{2}",
    r"(é|ß|漢|🙂){1,6}",
    r"^anchored$",
    r"(a|ab)(c|bcd)?d*",
    "a/b\n[\\d/]",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_walks_match_the_regex(
    pattern: str, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    template = backend.compile("regex", pattern)
    rng = random.Random(pattern)
    finished = set()
    for _ in range(count(ci=40, full=400)):
        tokens, done = walk(template.fork(), rng, 80)
        if done:
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            assert re.fullmatch(pattern, text), text
            finished.add(text)
    assert len(finished) >= 1
    assert allowed_ids(template) == allowed_ids(backend.compile("regex", pattern))


POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "size": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["box", "line", None, 4]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def check_point(value: Any) -> None:
    assert set(value) <= set(POINT["properties"]) and {"name", "size"} <= set(value)
    assert isinstance(value["name"], str) and len(value["name"]) <= 5
    assert len(value["size"]) <= 3
    assert all(type(item) is int for item in value["size"])
    assert isinstance(value.get("ok", True), bool)
    assert value.get("kind") in ["box", "line", None, 4]


def check_choice(value: Any) -> None:
    assert value is True or (isinstance(value, int) and 3 <= value <= 17)


SCHEMAS = [
    (POINT, check_point),
    ({"oneOf": [{"const": True}, {"type": "integer", "minimum": 3, "maximum": 17},
                {"type": "integer", "minimum": 10, "maximum": 12}]},
     check_choice),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 4},
     lambda value: value in [[None] * n for n in (2, 3, 4)] or pytest.fail(str(value))),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "check"), SCHEMAS, ids=["object", "oneOf", "array"])
def test_walks_validate(
    schema: Any, check: Any, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    template = backend.compile("json_schema", json.dumps(schema))
    rng = random.Random(3)
    n_finished = 0
    for _ in range(count(ci=60, full=500)):
        tokens, done = walk(template.fork(), rng, 200)
        if done:
            check(json.loads(tokenizer.decode(tokens, skip_special_tokens=False)))
            n_finished += 1
    assert n_finished >= 10


def test_compact_and_spaced_json_are_both_accepted(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    template = backend.compile("json_schema", json.dumps(POINT))
    value = {"name": "a", "size": [1, 2]}
    for indent, separators in ((None, (",", ":")), (None, None), (2, None)):
        grammar = template.fork()
        text = json.dumps(value, indent=indent, separators=separators)
        for token_id in tokenizer.encode(text).ids:
            grammar.accept(token_id)
        assert allowed_ids(grammar) == EOS_IDS


GBNF = """
# A sum of numbers.
root ::= term ("+" term)*
term ::= number | "(" root ")"
number ::= [0-9]{1,3}
"""
LARK = """
start: term ("+" term)*
term: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""


@pytest.mark.parametrize("source", [GBNF, LARK], ids=["gbnf", "lark"])
def test_walks_follow_the_ebnf(
    source: str, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    template = backend.compile("ebnf", source)
    rng = random.Random(5)
    n_finished = 0
    for _ in range(count(ci=60, full=500)):
        tokens, done = walk(template.fork(), rng, 60)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        if done:
            assert re.fullmatch(r"[0-9+()]+", text), text
            assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)
            n_finished += 1
    assert n_finished >= 10


def test_padding_and_special_ids_are_never_allowed(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    grammar = backend.compile("regex", r"(.|\n)*")
    ids = allowed_ids(grammar)
    assert max(ids) < tokenizer.get_vocab_size() < VOCAB_SIZE
    assert 1 not in ids
    assert set(EOS_IDS) < set(ids)


def test_a_complete_grammar_allows_eos_only(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    grammar = backend.compile("regex", "ab")
    assert not grammar.is_terminated()
    for token_id in tokenizer.encode("ab").ids:
        grammar.accept(token_id)
    assert grammar.is_terminated()
    assert allowed_ids(grammar) == EOS_IDS
    with pytest.raises(RuntimeError, match="does not allow token 70 after"):
        grammar.accept(70)
    for eos_id in (2, 0, 2):
        grammar.accept(eos_id)
        assert grammar.is_terminated() and allowed_ids(grammar) == EOS_IDS


def test_a_refused_token_changes_nothing(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    grammar = backend.compile("regex", "a[bc]d")
    grammar.accept(tokenizer.token_to_id("a"))
    before = allowed_ids(grammar)
    for token_id in set(range(VOCAB_SIZE)) - set(before):
        with pytest.raises(RuntimeError, match="does not allow token"):
            grammar.accept(token_id)
    assert allowed_ids(grammar) == before
    grammar.accept(tokenizer.token_to_id("c"))
    grammar.accept(tokenizer.token_to_id("d"))
    assert grammar.is_terminated()


@pytest.mark.parametrize(
    ("kind", "source"),
    [("regex", REGEXES[1]), ("json_schema", json.dumps(POINT)), ("ebnf", GBNF)],
)
def test_rollback_and_fork(kind: str, source: str, backend: LLGuidanceBackend) -> None:
    template = backend.compile(kind, source)
    for seed in range(count(ci=15, full=200)):
        rng = random.Random(seed)
        grammar = template.fork()
        masks = [allowed_ids(grammar)]
        for _ in range(rng.randint(1, 40)):
            grammar.accept(rng.choice(masks[-1]))
            masks.append(allowed_ids(grammar))
        accepted = len(masks) - 1
        fork = grammar.fork()
        n = rng.randint(0, accepted)
        grammar.rollback(n)
        assert allowed_ids(grammar) == masks[accepted - n]
        assert allowed_ids(fork) == masks[-1]
        grammar.rollback(accepted - n)
        assert allowed_ids(grammar) == masks[0]
        assert not grammar.is_terminated()
        with pytest.raises(ValueError, match="cannot roll back 1 tokens.*accepted 0"):
            grammar.rollback(1)
        fork.rollback(accepted)
        assert allowed_ids(fork) == masks[0]


def test_rollback_over_repeated_eos(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    for pattern in ("a", "a*"):
        grammar = backend.compile("regex", pattern)
        start = allowed_ids(grammar)
        for token_id in (tokenizer.token_to_id("a"), 0, 2, 0):
            grammar.accept(token_id)
        grammar.rollback(2)
        assert grammar.is_terminated()
        grammar.rollback(2)
        assert allowed_ids(grammar) == start


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "[z-a]", "invalid"),
        ("regex", "", "must not be empty"),
        ("json_schema", "{", "invalid json_schema"),
        ("json_schema", "", "invalid json_schema"),
        ("json_schema", "[1]", "an object or a boolean, got"),
        ("json_schema", '{"type": "foo"}', 'type: "foo"'),
        ("json_schema", '{"not": {"const": "x"}}', "not"),
        ("json_schema", '{"$ref": "#/nope"}', "nope"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "min"),
        ("ebnf", 'root ::= "a" b', "'b' not found"),
        ("ebnf", 'start: "a" b', "unknown name"),
        ("ebnf", "", "root"),
        ("ebnf", "hello", "::="),
        ("ebnf", "root ::= root", "cannot be followed"),
        ("xml", "<a/>", "unknown grammar kind 'xml'.*regex"),
    ],
)
def test_invalid_sources_are_explained(
    kind: str, source: str, message: str, backend: LLGuidanceBackend
) -> None:
    with pytest.raises(ValueError, match=message):
        backend.compile(kind, source)


def test_tokenizer_from_a_path(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    from_path = LLGuidanceBackend(path, vocab_size=VOCAB_SIZE, eos_ids=EOS_IDS)
    try:
        grammar = from_path.compile("regex", "ab")
        assert tokenizer.token_to_id("a") in allowed_ids(grammar)
    finally:
        from_path.close()


def test_constructor_errors(tokenizer: Tokenizer) -> None:
    text = tokenizer.to_str()
    with pytest.raises(ValueError, match="at least one EOS"):
        LLGuidanceBackend(text, vocab_size=VOCAB_SIZE, eos_ids=[])
    with pytest.raises(ValueError, match="EOS token id 999 is outside"):
        LLGuidanceBackend(text, vocab_size=VOCAB_SIZE, eos_ids=[999])
    with pytest.raises(ValueError, match="vocab size too small"):
        LLGuidanceBackend(text, vocab_size=50, eos_ids=[0])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 4096])
def test_apply_vocab_mask_bit_by_bit(vocab_size: int) -> None:
    mask = allocate_vocab_mask(5, vocab_size)
    mask[1:] = torch.randint(-(2**31), 2**31 - 1, mask[1:].shape, dtype=torch.int32)
    logits = torch.randn(5, vocab_size)
    got = apply_vocab_mask(logits, mask)
    for row in range(5):
        words = mask[row].tolist()
        for i in range(vocab_size):
            is_allowed = words[i // 32] >> (i % 32) & 1
            assert got[row, i] == (logits[row, i] if is_allowed else float("-inf"))


def test_forks_that_wait_share_their_state(backend: LLGuidanceBackend) -> None:
    """A copy of this state takes 230 kB; 4,000 requests of a call took 950 MB."""
    schema = {"enum": [f"value number {i:05d}" for i in range(3000)]}
    template = backend.compile_checked("json_schema", json.dumps(schema))
    forks = [template.fork() for _ in range(50)]
    assert {id(fork._matcher) for fork in forks} == {id(template._matcher)}
    first, second, third = forks[:3]
    choices = allowed_ids(first)
    assert choices == allowed_ids(template.fork())
    for token in choices[:1]:
        first.accept(token)
    again = first.fork()
    assert allowed_ids(again) == allowed_ids(first) != choices
    again.rollback(1)
    assert allowed_ids(again) == allowed_ids(second) == allowed_ids(third) == choices
    assert allowed_ids(first) != choices
    matchers = {id(fork._matcher) for fork in (first, second, third, again, forks[3])}
    assert len(matchers) == 5


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
