"""The canary's records of slots whose bytes move between tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_canary.records import (
    HALF_BITS,
    TOKEN_MASK,
    Record,
    WriterKind,
    draft_seed,
    pack_word3,
    prefix_lineages,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from sglang.srt.kv_canary.groups import EngineGroup
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.kv_tiers.group import TokenHistory
    from sglang.srt.mem_cache.page_ledger import IntArray

_EVERY_BIT = -1
_POSITION_BITS = _EVERY_BIT << HALF_BITS


class TierRecords:
    """Records of one group in one pool (`SlotRecords`).

    A unit takes the tail records along. They say which token, position and history a
    slot holds, whoever wrote it; the receiver compares them with what its request
    needs, and writes itself down as the writer (`transfer`).

    Attributes:
        sums: sums of a slot's heads that attention compares, int32 [slots, ...], which
            must travel with the bytes; None if it compares none.
    """

    def __init__(
        self,
        group: EngineGroup,
        *,
        token_offset: int,
        has_tokens: bool,
        clock: Callable[[], int],
    ) -> None:
        self._state = group.state
        self._offset = token_offset
        self._clock = clock
        self.sums = group.checks.fingerprint.sums
        self.words = group.state.tail
        self.identity_mask = _EVERY_BIT if has_tokens else _POSITION_BITS

    def expected(self, history: TokenHistory, length: int) -> IntArray:
        tokens = history.tokens[self._offset : length + self._offset]
        positions = np.arange(length, dtype=np.int64)
        seed = 0
        if self._offset:
            seed = draft_seed(int(history.tokens[0]), history.salt)
        words = np.empty((length, 2), dtype=np.int64)
        words[:, Record.WORD0] = (tokens & TOKEN_MASK) | (positions << HALF_BITS)
        words[:, Record.LINEAGE] = prefix_lineages(tokens, salt=history.salt, seed=seed)
        return words

    def adopt(self, slots: Tensor, words: Tensor) -> None:
        taken = words.clone()
        # The next forward must compare them, so they are older than it.
        word3 = pack_word3(self._clock() - 1, WriterKind.TRANSFER, 0)
        taken[:, Record.WORD3] = word3
        self._state.head.index_copy_(0, slots, taken)
        self._state.tail.index_copy_(0, slots, taken)


def create_tier_records(manager: CanaryManager, name: str) -> TierRecords | None:
    """Return the records of the group `name` of a manager's pool, or None if it has no
    such group."""
    target = manager.target
    for group in target.every:
        if group.name == name:
            return TierRecords(
                group,
                token_offset=target.token_offset,
                has_tokens=group is not target.states,
                clock=lambda: manager.clock,
            )
    return None
