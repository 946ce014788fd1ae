"""`keep_freed_memory`: what one step of a decode frees is kept for the next one. Every command and server of ours asks
for it; a program of one's own may."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
KEPT = {M_TRIM_THRESHOLD: 512 << 20, M_TOP_PAD: 64 << 20, M_MMAP_THRESHOLD: 32 << 20}  # bytes; glibc allows no more


def keep_freed_memory() -> bool:
    """Tell glibc's malloc not to return what is free to the system at once; False where there is no glibc.

    A forward pass on a CPU takes and frees tens of megabytes. Depending on where they happen to lie, malloc gives them
    back each time, and the system clears them again for the next step, page by page.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt if sys.platform == "linux" else None
    except (OSError, AttributeError):
        mallopt = None
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in KEPT.items())
