"""What a scheduler does for engines that share the work on a request with it.

Without a partner nothing is done: `Handover` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.source import UnitSource
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.managers.messages.tier_snapshot import TransferView


class Handover:
    """The side of an engine that hands over nothing and is handed nothing.

    Every rank calls all methods alike, except `decide`, which only rank 0 calls.

    Attributes:
        num_coming: requests that wait for another engine.
        wait_ms: how long an idle scheduler may wait at most, or None for any time.
        port: where other engines ask for KV, or 0.
    """

    num_coming: int = 0
    wait_ms: int | None = None
    port: int = 0

    def on_request(self, req: Req) -> None:
        """A request was accepted."""

    def on_end(self, req: Req) -> None:
        """A request has finished or was aborted."""

    def is_coming(self, req: Req) -> bool:
        """Return whether KV of a waiting request is still on its way."""
        return False

    def take_source(self, req: Req) -> UnitSource | None:
        """Return the units that came for a request, or None. They stay until
        `release`."""
        return None

    def release(self, req: Req) -> None:
        """Let the units that came for a request go, if there are any."""

    def decide(self) -> list[int]:
        """Return the serials of requests for which no more has to be awaited."""
        return []

    def apply(self, received: Sequence[int]) -> None:
        """Carry out what rank 0 decided."""

    def after_round(self) -> None:
        """Do what is due after a round."""

    def add_stats(self, stats: SchedulerStats) -> None:
        """Fill in the numbers of transfers."""

    def transfers(self) -> list[TransferView]:
        """Return what the inspector shows of transfers that have not ended."""
        return []

    def close(self) -> None:
        """End every connection."""
