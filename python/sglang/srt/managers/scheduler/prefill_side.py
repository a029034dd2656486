"""The prefill engine's side: units of requests that come with a room are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.sender import Room
from sglang.srt.managers.scheduler.handover import Handover

if TYPE_CHECKING:
    from sglang.srt.disaggregation.listener import Listener
    from sglang.srt.disaggregation.sender import Sender
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.managers.messages.tier_snapshot import TransferView
    from sglang.srt.mem_cache.base_prefix_cache import RadixKey

# While units wait to be copied or sent.
_BUSY_WAIT_MS = 1
# For what decode engines still wait for when this one stops.
_FINISH_SECONDS = 5.0
# With several ranks: another one may have been asked.
_RANKS_WAIT_MS = 5


class _Prompt(NamedTuple):
    """A request's room, and its tokens as a key of the cache."""

    number: int
    room: Room
    key: RadixKey


class PrefillSide(Handover):
    """Tells a sender which request belongs to which room.

    Args:
        ranks: ranks of this engine.
    """

    def __init__(
        self,
        tiers: KVTiers,
        *,
        sender: Sender,
        listener: Listener,
        ranks: int,
    ) -> None:
        self._tiers = tiers
        self._sender = sender
        self._listener = listener
        self.port = listener.port
        self._ranks = ranks
        self._rooms: dict[int, _Prompt] = {}
        self._ended: list[_Prompt] = []

    @property
    def wait_ms(self) -> int | None:  # type: ignore[override]
        if self._sender.is_busy:
            return _BUSY_WAIT_MS
        has_ranks = self._ranks > 1 and self._listener.num_links
        return _RANKS_WAIT_MS if has_ranks else None

    def on_request(self, req: Req) -> None:
        if req.bootstrap is None or req.no_cache:
            return
        prompt = req.tokens[: req.prompt_len]
        key = self._tiers.cache.key(prompt, namespace=req.namespace)
        room = Room(keys=[unit.key for unit in self._tiers.named_units(key, 0)])
        self._rooms[req.serial] = _Prompt(req.bootstrap.room, room, key)
        self._sender.open(req.bootstrap.room, room)
        # What was cached and is not on the host any more.
        self._tiers.store_path(key)

    def on_end(self, req: Req) -> None:
        prompt = self._rooms.pop(req.serial, None)
        if prompt is not None:
            self._ended.append(prompt)

    def after_round(self) -> None:
        for prompt in self._ended:
            self._tiers.store_path(prompt.key)
            self._sender.close(prompt.number, prompt.room)
        self._ended.clear()
        self._sender.poll()

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.num_prefill_inflight_queue_reqs = self._sender.num_deliveries
        stats.kv_transfer_sent_bytes_total = self._sender.sent_bytes

    def transfers(self) -> list[TransferView]:
        return self._sender.views()

    def close(self) -> None:
        self._sender.finish(_FINISH_SECONDS)
        self._listener.close()
