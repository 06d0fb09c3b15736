"""How this process keeps its memory."""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Of mallopt(3)."""
KEPT_BYTES: Final = 32 * 1024 * 1024
MAPPED_FROM_BYTES: Final = 8 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Have the allocator keep what is freed, up to `KEPT_BYTES`, and say whether it will.

    Every forecast takes and frees some hundred arrays of 100 to 200 KB. By its defaults glibc hands them
    back each time, and the kernel clears the same pages anew: hundreds of page faults a forecast. Other C
    libraries have no such call, and are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limits = ((M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(limit, size) for limit, size in limits)
