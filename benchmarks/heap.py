"""How much memory a process has in use, apart from what its allocator keeps."""

from __future__ import annotations

import ctypes
import gc


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
