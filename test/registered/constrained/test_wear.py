"""Compiled state that grows with every output: limits, estimates, end tokens."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer

from sglang.srt.constrained.base_grammar import EosInsideGrammarError, GrammarLimitError
from sglang.srt.constrained.llguidance_backend import (
    LLGuidanceBackend,
    LLGuidanceGrammar,
)
from sglang.srt.constrained.llguidance_compiler import StateLimits
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

VOCAB_SIZE = 421
EOS_IDS = [0, 2]
# Every word makes states of its own.
WORDS = r"(\w+ ?){1,300}"


@pytest.fixture(scope="module")
def frail(tokenizer_json: str) -> LLGuidanceBackend:
    return LLGuidanceBackend(
        tokenizer_json,
        vocab_size=VOCAB_SIZE,
        eos_ids=EOS_IDS,
        limits=StateLimits(max_states=400),
    )


def mask_of(grammar: LLGuidanceGrammar) -> list[int]:
    mask = torch.zeros(14, dtype=torch.int32)
    grammar.fill_mask(mask)
    bits = mask.view(torch.uint8)[:, None] >> torch.arange(8) & 1
    return bits.flatten().nonzero()[:, 0].tolist()


def follow(
    grammar: LLGuidanceGrammar, rng: random.Random, tokens: list[int], upto: int
) -> None:
    """Append random allowed tokens until there are `upto`."""
    while len(tokens) < upto:
        token = rng.choice([t for t in mask_of(grammar) if t not in EOS_IDS])
        tokens.append(token)
        grammar.accept(token)


def test_outputs_wear_out_what_they_share_and_resume_alone(
    frail: LLGuidanceBackend,
) -> None:
    template = frail.compile_checked("regex", WORDS)
    before = template.shared_bytes()
    rng = random.Random(1)
    failed = 0
    follow(template.fork(), rng, [], 5)
    assert template.shared_bytes() > before
    for _ in range(20):
        grammar, tokens = template.fork(), list[int]()
        while len(tokens) < 60:
            try:
                follow(grammar, rng, tokens, 60)
            except GrammarLimitError:
                failed += 1
                grammar = frail.resume("regex", WORDS, tokens)
    assert failed >= 10
    assert not template.is_usable()
    # Others do not notice, and one that is compiled again is as new.
    again = frail.compile_checked("regex", WORDS)
    assert again.is_usable() and again.shared_bytes() == before


def test_masks_after_a_resume_are_those_of_an_unworn_grammar(
    frail: LLGuidanceBackend, backend: LLGuidanceBackend
) -> None:
    for seed in range(5):
        reference, tokens = backend.compile_checked("regex", WORDS), list[int]()
        follow(reference, random.Random(seed), tokens, 40)
        resumed = frail.resume("regex", WORDS, tokens)
        assert mask_of(resumed) == mask_of(reference)
        resumed.rollback(40)
        assert mask_of(resumed) == mask_of(backend.compile_checked("regex", WORDS))


def test_an_estimate_does_not_change_what_it_measures(
    backend: LLGuidanceBackend,
) -> None:
    grammar = backend.compile_checked("regex", WORDS)
    follow(grammar, random.Random(3), tokens := [], 20)
    sizes = {grammar.shared_bytes() for _ in range(50)}
    assert len(sizes) == 1 and grammar.is_usable()
    follow(grammar, random.Random(4), tokens, 40)
    assert grammar.shared_bytes() > sizes.pop()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("ebnf", 'root ::= "a" "<end>"'),
        ("ebnf", 'root ::= "a" "<end>" "b"'),
        ("ebnf", "start: /a<end>/"),
        ("ebnf", "start: (/a/ | <eos>)*"),
        ("regex", r"a\<eos\>b"),
    ],
)
def test_an_eos_in_a_source_is_refused(
    kind: str, source: str, backend: LLGuidanceBackend
) -> None:
    with pytest.raises(ValueError, match="a token that ends an output"):
        backend.compile(kind, source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("json_schema", '{"const": "<end>x"}'), ("ebnf", 'start: "b" <[0-3]> "b"')],
)
def test_an_eos_that_only_the_mask_names(
    kind: str, source: str, backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    grammar = backend.compile(kind, source)
    for _ in range(8):
        allowed = mask_of(grammar)
        eos = [t for t in allowed if t in EOS_IDS]
        if eos:
            with pytest.raises(EosInsideGrammarError, match="inside an output"):
                grammar.accept(eos[0])
            assert mask_of(grammar) == allowed
            return
        grammar.accept(allowed[0])
    # The library spells it in ordinary tokens here.
    assert kind == "json_schema"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
