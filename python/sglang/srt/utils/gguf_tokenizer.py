"""The tokenizer in a GGUF file, as a `tokenizers.Tokenizer`.

Reads two of the format's tokenizer models: `gpt2` (byte-level BPE with merges) and
`llama` (SentencePiece BPE with scores). Reads no chat template and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from sglang.srt.utils.gguf_words import FAMILY_WORDS, WORDS, Words
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from sglang.srt.utils.gguf_header import GgufHeader

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"
INSTEAD = "name a folder with the model's tokenizer.json in --tokenizer-path"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Found in a text before anything else; the first two are special.
_ADDED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# Not made by merging.
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


def gguf_tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The content that `tokenizer_config.json` would have, but for the template.

    Raises:
        ValueError: as `gguf_tokenizer`.
    """
    texts = _tokens(header)
    config: dict[str, Any] = {}
    for name, key in _SPECIAL_TOKENS.items():
        token_id = header.values.get(PREFIX + key)
        if token_id is not None and token_id < len(texts):
            config[name] = texts[token_id]
    adds_bos = header.values.get(f"{PREFIX}add_bos_token")
    if adds_bos is None:
        adds_bos = _model(header) == "llama" or _words(header).adds_bos
    adds_eos = header.values.get(f"{PREFIX}add_eos_token", False)
    return config | {"add_bos_token": adds_bos, "add_eos_token": adds_eos}


def gguf_tokenizer(header: GgufHeader) -> tokenizers.Tokenizer:
    """Build the tokenizer of a file.

    Raises:
        ValueError: there is none, its model or pre-tokenizer is not known, or its
            parts do not fit each other; names file and key.
    """
    backend = _BUILDERS[_model(header)](header)
    texts, kinds = _tokens(header), _token_types(header)
    backend.add_tokens(
        [
            AddedToken(text, special=kind != TokenType.USER_DEFINED, normalized=False)
            for text, kind in zip(texts, kinds, strict=True)
            if kind in _ADDED and text
        ]
    )
    return backend


def _byte_level(header: GgufHeader) -> tokenizers.Tokenizer:
    words = _words(header)
    backend = _backend(
        header,
        merges=list(_merges(header)),
        ignore_merges=words.ignore_merges,
    )
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in words.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(header: GgufHeader) -> tokenizers.Tokenizer:
    texts = _tokens(header)
    unknown = header.values.get(f"{PREFIX}unknown_token_id")
    backend = _backend(
        header,
        merges=_scored_merges(header),
        unk_token=None if unknown is None else texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    # Spaces are pieces' letters; a text begins with one more unless the file says no.
    has_prefix = header.values.get(f"{PREFIX}add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPACE)]
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, *spaces])
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


_BUILDERS: dict[str, Callable[[GgufHeader], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_pieces,
}


def _backend(
    header: GgufHeader, *, merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    vocab = {text: token_id for token_id, text in enumerate(_tokens(header))}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises bare ones
        raise ValueError(f"{header.path}: {PREFIX}merges: {error}") from error


def _model(header: GgufHeader) -> str:
    model = header.values.get(f"{PREFIX}model")
    if model not in _BUILDERS:
        raise ValueError(
            f"{header.path}: {PREFIX}model {shown(model)} is not read; known: "
            f"{', '.join(_BUILDERS)}; {INSTEAD}"
        )
    return str(model)


def _words(header: GgufHeader) -> Words:
    """How the file's tokenizer cuts words; `default` says as little as no name."""
    name = header.values.get(f"{PREFIX}pre", "default")
    if name == "default":
        name = FAMILY_WORDS.get(header.values.get("general.architecture", ""), name)
    if name not in WORDS:
        raise ValueError(
            f"{header.path}: {PREFIX}pre {shown(name)} is not a pre-tokenizer known "
            f"here ({', '.join(WORDS)}); {INSTEAD}"
        )
    return WORDS[name]


def _tokens(header: GgufHeader) -> Sequence[str]:
    texts = header.values.get(f"{PREFIX}tokens")
    if not texts:
        raise ValueError(
            f"{header.path}: {PREFIX}tokens is missing: no tokenizer; {INSTEAD}"
        )
    found: Sequence[str] = texts
    return found


def _token_types(header: GgufHeader) -> Sequence[int]:
    return _per_token(header, "token_type", default=TokenType.NORMAL)


def _per_token(
    header: GgufHeader, name: str, *, default: float | None
) -> Sequence[Any]:
    """An array with one element for each token."""
    size = len(_tokens(header))
    values = header.values.get(PREFIX + name)
    if values is None and default is not None:
        return [default] * size
    if values is None or len(values) != size:
        has = "is missing" if values is None else f"has {len(values)} elements"
        raise ValueError(
            f"{header.path}: {PREFIX}{name} {has}; {size} are needed, one for each of "
            f"{PREFIX}tokens"
        )
    found: Sequence[Any] = values
    return found


def _merges(header: GgufHeader) -> Iterator[tuple[str, str]]:
    """`tokenizer.ggml.merges`: two pieces with a space between, which may begin with
    one."""
    key = f"{PREFIX}merges"
    for number, merge in enumerate(header.values.get(key, ())):
        left, space, right = merge[1:].partition(" ")
        if not space or not right:
            raise ValueError(
                f"{header.path}: {key}[{number}] must be two pieces and a space, got "
                f"{shown(merge)}"
            )
        yield merge[:1] + left, right


def _scored_merges(header: GgufHeader) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the one with the highest score first."""
    texts = _tokens(header)
    scores = _per_token(header, "scores", default=None)
    kinds = _token_types(header)
    ids = {
        text: token_id
        for token_id, text in enumerate(texts)
        if kinds[token_id] not in _UNMERGED
    }
    ranked = sorted(
        (-scores[token_id], ids[text[:i]], ids[text[i:]])
        for text, token_id in ids.items()
        for i in range(1, len(text))
        if text[:i] in ids and text[i:] in ids
    )
    return [(texts[left], texts[right]) for _, left, right in ranked]
