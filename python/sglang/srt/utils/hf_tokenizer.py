"""A tokenizer read from a checkpoint folder: text to ids, ids to text, chat template.

Built on `tokenizers`; transformers is imported only for folders without a
`tokenizer.json`. Knows nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sglang.srt.utils.chat_template import ChatTemplate
from sglang.srt.utils.paths import resolve_model_folder
from sglang.srt.utils.token_bytes import TokenBytes

TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Encodes and decodes as the checkpoint's own tokenizer does.

    Attributes:
        name: its folder, for messages.
        vocab_size: ids are in `[0, vocab_size)`; a model may pad its own.
        bos_token_id, eos_token_id: None where the folder names none.
        special_ids: ids that `skip_special_tokens` drops.
        chat_template: None where the folder has none.
        token_bytes_table: bytes of each token, or None (see `TokenBytes`).
        max_token_chars: characters of the longest token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any],
        name: str,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self._backend = backend
        self._add_bos: bool | None = config.get("add_bos_token")
        self._add_eos: bool | None = config.get("add_eos_token")
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocab), default=1)
        tokens = {key: _token_text(config.get(key)) for key in TEMPLATE_TOKENS}
        self.bos_token_id = self._token_id(tokens["bos_token"])
        self.eos_token_id = self._token_id(tokens["eos_token"])
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.token_bytes_table = TokenBytes.from_backend(backend)
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            variables = {key: text for key, text in tokens.items() if text is not None}
            self.chat_template = ChatTemplate(
                chat_template, origin=name, variables=variables
            )

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, in_thread: bool = False
    ) -> list[int]:
        """Tokenize `text`, with the special tokens that the checkpoint adds.

        `in_thread`: releases the interpreter lock; worth its cost for long texts.
        """
        around = add_special_tokens and self._add_bos is None
        if in_thread:
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
        """Return the bytes of one token; a special token's are its name."""
        if self.token_bytes_table is not None:
            return self.token_bytes_table.get(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation in the format that the model was trained on.

        `variables` are further names that the template may use.

        Raises:
            ValueError: no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                f"{self.name} has no chat template; start the server with "
                "--chat-template, or use /v1/completions"
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables or {},
        )

    def _token_id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Tokenizer:
    """Read the tokenizer of a folder (or hub name).

    Args:
        chat_template: jinja source that replaces the folder's own.

    Raises:
        ValueError: no tokenizer there, or a broken file; names the folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = resolve_model_folder(path)
    config = _read_json(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    template = chat_template or _read_chat_template(folder, config)
    return Tokenizer(backend, config=config, name=str(folder), chat_template=template)


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _convert_with_transformers(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Read older formats (SentencePiece, WordPiece); needs a slow import."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers, which reads older "
            "formats, is not installed"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # any of transformers' many error types
        raise ValueError(
            f"{folder} has no tokenizer that can be read: {error}"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return None if template is None else str(template)


def _token_text(entry: Any) -> str | None:
    """Return a special token's text from a string or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
