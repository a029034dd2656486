"""Checksums that decode launches compare their loaded bytes with, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_canary.kernels.triton.args import state_args
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER
from sglang.srt.layers.ops.attention.decode.launch import ComparedLayer
from sglang.srt.layers.ops.attention.shared.args import ByteCheck, Compares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_canary.attended import AttendedBytes
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.paged_backend import AttendedRows
    from sglang.srt.mem_cache.memory_pool import KVCache


class ComparedBytes:
    """The layers of one pool, by the checksums their bytes are compared with.

    Args:
        groups: checksums of the groups of `kv_pool`, by group name.
    """

    def __init__(self, kv_pool: KVCache, groups: Mapping[str, AttendedBytes]) -> None:
        self._pool = kv_pool
        self._groups = groups
        # By group, of the forward that attended last.
        self._attended: ForwardBatch | None = None
        self._checks: dict[str, ByteCheck] = {}

    def of_layer(
        self, layer_id: int, batch: ForwardBatch, rows: AttendedRows
    ) -> ComparedLayer:
        """Return how the decode launch of a layer over `rows` compares bytes."""
        (group, layer) = self._pool.layer_place(layer_id)
        attended = self._groups[group.name]
        if self._attended is not batch:
            self._attended, self._checks = batch, {}
        check = self._checks.get(group.name)
        if check is None:
            check = self._checks[group.name] = _make_check(attended, batch, rows)
        compares = Compares.IN_TURN if attended.in_turn else Compares.ALWAYS
        return ComparedLayer(check=check, layer=layer, compares=compares)


def _make_check(
    group: AttendedBytes, batch: ForwardBatch, rows: AttendedRows
) -> ByteCheck:
    """Return the check that all layers of a group share in a forward."""
    return ByteCheck(
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
