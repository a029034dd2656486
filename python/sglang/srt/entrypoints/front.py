"""What the routes of one server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sglang.srt.managers.tokenizer_manager import Phase, TokenizerManager
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Fields:
    server_args: configuration.
    manager: takes requests.
    model_name: what clients call the model.
    started: UNIX time in seconds.
    """

    server_args: ServerArgs
    manager: TokenizerManager
    model_name: str
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_ready(self) -> bool:
        return self.manager.phase is Phase.READY
