"""Treats names of special tokens in user text as plain text.

In the text of a prompt, control tokens from the template and the same text from a user
look alike. Before the template runs, users' occurrences are marked; in the prompt each
is preceded by a guard, one character. A prompt with guards is tokenized by a twin of
the tokenizer that knows each special token under a secret name: the template's
occurrences are renamed, the users' are not. The twin is otherwise identical, so no
other token changes.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from typing import Any

import tokenizers

# A noncharacter, which never occurs in text.
GUARD = "\ufdd0"


class EscapedTokens:
    """Encodes with a twin of `backend`.

    Raises:
        ValueError: the vocabulary has no room for new names.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder().values()
        special = [str(token.content) for token in added if token.special]
        secret = uuid.uuid4().hex
        self._names = {
            text: f"<{secret}:{number}>" for number, text in enumerate(special)
        }
        form = json.loads(backend.to_str())
        _rename(form, self._names)
        try:
            self._users = re.compile(_pattern(special))
            # A longer ordinary token takes precedence over a special token inside it.
            known = _pattern(str(token.content) for token in added)
            self._all = re.compile(f"({GUARD}?)({known})|{GUARD}")
            self._backend = tokenizers.Tokenizer.from_str(json.dumps(form))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"special tokens of this tokenizer cannot be escaped: {error}"
            ) from error

    @staticmethod
    def new_mark() -> str:
        """Return a mark for one rendering, which no text contains and no filter
        changes.
        """
        return uuid.uuid4().hex

    def marked(self, text: str, mark: str) -> str:
        """Return a user's text with `mark` before each special token."""
        return self._users.sub(lambda found: mark + found[0], text)

    @staticmethod
    def guarded(prompt: str, mark: str) -> str:
        """Return a prompt with guards instead of marks; guards from clients are
        dropped.
        """
        return prompt.replace(GUARD, "").replace(mark, GUARD)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a prompt with guards."""
        renamed = self._all.sub(self._renamed, text)
        # The batch call is the one that releases the interpreter lock.
        batch = self._backend.encode_batch(
            [renamed], add_special_tokens=add_special_tokens
        )
        return list(batch[0].ids)

    def _renamed(self, found: re.Match[str]) -> str:
        token = found[2] or ""
        return token if found[1] else self._names.get(token, token)


def _pattern(texts: Iterable[str]) -> str:
    """Return a pattern that matches the longest of `texts` at a position.

    It branches where the texts differ, so a position costs the length of one text
    rather than all.
    """
    root: dict[str, Any] = {}
    for text in filter(None, texts):
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = None
    return _branches(root) if root else "(?!)"


def _branches(node: dict[str, Any]) -> str:
    ways = [re.escape(char) + _branches(node[char]) for char in node if char]
    if not ways:
        return ""
    if len(ways) == 1 and "" not in node:
        return ways[0]
    return f"(?:{'|'.join(ways)})" + ("?" if "" in node else "")


def _rename(form: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens of a `tokenizer.json`, keeping their ids."""
    for token in form["added_tokens"]:
        if token["special"]:
            token["content"] = names[token["content"]]
    model = form["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): at for text, at in vocab.items()}
    else:  # Unigram: pairs of piece and score
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
