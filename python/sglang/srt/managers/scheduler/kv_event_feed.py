"""Passes the prefix cache's changes of each step to the publisher of KV events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.kv_events_hook import kv_events_config
from sglang.srt.kv_events.block_recorder import BlockRecorder
from sglang.srt.kv_events.event_publisher import ZmqEventPublisher
from sglang.srt.kv_events.host_blocks import HostBlocks

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def open_event_publisher(
    server_args: ServerArgs, *, rank: int
) -> ZmqEventPublisher | None:
    """Open this process's publisher, or return None if there is nothing to publish.
    Only the first rank publishes, because all ranks cache the same blocks.

    Raises:
        ValueError: an endpoint cannot be bound.
    """
    config = kv_events_config(server_args)
    if config is None or rank:
        return None
    publisher = ZmqEventPublisher(config)
    replays = config.replay_endpoint
    logger.info(
        "KV events: at %s, %s",
        config.endpoint,
        f"replays at {replays}" if replays else "without replays",
    )
    return publisher


class KvEventFeed:
    """Listens to a new, empty cache.

    The first event says that it is empty, so subscribers of a previous engine forget
    its blocks.
    """

    def __init__(self, cache: BasePrefixCache, publisher: ZmqEventPublisher) -> None:
        self._publisher = publisher
        self._recorder = BlockRecorder(page_size=cache.page_size, bigram=cache.bigram)
        self._recorder.on_cleared()
        cache.listeners.append(self._recorder)

    def watch(self, tiers: KVTiers) -> None:
        """Also report blocks in host memory."""
        blocks = HostBlocks(
            self._recorder.add,
            page_size=tiers.cache.page_size,
            bigram=tiers.cache.bigram,
        )
        tiers.watch_host(blocks)

    def publish(self) -> None:
        """Publish the events since the last call, if there are any."""
        events = self._recorder.take()
        if events:
            self._publisher.publish(events)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Fill in the numbers of published, dropped and replayed events, and of
        connections.
        """
        stats.kv_events_connections = self._publisher.num_connections
        stats.kv_events_published_total = self._publisher.num_published
        stats.kv_events_dropped_total = self._publisher.num_dropped
        stats.kv_events_replayed_total = self._publisher.num_replayed

    def close(self) -> None:
        self._publisher.close()
