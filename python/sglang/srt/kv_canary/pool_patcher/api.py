"""Attaches the canary's records to a KV pool.

A registry of adapters by pool class: the layout that the core sees, and how records
follow the bytes when slots move or travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary.attended import with_sums
from kv_canary.layout import (
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.state import CanaryState, create_state
from kv_canary.violation import pool_number
from sglang.srt.kv_canary.capacities import CanaryLaunchCapacities
from sglang.srt.kv_canary.config import CanaryConfig, RealData
from sglang.srt.kv_canary.groups import PoolGroup, WindowGroup
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.mla_memory_pool import MLATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.kv_group import KVGroup


FINGERPRINTS = {
    RealData.NONE: FingerprintMode.NONE,
    RealData.PARTIAL: FingerprintMode.PARTIAL,
    RealData.ROTATE: FingerprintMode.ROTATE,
    RealData.ALL: FingerprintMode.ALL,
}


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
    mode = FINGERPRINTS[config.real_data]
    try:
        return create_fingerprint(mode, layout, rotation_period=config.rotation_steps)
    except ValueError as error:
        raise ValueError(f"{error}. Use --kv-canary-real-data none") from error


# Exact pool class -> its layout. A class that is not here is refused by name.
_ADAPTERS: dict[type[KVCache], Callable[[KVCache, str], PoolLayout]] = {
    MHATokenToKVPool: _mha_layout,
    MLATokenToKVPool: _mla_layout,
}

# Exact class of a group's slots -> its page map. The primary group has no slots object.
_KINDS: dict[type[object], type[PoolGroup]] = {
    type(None): PoolGroup,
    WindowSlots: WindowGroup,
}


def attach_canary_buffers(
    *,
    pool: KVCache,
    config: CanaryConfig,
    device: torch.device | str,
    is_draft: bool,
    kv_token_id_vs_position_offset: int,
    req_to_token_pool: ReqToTokenPool,
    max_rows: int,
    num_managers: int = 1,
    num_branches: int = 0,
    keeps_sums: bool = False,
) -> tuple[PoolGroup, ...]:
    """Make records for every slot of `pool`; from now on they move with the bytes.

    Args:
        max_rows: rows of one forward at most.
        num_branches: draft branches of a batch at most; they have lineages of their
            own.
        keeps_sums: whether attention compares all bytes with sums that are kept of
            them; of pools that have K and V.

    Returns:
        The canary's groups, one per `pool.groups` and in its order.

    Raises:
        ValueError: a pool that no adapter knows, or bytes that cannot be fingerprinted;
            names the pool and what to do.
    """
    req_rows = req_to_token_pool.size + 1
    # Rows of a draft's pool begin with a seed, the same one in all of its groups.
    seeds = None
    if is_draft:
        seeds = torch.zeros(req_rows, dtype=torch.int64, device=device)
    groups = []
    for kv in pool.groups:
        layout = _layout_of(kv, config)
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
            lineage_rows=req_rows + 2 * num_branches,
            device=device,
            pool=pool_number(is_draft=is_draft, group=kv.name),
        )
        fingerprint = _fingerprint_of(layout, config)
        if keeps_sums:
            fingerprint = with_sums(fingerprint, heads=layout.groups[0].k.shape[2])
        group = _KINDS[type(kv.slots)](
            kv,
            CanaryBuffers(
                layout=layout,
                state=state,
                fingerprint=fingerprint,
                capacities=capacities,
                kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            ),
            rows=req_to_token_pool,
            checks_tokens=config.check_read_tokens,
            seeds=seeds,
        )
        kv.tensors.register_on_move(group.move)
        groups.append(group)
    return tuple(groups)


def _layout_of(kv: KVGroup, config: CanaryConfig) -> PoolLayout:
    """
    Raises:
        ValueError: nothing here knows the group's bytes or its slots.
    """
    adapter = _ADAPTERS.get(type(kv.tensors))
    for part, known in (
        (type(kv.tensors), list[type[object]](_ADAPTERS)),
        (type(kv.slots), list(_KINDS)),
    ):
        if part not in known:
            names = ", ".join(sorted(cls.__name__ for cls in known))
            raise ValueError(
                f"--kv-canary {config.mode.value} cannot check a {part.__name__}; it "
                f"knows {names}. Use --kv-canary none"
            )
    assert adapter is not None
    return adapter(kv.tensors, kv.name)
