"""Settings of the C library's allocator."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 256 * 1024


def return_large_blocks() -> None:
    """Have large blocks go back to the system as soon as they are freed.

    By itself glibc raises the size from which it maps blocks with each one that is
    freed, up to 32 MB; smaller ones then leave holes in its heap for good. Other C
    libraries know no such setting, and nothing is changed.
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
