"""Attaches the canary's records to a KV pool.

A registry of adapters by pool class: the layout that the core sees, and how records
follow the bytes when slots move or travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_canary.attended import with_sums
from kv_canary.layout import (
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.state import CanaryState, create_state
from kv_canary.violation import GROUPS, pool_number
from sglang.srt.kv_canary.capacities import CanaryLaunchCapacities
from sglang.srt.kv_canary.config import CanaryConfig, RealData
from sglang.srt.kv_canary.kernels import move_records
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
)
from sglang.srt.mem_cache.mla_memory_pool import MLATokenToKVPool

_MODES = {
    RealData.NONE: FingerprintMode.NONE,
    RealData.PARTIAL: FingerprintMode.PARTIAL,
    RealData.ROTATE: FingerprintMode.ROTATE,
    RealData.ALL: FingerprintMode.ALL,
}


FULL, SWA, LATENT = GROUPS


class RecordMover:
    """Moves records after the bytes of their slots, and the sums kept of them."""

    def __init__(self, state: CanaryState, sums: Tensor | None = None) -> None:
        self._state = state
        self._sums = sums

    def __call__(self, dst: Tensor, src: Tensor) -> None:
        move_records(self._state, dst=dst, src=src)
        if self._sums is not None:
            self._sums.index_copy_(0, dst, self._sums.index_select(0, src))


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBuffers:
    """The canary's side of one pool.

    Fields:
        layout: the pool as the core sees it.
        kv_token_id_vs_position_offset: the slot of position p holds token p + this:
            1 in a draft head's pool, 0 in others.
    """

    layout: PoolLayout
    state: CanaryState
    fingerprint: Fingerprint
    capacities: CanaryLaunchCapacities
    kv_token_id_vs_position_offset: int


def _mha_layout(pool: KVCache, group: str) -> PoolLayout:
    assert isinstance(pool, MHATokenToKVPool)
    layers = LayerGroup(name=group, k=pool.k_buffer, v=pool.v_buffer)
    return PoolLayout(groups=(layers,), page_size=pool.page_size)


def _mla_layout(pool: KVCache, group: str) -> PoolLayout:
    assert isinstance(pool, MLATokenToKVPool)
    layers = LayerGroup(name=group, k=pool.kv_buffer)
    return PoolLayout(groups=(layers,), page_size=pool.page_size)


def _fingerprint_of(layout: PoolLayout, config: CanaryConfig) -> Fingerprint:
    mode = _MODES[config.real_data]
    try:
        return create_fingerprint(mode, layout, rotation_period=config.rotation_steps)
    except ValueError as error:
        raise ValueError(f"{error}. Use --kv-canary-real-data none") from error


# Exact pool class -> its layout. A class that is not here is refused by name.
_ADAPTERS: dict[type[KVCache], Callable[[KVCache, str], PoolLayout]] = {
    MHATokenToKVPool: _mha_layout,
    MLATokenToKVPool: _mla_layout,
}


def attach_canary_buffers(
    *,
    pool: KVCache,
    config: CanaryConfig,
    device: torch.device | str,
    is_draft: bool,
    kv_token_id_vs_position_offset: int,
    req_rows: int,
    max_rows: int,
    num_managers: int = 1,
    num_branches: int = 0,
    group: str = FULL,
    keeps_sums: bool = False,
) -> CanaryBuffers:
    """Records for every slot of `pool`; from now on they move with the bytes.

    Args:
        group: of the slots, for reports (`kv_canary.violation.GROUPS`).
        req_rows: rows of `req_to_token`, padding row included.
        max_rows: rows of one forward at most.
        num_branches: draft branches of a batch at most; they have lineages of their
            own.
        keeps_sums: whether attention compares all bytes with sums that are kept of
            them; of pools that have K and V.

    Raises:
        ValueError: a pool that no adapter knows, or bytes that cannot be fingerprinted;
            names the pool and what to do.
    """
    adapter = _ADAPTERS.get(type(pool))
    if adapter is None:
        known = ", ".join(sorted(cls.__name__ for cls in _ADAPTERS))
        raise ValueError(
            f"--kv-canary {config.mode.value} cannot check a {type(pool).__name__}; it "
            f"knows {known}. Use --kv-canary none"
        )
    layout = adapter(pool, group)
    capacities = CanaryLaunchCapacities(
        num_slots=layout.num_slots,
        req_rows=req_rows,
        max_rows=max_rows,
        ring_capacity=config.ring_capacity,
        sweep_budget=config.sweep_budget,
    )
    state = create_state(
        num_slots=capacities.num_slots,
        req_rows=req_rows,
        ring_capacity=config.ring_capacity,
        num_managers=num_managers,
        lineage_rows=req_rows + num_branches,
        device=device,
        pool=pool_number(is_draft=is_draft, group=group),
    )
    fingerprint = _fingerprint_of(layout, config)
    if keeps_sums:
        fingerprint = with_sums(fingerprint, heads=layout.groups[0].k.shape[2])
    pool.register_on_move(RecordMover(state, fingerprint.sums))
    return CanaryBuffers(
        layout=layout,
        state=state,
        fingerprint=fingerprint,
        capacities=capacities,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
    )
