"""Stop strings: what is shown, what is held back; streams equal whole answers."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.front.output_text import OutputText
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.detokenizer import IncrementalDetokenizer
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.srt.utils.stop_matcher import StopMatcher
from sglang.srt.utils.stop_patterns import StopPatterns
from sglang.srt.utils.text_stops import held_back
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=4, suite="cpu")

TOKENIZER = load_tokenizer(str(bundled_demo_model_path()))
LENGTH = FinishReason(type="length", length=1)
PIECES = st.lists(
    st.sampled_from(["a", "ab", "b", "\n", "\n\n", "é", "x", "def"]), max_size=25
)


def new_detokenizer() -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TOKENIZER)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def stopped_at(pieces: list[list[int]], stop: str) -> tuple[list[list[int]], str]:
    """The tokens up to the one that completes `stop`, and their whole text."""
    shown = OutputText(TOKENIZER, SamplingParams())
    text, kept = "", []
    for token in (token for piece in pieces for token in piece):
        text += shown.push([token])
        kept.append([token])
        if stop in text:
            break
    return kept, text


@given(pieces=PIECES, stop=st.sampled_from(["ab", "aba", "\n\n", "bé", "ef"]))
@settings(max_examples=count(ci=300, full=10000), derandomize=True, deadline=None)
def test_streamed_pieces_join_to_the_trimmed_text(pieces: list[str], stop: str) -> None:
    steps, whole = stopped_at([ids_of(piece) for piece in pieces], stop)
    if not steps:
        return
    reason = LENGTH
    if stop in whole:
        reason = FinishReason(type="stop", matched=stop)
    streamed = OutputText(TOKENIZER, SamplingParams(stop=[stop]))
    parts = [streamed.push(step) for step in steps[:-1]]
    parts.append(streamed.push(steps[-1], reason))
    assert "".join(parts) == whole.split(stop)[0]
    at_once = OutputText(TOKENIZER, SamplingParams(stop=[stop]))
    flat = [token for step in steps for token in step]
    assert at_once.push(flat, reason) == "".join(parts)


def test_the_stop_string_is_kept_where_asked() -> None:
    shown = OutputText(TOKENIZER, SamplingParams(stop=["ab"], no_stop_trim=True))
    reason = FinishReason(type="stop", matched="ab")
    assert shown.push(ids_of("xab"), reason) == "xab"


def test_a_match_before_min_new_tokens_is_not_cut() -> None:
    """The first "ab" did not end the output; only the last one is trimmed."""
    shown = OutputText(TOKENIZER, SamplingParams(stop=["ab"]))
    reason = FinishReason(type="stop", matched="ab")
    tokens = [token for piece in ("ab", "x", "a", "b") for token in ids_of(piece)]
    assert shown.push(tokens, reason) == "abx"


def first_stop(
    texts: list[str], stops: list[str], min_new_tokens: int
) -> tuple[int, int] | None:
    """(tokens, characters) of the answer that the first stop ends, by brute force.

    `texts[n]` is the text of n tokens. A stop counts for the token that brings its last
    character.
    """
    for n in range(max(min_new_tokens, 1), len(texts)):
        starts = [
            start
            for stop in stops
            for start in range(len(texts[n]))
            if texts[n].startswith(stop, start)
            and start + len(stop) > len(texts[n - 1])
        ]
        if starts:
            return n, min(starts)
    return None


@given(
    pieces=PIECES,
    stops=st.lists(
        st.sampled_from(["a", "ab", "aba", "ba", "\n\n", "bé", "ef", "xx"]),
        min_size=1,
        max_size=3,
    ),
    min_new_tokens=st.integers(0, 12),
    cuts=st.sets(st.integers(1, 60)),
)
@settings(max_examples=count(ci=500, full=10000), derandomize=True, deadline=None)
def test_streams_equal_whole_answers_with_min_new_tokens(
    pieces: list[str], stops: list[str], min_new_tokens: int, cuts: set[int]
) -> None:
    """The first stop that counts ends the output, and nothing before it is lost."""
    tokens = [token for piece in pieces for token in ids_of(piece)]
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    texts = list(itertools.accumulate(map(detokenizer.push, tokens), initial=""))
    expected = first_stop(texts, stops, min_new_tokens)
    matcher = StopMatcher(new_detokenizer, stops=stops, patterns=[])
    found = [matcher.push(token) for token in tokens]
    counting = [n for n, m in enumerate(found, 1) if m and n >= min_new_tokens]
    assert counting[:1] == ([expected[0]] if expected else [])
    if not expected:
        return
    used, chars = tokens[: expected[0]], expected[1]
    reason = FinishReason(type="stop", matched=found[len(used) - 1])
    shown = OutputText(TOKENIZER, SamplingParams(stop=stops))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(used)), len(used)]
    parts = [shown.push(used[a:b]) for a, b in itertools.pairwise(bounds[:-1])]
    parts.append(shown.push(used[bounds[-2] :], reason))
    assert "".join(parts) == texts[-1][:chars]


def test_a_stop_without_new_text_is_no_match() -> None:
    """The window of the longer stop reaches back over the shorter one."""
    matcher = StopMatcher(new_detokenizer, stops=["b", "xxxxxx"], patterns=[])
    assert [matcher.push(t) for t in (*ids_of("b"), *ids_of("x"))] == ["b", None]


@pytest.mark.parametrize(
    ("pattern", "pieces", "found"),
    [
        ("a+b", ["x", "a", "ab", "x", "b"], [None, None, "aab", None, None]),
        # A match that was ignored does not hide the next one.
        ("a.*?b", ["ab", "x", "a", "b"], ["ab", None, None, "ab"]),
        ("a+", ["a", "x", "a"], ["a", None, "a"]),
        # Empty matches are none, whatever follows them.
        ("x*", ["a", "b", "x"], [None, None, "x"]),
        ("(ab)?", ["x", "a", "b"], [None, None, "ab"]),
        ("$", ["a", "b"], [None, None]),
        # Text before the one that is searched still counts.
        ("^x", ["x", "x"], ["x", None]),
        ("(?m)^x", ["x", "x", "\n", "x"], ["x", None, None, "x"]),
        (r"\pL", ["é"], ["é"]),
    ],
)
def test_patterns_match_once_where_they_end(
    pattern: str, pieces: list[str], found: list[str | None]
) -> None:
    patterns, text, hits = StopPatterns([pattern]), "", []
    for piece in pieces:
        known, text = len(text), text + piece
        hits.append(patterns.find(text, known=known))
    assert [hit is not None for hit in hits] == [each is not None for each in found]
    assert set(hits) <= {None, pattern}


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|b)*a(a|b){400}c", "(?:a?){900}a{900}c", "(|a)*c"]
)
def test_no_pattern_runs_away(pattern: str) -> None:
    """Backtracking takes forever here, and a search of the whole text grows with it."""
    patterns, text = StopPatterns([pattern]), "ab" * 500_000 + "a" * 2000
    start = time.monotonic()
    patterns.find(text, known=len(text))
    assert time.monotonic() - start < 2


def test_text_that_matched_a_pattern_is_kept() -> None:
    shown = OutputText(TOKENIZER, SamplingParams(stop_regex=["a+b"]))
    reason = FinishReason(type="stop", matched="aab")
    assert shown.push(ids_of("xaab"), reason) == "xaab"


@pytest.mark.parametrize(("keep", "text"), [(False, "x"), (True, "xdef")])
def test_stop_tokens_are_not_shown(keep: bool, text: str) -> None:
    tokens = ids_of("x") + ids_of("def")[:1]
    params = SamplingParams(stop_token_ids=tokens[-1:], no_stop_trim=keep)
    reason = FinishReason(type="stop", matched=tokens[-1])
    assert OutputText(TOKENIZER, params).push(tokens, reason) == text


@pytest.mark.parametrize("skip", [True, False])
def test_the_end_token_is_not_shown(skip: bool) -> None:
    assert TOKENIZER.eos_token_id is not None
    tokens = [*ids_of("x"), TOKENIZER.eos_token_id]
    params = SamplingParams(skip_special_tokens=skip)
    reason = FinishReason(type="stop", matched=TOKENIZER.eos_token_id)
    assert OutputText(TOKENIZER, params).push(tokens, reason) == "x"


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1), max_size=3),
)
@settings(max_examples=count(ci=300, full=5000), derandomize=True, deadline=None)
def test_held_back_is_the_longest_beginning_of_a_stop(
    text: str, stops: list[str]
) -> None:
    expected = max(
        (
            n
            for n in range(1, len(text) + 1)
            for stop in stops
            if n < len(stop) and stop.startswith(text[-n:])
        ),
        default=0,
    )
    assert held_back(text, stops) == expected


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
