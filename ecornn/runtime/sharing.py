"""The calls that run on this process's cores, of all modules: each takes its part of the cores."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

from ecornn.host_cpu import physical_cores

_running = ctypes.c_int32(0)  # how many; the code of modules writes it


@cache
def _cores(allowed: frozenset[int]) -> int:
    return physical_cores(sorted(allowed))


def share_cores(share: Callable[[int, int], None]) -> None:
    """Has a module, whose function ``share`` this is, count its calls among those of the others."""
    share(ctypes.addressof(_running), cores())


def cores() -> int:
    """How many this thread may use."""
    return _cores(frozenset(os.sched_getaffinity(0)))
