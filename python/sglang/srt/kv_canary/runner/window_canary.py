"""The window slots' side of `CanaryManager`: what it does once per launch or step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.kv_canary.kernels import (
    expect_rows,
    finish_step,
    gather_findings,
    poison,
)
from sglang.srt.kv_canary.single_forward_manager.window_launches import combine

if TYPE_CHECKING:
    from kv_canary.evidence import Owner
    from kv_canary.reporter import OwnerOf
    from kv_canary.view import ForwardView
    from sglang.srt.kv_canary.single_forward_manager.window_launches import WindowGroup


class WindowCanary:
    """The records of window slots, between forwards.

    Args:
        upload: copies a tensor of the host to the pool's device, in stream order.

    Attributes:
        state: of the window group.
    """

    def __init__(
        self, group: WindowGroup, *, upload: Callable[[Tensor], Tensor]
    ) -> None:
        self.group = group
        self.state = group.buffers.state
        self._upload = upload
        self._freed: list[Tensor] = []

    def register(self) -> None:
        """Hear of window slots that are freed from now on."""
        self.group.slots.register_on_free(self._on_free)

    def _on_free(self, slots: Tensor) -> None:
        self._freed.append(slots)

    def on_region_free(self, slots: Tensor) -> None:
        """Remember freed slots of the draft region (int64, host)."""
        self._freed.append(torch.from_numpy(self.group.slots.map_slots(slots.numpy())))

    def forget_freed(self) -> None:
        """Let the slots that were freed since the last launch be as they are."""
        self._freed.clear()

    def expect(self, rows: Tensor, values: Tensor, seeds: Tensor | None) -> None:
        """As `launches.expect_rows`."""
        expect_rows(self.state, rows, values, seeds)

    def flush_freed(self) -> None:
        """Poison what was freed since the last launch, in stream order."""
        if self._freed:
            freed, self._freed = self._freed, []
            poison(self.state, self._upload(torch.cat(freed)))

    def finish(self, accepted: ForwardView, findings: Tensor) -> None:
        """Finish a verification; put its findings to those of the full group."""
        combine(findings, finish_step(self.state, accepted))

    def collect(self, req_rows: Tensor, findings: Tensor) -> None:
        """Put the findings about request rows to those of the full group."""
        combine(findings, gather_findings(self.state, req_rows))

    def owner_of(self, full: OwnerOf) -> OwnerOf:
        """The owner of a window slot: of the slot that has it."""

        def owner(slot: int) -> Owner:
            return full(self.group.slots.primary_slot(slot) if slot >= 0 else slot)

        return owner
