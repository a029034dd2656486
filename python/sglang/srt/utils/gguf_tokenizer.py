"""Builds a `tokenizers.Tokenizer` from a GGUF file.

Supports two of the format's tokenizer models: `gpt2` (byte-level BPE with merges) and
`llama` (SentencePiece BPE with scores). Does not read tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from sglang.srt.utils.checked_values import ConfigValues, Key
from sglang.srt.utils.gguf_words import FAMILY_WORDS, WORDS, Words
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.utils.gguf_header import GgufHeader

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
TOOL_TEMPLATE = f"{TEMPLATE}.tool_use"
SPACE = "\u2581"
# Each substring of a piece is looked up; published pieces have up to a hundred
# characters.
MAX_PIECE_CHARS = 1024
INSTEAD = "name a folder with the model's tokenizer.json in --tokenizer-path"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Matched in a text before anything else; the first two are special.
_ADDED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# Not produced by merges.
_UNMERGED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_NEEDED_IDS = ("bos_token_id", "eos_token_id", "unknown_token_id")
_TOKEN_ID = Key(int, 0, (1 << 32) - 1)
KEYS: dict[str, Key] = {
    "general.architecture": Key(str, default=""),
    TEMPLATE: Key(str),
    TOOL_TEMPLATE: Key(str),
    f"{PREFIX}model": Key(str),
    f"{PREFIX}pre": Key(str),
    f"{PREFIX}tokens": Key(list, of=str),
    f"{PREFIX}token_type": Key(list, of=int),
    f"{PREFIX}scores": Key(list, -1e30, 1e30, of=float),
    f"{PREFIX}merges": Key(list, of=str, default=[]),
    **{PREFIX + key: _TOKEN_ID for key in _SPECIAL_TOKENS.values()},
    f"{PREFIX}add_bos_token": Key(bool),
    f"{PREFIX}add_eos_token": Key(bool, default=False),
    # The format's default for `llama`.
    f"{PREFIX}add_space_prefix": Key(bool, default=True),
}


class GgufTokenizer:
    """The values in a file that describe its tokenizer.

    Raises:
        ValueError: there is no tokenizer, its model or pre-tokenizer is unknown, a
            value is not allowed, or its parts are inconsistent; names file and key.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._values = ConfigValues(header.path, header.values, keys=KEYS)
        model = self._get("model")
        if model not in BUILDERS:
            raise self._error(
                "model",
                f"{shown(model)} is not read; known: {', '.join(BUILDERS)}; {INSTEAD}",
            )
        self._build = BUILDERS[model]
        self.texts: list[str] = self._get("tokens") or []
        if not self.texts:
            raise self._error("tokens", f"is missing: no tokenizer; {INSTEAD}")
        kinds = self._per_token("token_type")
        self.kinds = [TokenType.NORMAL] * len(self.texts) if kinds is None else kinds

    def backend(self) -> tokenizers.Tokenizer:
        """Build the tokenizer."""
        backend = self._build(self)
        backend.add_tokens(
            [
                AddedToken(
                    text, special=kind != TokenType.USER_DEFINED, normalized=False
                )
                for text, kind in zip(self.texts, self.kinds, strict=True)
                if kind in _ADDED and text
            ]
        )
        return backend

    def config(self) -> dict[str, Any]:
        """The contents that `tokenizer_config.json` would have."""
        config: dict[str, Any] = {
            name: self.texts[token_id]
            for name, key in _SPECIAL_TOKENS.items()
            if (token_id := self._token_id(key)) is not None
        }
        adds_bos = self._get("add_bos_token")
        if adds_bos is None:
            is_pieces = self._build is _sentence_pieces
            adds_bos = is_pieces or self.words().adds_bos
        config |= {
            "add_bos_token": adds_bos,
            "add_eos_token": self._get("add_eos_token"),
        }
        if self.template is not None:
            config["chat_template"] = self.template
        return config

    @property
    def template(self) -> str | None:
        """The chat template."""
        return self._template(TEMPLATE)

    @property
    def tool_template(self) -> str | None:
        """The template for chats with tools, if there is a separate one."""
        return self._template(TOOL_TEMPLATE)

    def _template(self, key: str) -> str | None:
        template: str | None = self._values.get(key)
        return template

    @property
    def has_space_prefix(self) -> bool:
        """Whether a space is added before a text."""
        return bool(self._get("add_space_prefix"))

    @property
    def unknown(self) -> str | None:
        """The token for anything without a token."""
        token_id = self._token_id("unknown_token_id")
        return None if token_id is None else self.texts[token_id]

    def words(self) -> Words:
        """How the tokenizer splits words."""
        name = self._get("pre")
        if name in (None, "default"):
            architecture = self._values.get("general.architecture")
            name = FAMILY_WORDS.get(architecture, name)
        if name not in WORDS:
            raise self._error(
                "pre",
                f"{shown(name)} is not a pre-tokenizer known here "
                f"({', '.join(WORDS)}); {INSTEAD}",
            )
        return WORDS[name]

    def merges(self) -> Iterator[tuple[str, str]]:
        """Pairs of pieces separated by a space; a piece may begin with a space."""
        for number, merge in enumerate(self._get("merges")):
            left, space, right = merge[1:].partition(" ")
            if not space or not right:
                raise self._error(
                    f"merges[{number}]",
                    f"must be two pieces and a space, got {shown(merge)}",
                )
            yield merge[:1] + left, right

    def scored_merges(self) -> list[tuple[str, str]]:
        """All pairs of pieces that form a piece, highest score first."""
        scores = self._per_token("scores")
        if scores is None:
            raise self._error("scores", "is missing")
        texts = self.texts
        longest = max(range(len(texts)), key=lambda token_id: len(texts[token_id]))
        if len(texts[longest]) > MAX_PIECE_CHARS:
            raise self._error(
                f"tokens[{longest}]",
                f"has {len(texts[longest])} characters; at most {MAX_PIECE_CHARS} are "
                "read",
            )
        ids = {
            text: token_id
            for token_id, text in enumerate(texts)
            if self.kinds[token_id] not in _UNMERGED
        }
        ranked = sorted(
            (-scores[token_id], ids[text[:i]], ids[text[i:]])
            for text, token_id in ids.items()
            for i in range(1, len(text))
            if text[:i] in ids and text[i:] in ids
        )
        return [(texts[left], texts[right]) for _, left, right in ranked]

    def bpe(self, merges: Iterable[tuple[str, str]], **options: Any) -> models.BPE:
        """Build the vocabulary with its merges."""
        vocab = {text: token_id for token_id, text in enumerate(self.texts)}
        try:
            return models.BPE(vocab, list(merges), **options)
        except Exception as error:  # the library raises bare ones
            raise self._error("merges", f"do not fit the tokens: {error}") from error

    def _token_id(self, key: str) -> int | None:
        token_id: int | None = self._get(key)
        if token_id is None or token_id < len(self.texts):
            return token_id
        if key not in _NEEDED_IDS:  # used only by templates, and often wrong
            return None
        raise self._error(
            key, f"is {token_id}; {PREFIX}tokens has {len(self.texts)} elements"
        )

    def _per_token(self, name: str) -> list[Any] | None:
        """Return an array with one element per token."""
        values: list[Any] | None = self._get(name)
        if values is not None and len(values) != len(self.texts):
            raise self._error(
                name,
                f"has {len(values)} elements; {len(self.texts)} are needed, one for "
                f"each of {PREFIX}tokens",
            )
        return values

    def _get(self, name: str) -> Any:
        return self._values.get(PREFIX + name)

    def _error(self, name: str, text: str) -> ValueError:
        return self._values.error(PREFIX + name, text)


def _byte_level(given: GgufTokenizer) -> tokenizers.Tokenizer:
    words = given.words()
    backend = tokenizers.Tokenizer(
        given.bpe(given.merges(), ignore_merges=words.ignore_merges)
    )
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in words.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(given: GgufTokenizer) -> tokenizers.Tokenizer:
    """Configure SentencePiece pieces, in which spaces are ordinary characters."""
    backend = tokenizers.Tokenizer(
        given.bpe(
            given.scored_merges(),
            unk_token=given.unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = given.has_space_prefix
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence(
        [*prefix, normalizers.Replace(" ", SPACE)]
    )
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    return backend


BUILDERS: dict[str, Callable[[GgufTokenizer], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_pieces,
}
