"""Stops an engine whose requests wait forever: nothing runs and nothing is admitted.

Counts rounds and reads no clock, so that all tensor parallel ranks stop in the same
round.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.scheduler.schedule_policy import SlotNeed
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.groups.runs import GroupRuns

# A healthy engine has at most two such rounds in succession (to remove a finished
# batch, and to give back promised slots).
MAX_EMPTY_ROUNDS = 16
# Number of requests that the error describes.
MAX_DESCRIBED = 8


class SchedulerStalled(RuntimeError):
    """Requests wait and would never be admitted. The message shows the memory."""


class StallCheck:
    """Counts successive rounds that launched nothing although requests wait.

    With nothing in flight and no message, such a round changes nothing, so the next one
    must end like it.

    Args:
        batches: owner of the waiting queue.
    """

    def __init__(self, batches: BatchSelector, *, cache: BasePrefixCache) -> None:
        self._batches = batches
        self._cache = cache
        self._num_rounds = 0
        self._num_forwards = 0

    def restart(self) -> None:
        """Note a round that may have changed something, or in which requests wait for
        their grammar.
        """
        self._num_rounds = 0

    def count_round(self, num_forwards: int) -> None:
        """Count a round that changed nothing.

        Args:
            num_forwards: number of batches launched so far. A number that differs from
                the last counted round's starts a new count, so a round that launches a
                batch need not call anything here.

        Raises:
            SchedulerStalled: there were too many such rounds.
        """
        if num_forwards != self._num_forwards:
            self._num_forwards = num_forwards
            self._num_rounds = 0
        self._num_rounds += 1
        if self._num_rounds >= MAX_EMPTY_ROUNDS:
            raise SchedulerStalled(self._describe())

    def _describe(self) -> str:
        waiting = self._batches.waiting
        needs = self._batches.slot_needs(MAX_DESCRIBED)
        lines = [
            f"the scheduler has stalled: {len(waiting)} request(s) wait, none runs, "
            f"and none was admitted in {self._num_rounds} rounds",
            *map(_describe_need, needs),
        ]
        if len(waiting) > len(needs):
            lines.append(f"and {len(waiting) - len(needs)} more")
        return "\n  ".join([*lines, self._describe_slots(), self._describe_rows()])

    def _describe_slots(self) -> str:
        allocator, cache = self._cache.allocator, self._cache
        held = allocator.size - allocator.available_size() - cache.total_size()
        return (
            f"KV slots: {allocator.size} in pages of {allocator.page_size}, "
            f"{allocator.available_size()} free, {cache.evictable_size()} evictable, "
            f"{cache.protected_size()} protected, {held} neither free nor cached"
            + "".join(_describe_group(group) for group in cache.groups)
        )

    def _describe_rows(self) -> str:
        rows = self._cache.req_to_token_pool
        return (
            f"request rows: {rows.size - rows.available_size()} of {rows.size} in use"
        )


def _describe_group(group: GroupRuns) -> str:
    slots = group.slots
    return (
        f"; {slots.name} slots: {slots.size}, {slots.available_size()} free, "
        f"{group.evictable_size()} evictable, {group.protected_size()} protected"
    )


def _describe_need(need: SlotNeed) -> str:
    fits = need.slots + need.reserved <= need.usable
    return (
        f"{json.dumps(need.rid)}: {need.num_tokens} tokens and up to "
        f"{need.num_new_tokens} new ones, {need.cached} cached; admission asks for "
        f"{need.slots} slots beside {need.reserved} reserved, {need.usable} are usable"
        + (": it fits, and yet its slots could not be taken" if fits else "")
    )
