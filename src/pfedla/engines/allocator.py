"""Freed memory is kept for the next step instead of being given back to the system."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_KEPT = 2**25  # the largest that every glibc takes
KEPT = 2**28


def keep_freed_memory() -> None:
    """A training step allocates and frees a few MiB; returned to the system, each step would have its pages faulted in again.

    That costs up to a third of a small CNN's step. It concerns glibc alone, holds for the whole process, and does nothing
    elsewhere.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(M_TRIM_THRESHOLD, KEPT)
