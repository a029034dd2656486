"""Creates the tiers of an engine: its groups of slots, host memory, and reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.tiers_hook import (
    StorageConfig,
    has_other_engines,
    has_tiers,
    storage_config,
)
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
from sglang.srt.kv_canary.tier_records import create_tier_records
from sglang.srt.kv_canary.tier_report import TierReporter
from sglang.srt.kv_tiers.files import FileLimits, open_folder
from sglang.srt.kv_tiers.group import TierGroup
from sglang.srt.kv_tiers.landing import LandingMemory
from sglang.srt.kv_tiers.mover import MOST_STORED_AT_ONCE, Mover
from sglang.srt.kv_tiers.places import (
    Places,
    PrimaryPlaces,
    StatePlaces,
    WindowPlaces,
)
from sglang.srt.kv_tiers.storage import Storage
from sglang.srt.kv_tiers.tiers import KVTiers
from sglang.srt.kv_tiers.unit import SlotTensor, unit_tokens
from sglang.srt.managers.scheduler.disaggregation_setup import create_handover
from sglang.srt.managers.scheduler.model_digest import (
    DIGEST_BYTES,
    kv_identity,
    loading_flags,
    model_digest,
)
from sglang.srt.managers.scheduler.tier_loads import ReadPolicy, TierLoads
from sglang.srt.mem_cache.groups.state_runs import StateRuns
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.utils.memory import available_host_bytes

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_tiers.group import SlotRecords
    from sglang.srt.managers.scheduler.canary_gate import CanaryGate
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.mem_cache.groups.kv_group import KVGroup
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Host memory that stays free for everything else.
_KEPT_FREE = 1 << 30
# Units of files that may be in pinned memory, and their bytes.
_FILE_UNITS = 160
_MOST_FILE_BYTES = 2 << 30
# A prefill engine may have so many times more on its way to the host.
_PREFILL_FACTOR = 4


def create_tier_loads(
    server_args: ServerArgs,
    worker: Worker,
    cache: object,
    *,
    group: TensorParallelGroup,
    canary: CanaryGate | None,
    wake: Callable[[], None],
    is_warm_up: bool = False,
) -> TierLoads | None:
    """Create the tiers that the flags ask for, or return None.

    Args:
        is_warm_up: whether requests are made up. Then nothing is kept, because their KV
            may not be computed, and only the kernels are prepared.
        wake: called in other threads when an idle scheduler has something to do.

    Raises:
        ValueError: there is too little host memory, or no way to other engines; names
            the flag and the fix.
    """
    if not has_tiers(server_args):
        return None
    assert isinstance(cache, RadixCache)
    runners = worker.model_runners()
    groups = _create_groups(runners, cache)
    if is_warm_up:
        _rehearse(groups, cache)
        return None
    reporter = TierReporter(
        server_args,
        manager=None if canary is None else canary.manager,
        page_size=cache.page_size,
        rank=group.rank,
    )
    most_stored = MOST_STORED_AT_ONCE
    if server_args.disaggregation_mode == "prefill":
        # What is not stored yet cannot be sent.
        most_stored *= _PREFILL_FACTOR
    mover = Mover(runners[0].token_to_kv_pool.device, most_stored=most_stored)
    layout = _layout_digest(groups, rank=group.rank, size=group.size)
    identity, model, storage = layout, b"", None
    if has_other_engines(server_args):
        model = model_digest(server_args, runners)
        identity = kv_identity(
            model=model, loading=loading_flags(server_args), layout=layout
        )
    config = storage_config(server_args)
    if server_args.hicache_storage_backend is not None:
        storage = _open_storage(
            config,
            groups,
            cache,
            identity=identity,
            landing=_file_landing(mover, groups, ranks=group.size),
        )
    tiers = KVTiers(
        cache=cache,
        groups=groups,
        mover=mover,
        host_units=_host_units(server_args, groups, cache, ranks=group.size),
        identity=identity,
        storage=storage,
        before_load=(lambda: None) if canary is None else canary.settle,
    )
    handover = create_handover(
        server_args,
        runners,
        tiers,
        group=group,
        model=model,
        layout=layout,
        report=reporter.report,
        wake=wake,
    )
    has_host = server_args.enable_hierarchical_cache
    loads = TierLoads(
        tiers,
        group=group,
        policy=server_args.hicache_write_policy if has_host else "",
        report=reporter.report,
        read_policy=_read_policy(server_args.hicache_storage_prefetch_policy, config),
        handover=handover,
    )
    cache.listeners.append(loads)
    if not has_host:
        return loads
    logger.info(
        "KV in host memory: %d tokens in units of %d, %.2f GiB (%s)",
        tiers.pools[0].size * tiers.unit,
        tiers.unit,
        sum(pool.memory.nbytes for pool in tiers.pools) / 2**30,
        ", ".join(
            f"{own.name} {pool.size} units"
            for own, pool in zip(groups, tiers.pools, strict=True)
        ),
    )
    return loads


def _rehearse(groups: Sequence[TierGroup], cache: RadixCache) -> None:
    """Move a unit of each group both ways, so that no request waits for kernels."""
    KVTiers(
        cache=cache,
        groups=groups,
        mover=Mover(groups[0].tensors[0].words.device),
        host_units=[1] * len(groups),
        identity=b"",
    ).rehearse()


# -- groups ------------------------------------------------------------------------


def _create_groups(
    runners: Sequence[ModelRunner], cache: RadixCache
) -> list[TierGroup]:
    """Return the groups of slots with everything that all pools keep there."""
    size = unit_tokens(cache.page_size)
    primary = runners[0].token_to_kv_pool.groups[0]
    groups = [_kv_group(primary, PrimaryPlaces(size), runners)]
    for index, runs in enumerate(cache.groups):
        if isinstance(runs.slots, WindowSlots):
            places: Places = WindowPlaces(size, runs.slots, index=index)
            kv = next(
                kv
                for runner in runners
                for kv in runner.token_to_kv_pool.groups
                if kv.slots is runs.slots
            )
            groups.append(_kv_group(kv, places, runners))
        else:
            assert isinstance(runs, StateRuns)
            places = StatePlaces(size, runs, index=index)
            groups.append(_state_group(places, runners[0]))
    return groups


def _kv_group(kv: KVGroup, places: Places, runners: Sequence[ModelRunner]) -> TierGroup:
    """Return all pools' part of the slots of `kv`."""
    tensors: list[SlotTensor] = []
    records: list[SlotRecords] = []
    for runner in runners:
        own = [g for g in runner.token_to_kv_pool.groups if g.slots is kv.slots]
        for group in own:
            tensors += [
                SlotTensor(f"{group.name}.{source.name}", source.buffer)
                for source in group.tensors.canary_sources()
            ]
            _add_records(runner, group.name, tensors, records)
    return TierGroup(kv.name, places, tuple(tensors), tuple(records))


