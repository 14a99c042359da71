"""Weights of a module, packed once, where its code runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.dtypes import ITEMSIZE
from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import PACKED, Packing
from ecornn.runtime.device_packing import DevicePacking
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.library import Library
from ecornn.runtime.memory import DeviceMemory, HostMemory, Memory, address
from ecornn.runtime.packing import pack
from ecornn.runtime.plan import CallPlan, EntryPlan
from ecornn.runtime.repacking import HostPacking, Repacking


class Bound:
    """Packed weights and zero states.

    Attributes
    ----------
    arguments : arguments of ``run`` with the packed weights' pointers, all others 0
    packed : name of a buffer -> where its packed weights are; equal ones are kept once
    """

    def __init__(self, manifest: Manifest, plan: CallPlan | EntryPlan, parameters: Mapping[str, Any],
                 library: Library, device: int) -> None:
        work = manifest.workload
        self._manifest = manifest
        self._library, self._device = (library if manifest.device.kind == "cuda" else None), device
        self.arguments = [0] * plan.count
        self._kept: list[Memory] = []

        tensors = any(not isinstance(value, np.ndarray) for value in parameters.values())

        self.packed: dict[str, int] = {}
        self._repackings: list[Repacking] = []  # of the host
        again = tensors and library.pack is not None  # by the module's own kernel
        made_of: dict[Packing, tuple[int, int]] = {}  # packing -> elements, pointer
        for buffer in manifest.buffers:
            if buffer.role != PACKED:
                continue
            if buffer.packing is None:
                raise ModuleError(f"the module does not say how to pack {buffer.name}")
            if buffer.packing not in made_of:
                made_of[buffer.packing] = self._room(buffer.packing) if again else self._pack(
                    buffer.packing, parameters, tensors)
            made, self.packed[buffer.name] = made_of[buffer.packing]
            if buffer.extent.at(0) > made:
                raise ModuleError(f"the packing of {buffer.name} makes {made} of its "
                                  f"{buffer.extent.at(0)} elements")
        for position, buffer in plan.packed:
            self.arguments[position] = self.packed[buffer.name]
        self._places = {packing: pointer for packing, (_, pointer) in made_of.items()}
        if again:
            library.synchronize(device, self.repack_tensors(parameters))  # any stream may read
        self._zeros = (0, 0)
        self.zeros(manifest.stack.count * work.batch * work.hidden * work.itemsize)

    def _pack(self, packing: Packing, parameters: Mapping[str, Any], tensors: bool) -> tuple[int, int]:
        """Elements, and where they are."""
        if tensors:
            from ecornn.runtime.torch_packing import pack_tensors

            values = pack_tensors(packing, parameters)
        else:
            values = pack(packing, parameters)
        pointer, memory = self._place(values), self._kept[-1]
        if isinstance(memory, HostMemory):
            self._repackings.append(Repacking(packing, memory))
        return prod(values.shape), pointer

    def repack(self, parameters: Mapping[str, NDArray[Any]], changed: Collection[str], packing: HostPacking) -> None:
        """Packs anew, into the same memory, what has parameters that have changed."""
        if packing:
            given = [np.ascontiguousarray(parameters[p.key], np.float32) for p in self._manifest.parameters]
            packing([*map(address, given)], [n for n, p in enumerate(self._manifest.parameters) if p.key in changed])
        for one in packing.rest:
            if any(name in changed for name, _ in one.packing.sources):
                one.by_numpy(parameters)

    def host_packing(self, library: Library, threads: int) -> HostPacking:
        """What packs again on a CPU."""
        return HostPacking(self._manifest, self._repackings, library, threads)

    def _room(self, packing: Packing) -> tuple[int, int]:
        """As :meth:`_pack`, of memory to pack to later."""
        assert self._library is not None
        count = prod(packing.split)
        memory = DeviceMemory(self._library, self._device, count * ITEMSIZE.get(packing.dtype, 4))
        self._kept.append(memory)
        return count, memory.pointer

    @cached_property
    def device_packings(self) -> dict[bool, DevicePacking]:
        """What packs again on a GPU, by a module that knows how: all that a call needs that has null for tensors that
        it may (False), and what else there is (True)."""
        library, late = self._library, {*(self._manifest.packed_for_optional or ())}
        assert library is not None and library.pack is not None
        early = {b.packing for b in self._manifest.buffers if b.packing is not None and b.name not in late}
        return {optional: DevicePacking(self._manifest, {packing: at for packing, at in self._places.items()
                                                         if (packing not in early) == optional},
                                        self._place, library.pack, self._device) for optional in (False, True)}

    def repack_tensors(self, parameters: Mapping[str, Any]) -> int:
        """Packs tensors that are on the GPU, on torch's current stream, where the last ones were packed. Returns the
        stream."""
        values = [parameters[p.key] for p in self._manifest.parameters]
        arrays, kinds = arrays_of(values[0], "weights"), {value.dtype for value in values}
        if len(kinds) > 1:
            values = [value.float() for value in values]
        values = [value.contiguous() for value in values]
        queue = arrays.queue(self._device)
        for packing in self.device_packings.values():
            packing([v.data_ptr() for v in values], arrays.facts(values[0])[1], queue)
        return queue

    def _place(self, values: Any) -> int:
        library = self._library
        memory = _on_host(values) if library is None else _on_device(values, library, self._device)
        self._kept.append(memory)
        return memory.pointer

    @property
    def nbytes(self) -> int:
        """Device or host memory held."""
        return sum(memory.nbytes for memory in self._kept)

    def zeros(self, nbytes: int) -> int:
        """A pointer to as many zeros: kept, of the compiled B at least, and more where there are more sequences."""
        room, pointer = self._zeros  # one tuple, so that a thread never sees halves of two
        if room < nbytes:
            pointer = self._place(np.zeros(nbytes, np.uint8))
            self._zeros = nbytes, pointer
        return pointer


def _on_host(values: NDArray[Any]) -> HostMemory:
    memory = HostMemory(values.nbytes)
    memory.bytes[:] = values.reshape(-1).view(np.uint8)
    return memory


def _on_device(values: Any, library: Library, device: int) -> DeviceMemory:
    """A copy, also of a tensor that is there: torch would give its memory to others while kernels of a stream that it
    does not know of may still read."""
    memory, arrays = DeviceMemory(library, device, values.nbytes), arrays_of(values, "weights")
    queue, (kept, pointer) = arrays.queue(device), arrays.ready(values, "weights")
    library.copy(device, memory.pointer, pointer, kept.nbytes, queue)
    library.synchronize(device, queue)  # the array may go now, and any stream may read
    return memory
