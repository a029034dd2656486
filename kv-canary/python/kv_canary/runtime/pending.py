"""Findings of a forward that are on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kv_canary.runtime.group import CanaryGroup
    from kv_canary.slot_bytes import ByteFindings


class GroupFindings(NamedTuple):
    """Findings about bytes of a group's slots."""

    group: CanaryGroup
    findings: ByteFindings


class Pending(NamedTuple):
    """The findings of a forward.

    Fields:
        event: happens when `counts` has arrived. None: it is there.
        counts: int64 on the host. The entries of each group's ring, the findings about
            bytes, and then the forwards checked since `begin` (where launches can be
            captured).
        found: findings about bytes.
        forward: its number, by the host's count.
        mode: the kind of forward, as the host names it. None if it has no name.
    """

    event: torch.cuda.Event | None
    counts: Tensor
    found: Sequence[GroupFindings]
    forward: int
    mode: str | None

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


def send_counts(counts: Tensor) -> tuple[torch.cuda.Event | None, Tensor]:
    """Start the copy of `counts` to the host; the event marks its end."""
    if not counts.is_cuda:
        return None, counts
    host = torch.empty(len(counts), dtype=torch.int64, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event, host
