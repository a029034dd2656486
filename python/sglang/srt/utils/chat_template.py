"""Chat templates in the jinja dialect of published checkpoints.

Runs templates in jinja's immutable sandbox. Knows nothing of tokens or of OpenAI's API.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Errors that a client's messages and variables can cause in a template.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """One compiled template.

    `variables` are the names that every rendering sees, such as `bos_token`.
    """

    def __init__(
        self, source: str, *, origin: str, variables: Mapping[str, str]
    ) -> None:
        """Compile `source`.

        Raises:
            ValueError: `source` is not a template; names `origin`.
        """
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template of {origin}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation; `variables` are further names for the template.

        Raises:
            ValueError: the template refuses the messages, or a variable is reserved.
        """
        reserved = sorted(RESERVED_NAMES & set(variables))
        if reserved:
            raise ValueError(f"{reserved[0]} is not a free variable of a chat template")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **{**self._variables, **variables},
            )
        except _RENDER_ERRORS as error:
            raise ValueError(
                f"the chat template refused the messages: {error}"
            ) from error


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks text for training; no effect while serving."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()