def _state_group(places: Places, runner: ModelRunner) -> TierGroup:
    pool = runner.state_pool
    assert pool is not None
    tensors = [
        SlotTensor(name, tensor, has_layers=False) for name, tensor in pool.named()
    ]
    records: list[SlotRecords] = []
    name = "state"
    _add_records(runner, name, tensors, records)
    return TierGroup(name, places, tuple(tensors), tuple(records))


def _add_records(
    runner: ModelRunner,
    name: str,
    tensors: list[SlotTensor],
    records: list[SlotRecords],
) -> None:
    """Add what the canary of a runner keeps of a group."""
    manager = runner.canary_manager
    own = None
    if isinstance(manager, CanaryManager):
        own = create_tier_records(manager, name)
    if own is None:
        return
    records.append(own)
    if own.sums is not None:
        tensors.append(SlotTensor(f"{name}.sums", own.sums, has_layers=False))


# -- sizes -------------------------------------------------------------------------


def _host_units(
    server_args: ServerArgs,
    groups: Sequence[TierGroup],
    cache: RadixCache,
    *,
    ranks: int,
) -> list[int]:
    """Return the units of host memory of each group: all have the same share of their
    slots on the device, or none without --enable-hierarchical-cache.

    Raises:
        ValueError: there is too little host memory, or not a unit fits.
    """
    if not server_args.enable_hierarchical_cache:
        return [0] * len(groups)
    slots = [cache.allocator.size, *(runs.slots.size for runs in cache.groups)]
    on_device = [
        size / group.places.per_unit * group.layout.bytes_per_unit
        for group, size in zip(groups, slots, strict=True)
    ]
    flag, value = "--hicache-ratio", server_args.hicache_ratio
    assert value is not None
    ratio = float(value)
    if server_args.hicache_size:
        flag, value = "--hicache-size", server_args.hicache_size
        ratio = value * 1e9 / sum(on_device)
    units = [
        int(size / group.places.per_unit * ratio)
        for group, size in zip(groups, slots, strict=True)
    ]
    needed = ratio * sum(on_device)
    room = max(available_host_bytes() - _KEPT_FREE, 0) // ranks
    if needed > room:
        raise ValueError(
            f"{flag} {value} takes {needed / 1e9:.1f} GB of host memory for each rank, "
            f"but {room / 1e9:.1f} GB are available; use at most "
            f"{value * room / needed:.2g}"
        )
    if min(units) < 1:
        least = groups[units.index(min(units))]
        raise ValueError(
            f"{flag} {value}: host memory holds no unit of group {least.name}, which "
            f"takes {least.layout.bytes_per_unit} bytes; use a larger value"
        )
    return units


