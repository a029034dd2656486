"""Checks the flags of the tiers below the device: host memory, files, other engines."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FLAG = "--enable-hierarchical-cache"
NIXL_MODULES = ("nixl_cu13", "nixl_cu12")
"""Packages of NIXL, which are named after the CUDA version that they are built for."""
STORAGE_FLAG = "--hicache-storage-backend"
EXTRA_FLAG = "--hicache-storage-backend-extra-config"
_DEFAULT_RATIO = 2.0
_EXAMPLE = '{"dir": "/var/kv", "max_gb": 100}'
_DEFAULT_DIR = "~/.cache/sglang/hicache"


class StorageConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Settings of the tier of files.

    Fields:
        dir: folder of the files.
        max_gb: most gigabytes of all files of one rank and group.
        max_age_days: days after which an unused file is removed at start, or None.
        prefetch_timeout_base: seconds that a request waits for files with the policy
            `timeout`; prefetch_timeout_per_ki_token: and for every 1,024 tokens.
    """

    dir: str = _DEFAULT_DIR
    max_gb: float = 32.0
    max_age_days: float | None = None
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25

    @property
    def folder(self) -> Path:
        return Path(self.dir).expanduser()


def has_tiers(server_args: ServerArgs) -> bool:
    """Return whether KV is kept anywhere but on the device."""
    return (
        server_args.enable_hierarchical_cache
        or server_args.disaggregation_mode != "null"
    )


def has_other_engines(server_args: ServerArgs) -> bool:
    """Return whether KV comes from other engines, or from those before a restart."""
    return (
        server_args.hicache_storage_backend is not None
        or server_args.disaggregation_mode != "null"
    )


def storage_config(server_args: ServerArgs) -> StorageConfig:
    """Return the settings of the tier of files.

    Raises:
        ValueError: names the key, its value and the fix.
    """
    text = server_args.hicache_storage_backend_extra_config
    if text is None:
        return StorageConfig()
    try:
        config = msgspec.json.decode(text, type=StorageConfig)
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        keys = ", ".join(StorageConfig.__struct_fields__)
        raise ValueError(
            f"{EXTRA_FLAG} {quoted(text)}: {error}; write JSON such as {_EXAMPLE}, "
            f"with the keys {keys}"
        ) from None
    for key in ("max_gb", "max_age_days"):
        value = getattr(config, key)
        if value is not None and not value > 0:
            raise ValueError(f"{EXTRA_FLAG}: {key} {value} must be above 0")
    for key in ("prefetch_timeout_base", "prefetch_timeout_per_ki_token"):
        if getattr(config, key) < 0:
            raise ValueError(
                f"{EXTRA_FLAG}: {key} {getattr(config, key)} must not be negative"
            )
    return config


def handle_tiers(server_args: ServerArgs) -> None:
    """Resolve the flags of host memory, files and other engines.

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
    storage_config(server_args)
    if server_args.disaggregation_mode != "null":
        _handle_disaggregation(server_args)
    backend = server_args.hicache_storage_backend
    if not server_args.enable_hierarchical_cache:
        if backend is not None:
            raise ValueError(
                f"{STORAGE_FLAG} {backend} keeps files below host memory; add {FLAG}"
            )
        return
    if server_args.disable_radix_cache:
        raise ValueError(
            f"{FLAG} keeps cached prefixes in host memory, but --disable-radix-cache "
            "keeps none; remove one of them"
        )
    if backend is None and server_args.hicache_storage_backend_extra_config is not None:
        raise ValueError(f"{EXTRA_FLAG} has no effect without {STORAGE_FLAG}; add it")


def _handle_disaggregation(server_args: ServerArgs) -> None:
    """Resolve the flags of prefill and decode on different engines.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    flag = f"--disaggregation-mode {server_args.disaggregation_mode}"
    if server_args.disable_radix_cache:
        raise ValueError(
            f"{flag} hands over cached prefixes, but --disable-radix-cache keeps none; "
            "remove one of them"
        )
    if server_args.disaggregation_transfer_backend == "mooncake":
        raise ValueError(
            "--disaggregation-transfer-backend mooncake is not supported; use nixl or "
            "tcp on both engines"
        )
    if server_args.disaggregation_transfer_backend == "auto":
        server_args.disaggregation_transfer_backend = _best_backend()
    if server_args.disaggregation_mode != "prefill":
        return
    if server_args.hicache_write_policy != "write_through":
        raise ValueError(
            f"--hicache-write-policy {server_args.hicache_write_policy} stores too "
            f"late for {flag}, which sends from host memory; use write_through"
        )
    # It sends what it keeps in host memory.
    server_args.enable_hierarchical_cache = True


def _best_backend() -> str:
    """Return the backend that is installed."""
    if any(find_spec(module) is not None for module in NIXL_MODULES):
        return "nixl"
    logger.warning(
        "--disaggregation-transfer-backend is tcp, because NIXL is not installed: "
        "pip install 'sglang-canary[nixl]'"
    )
    return "tcp"
