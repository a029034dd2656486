"""Available memory of this machine, and allocation in huge pages."""

from __future__ import annotations

import errno
import math
import mmap
import weakref
from contextlib import suppress
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")
_CGROUP_CURRENT = Path("/sys/fs/cgroup/memory.current")
HUGE_PAGE_BYTES = 2 << 20
# Advice for `madvise`; has no name before Python 3.14.
_POPULATE_WRITE = 23
# Bytes that `HostBlocks` allocates at once; while it copies, there are two of each
# block.
_BLOCK_BYTES = 32 << 20
_LINE_BYTES = 64


def available_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within a container."""
    available = _meminfo_available()
    limit = _read_int(_CGROUP_MAX)
    if limit is not None:
        available = min(available, limit - (_read_int(_CGROUP_CURRENT) or 0))
    return max(available, 0)


def available_device_bytes(device: str) -> int:
    """Return the free bytes of "cpu" or of the current CUDA device."""
    if device == "cpu":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info()
    return free


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros on the CPU, in huge pages if the size is large and they are
    available.

    Scattered reads of ordinary pages cost a page walk each.

    Raises:
        OSError: there is not enough memory.
    """
    size = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if size < HUGE_PAGE_BYTES or advice is None:
        return torch.zeros(shape, dtype=dtype)
    # The tensor keeps the zeroed mapping alive, which need not begin at a huge page.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=private)
    with suppress(OSError):  # A kernel without huge pages uses ordinary ones.
        mapping.madvise(advice)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    begin = -memory.data_ptr() % HUGE_PAGE_BYTES
    tensor = memory[begin : begin + size].view(dtype).view(shape)
    # Take all of it now, so that a lack of memory shows immediately.
    try:
        mapping.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        tensor.zero_()  # a kernel before Linux 5.14
    return tensor


def host_bytes(
    size: int, *, pinned_for: object | None = None, advice: str = ""
) -> torch.Tensor:
    """Allocate zeros, uint8 [size], in pages of their own.

    Args:
        pinned_for: pin the pages for copies by the GPU as long as this object lives.
        advice: what to change if they cannot be pinned.

    Raises:
        OSError: there is not enough memory.
        RuntimeError: the driver cannot pin it.
    """
    pages = max(-(-size // HUGE_PAGE_BYTES), 1)
    # Whole pages, because a page cannot be pinned twice.
    memory = host_zeros((pages * HUGE_PAGE_BYTES,), torch.uint8)
    if pinned_for is not None:
        _pin(memory, advice=advice)
        weakref.finalize(pinned_for, _unpin, memory)
    return memory[:size]


def _unpin(memory: torch.Tensor) -> None:
    """Unlock memory before it is given back: otherwise whoever gets its addresses next
    would share them with the GPU's copies of the old pages."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _pin(memory: torch.Tensor, *, advice: str) -> None:
    """Lock memory for copies by the GPU. PyTorch's own pinned allocations round up to
    powers of two."""
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result):
        raise RuntimeError(
            f"the driver cannot pin {memory.nbytes / 2**30:.1f} GiB of host memory "
            f"(CUDA error {int(result)}); {advice}, or raise the limit of locked "
            "memory (ulimit -l)"
        )


class HostBlocks:
    """Copies tensors one after another into blocks large enough for huge pages; most
    weights of a small model are too small by themselves.

    Args:
        size: total bytes of all tensors; slightly more may be used.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous CPU copy of a tensor, aligned to a cache line.

        Raises:
            OSError: there is not enough memory.
        """
        size = tensor.numel() * tensor.dtype.itemsize
        room = -(-size // _LINE_BYTES) * _LINE_BYTES
        if room > len(self._block):
            wanted = max(room, min(self._left, _BLOCK_BYTES))
            self._block = host_zeros((wanted,), torch.uint8)
        self._left -= size
        place, self._block = self._block[:size], self._block[room:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _meminfo_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_MEMINFO} has no MemAvailable line")


def _read_int(path: Path) -> int | None:
    """Return the number in `path`, or None if the file is missing or contains "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
