"""The sums that decode launches compare the bytes they load with, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_canary.kernels.triton_args import state_args
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER
from sglang.srt.layers.attention.triton_ops.args import Check, Compares
from sglang.srt.layers.attention.triton_ops.decode_attention import ComparedLayer
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

if TYPE_CHECKING:
    from kv_canary.attended import AttendedBytes
    from sglang.srt.layers.attention.paged_backend import AttendedRows
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class ComparedBytes:
    """The layers of one pool, by what their bytes are compared with.

    Args:
        windows: of the window slots of `kv_pool`, if it has any.
    """

    def __init__(
        self, kv_pool: KVCache, full: AttendedBytes, windows: AttendedBytes | None
    ) -> None:
        self._pool = kv_pool
        self._full = full
        self._windows = windows
        # Of the forward that attended last, by whether its layers are sliding.
        self._attended: ForwardBatch | None = None
        self._checks: dict[bool, Check] = {}

    def of_layer(
        self, layer_id: int, batch: ForwardBatch, rows: AttendedRows
    ) -> ComparedLayer:
        """How the decode launch of a layer over `rows` compares."""
        pool, layer, is_sliding = self._pool, layer_id, False
        if isinstance(pool, SWAKVPool):
            is_sliding = pool.is_sliding(layer_id)
            layer = pool.place_in_group(layer_id)
        group = self._windows if is_sliding else self._full
        assert group is not None
        if self._attended is not batch:
            self._attended, self._checks = batch, {}
        check = self._checks.get(is_sliding)
        if check is None:
            check = self._checks[is_sliding] = _check_of(group, batch, rows)
        compares = Compares.IN_TURN if group.in_turn else Compares.ALWAYS
        return ComparedLayer(check=check, layer=layer, compares=compares)


def _check_of(group: AttendedBytes, batch: ForwardBatch, rows: AttendedRows) -> Check:
    """The same for all layers of a group in a forward."""
    return Check(
        state=state_args(group.state),
        sums=group.sums,
        slot_stride=group.sums.stride(0),
        layers=group.sums.shape[1],
        req_rows=batch.req_pool_indices,
        serials=batch.req_serial,
        prefix_lens=rows.prefix_lens,
        first_position=rows.first_position,
        tag=ring_tag(Launch.ATTENTION, NO_MANAGER, group.state.pool),
    )