def _layout_digest(groups: Sequence[TierGroup], *, rank: int, size: int) -> bytes:
    """Return a digest of the layout of units and of this rank's share of them."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for group in groups:
        digest.update(f"{group.name} {group.layout.slots}".encode())
        for tensor in (*group.layout.tensors, *group.layout.records):
            shape = (tensor.name, tensor.dtype, tensor.words.shape[0], tensor.row_bytes)
            digest.update(repr(shape).encode())
    digest.update(f"rank {rank} of {size}".encode())
    return digest.digest()


# -- files -------------------------------------------------------------------------


def _open_storage(
    config: StorageConfig,
    groups: Sequence[TierGroup],
    cache: RadixCache,
    *,
    identity: bytes,
    landing: LandingMemory | None,
) -> Storage:
    """Open the rank's folder.

    Raises:
        ValueError: it cannot be used; names the flag and the fix.
    """
    open_folder(config.folder)
    days = config.max_age_days
    folder = config.folder / identity.hex()
    try:
        storage = Storage(
            folder,
            groups,
            identity=identity,
            size=unit_tokens(cache.page_size),
            limits=FileLimits(
                max_bytes=int(config.max_gb * 1e9),
                max_age=None if days is None else days * 86_400,
            ),
            landing=landing,
        )
    except OSError as error:
        raise ValueError(
            f"--hicache-storage-backend file: {folder}: {error.strerror}; name another "
            "dir in --hicache-storage-backend-extra-config"
        ) from None
    logger.info(
        "KV in files: %s holds %d units, %.2f GiB",
        folder,
        len(storage.stores[0]),
        storage.total_bytes / 2**30,
    )
    return storage


def _file_landing(
    mover: Mover, groups: Sequence[TierGroup], *, ranks: int
) -> LandingMemory | None:
    """Return pinned memory for files on a GPU: the scheduler would wait for copies from
    ordinary memory."""
    if mover.device.type != "cuda":
        return None
    size = _FILE_UNITS * max(group.layout.bytes_per_unit for group in groups)
    room = available_host_bytes() // ranks // 4
    return LandingMemory(
        min(size, _MOST_FILE_BYTES, room),
        is_pinned=True,
        advice="leave --hicache-storage-backend out",
    )


def _read_policy(name: str, config: StorageConfig) -> ReadPolicy:
    """Return how long requests wait for files."""
    if name == "best_effort":
        return ReadPolicy(base=0.0, per_ki_token=0.0)
    if name == "wait_complete":
        return ReadPolicy(base=float("inf"), per_ki_token=0.0)
    return ReadPolicy(
        base=config.prefetch_timeout_base,
        per_ki_token=config.prefetch_timeout_per_ki_token,
    )
