"""One line per request and one per answer: ids, lengths and sampling parameters, never
a prompt or an output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.front.request_state import Update
    from sglang.srt.managers.messages.io_struct import GenerateReq

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs requests as set by `--log-requests` and `/configure_logging`.

    Attributes:
        is_on: whether requests are logged.
        has_params: whether their sampling parameters are logged.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.has_params = True

    def on_sent(self, requests: Sequence[GenerateReq]) -> None:
        """Log requests that are sent to the scheduler."""
        if not self.is_on:
            return
        for request in requests:
            logger.info(
                "received rid=%s prompt_tokens=%d stream=%s%s",
                request.rid,
                len(request.input_ids),
                request.stream,
                f" params={request.sampling_params}" if self.has_params else "",
            )

    def on_updates(self, news: Sequence[Update]) -> None:
        """Log the requests that finish in these updates."""
        if not self.is_on:
            return
        for update in news:
            if update.finish_reason is not None:
                logger.info(
                    "finished rid=%s reason=%s prompt_tokens=%d completion_tokens=%d "
                    "cached_tokens=%d seconds=%.3f",
                    update.rid,
                    update.finish_reason.type,
                    update.prompt_tokens,
                    update.completion_tokens,
                    update.cached_tokens,
                    update.e2e_latency,
                )
