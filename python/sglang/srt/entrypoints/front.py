"""State shared by the routes of one server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sglang.srt.managers.errors import NotFound
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

    def check_model(self, asked: str | None, *, is_strict: bool = False) -> None:
        """Refuse a model that is not served, if asked or told to be strict; a request
        may leave the name out.

        Raises:
            NotFound: names both.
        """
        is_strict = is_strict or self.server_args.strict_model_name
        if is_strict and asked is not None and asked != self.model_name:
            raise NotFound(
                f"the model {asked!r} does not exist; this server has "
                f"{self.model_name!r}",
                param="model",
            )

    @property
    def is_ready(self) -> bool:
        return self.manager.phase is Phase.READY
