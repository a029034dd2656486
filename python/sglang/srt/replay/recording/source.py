"""A scheduler as seen by its recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.server_args import ServerArgs


class RecordedScheduler(Protocol):
    """Has the attributes of `Scheduler`."""

    server_args: ServerArgs
    worker: Worker
    cache: BasePrefixCache
    batches: BatchSelector
    max_in_flight: int
    idle_checked: bool

    @property
    def unfinished(self) -> Sequence[Req]:
        """All unfinished requests."""

    @property
    def num_created(self) -> int:
        """Number of requests so far."""

    @property
    def is_paused(self) -> bool:
        """Whether launching is paused."""

    def catch_up(self) -> None:
        """Let the drafts' KV have all that the target's has."""

    def why_not_saved(self) -> str | None:
        """Return why a checkpoint would not be enough to continue from, or None if it
        would.
        """
