"""How much memory this machine can still give."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")
_CGROUP_CURRENT = Path("/sys/fs/cgroup/memory.current")


def available_host_bytes() -> int:
    """Bytes that can be allocated without swapping, a container's limit respected."""
    available = _meminfo_available()
    limit = _read_int(_CGROUP_MAX)
    if limit is not None:
        available = min(available, limit - (_read_int(_CGROUP_CURRENT) or 0))
    return max(available, 0)


def available_device_bytes(device: str) -> int:
    """Free memory of "cpu" or of the current CUDA device."""
    if device == "cpu":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info()
    return free


def _meminfo_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_MEMINFO} has no MemAvailable line")


def _read_int(path: Path) -> int | None:
    """The number in `path`; None where the file is absent or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
