"""The C interface of a module (``include/ecornn.h``) by ctypes: it packs weights, on a CPU and on a GPU."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ecornn.dtypes import DLPACK
from ecornn.errors import DeviceError, ModuleError, NotFiniteError
from ecornn.runtime.dlpack import CPU, CUDA, DLDataType, DLTensor
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.memory import address

NEEDED, OPTIONAL = 1, 2  # ecornn_parts
_VERSION, _UNSUPPORTED = 1, 9
_ONLY_PACKS = -1  # of ecornn_bind_options.reserve
_RAISED: dict[int, type[Exception]] = {12: MemoryError, 13: RuntimeError}  # of memory and of the CUDA driver


class _Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("message", ctypes.c_char * 508)]


class _Named(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", ctypes.POINTER(DLTensor))]


class _Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("device", ctypes.c_int32), ("threads", ctypes.c_int32),
                ("reserve", ctypes.c_int64), ("stream", ctypes.c_void_p)]


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int32
_WEIGHTS, _ERROR = ctypes.POINTER(_Named), ctypes.POINTER(_Error)


def _function(*arguments: Any, result: Any = _NUMBER) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)


class _Api(ctypes.Structure):
    _fields_ = [("version", _NUMBER), ("size", _NUMBER), ("describe", _POINTER),
                ("bind", _function(_WEIGHTS, _NUMBER, ctypes.POINTER(_Options), ctypes.POINTER(_POINTER), _ERROR)),
                ("repack", _function(_POINTER, _WEIGHTS, _NUMBER, _POINTER, _ERROR)),
                ("release", _function(_POINTER, result=None)), ("workspace_size", _POINTER), ("kept_size", _POINTER),
                ("run", _POINTER), ("forward", _POINTER), ("backward", _POINTER),
                ("packed", _function(_POINTER, result=ctypes.POINTER(ctypes.c_int64))),
                ("pack_at", _function(_POINTER, _POINTER, DLDataType, ctypes.c_char_p, _NUMBER, _POINTER, _ERROR))]


class PackedWeights:
    """Weights that a module has packed where it runs; the memory lives as long as this.

    Parameters
    ----------
    file : the module's, loaded
    weights : by name, shaped (G*H, K) or (G*H,) as PyTorch has them: NumPy arrays, float16, float32 or float64; or
        contiguous torch tensors of one type on the module's GPU
    device : number of the GPU; 0 for a CPU
    threads : of a CPU, which pack; None on a GPU
    stream : the CUDA stream that tensors are read on; it is waited for

    Raises :class:`~ecornn.errors.NotFiniteError` for an infinite weight where the module's products need finite ones,
    :class:`~ecornn.errors.DeviceError` for a device that is not there, and :class:`~ecornn.errors.ModuleError` for a
    module that packs in a way that is not known.
    """

    def __init__(self, file: ctypes.CDLL, weights: Mapping[str, Any], device: int, threads: int | None,
                 stream: int = 0) -> None:
        get = file.ecornn_module_api
        get.restype = ctypes.POINTER(_Api)
        found = get(_VERSION)
        if not found or found.contents.size < ctypes.sizeof(_Api):
            raise ModuleError("the module was compiled by another version of ecornn: compile it again")
        self._api = api = found.contents
        layer, error = _POINTER(), _Error()
        options = _Options(ctypes.sizeof(_Options), device, threads or 0, _ONLY_PACKS, stream)
        named, _kept = _named(weights)
        code = api.bind(named, len(weights), ctypes.byref(options), ctypes.byref(layer), ctypes.byref(error))
        self._check(code, error)
        self._layer = layer
        # At the end of the process the driver takes everything back, and may be gone already.
        weakref.finalize(self, api.release, layer).atexit = False

    def addresses(self, count: int) -> list[int]:
        """The addresses of the ``count`` packed buffers, in the order of their packings in the manifest."""
        found: list[int] = self._api.packed(self._layer)[:count]
        return found

    def pack(self, weights: Mapping[str, Any], stream: int = 0) -> None:
        """Packs others, as given to the constructor, in the same memory; tensors on this stream, without waiting."""
        error, (named, _kept) = _Error(), _named(weights)
        self._check(self._api.repack(self._layer, named, len(weights), stream, ctypes.byref(error)), error)

    def pack_at(self, pointers: Sequence[int], dtype: str = "float32", changed: Collection[int] | None = None,
                parts: int = NEEDED | OPTIONAL, stream: int = 0) -> bool:
        """Packs contiguous weights at these addresses, in the manifest's order, by ``pack_at`` of ecornn.h.

        ``changed``: the numbers of those that are not as they were, default: all. Returns False, and does nothing,
        where the module's own code cannot pack them."""
        flags = None if changed is None else bytes(n in changed for n in range(len(pointers)))
        at, kind, error = (ctypes.c_int64 * len(pointers))(*pointers), DLDataType(*DLPACK[dtype], 1), _Error()
        code = self._api.pack_at(self._layer, at, kind, flags, parts, stream, ctypes.byref(error))
        if code != _UNSUPPORTED:
            self._check(code, error)
        return not code

    @staticmethod
    def _check(code: int, error: _Error) -> None:
        if not code:
            return
        said = error.message.decode(errors="replace")
        if code == 5:
            raise DeviceError("device", said, "a device of this machine")
        if code == 8:
            raise NotFiniteError("weights", said, "finite numbers")
        raise _RAISED.get(code, ModuleError)(said)


def _named(weights: Mapping[str, Any]) -> tuple[ctypes.Array[_Named], list[Any]]:
    """An array of ``ecornn_named``, and what it points to."""
    made, kept = (_Named * len(weights))(), []
    for one, (name, value) in zip(made, weights.items(), strict=True):
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value)
            data, dtype, place = address(value), value.dtype.name, (CPU, 0)
        else:
            _, dtype, where = arrays_of(value, name).facts(value)
            data, place = value.data_ptr(), (CUDA, int(where.removeprefix("cuda:")))
        shape = (ctypes.c_int64 * value.ndim)(*value.shape)
        tensor = DLTensor(data, *place, value.ndim, DLDataType(*DLPACK[dtype], 1), shape, None, 0)
        one.name, one.tensor = name.encode(), ctypes.pointer(tensor)
        kept += [value, tensor, shape]
    return made, kept
