"""State shared by the routes of one server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sglang.srt.managers.tokenizer_manager import Phase, TokenizerManager
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A server as its routes see it.

    Fields:
        server_args: configuration.
        manager: takes requests.
        model_name: name under which clients address the model.
        started: UNIX time in seconds.
    """

    server_args: ServerArgs
    manager: TokenizerManager
    model_name: str
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_ready(self) -> bool:
        return self.manager.phase is Phase.READY
