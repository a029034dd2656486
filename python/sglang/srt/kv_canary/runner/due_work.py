"""Work that is due before a read check: freed slots and announced prefixes.

Both must be on the device before the next read check, in stream order. Neither must be
before the model: a forward whose layers are one replayed graph starts the graph first
(`CanaryManager.with_launch_behind`), because until then the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.kv_canary.kernels import expect_rows, poison
from sglang.srt.kv_canary.lineages import PrefixLineages, TokenOwner
from sglang.srt.kv_canary.runner.window_canary import WindowCanary

if TYPE_CHECKING:
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget


class DueWork:
    """The work that is due on the device of one pool.

    Attributes:
        freed: slots that were freed since the last `settle`, int64 on the host each.
        windows: of a model with window slots; None: there are none.
    """

    def __init__(self, target: CanaryTarget) -> None:
        self._target = target
        self._state = target.buffers.state
        self._lineages = PrefixLineages(token_offset=target.token_offset)
        self.freed: list[Tensor] = []
        self._announced: Callable[[], None] | None = None
        self.windows: WindowCanary | None = None
        if target.windows is not None:
            self.windows = WindowCanary(target.windows, upload=self.upload)

    def on_free(self, slots: Tensor) -> None:
        """Remember freed slots (int64, host): poisoned before the next forward."""
        self.freed.append(slots)

    def on_region_free(self, slots: Tensor) -> None:
        """The same for slots of the draft region and their window slots."""
        self.freed.append(slots)
        if self.windows is not None:
            self.windows.on_region_free(slots)

    def announce(
        self,
        owners: Sequence[TokenOwner],
        prefix_lens: Sequence[int],
        req_pool_indices: Tensor,
    ) -> None:
        """Remember prefixes; see `CanaryManager.expect_prefixes`."""
        if self._announced is not None:
            self._announced()
        self._announced = partial(self._expect, owners, prefix_lens, req_pool_indices)

    def settle(self) -> None:
        """Enqueue all of it on the current stream."""
        if self.freed:
            freed, self.freed = self.freed, []
            slots = freed[0] if len(freed) == 1 else torch.cat(freed)
            poison(self._state, self.upload(slots))
        if self.windows is not None:
            self.windows.flush_freed()
        if self._announced is not None:
            announced, self._announced = self._announced, None
            announced()

    def _expect(
        self,
        owners: Sequence[TokenOwner],
        prefix_lens: Sequence[int],
        req_pool_indices: Tensor,
    ) -> None:
        values = [
            self._lineages.prefixes(owners, prefix_lens),
            [self._lineages.seed(owner) for owner in owners],
            [owner.serial for owner in owners],
        ]
        announced = self.upload(torch.tensor(values))
        seeds = self._target.seeds
        expect_rows(self._state, req_pool_indices, announced, seeds)
        if self.windows is not None:
            self.windows.expect(req_pool_indices, announced, seeds)
        oracle = self._target.oracle
        if oracle is not None:
            prompt_lens = torch.tensor([owner.prompt_len for owner in owners])
            oracle.expect_prompts(self.upload(prompt_lens), req_pool_indices)

    def upload(self, host: Tensor) -> Tensor:
        """Copy to the pool's device, in stream order."""
        if self._state.is_cpu:
            return host
        return host.pin_memory().to(self._state.head.device, non_blocking=True)
