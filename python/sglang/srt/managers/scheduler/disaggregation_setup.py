"""Connects an engine with those that share the work on its requests."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.disaggregation.link import Pace
from sglang.srt.disaggregation.listener import Listener
from sglang.srt.disaggregation.messages import PROTOCOL, EngineIdentity
from sglang.srt.disaggregation.needs import most_needed
from sglang.srt.disaggregation.receiver import Receiver
from sglang.srt.disaggregation.sender import Sender
from sglang.srt.disaggregation.transport import create_inlet, create_outlet
from sglang.srt.environ import envs
from sglang.srt.kv_tiers.landing import LandingMemory
from sglang.srt.managers.scheduler.decode_side import DecodeSide
from sglang.srt.managers.scheduler.handover import Handover
from sglang.srt.managers.scheduler.model_digest import loading_flags
from sglang.srt.managers.scheduler.prefill_side import PrefillSide
from sglang.srt.utils.memory import available_host_bytes

if TYPE_CHECKING:
    import torch

    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_tiers.damage import Damage
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Beats that may stay out before an engine is given up.
_SILENT_BEATS = 5


def create_handover(
    server_args: ServerArgs,
    runners: Sequence[ModelRunner],
    tiers: KVTiers,
    *,
    group: TensorParallelGroup,
    model: bytes,
    layout: bytes,
    report: Callable[[str, int, Sequence[Damage]], None],
    wake: Callable[[], None],
) -> Handover:
    """Create this engine's side of --disaggregation-mode.

    Args:
        model: digest of the weights.
        layout: digest of the bytes of a unit on this rank.
        report: called with a request's id and number, and the units that were damaged.
        wake: called in other threads when an idle scheduler has something to do.

    Raises:
        ValueError: the address is in use, memory is short, or the transport is missing;
            names the flag and the fix.
    """
    mode = server_args.disaggregation_mode
    if mode == "null":
        return Handover()
    identity = _identity(server_args, runners, tiers, model=model, layout=layout)
    beat = envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.get()
    pace = Pace(beat, beat * _SILENT_BEATS)
    patience = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
    backend = server_args.disaggregation_transfer_backend
    is_pinned = runners[0].token_to_kv_pool.device.type == "cuda"
    if mode == "decode":
        size = _landing_bytes(server_args, tiers, ranks=group.size)
        landing = LandingMemory(size, is_pinned=is_pinned)
        receiver = Receiver(
            identity,
            rank=group.rank,
            inlet=create_inlet(backend, landing.memory),
            landing=landing,
            layouts=[group.layout for group in tiers.groups],
            pace=pace,
            on_news=wake,
        )
        return DecodeSide(
            tiers,
            receiver=receiver,
            group=group,
            patience=patience,
            report=report,
        )
    outlet = create_outlet(backend, [pool.memory for pool in tiers.pools])
    server = _bind(server_args, rank=group.rank)
    listener = Listener(
        server,
        identity,
        rank=group.rank,
        ports=_share_ports(server.getsockname()[1], group),
        description=outlet.describe(),
        pace=pace,
        on_news=wake,
    )
    sender = Sender(tiers, listener=listener, outlet=outlet, patience=patience)
    return PrefillSide(tiers, sender=sender, listener=listener, ranks=group.size)


def _identity(
    server_args: ServerArgs,
    runners: Sequence[ModelRunner],
    tiers: KVTiers,
    *,
    model: bytes,
    layout: bytes,
) -> EngineIdentity:
    return EngineIdentity(
        protocol=PROTOCOL,
        model=model.hex(),
        loading=loading_flags(server_args),
        dtype=_name(runners[0].dtype),
        kv_dtype=_name(runners[0].kv_dtype),
        draft_pools=len(runners) - 1,
        unit_tokens=tiers.unit,
        tp_size=server_args.tp_size,
        kv_canary="off" if server_args.kv_canary == "none" else "on",
        layout=layout.hex(),
        transport=server_args.disaggregation_transfer_backend,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _landing_bytes(server_args: ServerArgs, tiers: KVTiers, *, ranks: int) -> int:
    """Return the size of the landing memory.

    Raises:
        ValueError: there is less memory, or not a unit fits.
    """
    flag = "--disaggregation-landing-size"
    layouts = [group.layout for group in tiers.groups]
    sizes = [layout.bytes_per_unit for layout in layouts]
    least = sum(
        size * count
        for size, count in zip(sizes, [1, *most_needed(tiers, 0, 1)], strict=True)
    )
    size = int(server_args.disaggregation_landing_size * 1e9)
    if not size:
        on_device = tiers.cache.allocator.size // tiers.unit * sizes[0]
        size = max(on_device // 2, 2 * least)
    room = available_host_bytes() // ranks
    if size > room:
        raise ValueError(
            f"{flag}: {size / 1e9:.2f} GB are needed on each rank, but "
            f"{room / 1e9:.2f} GB are available; use at most {room * 0.9 / 1e9:.2f}"
        )
    if size < least:
        raise ValueError(
            f"{flag} {server_args.disaggregation_landing_size}: {least / 1e9:.3g} GB "
            "hold the KV of the smallest prefix; use a larger value"
        )
    return size


def _bind(server_args: ServerArgs, *, rank: int) -> socket.socket:
    """Listen on the bootstrap port, or on any port for the ranks after the first.

    Raises:
        ValueError: the address cannot be used; names the flag.
    """
    host = server_args.host
    port = 0 if rank else server_args.disaggregation_bootstrap_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ValueError(
            f"--disaggregation-bootstrap-port {port}: cannot listen on {host}: "
            f"{error.strerror or error}; use a free port"
        ) from error


def _share_ports(own: int, group: TensorParallelGroup) -> list[int]:
    """Return where each rank listens."""
    if group.size == 1:
        return [own]
    every = group.all_gather_bytes(msgspec.msgpack.encode(own))
    return [msgspec.msgpack.decode(port, type=int) for port in every]
