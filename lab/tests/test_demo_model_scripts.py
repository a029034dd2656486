"""The tools that train the model: corpus rules, chat samples, packing, and the measure
of completions that parse."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.demo_model.build_corpus import clean, is_heldout, is_skipped
from lab.demo_model.chat_samples import (
    base_verb,
    first_sentence,
    iter_samples,
    name_to_sentence,
    third_person,
)
from lab.demo_model.completions import (
    PromptCase,
    choose_cases,
    cut_completion,
    distinct_ratio,
    does_parse,
    iter_cases,
    pooled_distinct_ratio,
)
from lab.demo_model.data import Split, cut_windows, epoch_windows, join
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="lab")

SOURCE = '''\
import os


class Reader:
    def lines(self, path):
        """Return the lines of a file.

        The file is closed.
        """
        with open(path) as stream:
            found = stream.readlines()

        # A comment inside.
        return found

    def close(self): pass


def short(x):
    return x


def count_items(values, key):
    """Counts the values
    that have a key."""
    total = 0
    for value in values:
        if key in value:
            total += 1
    return total
'''


def case_named(name: str) -> PromptCase:
    return next(
        c for c in iter_cases("a.py", SOURCE) if f"def {name}" in c.prompt[-200:]
    )


def test_corpus_keeps_source_and_drops_the_rest() -> None:
    source = "import os\n" * 10
    assert clean(source.replace("\n", "  \r\n").encode()) == source
    assert clean(b"\xff" * 100) is None
    assert clean(b"print 'python 2'\n" * 10) is None
    assert clean(b"x = [" + b"1234567890, " * 40 + b"]\n") is None
    assert clean(("x = '" + "a" * 2000 + "'\n").encode()) is None
    assert is_skipped("numpy/lib/tests/a.py") and not is_skipped("numpy/testing/a.py")


def test_heldout_is_two_percent_of_hashes() -> None:
    share = sum(is_heldout(f"{i * 2654435761 % 2**32:08x}") for i in range(50_000))
    assert 0.018 < share / 50_000 < 0.022


@pytest.mark.parametrize(
    ("verb", "expected"),
    [("return", "returns"), ("copy", "copies"), ("search", "searches"), ("do", "does")],
)
def test_verbs_go_both_ways(verb: str, expected: str) -> None:
    assert third_person(verb) == expected
    assert base_verb(expected.capitalize()) == verb
    assert base_verb("class") is None


def test_requests_come_from_docstrings_and_names() -> None:
    assert first_sentence("\n  Return ``x``\n  twice. More.\n\n  Rest") == (
        "Return `x` twice."
    )
    assert first_sentence(">>> f()") == ""
    assert name_to_sentence("_parse_header") == "Parse header."
    assert name_to_sentence("header") == "" and name_to_sentence("__init__") == ""


def test_chat_samples_ask_for_what_they_answer() -> None:
    samples = list(iter_samples(SOURCE, random.Random(0)))
    answers = {sample.assistant for sample in samples}
    assert not any("def short" in a or "def close" in a for a in answers)
    counted = [s for s in samples if s.assistant.startswith("def count_items(")]
    assert len(counted) > 1
    for sample in counted:
        compile(sample.assistant, "<sample>", "exec")
        assert "that have a key" in sample.user
    lines = [s for s in samples if "def lines" in s.assistant]
    assert len(lines) == 1 and "return found" in lines[0].assistant


def test_cases_end_behind_the_docstring() -> None:
    case = case_named("lines")
    assert case.prompt.endswith('closed.\n        """\n')
    assert case.reference.endswith("return found\n")
    assert len(list(iter_cases("a.py", SOURCE))) == 2
    assert len(choose_cases([("a.py", SOURCE)], count=9, seed=0)) == 2


def test_the_original_text_is_cut_at_the_end_of_its_function() -> None:
    for case in iter_cases("a.py", SOURCE):
        rest = SOURCE[len(case.prompt) :]
        for is_truncated in (False, True):
            if rest == case.reference and is_truncated:
                continue  # nothing after the function shows that it has ended
            cut = cut_completion(case, rest, is_truncated=is_truncated)
            assert cut.is_closed and cut.text == case.reference
            assert does_parse(case, cut)


def test_a_truncated_completion_loses_what_is_unfinished() -> None:
    case = case_named("lines")
    body = "        a = 1\n        b = 2\n"
    for tail in ("        c = (1,", "        c = (1,\n", "        if a:\n            "):
        cut = cut_completion(case, body + tail, is_truncated=True)
        assert cut.text == body and not cut.is_closed
        assert does_parse(case, cut)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "        return 1\n",
        "        return 1\n        # only a comment\n",
        "        a = (1\n        b = 2\n",
        "        a = 1\n          b = 2\n",
        "a = 1\nb = 2\n",
        '        """never closed\n        a = 1\n',
    ],
)
def test_bad_completions_do_not_count(completion: str) -> None:
    case = case_named("lines")
    cut = cut_completion(case, completion, is_truncated=False)
    assert not does_parse(case, cut)


def test_distinct_ratios() -> None:
    assert distinct_ratio([[1, 2, 3, 4, 5], [7] * 8]) == pytest.approx((1 + 0.2) / 2)
    assert pooled_distinct_ratio([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.5
    assert distinct_ratio([[1, 2]]) == 0.0


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    length=st.integers(1, 16),
)
def test_windows_predict_every_token_once(sizes: list[int], length: int) -> None:
    documents = [np.arange(1, n + 1, dtype=np.uint16) for n in sizes]
    stream = join(documents)
    assert len(stream) == sum(sizes) + len(sizes) + 1
    assert stream[0] == 0 and stream[-1] == 0
    windows = cut_windows(stream, length=length)
    count = len(windows) * length
    assert np.array_equal(windows[:, 1:].flatten(), stream[1 : count + 1])
    assert len(stream) - 1 - count < length


def test_an_epoch_holds_every_file_and_the_share_of_chats() -> None:
    code = [np.full(50, i + 1, dtype=np.uint16) for i in range(100)]
    chat = [np.full(20, 1000 + i, dtype=np.uint16) for i in range(200)]
    split = Split(code=code, chat=chat, code_bytes=0, chat_bytes=0)
    first, second = (
        epoch_windows(split, length=8, chat_share=0.2, seed=seed) for seed in (0, 1)
    )
    tokens = first[:, 1:].flatten()
    assert 0.17 < (tokens >= 1000).sum() / (tokens > 0).sum() < 0.23
    assert set(range(1, 101)) <= set(tokens.tolist())
    assert set(np.unique(second)) != set(np.unique(first))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
