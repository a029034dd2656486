"""A tokenizer read from a checkpoint folder: text to ids, ids to text, chat template.

Built on `tokenizers`; transformers is imported only for folders without a
`tokenizer.json`. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sglang.srt.utils.chat_template import RESERVED_NAMES, ChatTemplate
from sglang.srt.utils.escaped_tokens import GUARD, EscapedTokens
from sglang.srt.utils.gguf_header import is_gguf, read_gguf_header
from sglang.srt.utils.gguf_tokenizer import GgufTokenizer
from sglang.srt.utils.json_file import read_json_object, read_text_file, shown
from sglang.srt.utils.paths import resolve_model_path
from sglang.srt.utils.token_bytes import TokenBytes

CONFIG = "tokenizer_config.json"
PROCESSOR_TEMPLATE = "chat_template.json"
# Larger ids would need tables of gigabytes.
MAX_VOCAB_SIZE = 1 << 24
# Vocabulary files that transformers can convert.
OLDER_FORMATS = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
    *("vocab.json", "vocab.txt", "added_tokens.json"),
)
MAX_REASON_CHARS = 500
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
# Groups of tokens by name, and lists of tokens without names.
NAMED_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """Encodes and decodes like the checkpoint's own tokenizer.

    Args:
        escape_special_tokens: whether `encode` handles the guards of `escaped_tokens`.

    Attributes:
        name: folder of the tokenizer, for messages.
        vocab_size: ids are in `[0, vocab_size)`; a model may pad its own.
        bos_token_id, eos_token_id: ids, or None if the folder has none.
        special_ids, special_texts: tokens that `skip_special_tokens` drops.
        chat_template: the template, or None if the folder has none. Some folders have a
            separate one for chats with tools.
        token_bytes_table: bytes of each token, or None (see `TokenBytes`).
        max_token_chars: number of characters in the longest token.
        escaped_tokens: the escaping tokenizer, or None without `escape_special_tokens`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any],
        name: str,
        chat_template: str | None = None,
        tool_template: str | None = None,
        escape_special_tokens: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.escaped_tokens = EscapedTokens(backend) if escape_special_tokens else None
        self.name = name
        self._made_with = {
            "config": dict(config),
            "name": name,
            "chat_template": chat_template,
            "tool_template": tool_template,
            "escape_special_tokens": escape_special_tokens,
        }
        self._backend = backend
        self._add_bos: bool | None = config.get("add_bos_token")
        self._add_eos: bool | None = config.get("add_eos_token")
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"{name}: tokenizer.json has the token id {self.vocab_size - 1}; ids "
                f"must be below {MAX_VOCAB_SIZE}"
            )
        self.max_token_chars = max(map(len, vocab), default=1)
        variables = _template_tokens(config)
        self.bos_token_id = self._token_id(variables.get("bos_token"))
        self.eos_token_id = self._token_id(variables.get("eos_token"))
        special = {
            token_id: str(token.content)
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_ids = frozenset(special)
        self.special_texts = frozenset(special.values())
        self.token_bytes_table = TokenBytes.from_backend(backend)

        def compiled(source: str | None) -> ChatTemplate | None:
            if source is None:
                return None
            return ChatTemplate(source, origin=name, variables=variables)

        self.chat_template = compiled(chat_template)
        self._tool_template = compiled(tool_template) or self.chat_template

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the contents of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def portable(self) -> dict[str, Any]:
        """Return everything as JSON, for another process."""
        return {"backend": self.tokenizer_json, **self._made_with}

    @classmethod
    def from_portable(cls, portable: Mapping[str, Any]) -> Tokenizer:
        """Create a tokenizer from the result of `portable`."""
        backend, options = portable["backend"], dict(portable)
        del options["backend"]
        return cls(tokenizers.Tokenizer.from_str(backend), **options)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, in_thread: bool = False
    ) -> list[int]:
        """Tokenize `text`, with the special tokens that the checkpoint adds.

        `in_thread` releases the interpreter lock, which pays off for long texts.
        """
        around = add_special_tokens and self._add_bos is None
        if self.escaped_tokens is not None and GUARD in text:
            ids = self.escaped_tokens.encode(text, add_special_tokens=around)
        elif in_thread:
            # The batch call is the one that releases the interpreter lock.
            batch = self._backend.encode_batch([text], add_special_tokens=around)
            ids = list(batch[0].ids)
        else:
            ids = list(self._backend.encode(text, add_special_tokens=around).ids)
        if add_special_tokens and not around:
            if self._add_bos and self.bos_token_id is not None:
                ids.insert(0, self.bos_token_id)
            if self._add_eos and self.eos_token_id is not None:
                ids.append(self.eos_token_id)
        return ids

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Decode `ids`; ids outside the vocabulary give no text.

        `spaces_between_special_tokens` has no effect on tokenizers of this kind.
        """
        return str(
            self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; for a special token, its name."""
        if self.token_bytes_table is not None:
            return self.token_bytes_table.get(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation in the format the model was trained on.

        `variables` are further variables for the template.

        Raises:
            ValueError: there is no template, or the template rejects the messages.
        """
        template = self._tool_template if tools else self.chat_template
        if template is None:
            raise ValueError(
                f"{self.name} has no chat template; start the server with "
                "--chat-template, or use /v1/completions"
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables or {},
        )

    def _token_id(self, token: Any) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(
    path: str, *, chat_template: str | None = None, escape_special_tokens: bool = False
) -> Tokenizer:
    """Read the tokenizer of a folder (or hub name) or of a GGUF file.

    Args:
        chat_template: Jinja source that replaces the model's own template.
        escape_special_tokens: as in `Tokenizer`.

    Raises:
        ValueError: there is no tokenizer, or a file is broken; names the path.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = resolve_model_path(path, flag="--tokenizer-path")
    if is_gguf(folder):
        return _load_from_gguf(
            folder, chat_template, escape_special_tokens=escape_special_tokens
        )
    config = _read_config(folder / CONFIG)
    backend = _read_backend(folder)
    template = chat_template or _read_chat_template(folder, config)
    tool_template = None if chat_template else _read_tool_template(folder, config)
    return Tokenizer(
        backend,
        config=config,
        name=str(folder),
        chat_template=template,
        tool_template=tool_template,
        escape_special_tokens=escape_special_tokens,
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        if not any((folder / name).is_file() for name in OLDER_FORMATS):
            raise ValueError(
                f"{folder} has no tokenizer.json; name a folder with one in "
                "--tokenizer-path, or serve token ids with --skip-tokenizer-init"
            )
        return _convert_with_transformers(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # For a broken file the library raises bare Exception, or panics with an error that
    # does not derive from Exception.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{file} is not a tokenizer: {_one_line(error)}") from error


def _load_from_gguf(
    file: Path, chat_template: str | None, *, escape_special_tokens: bool
) -> Tokenizer:
    given = GgufTokenizer(read_gguf_header(file))
    return Tokenizer(
        given.backend(),
        config=given.config(),
        name=str(file),
        chat_template=chat_template or given.template,
        tool_template=None if chat_template else given.tool_template,
        escape_special_tokens=escape_special_tokens,
    )


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Read other formats (SentencePiece, WordPiece); requires a slow import."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers, which reads other "
            "formats, is not installed: pip install 'sglang-canary[gguf]'"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # one of transformers' many error types
        raise ValueError(
            f"{folder} has no tokenizer that can be read: {_one_line(error)}"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


def _read_config(file: Path) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`; empty if there is none."""
    config = read_json_object(file) if file.is_file() else {}
    for name in ("add_bos_token", "add_eos_token"):
        if not isinstance(config.get(name), bool | None):
            raise ValueError(
                f"{file}: {name} must be true or false, got {shown(config[name])}"
            )
    return config


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text_file(file)
    template = _configured_template(folder / CONFIG, config, DEFAULT_TEMPLATE)
    # Older multimodal checkpoints keep it next to their processor's configuration.
    file = folder / PROCESSOR_TEMPLATE
    if template is None and file.is_file():
        template = _configured_template(file, read_json_object(file), DEFAULT_TEMPLATE)
    return template


def _read_tool_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Read the template for chats with tools, if there is a separate one."""
    file = folder / "additional_chat_templates" / f"{TOOL_TEMPLATE}.jinja"
    if file.is_file():
        return read_text_file(file)
    if not isinstance(config.get("chat_template"), list):
        return None
    return _configured_template(folder / CONFIG, config, TOOL_TEMPLATE)


def _configured_template(
    file: Path, config: Mapping[str, Any], name: str
) -> str | None:
    """Return the template in the configuration `file`: the only one, or the one called
    `name`.
    """
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next(
            (e.get("template") for e in named if e.get("name") == name), None
        )
    if not isinstance(template, str | None):
        raise ValueError(f"{file}: chat_template must be a text, got {shown(template)}")
    return template


def _template_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that templates see by name: every `..._token` in the
    configuration and its groups, and the lists of unnamed tokens.
    """
    groups = [config.get(name) for name in NAMED_TOKENS]
    named = {
        name: _token_text(entry)
        for group in (*groups, config)
        if isinstance(group, Mapping)
        for name, entry in group.items()
        if group is not config or name.endswith("_token")
    }
    found: dict[str, Any] = {name: text for name, text in named.items() if text}
    for name in LISTED_TOKENS:
        if isinstance(config.get(name), list):
            found[name] = [text for text in map(_token_text, config[name]) if text]
    return {name: found[name] for name in found if name not in RESERVED_NAMES}


def _token_text(entry: Any) -> str | None:
    """Return the text of a special token from a string or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
