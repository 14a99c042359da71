"""The framework that an array is of, imported where one is there; and NumPy's, of which CUDA modules get copies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ecornn.errors import ArgumentError
from ecornn.runtime.arrays import ALIGNMENT, Arrays, Facts, Placed, Shape
from ecornn.runtime.library import Library
from ecornn.runtime.memory import HostMemory, Memory, address

_view: Any = ctypes.c_char.from_buffer  # takes any writable buffer
_address = ctypes.addressof


class NumPyArrays(Arrays):
    """numpy.ndarray; bfloat16 is ml_dtypes', which is recognised by its name."""

    name = "a NumPy array"
    staged = True

    def __init__(self) -> None:
        self._names: dict[np.dtype[Any], str] = {}

    def take(self, value: Any, name: str) -> np.ndarray[Any, Any]:
        if not isinstance(value, np.ndarray):
            raise ArgumentError(name, type(value), f"{self.name}, as x is")
        if type(value) is not np.ndarray:
            if isinstance(value, np.ma.MaskedArray):
                raise ArgumentError(name, type(value), "an array without a mask")
            return np.asarray(value)
        return value

    def facts(self, array: np.ndarray[Any, Any]) -> Facts:
        dtype = self._names.get(array.dtype)
        if dtype is None:  # dtype.name takes a microsecond, and hides the byte order
            dtype = array.dtype.name if array.dtype.isnative else array.dtype.str
            self._names[array.dtype] = dtype
        return array.shape, dtype, "cpu"

    def ready(self, array: np.ndarray[Any, Any], name: str) -> Placed:
        if array.flags.c_contiguous:
            pointer = _pointer(array)
            if not pointer % ALIGNMENT:
                return array, pointer
        made, pointer = _empty(array.shape, array.dtype)
        made[...] = array
        return made, pointer

    def in_place(self, array: np.ndarray[Any, Any]) -> Placed | None:
        pointer = _pointer(array)
        flags = array.flags
        return None if pointer % ALIGNMENT or not (flags.c_contiguous and flags.writeable) else (array, pointer)

    def beside(self, x: Any, others: Sequence[Any], width: int) -> Any:
        return np.concatenate([x, *(np.broadcast_to(o, (*x.shape[:2], width)) for o in others)], axis=2)

    def empty(self, shape: Shape, like: np.ndarray[Any, Any], library: Library) -> Placed:
        return _empty(shape, like.dtype)

    def zeros(self, shape: Shape, like: np.ndarray[Any, Any], dtype: str) -> Placed:
        made, pointer = _empty(shape, np.dtype(dtype))
        made[...] = 0
        return made, pointer

    def swapped(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        swapped: np.ndarray[Any, Any] = array.swapaxes(0, 1)
        return swapped

    def clear(self, array: np.ndarray[Any, Any], steps: int) -> bool:
        array[steps:] = 0
        return True

    def rows(self, value: np.ndarray[Any, Any], dtype: str, like: Any, library: Library) -> Placed:
        made = np.ascontiguousarray(value, dtype)
        return made, address(made)

    def to_host(self, value: np.ndarray[Any, Any], name: str, library: Library) -> np.ndarray[Any, Any]:
        if isinstance(value, np.ma.MaskedArray):
            raise ArgumentError(name, type(value), "an array without a mask")
        return np.asarray(value.astype(np.float32) if value.dtype.name == "bfloat16" else value)

    def workspace(self, nbytes: int, like: Any, library: Library) -> Memory:
        return HostMemory(nbytes)


def _pointer(array: np.ndarray[Any, Any]) -> int:
    try:
        return _address(_view(array))  # a third of the other's time, but for writable arrays alone
    except (BufferError, TypeError, ValueError):
        return address(array)


def _empty(shape: Shape, dtype: np.dtype[Any]) -> Placed:
    made = np.empty(shape, dtype)
    pointer = _pointer(made)
    if pointer % ALIGNMENT:  # NumPy promises no more than its allocator does
        memory = HostMemory(prod(shape) * dtype.itemsize)
        return memory.bytes.view(dtype).reshape(shape), memory.pointer
    return made, pointer


_KNOWN: dict[type, Arrays] = {}


def arrays_of(value: Any, name: str) -> Arrays:
    """The framework of an array; :class:`ArgumentError` where it is of none. ``name`` is for messages."""
    known = _KNOWN.get(type(value))
    if known is None:
        known = _KNOWN[type(value)] = _find(value, name)
    return known


def _find(value: Any, name: str) -> Arrays:
    if isinstance(value, np.ndarray):
        return NumPyArrays()
    if any(base.__module__.split(".")[0] == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__):
        # A torch tensor exists, so torch is imported already.
        from ecornn.runtime.torch_arrays import TorchArrays

        return TorchArrays()
    if hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__"):
        from ecornn.runtime.dlpack import ForeignArrays

        return ForeignArrays(value)
    raise ArgumentError(name, type(value), "a NumPy array, a torch.Tensor, or an array with __dlpack__")
