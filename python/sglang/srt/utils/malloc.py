"""Settings of the C library's allocator."""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 256 * 1024


def return_large_blocks() -> None:
    """Return large blocks to the system as soon as they are freed.

    By default glibc raises its mapping threshold with each freed block, up to 32 MB;
    smaller blocks then leave permanent holes in its heap. Does nothing with other C
    libraries, which have no such setting.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, LARGE_BYTES)


def return_free_pages() -> None:
    """Give the free pages of all heaps back to the system; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
