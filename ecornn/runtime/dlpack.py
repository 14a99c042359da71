"""DLPack: reading arrays of other frameworks, and handing them memory of ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ecornn.dtypes import DLPACK, ITEMSIZE
from ecornn.runtime.memory import Memory

CPU, CUDA = 1, 2  # DLDeviceType
_NAME = b"dltensor"


class DLDataType(ctypes.Structure):
    """A data type, laid out as in DLPack's header."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """An array, laid out as in DLPack's header; strides are in elements."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("dtype", DLDataType), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64))


class _Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array in C order."""
    return tuple(prod(shape[axis + 1:]) for axis in range(len(shape)))


def host_bits(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...],
              itemsize: int) -> np.ndarray[Any, Any]:
    """Host memory as unsigned integers of ``itemsize`` bytes; strides in elements, none negative."""
    kind = np.dtype(f"u{itemsize}")
    if not prod(shape):
        return np.empty(shape, kind)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = np.frombuffer(memoryview((ctypes.c_char * (extent * itemsize)).from_address(pointer)), kind)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * itemsize for s in strides))


class Block:
    """A contiguous array in memory of ours, which other frameworks take over with their ``from_dlpack``.

    ``device`` is DLPack's (type, number); ``finish`` waits for the work that writes the array.
    """

    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: str, device: tuple[int, int],
                 finish: Callable[[], Any] = lambda: None) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.pointer, self.strides = memory.pointer, strides_of(shape)
        self._memory, self._finish = memory, finish

    def is_contiguous(self) -> bool:
        """Always."""
        return True

    def bits(self) -> np.ndarray[Any, Any]:
        """The elements on a CPU as unsigned integers, in the same memory."""
        return host_bits(self.pointer, self.shape, self.strides, ITEMSIZE[self.dtype])

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: bool | None = None) -> Any:
        """A capsule of DLPack 0.x, which every consumer reads; waits, so that any stream may use it."""
        if copy or (dl_device is not None and tuple(dl_device) != self.device):
            raise BufferError("an ecornn result is handed over where it lies, without a copy")
        self._finish()
        return _capsule(self)


class _Export:
    """What a capsule points to, kept until the consumer's call of the deleter."""

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
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    _exports.pop(managed, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    # A consumer renames the capsule that it takes over; this one nobody took.
    if _is_valid(capsule, _NAME):
        _exports.pop(_get_pointer(capsule, _NAME), None)


def _capsule(block: Block) -> Any:
    export = _Export(block)
    _exports[export.address] = export
    return _new(export.address, _NAME, ctypes.cast(_drop, ctypes.c_void_p).value)
