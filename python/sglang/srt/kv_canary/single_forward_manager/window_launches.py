"""The canary's launches over the window slots of a model with sliding layers.

A second group of slots with records of its own. Every token of a window is in both
groups, with the same lineage; the views differ in slots and in where rows begin:

```
positions          0 ............ first_position ......... prefix .... end
full group         | verified                              | written   |
window group       | left the window    | verified         | written   |
```
Which slot a token must have is known from the host's records (`req_to_slots`), not from
the mapping on the device through which attention finds it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.findings import RING
from kv_canary.pool_checks import GroupForward
from kv_canary.view import ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.pool_checks import PoolChecks
    from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.mem_cache.groups.window_slots import WindowSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup:
    """The window slots of one pool.

    Fields:
        req_to_slots: int32 [req_rows, W], window slots by request row and position.
    """

    buffers: CanaryBuffers
    slots: WindowSlots
    req_to_slots: Tensor


class WindowLaunches:
    """The launches of the forwards with one place in a launch.

    Args:
        checks: of the full group.
        findings: int64 [STATUS_WORDS + rows], what the full group's launches found.

    Attributes:
        findings: the same of the window group, written by its launches.
    """

    def __init__(
        self, group: WindowGroup, *, checks: PoolChecks, findings: Tensor
    ) -> None:
        self._group = group
        self._state = group.buffers.state
        self._checks = dataclasses.replace(
            checks,
            fingerprint=group.buffers.fingerprint,
            req_to_token=group.req_to_slots,
            # Compared once, in the full group.
            published=None,
        )
        self._branch_checks = dataclasses.replace(self._checks, tokens=None)
        self._attended_checks = dataclasses.replace(self._checks, compares_bytes=False)
        self.findings = torch.zeros_like(findings)
        # No slot of the window precedes its first one.
        self._no_slots = findings.new_full((len(findings),), -1)

    def forward(
        self,
        view: ForwardView,
        forward: WindowForward,
        *,
        read: KVReadView,
        is_branch: bool,
        is_attended: bool,
    ) -> GroupForward:
        """The forward in the window group: what it is about to read and to write.

        Args:
            view, read: of the full group.
            is_branch: whether the rows are branches whose tokens no table holds.
            is_attended: whether attention compares the bytes that it reads.
        """
        rows = forward.rows
        window = KVReadView(
            read_lens=rows.read_lens,
            page_table=rows.page_table,
            page_size=read.page_size,
            first_position=rows.first_position,
            prev_slots=self._no_slots[: view.num_rows],
            takes_new=read.takes_new,
            reach=self._group.slots.window - 1,
        )
        of_windows = dataclasses.replace(
            view, out_cache_loc=forward.cache_loc, reads=(window,), oracle=None
        )
        checks = self._checks
        if is_branch:
            checks = self._branch_checks
        elif is_attended:
            checks = self._attended_checks
        return GroupForward(self._state, of_windows, checks)


def combine(findings: Tensor, others: Tensor) -> None:
    """Put the findings of another group, int64 [STATUS_WORDS + R], to `findings`, whose
    counters stay."""
    findings[RING:] |= others[RING:]
