"""Tokenizers of GGUF files: small vocabularies, one for each mechanism of the format.

The suite `real` has published vocabularies with the ids that are right.
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from sglang.srt.utils.gguf_header import read_gguf_header
from sglang.srt.utils.gguf_tokenizer import GgufTokenizer
from sglang.srt.utils.gguf_words import WORDS
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.gguf_files import write_vocabulary
from sglang.test.scale import count
from sglang.test.tiny_models import byte_alphabet

register_cpu_ci(est_time=3, suite="cpu")

# Without merges for what they make, as Llama 3 has hundreds: `hello` is reached by
# nothing but its own entry.
WORD_TOKENS = [*byte_alphabet(), "he", "ll", "hello", "<|bos|>", "<|eos|>", "<tool>"]
WORD_MERGES = ["h e", "l l"]
BOS = WORD_TOKENS.index("<|bos|>")
BMP = [code for code in range(0x10000) if not 0xD800 <= code < 0xE000]
KINDS = {
    "<|bos|>": TokenType.CONTROL,
    "<|eos|>": TokenType.CONTROL,
    "<tool>": TokenType.USER_DEFINED,
}


def byte_level(tmp_path: Path, *, architecture: str = "llama", **values: Any) -> Path:
    return write_vocabulary(
        tmp_path / "m.gguf",
        WORD_TOKENS,
        architecture=architecture,
        merges=WORD_MERGES,
        kinds=KINDS,
        **{"bos_token_id": BOS, "eos_token_id": BOS + 1} | values,
    )


def pieces(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=special)
    return [tokenizer.token_text(token_id) for token_id in ids]


# -- byte-level BPE ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        *((name, ["hello"]) for name in ("llama-bpe", "llama3", "tekken", "pixtral")),
        *((name, ["he", "ll", "o"]) for name in ("qwen2", "smaug-bpe", "gpt-2")),
    ],
)
def test_a_word_of_the_vocabulary_is_one_token_where_merges_are_ignored(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path, pre=pre)))
    assert pieces(tokenizer, "hello") == expected


NAMES_BY_WORDS = {
    "llama-bpe": ("llama-v3", "llama3", "dbrx", "smaug-bpe"),
    "qwen2": ("deepseek-r1-qwen",),
    "tekken": ("pixtral",),
    "smollm": ("command-r", "refact", "starcoder"),
    "gpt-2": ("mpt",),
}
# Name -> texts with "|" between their words.
CUTS: dict[str, list[str]] = {
    "deepseek-coder": [
        *("I|'|ve| |1|2|3|4| WE|'|LL", "a|  |\n|\n| c|\r|\n|  ", "Hé| |漢字| ا|.| +="),
        *("x|.|y|//|\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301|x"),
    ],
    "deepseek-llm": [
        *("I|'|ve| |1|2|3|4| WE|'|LL", "a|  |\n|\n| c|\r|\n|  ", "H|é| |漢字| ا|.| +="),
        *("x|.|y|//|\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301|x"),
    ],
    "deepseek-v3": [
        *("I|'ve| |123|4| WE|'LL", "a|  \n\n| c|\r\n|  ", "Hé| |漢字| ا|.| +="),
        *("x|.y|//\n", "HelloWorld| HTMLPage", "ภาษา| e\u0301x"),
    ],
    "default": [
        *("I|'|ve| |123|4| WE|'|LL", "a|  \n\n| c|\r\n  ", "Hé| 漢字| ا|.| |+="),
        *("x|.|y|//|\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301|x"),
    ],
    "gpt-2": [
        *("I|'ve| 1234| WE|'|LL", "a|  \n\n| c|\r\n  ", "Hé| 漢字| ا|.| +="),
        *("x|.|y|//|\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301|x"),
    ],
    "gpt-4o": [
        *("I've| |123|4| WE'LL", "a|  \n\n| c|\r\n|  ", "Hé| 漢字| ا|.| +="),
        *("x|.y|//\n", "Hello|World| HTMLPage", "ภาษา| e\u0301x"),
    ],
    "llama-bpe": [
        *("I|'ve| |123|4| WE|'LL", "a|  \n\n| c|\r\n|  ", "Hé| 漢字| ا|.| +="),
        *("x|.y|//\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301x"),
    ],
    "qwen2": [
        *("I|'ve| |1|2|3|4| WE|'LL", "a|  \n\n| c|\r\n|  ", "Hé| 漢字| ا|.| +="),
        *("x|.y|//\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301x"),
    ],
    "qwen35": [
        *("I|'ve| |1|2|3|4| WE|'LL", "a|  \n\n| c|\r\n|  ", "Hé| 漢字| ا|.| +="),
        *("x|.y|//\n", "HelloWorld| HTMLPage", "ภาษา| e\u0301x"),
    ],
    "smollm": [
        *("I|'ve| |1|2|3|4| WE|'|LL", "a|  \n\n| c|\r\n  ", "Hé| 漢字| ا|.| +="),
        *("x|.|y|//|\n", "HelloWorld| HTMLPage", "ภาษา| e|\u0301|x"),
    ],
    "tekken": [
        *("I|'ve| |1|2|3|4| WE|'LL", "a|  \n\n| c|\r\n|  ", "Hé| 漢字| ا|.| +="),
        *("x|.y|//\n", "Hello|World| HTMLPage", "ภาษา| e\u0301x"),
    ],
}


@pytest.mark.parametrize("name", CUTS)
def test_words_are_cut_as_the_pre_tokenizer_s_name_says(
    tmp_path: Path, name: str
) -> None:
    header = read_gguf_header(byte_level(tmp_path, pre=name))
    backend = GgufTokenizer(header).backend()
    assert backend.pre_tokenizer is not None
    for cut in CUTS[name]:
        text = cut.replace("|", "")
        spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert "|".join(text[begin:end] for begin, end in spans) == cut


def test_every_name_has_a_row() -> None:
    same = [name for names in NAMES_BY_WORDS.values() for name in names]
    assert {*CUTS, *same} == set(WORDS)
    for name, names in NAMES_BY_WORDS.items():
        assert all(WORDS[other].patterns == WORDS[name].patterns for other in names)


def test_deepseek_s_letters_are_those_with_case() -> None:
    found = re.findall(WORDS["deepseek-llm"].patterns[1], "".join(map(chr, BMP)))
    kinds = {unicodedata.category(char) for char in "".join(found)}
    assert kinds - {"Zs", "Zl", "Zp", "Cc"} == {"Lu", "Ll", "Lt"}


@pytest.mark.parametrize(
    ("values", "architecture", "words"),
    [
        ({"pre": "viking"}, "llama", ['tokenizer.ggml.pre "viking"', "llama-bpe"]),
        ({}, "llama", ["tokenizer.ggml.pre null", "--tokenizer-path"]),
        ({"model": "rwkv"}, "llama", ['tokenizer.ggml.model "rwkv"', "gpt2, llama"]),
        ({"model": "t5"}, "qwen2", ['tokenizer.ggml.model "t5"']),
        ({"pre": "Qwen2"}, "qwen2", ['tokenizer.ggml.pre "Qwen2"']),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, values: dict[str, str], architecture: str, words: list[str]
) -> None:
    file = byte_level(tmp_path, architecture=architecture, **values)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(str(file))
    for word in [*words, "m.gguf"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("values", [{}, {"pre": "default"}])
def test_a_family_with_one_pre_tokenizer_needs_no_name(
    tmp_path: Path, architecture: str, values: dict[str, str]
) -> None:
    file = byte_level(tmp_path, architecture=architecture, **values)
    assert pieces(load_tokenizer(str(file)), "I've 12") == [*"I've 12"]


@pytest.mark.parametrize(
    ("values", "begins", "ends"),
    [
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "gpt-2"}, False, False),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_a_prompt_begins_and_ends_as_the_file_or_its_family_says(
    tmp_path: Path, values: dict[str, Any], begins: bool, ends: bool
) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path, **values)))
    expected = [BOS] * begins + [ord("a")] + [BOS + 1] * ends
    # Bytes are the first tokens, in order.
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]


def test_tokens_of_the_file_s_own_are_found_in_texts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path, pre="gpt-2")))
    ids = tokenizer.encode("a<tool>b<|eos|>", add_special_tokens=False)
    assert ids == [ord("a"), BOS + 2, ord("b"), BOS + 1]
    assert tokenizer.special_ids == {BOS, BOS + 1}
    assert tokenizer.decode(ids) == "a<tool>b"


# -- pieces with scores (SentencePiece) --------------------------------------------

LETTERS = ["▁", *"abcd"]
LONGER = ["▁a", "ab", "bc", "abc", "cd", "▁▁", "aa", "▁▁▁▁", "dd", "abcd", "ba", "bab"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *LONGER, *LETTERS]
SPM_SCORES = [-float(index) for index in range(len(SPM_TOKENS))]
SPM_KINDS = {
    "<unk>": TokenType.UNKNOWN,
    **dict.fromkeys(("<s>", "</s>"), TokenType.CONTROL),
    **dict.fromkeys(BYTES, TokenType.BYTE),
}


def sentence_pieces(tmp_path: Path, **values: Any) -> Path:
    own = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_vocabulary(
        tmp_path / "m.gguf",
        SPM_TOKENS,
        model="llama",
        scores=SPM_SCORES,
        kinds=SPM_KINDS,
        **own | values,
    )


@pytest.mark.parametrize(
    ("text", "with_prefix", "without"),
    [
        ("a", ["▁a"], ["a"]),
        (" a", ["▁", "▁a"], ["▁a"]),
        ("  a", ["▁▁", "▁a"], ["▁", "▁a"]),
        ("   a", ["▁▁", "▁", "▁a"], ["▁▁", "▁a"]),
        (" ", ["▁▁"], ["▁"]),
        ("d b", ["▁", "d", "▁", "b"], ["d", "▁", "b"]),
        ("b ", ["▁", "b", "▁"], ["b", "▁"]),
        ("a<s> a", ["▁a", "<s>", "▁", "▁a"], ["a", "<s>", "▁a"]),
        ("a\n", ["▁a", "<0x0A>"], ["a", "<0x0A>"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>"]),
        ("", [], []),
    ],
)
def test_spaces_before_words_are_kept(
    tmp_path: Path, text: str, with_prefix: list[str], without: list[str]
) -> None:
    for expected, values in (
        (with_prefix, {}),
        (with_prefix, {"add_space_prefix": True}),
        (without, {"add_space_prefix": False}),
    ):
        tokenizer = load_tokenizer(str(sentence_pieces(tmp_path, **values)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [SPM_TOKENS[token_id] for token_id in ids] == expected
        assert tokenizer.encode(text) == [1, *ids]
        if "<s>" not in text:
            assert tokenizer.decode(ids) == text


def merged(text: str) -> list[str]:
    """Merge the best pair first, the leftmost of equal ones."""
    scores = dict(zip(SPM_TOKENS, SPM_SCORES, strict=True))
    parts = list(text)
    while True:
        pairs = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not pairs:
            return parts
        _, index = min(pairs)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def test_the_best_pair_is_merged_first(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(sentence_pieces(tmp_path, add_space_prefix=False)))
    random_ = random.Random(46)
    for _ in range(count(ci=300, full=10000)):
        text = "".join(random_.choices("abcd ", k=random_.randint(1, 14)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = merged(text.replace(" ", "▁"))
        assert [SPM_TOKENS[token_id] for token_id in ids] == expected, text


# -- parts that do not fit ---------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merges": ["he"]}, [r"merges\[0\]", "two pieces"]),
        ({"merges": ["h e", "h "]}, [r"merges\[1\]", "two pieces"]),
        ({"merges": ["h o"]}, ["merges", "ho"]),
        ({"merges": [1, 2]}, [r"merges\[0\] must be a text, got 1"]),
        ({"token_type": "x"}, ["token_type", "list"]),
        ({"pre": 7}, ["pre must be a text, got 7"]),
        ({"add_bos_token": 1}, ["add_bos_token must be true or false, got 1"]),
        ({"eos_token_id": 999}, ["eos_token_id is 999", "262 elements"]),
        ({"bos_token_id": "x"}, ['bos_token_id must be an integer, got "x"']),
        ({"model": "llama", "scores": None}, ["scores is missing"]),
        ({"model": "llama", "scores": [0.0]}, ["scores has 1 elements", "tokens"]),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    given = {"merges": WORD_MERGES, "pre": "gpt-2"} | changes
    file = write_vocabulary(tmp_path / "m.gguf", WORD_TOKENS, **given)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(str(file))
    for word in [*words, r"m\.gguf: tokenizer\.ggml\."]:
        assert re.search(word, str(caught.value))


def test_a_piece_of_a_million_characters_costs_nothing(tmp_path: Path) -> None:
    file = write_vocabulary(
        tmp_path / "m.gguf", ["a", "a" * 10**6], model="llama", scores=[0.0, 1.0]
    )
    with pytest.raises(ValueError, match=r"tokens\[1\] has 1000000 characters"):
        load_tokenizer(str(file))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
