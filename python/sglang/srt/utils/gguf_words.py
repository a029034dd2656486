"""How tokenizers split text into words, by the name in a file's `tokenizer.ggml.pre`.

The patterns are facts from published `tokenizer.json` files. Unknown names are
rejected, because a guess would split words where the model never saw them split. Like
in other readers of the format, texts are not normalized (Unicode NFC).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4 and its relatives, except for how they split letters and digits.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_HAN_AND_MORE = r"[一-龥ࠀ-一가-퟿]+"
# Letters with case, as listed by DeepSeek's tokenizer.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a"
    "\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a byte-level BPE tokenizer splits a text.

    Fields:
        patterns: regular expressions applied one after another; each match is a piece.
        ignore_merges: whether a piece in the vocabulary is one token, regardless of the
            merges.
        adds_bos: whether prompts begin with BOS if the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = Words(patterns=(GPT2,))
_SINGLE_DIGITS = Words(patterns=(r"\p{N}", GPT2))
_CL100K = Words(
    patterns=("|".join((_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _SPACES)),)
)
_LLAMA3 = replace(_CL100K, ignore_merges=True, adds_bos=True)
_QWEN2 = Words(
    patterns=("|".join((_ENDINGS, _LETTERS, r"\p{N}", _SIGNS, _SPACES)),),
)
_QWEN35 = Words(
    patterns=(
        "|".join(
            (
                _ENDINGS,
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                _SPACES,
            )
        ),
    ),
)


def _by_case(ending: str, digits: str) -> str:
    """Return the pattern for words of upper-case, then lower-case letters (GPT-4o,
    Mistral's Tekken).
    """
    return "|".join(
        (
            f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}",
            f"{_BEFORE}{_UPPER}+{_LOWER}*{ending}",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _SPACES,
        )
    )


_TEKKEN = Words(patterns=(_by_case("", r"\p{N}"),), ignore_merges=True, adds_bos=True)
_DEEPSEEK_V3 = Words(
    patterns=(
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    ),
    adds_bos=True,
)

WORDS: dict[str, Words] = {
    "command-r": _SINGLE_DIGITS,
    "dbrx": _CL100K,
    # For files whose writer did not know the name; a pre-tokenizer like Falcon's.
    "default": Words(
        patterns=(r"[\p{P}$+<=>^|~]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "deepseek-coder": Words(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_MORE, r"\p{N}")
    ),
    "deepseek-llm": Words(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _HAN_AND_MORE,
            r"\p{N}",
        )
    ),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-2": _GPT2,
    "gpt-4o": Words(patterns=(_by_case(_ENDINGS + "?", r"\p{N}{1,3}"),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mpt": _GPT2,
    "pixtral": _TEKKEN,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "refact": _SINGLE_DIGITS,
    "smaug-bpe": _CL100K,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": _TEKKEN,
}
# For files without a name or with `default`, by architecture, if the family has one.
FAMILY_WORDS = {"qwen2": "qwen2", "qwen3": "qwen2"}
