"""DLPack: arrays of other frameworks, and memory of ours that is handed to them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ecornn.dtypes import DLPACK, ITEMSIZE
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ecornn.runtime.arrays import ALIGNMENT, Arrays, Facts, Placed, Shape
from ecornn.runtime.library import Library
from ecornn.runtime.memory import DeviceMemory, HostMemory, Memory, address

CPU, CUDA = 1, 2  # DLDeviceType
_NAME = b"dltensor"


class DLDataType(ctypes.Structure):  # as all three in DLPack's header
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):  # strides are in elements
    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("dtype", DLDataType), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64))


class _Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Elements:
    """The common part of both kinds of arrays; strides are in elements, and none is negative."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def bits(self) -> np.ndarray[Any, Any]:
        """The elements on a CPU as unsigned integers, in the same memory, which these keep."""
        size, kind = ITEMSIZE[self.dtype], f"u{ITEMSIZE[self.dtype]}"
        if not prod(self.shape):
            return np.empty(self.shape, kind)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        memory: Any = (ctypes.c_char * (extent * size)).from_address(self.pointer)
        memory.owner = self
        flat = np.frombuffer(memoryview(memory), kind)
        return np.lib.stride_tricks.as_strided(flat, self.shape, tuple(s * size for s in self.strides))


class Block(_Elements):
    """A contiguous array of ours, which other frameworks take over. ``finish`` waits for the work that writes it."""

    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: str, device: tuple[int, int],
                 finish: Callable[[], Any] = lambda: None) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.pointer, self.strides = memory.pointer, tuple(prod(shape[axis + 1:]) for axis in range(len(shape)))
        self._memory, self._finish = memory, finish

    def is_contiguous(self) -> bool:
        return True

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: bool | None = None) -> Any:
        """A capsule of DLPack 0.x, which every consumer reads; waits, so that any stream may use it."""
        if copy or (dl_device is not None and tuple(dl_device) != self.device):
            raise BufferError("an ecornn result is handed over where it lies, without a copy")
        self._finish()
        export = _Export(self)
        _exports[export.address] = export
        return _new(export.address, _NAME, ctypes.cast(_drop, ctypes.c_void_p).value)


class _Export:
    """The target of a capsule, kept until the consumer calls the deleter."""

    def __init__(self, block: Block) -> None:
        dims = ctypes.c_int64 * max(1, len(block.shape))
        self.block, self.shape, self.strides = block, dims(*block.shape), dims(*block.strides)
        pointer = ctypes.POINTER(ctypes.c_int64)
        self.managed = _Managed(DLTensor(
            block.pointer, *block.device, len(block.shape), DLDataType(*DLPACK[block.dtype], 1),
            ctypes.cast(self.shape, pointer), ctypes.cast(self.strides, pointer), 0), None,
            ctypes.cast(_delete, ctypes.c_void_p).value)
        self.address = ctypes.addressof(self.managed)


_exports: dict[int, _Export] = {}
_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    _exports.pop(managed, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    # A consumer renames the capsule that it takes over; this one nobody took.
    if _is_valid(capsule, _NAME):
        _exports.pop(_get_pointer(capsule, _NAME), None)


class View(_Elements):
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
        return self._tensor.is_contiguous()


class ForeignArrays(Arrays):
    """The type of ``example``, which has ``__dlpack__``, on CUDA on the legacy default stream. Results are made by its
    ``from_dlpack``; without one they are NumPy arrays, and :class:`Block` on CUDA or where NumPy lacks the type."""

    def __init__(self, example: Any) -> None:
        self._kind = kind = type(example)
        self.name, self._make = f"a {kind.__module__}.{kind.__qualname__}", _from_dlpack(example)

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
        return (array, array.pointer) if array.is_contiguous() and not array.pointer % ALIGNMENT else None

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
        return array.bits().view(array.dtype) if array.device[0] == CPU and array.dtype != "bfloat16" else array

    def to_host(self, value: Any, name: str, library: Library) -> np.ndarray[Any, Any]:
        view = View(value, name)
        if view.dtype not in ITEMSIZE:
            raise DTypeError(f"{name}.dtype", view.dtype, f"one of {', '.join(ITEMSIZE)}")
        bits = view.bits() if view.device[0] == CPU else _download(view, name, library)
        if view.dtype == "bfloat16":  # the upper half of a float32
            return np.asarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
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
    """``from_dlpack`` of the array's namespace, else of the outermost package that has its type or a base class."""
    places = [example.__array_namespace__()] if hasattr(example, "__array_namespace__") else []
    for parts in (base.__module__.split(".") for base in type(example).__mro__):
        places += [sys.modules.get(".".join(parts[:depth])) for depth in range(1, len(parts) + 1)]
    return next((place.from_dlpack for place in places if hasattr(place, "from_dlpack")), None)
