"""How much memory a process has in use, apart from what its allocator keeps."""

from __future__ import annotations

import ctypes
import gc

from ecornn.runtime.memory import Pool

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


class Heap(ctypes.Structure):
    """What mallinfo2() of malloc.h returns, in bytes, of the heaps of all threads."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "chunks", "small", "mappings", "mapped", "most",
                                                     "small_free", "in_use", "free", "releasable")]


def in_use() -> int | None:
    """Bytes that malloc() has given and not got back, after a collection; None with a C library that does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = Heap
    gc.collect()
    found = libc.mallinfo2()
    return int(found.in_use + found.mapped)


def share_one_heap() -> bool:
    """Has all threads that begin later use one heap of malloc()'s. Each otherwise has one of its own, from which others
    get nothing: what a process has then grows as long as the peaks of its threads meet otherwise than before, though
    no more is in use. False with a C library that does not take it."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and bool(libc.mallopt(_ARENA_MAX, 1))


def workspaces() -> tuple[int, int]:
    """Bytes that layers keep for their next calls, and the most pieces that one of them keeps: as many as its calls
    that ran at the same time."""
    pools = [value for value in gc.get_objects() if type(value) is Pool]
    kept = [pieces for pool in pools for pieces in pool.idle().values()]
    return sum(sum(pieces) for pieces in kept), max(map(len, kept), default=0)
