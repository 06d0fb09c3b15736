"""Allocator settings of the sidecar's process."""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""
KEPT_BYTES: Final = 32 * 1024 * 1024
MAPPED_FROM_BYTES: Final = 8 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Make glibc keep up to `KEPT_BYTES` of freed memory; returns False with other C libraries, which have no `mallopt`.

    Each forecast allocates and frees some hundred arrays of 100 to 200 KB. By default glibc returns them to the kernel
    each time, which costs hundreds of page faults per forecast.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limits = ((M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(limit, size) for limit, size in limits)
