"""Weights of a layer, packed where its code runs, and zero states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ecornn.errors import DeviceError, ModuleError
from ecornn.manifest import Manifest
from ecornn.program import PACKED
from ecornn.runtime.c_interface import NEEDED, OPTIONAL, PackedWeights
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.library import Library
from ecornn.runtime.memory import DeviceMemory, HostMemory, Memory
from ecornn.runtime.weights import read_weights


class Bound:
    """Packed weights and zeros of a module, on this device.

    Attributes
    ----------
    packed : name of a buffer -> the address of its packed weights; equal ones are kept once
    """

    def __init__(self, manifest: Manifest, weights: Mapping[str, Any], library: Library, device: int,
                 threads: int | None) -> None:
        self._manifest, self._library, self._device = manifest, library, device
        self._cuda = manifest.device.kind == "cuda"
        if library.file is None:
            raise ModuleError("the module has no C interface: compile it again")
        given, stream = self._read(weights)
        self._weights = PackedWeights(library.file, given, device, threads, stream)
        buffers = [b for b in manifest.buffers if b.role == PACKED]
        for buffer in buffers:
            if buffer.packing is None:
                raise ModuleError(f"the module does not say how to pack {buffer.name}")
        packings = [*dict.fromkeys(b.packing for b in buffers)]
        addresses = self._weights.addresses(len(packings))
        self.packed = {b.name: addresses[packings.index(b.packing)] for b in buffers}
        work = manifest.workload
        self._zeros: tuple[int, int, list[Memory]] = 0, 0, []  # bytes, where they are, and what they were before
        self.zeros(manifest.stack.count * work.batch * work.hidden * work.itemsize)

    def repack(self, weights: Mapping[str, Any]) -> None:
        """Packs weights where the ones before were; see :meth:`Layer.repack`."""
        given, stream = self._read(weights)
        if self._cuda:
            for name, value in given.items():
                if isinstance(value, np.ndarray):
                    raise DeviceError(f"weights: {name}", "not all on the GPU", f"float32, float16 or bfloat16 tensors "
                                      f"on cuda:{self._device}, where they are packed")
        self._weights.pack(given, stream)

    def repack_at(self, pointers: Sequence[int], dtype: str, stream: int, optional: bool | None) -> None:
        """See :meth:`Layer.repack_at`."""
        parts = NEEDED | OPTIONAL if optional is None else OPTIONAL if optional else NEEDED
        self._weights.pack_at(pointers, dtype, parts=parts, stream=stream)

    def repack_here(self, pointers: Sequence[int], changed: Collection[int] | None) -> bool:
        """See :meth:`Layer.repack_here`."""
        return self._weights.pack_at(pointers, changed=changed)

    def _read(self, weights: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The weights as they are packed, and the stream that they are read on."""
        given = read_weights(self._manifest, weights, self._library, self._device)
        first = next(iter(given.values()), None)
        if first is None or isinstance(first, np.ndarray):
            return given, 0
        if len({value.dtype for value in given.values()}) > 1:
            given = {name: value.float() for name, value in given.items()}
        return ({name: value.contiguous() for name, value in given.items()},
                arrays_of(first, "weights").queue(self._device))

    def zeros(self, nbytes: int) -> int:
        """A pointer to as many zeros: kept, of the compiled B at least, and more where there are more sequences."""
        room, pointer, kept = self._zeros  # one tuple, so that a thread never sees halves of two
        if room < nbytes:
            memory = self._zero_memory(nbytes)
            pointer = memory.pointer
            self._zeros = nbytes, pointer, [*kept, memory]
        return pointer

    def _zero_memory(self, nbytes: int) -> Memory:
        host = HostMemory(nbytes)
        host.bytes[:] = 0
        if not self._cuda:
            return host
        memory, library = DeviceMemory(self._library, self._device, nbytes), self._library
        library.copy(self._device, memory.pointer, host.pointer, nbytes, 0)
        library.synchronize(self._device, 0)  # any stream may read
        return memory
