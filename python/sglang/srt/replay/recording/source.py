"""A scheduler as its recorder sees it."""

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
    """The attributes are those of `Scheduler`."""

    server_args: ServerArgs
    worker: Worker
    cache: BasePrefixCache
    batches: BatchSelector
    max_in_flight: int
    idle_checked: bool

    @property
    def unfinished(self) -> Sequence[Req]:
        """All requests that have not ended."""

    @property
    def num_created(self) -> int:
        """Requests so far."""

    @property
    def is_paused(self) -> bool:
        """Whether nothing is launched."""

    def why_not_saved(self) -> str | None:
        """Why a checkpoint would not suffice to go on from; None: it would."""
