"""State shared by the routes of one server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.entrypoints.http_io import EventStream
from sglang.srt.entrypoints.output_share import OutputShare
from sglang.srt.managers.front.request_state import RequestGroup
from sglang.srt.managers.front.tokenizer_manager import ServerPhase, TokenizerManager
from sglang.srt.managers.messages.errors import NotFound
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.quoting import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A server as seen by its routes.

    Fields:
        server_args: configuration.
        manager: accepts requests.
        model_name: name under which clients address the model.
        output_share: rate that streams with large events share.
        started: start time, UNIX time in seconds.
    """

    server_args: ServerArgs
    manager: TokenizerManager
    model_name: str
    output_share: OutputShare = field(default_factory=OutputShare)
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, asked: str | None, *, is_strict: bool = False) -> None:
        """Reject a model that is not served, if required by the caller or a strict
        flag; a request may omit the name. An adapter of the model may be named too.

        Raises:
            NotFound: names both models, or the adapter.
        """
        if self.manager.loras.of_model(asked) is not None:
            return
        is_strict = is_strict or self.server_args.strict_model_name
        if is_strict and asked is not None and asked != self.model_name:
            raise NotFound(
                f"the model {quoted(asked)} does not exist; this server has "
                f"{self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def stream(
        self, events: AsyncIterator[bytes], group: RequestGroup, **form: Any
    ) -> EventStream:
        """Return the answer that streams `events` of `group`, in the `form` described
        by `EventStream`.
        """
        return EventStream(
            events,
            group=group,
            release=self.manager.release,
            share=self.output_share,
            **form,
        )

    @property
    def is_ready(self) -> bool:
        return self.manager.phase is ServerPhase.READY
