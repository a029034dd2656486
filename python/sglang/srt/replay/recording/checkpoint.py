"""Saves a scheduler's records of memory and queues between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.batch.saved_req import save_req
from sglang.srt.replay.recording.record_file import Checkpoint

if TYPE_CHECKING:
    from sglang.srt.replay.recording.source import RecordedScheduler


def save_checkpoint(scheduler: RecordedScheduler) -> Checkpoint:
    """Save a checkpoint of a scheduler without results in flight. Copies no tokens and
    no arrays of the tree; takes O(runs of the tree + pages).
    """
    cache, rows = scheduler.cache, scheduler.cache.req_to_token_pool
    tree, runs = cache.save()
    checkpoints = cache.checkpoints
    return Checkpoint(
        tree=tree,
        free_pages=cache.allocator.save(),
        free_rows=rows.save_rows(),
        states=None if checkpoints is None else checkpoints.save(runs),
        reqs=[save_req(req, rows, runs, checkpoints) for req in scheduler.unfinished],
        batches=scheduler.batches.save(),
        created=scheduler.num_created,
        idle_checked=scheduler.idle_checked,
        is_paused=scheduler.is_paused,
        canaries=[manager.save() for manager in scheduler.worker.canary_managers()],
    )
