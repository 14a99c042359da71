"""Arrays of other frameworks, through DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ecornn.dtypes import ITEMSIZE
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ecornn.runtime.arrays import ALIGNMENT, Arrays, Facts, Placed, Shape
from ecornn.runtime.dlpack import CPU, CUDA, Block, host_bits
from ecornn.runtime.library import Library
from ecornn.runtime.memory import DeviceMemory, HostMemory, Memory, address


class View:
    """A foreign array as the runtime sees it; keeps it alive."""

    def __init__(self, value: Any, name: str) -> None:
        import tvm_ffi

        try:
            tensor = tvm_ffi.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(name, type(value), f"an array that DLPack can pass on ({error})") from error
        kind, number = value.__dlpack_device__()
        self.value, self._tensor = value, tensor
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.strides)
        self.dtype, self.device, self.pointer = str(tensor.dtype), (int(kind), int(number)), tensor.data_ptr()

    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in C order."""
        return self._tensor.is_contiguous()

    def bits(self) -> np.ndarray[Any, Any]:
        """The elements on a CPU as unsigned integers."""
        return host_bits(self.pointer, self.shape, self.strides, ITEMSIZE[self.dtype])


class ForeignArrays(Arrays):
    """The type of ``example``, which has ``__dlpack__``. On CUDA, work is put on the legacy default stream.

    Results are made by the framework's ``from_dlpack`` where it has one; otherwise they are NumPy
    arrays on a CPU, and :class:`~ecornn.runtime.dlpack.Block` on CUDA or where NumPy lacks the type.
    """

    def __init__(self, example: Any) -> None:
        self._kind = kind = type(example)
        self.name = f"a {kind.__module__}.{kind.__qualname__}"
        self._make = _from_dlpack(example)

    def take(self, value: Any, name: str) -> View:
        if not isinstance(value, self._kind):
            raise ArgumentError(name, type(value), f"{self.name}, as x is")
        return View(value, name)

    def facts(self, array: View) -> Facts:
        kind, number = array.device
        place = {CPU: "cpu", CUDA: f"cuda:{number}"}.get(kind, f"DLPack device {kind}:{number}")
        return array.shape, array.dtype, place

    def ready(self, array: View, name: str) -> Placed:
        if array.is_contiguous() and not array.pointer % ALIGNMENT:
            return array, array.pointer
        if array.device[0] != CPU:
            raise _no_copy(name, array)
        made = _host_block(array.shape, array.dtype)
        made.bits()[...] = array.bits()
        return made, made.pointer

    def in_place(self, array: View) -> Placed | None:
        fits = array.is_contiguous() and not array.pointer % ALIGNMENT
        return (array, array.pointer) if fits else None

    def empty(self, shape: Shape, like: View | Block, library: Library) -> Placed:
        kind, number = like.device
        if kind == CPU:
            made = _host_block(shape, like.dtype)
        else:
            memory = DeviceMemory(library, number, prod(shape) * ITEMSIZE[like.dtype])
            made = Block(memory, shape, like.dtype, like.device, lambda: library.synchronize(number, 0))
        return made, made.pointer

    def clear(self, array: View | Block, steps: int) -> bool:
        if array.device[0] != CPU:
            return False
        array.bits()[steps:] = 0
        return True

    def rows(self, value: np.ndarray[Any, Any], dtype: str, like: View | Block, library: Library) -> Placed:
        made = np.ascontiguousarray(value, dtype)
        if like.device[0] == CPU:
            return made, address(made)
        number = like.device[1]
        memory = DeviceMemory(library, number, made.nbytes)
        library.copy(number, memory.pointer, address(made), made.nbytes, 0)
        library.synchronize(number, 0)
        return memory, memory.pointer

    def give(self, array: Block) -> Any:
        if self._make is not None:
            return self._make(array)
        if array.device[0] == CPU and array.dtype != "bfloat16":
            return array.bits().view(array.dtype)
        return array

    def to_host(self, value: Any, name: str, library: Library) -> np.ndarray[Any, Any]:
        view = View(value, name)
        if view.dtype not in ITEMSIZE:
            raise DTypeError(f"{name}.dtype", view.dtype, f"one of {', '.join(ITEMSIZE)}")
        bits = view.bits() if view.device[0] == CPU else _download(view, name, library)
        if view.dtype == "bfloat16":  # the upper half of a float32
            wide: np.ndarray[Any, Any] = bits.astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32)
        return np.array(bits, order="C").view(view.dtype)

    def workspace(self, nbytes: int, like: View | Block, library: Library) -> Memory:
        kind, number = like.device
        return HostMemory(nbytes) if kind == CPU else DeviceMemory(library, number, nbytes)


def _host_block(shape: Shape, dtype: str) -> Block:
    return Block(HostMemory(prod(shape) * ITEMSIZE[dtype]), shape, dtype, (CPU, 0))


def _download(view: View, name: str, library: Library) -> np.ndarray[Any, Any]:
    kind, number = view.device
    if kind != CUDA or not library.has_memory:
        raise DeviceError(f"{name}.device", view.device, "the device that the module was compiled for, or cpu")
    if not view.is_contiguous():
        raise _no_copy(name, view)
    host = np.empty(view.shape, f"u{ITEMSIZE[view.dtype]}")
    library.copy(number, address(host), view.pointer, host.nbytes, 0)
    library.synchronize(number, 0)
    return host


def _no_copy(name: str, view: View) -> ShapeError:
    return ShapeError(f"{name}.strides", view.strides, "contiguous elements in C order, aligned to 16 bytes")


def _from_dlpack(example: Any) -> Callable[[Any], Any] | None:
    """The framework's ``from_dlpack``: of its array namespace, else of a package that holds the type or
    one of its base classes, the outermost first."""
    found: Callable[[Any], Any] | None = None
    if hasattr(example, "__array_namespace__"):
        found = getattr(example.__array_namespace__(), "from_dlpack", None)
    for base in type(example).__mro__ if found is None else ():
        parts = base.__module__.split(".")
        for depth in range(1, len(parts) + 1):
            found = found or getattr(sys.modules.get(".".join(parts[:depth])), "from_dlpack", None)
    return found
