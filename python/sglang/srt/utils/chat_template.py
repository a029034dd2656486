"""Chat templates in the Jinja dialect of published checkpoints.

Runs templates in Jinja's immutable sandbox, within the bounds of `template_limits`, so
that a hostile template can neither hang a process nor exhaust its memory. Knows nothing
about tokens or OpenAI's API.
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

from sglang.srt.utils.message_form import find_form
from sglang.srt.utils.template_environment import LimitedEnvironment
from sglang.srt.utils.template_limits import TemplateTooExpensive, limited_rendering

# Errors that a client's messages and variables can cause in a template.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
# Errors of text that is not a template, or is nested too deeply.
_COMPILE_ERRORS = (*_RENDER_ERRORS, SyntaxError)
MAX_SOURCE_CHARS = 1 << 20
TRIAL = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello!"},
)
RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})
# Variables that templates compare with null instead of testing whether they are
# defined.
_ALWAYS_THERE: dict[str, Any] = {"tools": None, "documents": None}


class ChatTemplate:
    """One compiled template.

    `variables` are visible in every rendering, such as `bos_token`.
    """

    def __init__(
        self, source: str, *, origin: str, variables: Mapping[str, Any]
    ) -> None:
        """Compile `source` and try it on a short conversation.

        Raises:
            ValueError: `source` is not a template, or takes too long for two messages;
                names `origin`.
        """
        self.source = source
        self._variables = dict(variables)
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(
                f"chat template of {origin}: {len(source)} characters, more than "
                f"{MAX_SOURCE_CHARS}"
            )
        try:
            self._template = _ENVIRONMENT.from_string(source)
            self._try(TRIAL)
            self._form = find_form(source, self._try)
        except _COMPILE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"chat template of {origin}: {reason}") from error

    def _try(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | None:
        """Render, and raise only if a bound is exceeded: a template may reject messages
        for other reasons, such as a missing system prompt.
        """
        try:
            return self._rendered(messages, add_generation_prompt=True, tools=tools)
        except TemplateTooExpensive:
            raise
        except _RENDER_ERRORS:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation.

        Args:
            messages: in OpenAI's format; converted to the form that the template
                expects (`MessageForm`).
            variables: further variables for the template.

        Raises:
            ValueError: the template rejects the messages, or a variable is reserved.
        """
        reserved = sorted(RESERVED_NAMES & set(variables))
        if reserved:
            raise ValueError(f"{reserved[0]} is not a free variable of a chat template")
        try:
            return self._rendered(
                self._form.adapt(messages),
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **variables,
            )
        except _RENDER_ERRORS as error:
            raise ValueError(
                f"the chat template refused the messages: {error}"
            ) from error

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        names = {**_ALWAYS_THERE, **self._variables, **variables}
        with limited_rendering():
            return self._template.render(messages=messages, **names)


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, with the parameters used by published templates.

    Jinja's own filter escapes HTML characters, which models were not trained on.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _make_environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationBlock],
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()
