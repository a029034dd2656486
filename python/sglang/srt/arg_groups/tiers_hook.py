"""Checks the flags of the tiers below the device: host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

FLAG = "--enable-hierarchical-cache"
_DEFAULT_RATIO = 2.0


def has_tiers(server_args: ServerArgs) -> bool:
    """Return whether KV is kept anywhere but on the device."""
    return server_args.enable_hierarchical_cache


def handle_tiers(server_args: ServerArgs) -> None:
    """Resolve the flags of host memory.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    if server_args.hicache_ratio is None:
        server_args.hicache_ratio = _DEFAULT_RATIO
    if not server_args.hicache_ratio > 0:
        raise ValueError(
            f"--hicache-ratio {server_args.hicache_ratio}: must be above 0; it is the "
            "size of host memory for KV per size of the device's"
        )
    if not has_tiers(server_args):
        return
    if server_args.disable_radix_cache:
        raise ValueError(
            f"{FLAG} keeps cached prefixes in host memory, but --disable-radix-cache "
            "keeps none; remove one of them"
        )
