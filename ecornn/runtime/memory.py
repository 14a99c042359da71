"""Memory that the runtime owns: on the host, on a device, and workspaces kept between calls."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ecornn.runtime.library import Library

ALIGNMENT = 256  # bytes; of workspaces, as program.Buffer promises, and of packed weights


class Memory(Protocol):
    """A piece of memory; it lives as long as the object. ``pointer`` is a multiple of ALIGNMENT."""

    pointer: int
    nbytes: int


class HostMemory:
    """``nbytes`` of host memory, contents undefined; ``bytes`` is a NumPy view of it."""

    def __init__(self, nbytes: int) -> None:
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        skip = -address(whole) % ALIGNMENT
        self.bytes, self.nbytes = whole[skip:skip + nbytes], nbytes
        self.pointer = address(whole) + skip


@dataclass
class GivenMemory:
    array: Any
    pointer: int
    nbytes: int


class DeviceMemory:
    """``nbytes`` of device memory from the module's own allocator; freed with the object."""

    def __init__(self, library: Library, device: int, nbytes: int) -> None:
        self.pointer, self.nbytes = int(library.alloc(device, nbytes)), nbytes
        # At the end of the process the driver takes everything back, and may be gone already.
        weakref.finalize(self, library.free, device, self.pointer).atexit = False


def address(array: np.ndarray[Any, Any]) -> int:
    at: int = array.__array_interface__["data"][0]
    return at


class Pool:
    """Idle workspaces, by a key that stands for what orders their users: a CUDA stream, on which the work of a call may
    still be under way when its workspace is given back."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[Memory]] = {}

    def take(self, key: Hashable, nbytes: int) -> Memory | None:
        """An idle one of at least ``nbytes``; None where the caller makes one, for which a smaller one is dropped."""
        try:
            found = self._idle[key].pop()
        except (KeyError, IndexError):
            return None
        return found if found.nbytes >= nbytes else None

    def give(self, key: Hashable, memory: Memory) -> None:
        """For later calls; not after a call that failed, whose work may go on."""
        self._idle.setdefault(key, []).append(memory)

    def idle(self) -> dict[Hashable, list[int]]:
        """Bytes of each that no call uses, by key."""
        return {key: [memory.nbytes for memory in kept] for key, kept in [*self._idle.items()]}


def layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Offsets of parts of these sizes, each aligned, and the bytes of all."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), total
