"""The weights of a layer: as a user passes them, and packed where its code runs, by the C interface (``ecornn.h``)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ecornn.dtypes import DLPACK
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ModuleError, NotFiniteError, ShapeError, WeightsError
from ecornn.manifest import Manifest, Parameter
from ecornn.program import FINITE, PACKED
from ecornn.runtime.dlpack import CPU, CUDA, DLDataType, DLTensor
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.library import Library
from ecornn.runtime.memory import DeviceMemory, HostMemory, Memory, address

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
_function = partial(ctypes.CFUNCTYPE, _NUMBER)


class _Api(ctypes.Structure):
    _fields_ = [("version", _NUMBER), ("size", _NUMBER), ("describe", _POINTER),
                ("bind", _function(_WEIGHTS, _NUMBER, ctypes.POINTER(_Options), ctypes.POINTER(_POINTER), _ERROR)),
                ("repack", _function(_POINTER, _WEIGHTS, _NUMBER, _POINTER, _ERROR)),
                ("release", ctypes.CFUNCTYPE(None, _POINTER)), ("workspace_size", _POINTER), ("kept_size", _POINTER),
                ("run", _POINTER), ("forward", _POINTER), ("backward", _POINTER),
                ("packed", ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_int64), _POINTER)),
                ("pack_at", _function(_POINTER, _POINTER, DLDataType, ctypes.c_char_p, _NUMBER, _POINTER, _ERROR))]


def api_of(file: ctypes.CDLL | None) -> _Api:
    """The C interface of a loaded module; :class:`ModuleError` where it has none, or too old a one."""
    if file is None:
        raise ModuleError("the module has no C interface: compile it again")
    file.ecornn_module_api.restype = ctypes.POINTER(_Api)
    found = file.ecornn_module_api(_VERSION)
    if not found or found.contents.size < ctypes.sizeof(_Api):
        raise ModuleError("the module was compiled by another version of ecornn: compile it again")
    api: _Api = found.contents
    return api


class PackedWeights:
    """Weights that a module has packed where it runs, and zeros, as long as this lives. ``packed``: their addresses by
    buffer. ``threads`` are a CPU's, None on a GPU, whose number ``device`` is. Raises as :meth:`Module.bind`."""

    def __init__(self, manifest: Manifest, library: Library, weights: Mapping[str, Any], device: int,
                 threads: int | None) -> None:
        self._manifest, self._library, self._device = manifest, library, device
        self._api = api = api_of(library.file)
        given, stream = self._read(weights)
        self._layer, error, (named, _kept) = _POINTER(), _Error(), _named(given)
        options = _Options(ctypes.sizeof(_Options), device, threads or 0, _ONLY_PACKS, stream)
        code = api.bind(named, len(given), ctypes.byref(options), ctypes.byref(self._layer), ctypes.byref(error))
        _check(code, error)
        # At the end of the process the driver takes everything back, and may be gone already.
        weakref.finalize(self, api.release, self._layer).atexit = False
        buffers = [b for b in manifest.buffers if b.role == PACKED]
        if unknown := [b.name for b in buffers if b.packing is None]:
            raise ModuleError(f"the module does not say how to pack {unknown[0]}")
        packings = [*dict.fromkeys(b.packing for b in buffers)]
        addresses = api.packed(self._layer)[:len(packings)]  # in the order of packings in the manifest
        self.packed: dict[str, int] = {b.name: addresses[packings.index(b.packing)] for b in buffers}
        work = manifest.workload
        self._zeros: tuple[int, int, list[Memory]] = 0, 0, []  # bytes, where they are, and what they were before
        self.zeros(manifest.stack.count * work.batch * work.hidden * work.itemsize)

    def repack(self, weights: Mapping[str, Any]) -> None:
        given, stream = self._read(weights)
        for name, value in given.items() if self._manifest.device.kind == "cuda" else ():
            if isinstance(value, np.ndarray):
                raise DeviceError(f"weights: {name}", "not all on the GPU", f"float32, float16 or bfloat16 tensors on "
                                  f"cuda:{self._device}, where they are packed")
        error, (named, _kept) = _Error(), _named(given)
        _check(self._api.repack(self._layer, named, len(given), stream, ctypes.byref(error)), error)

    def repack_at(self, pointers: Sequence[int], dtype: str, stream: int, optional: bool | None = None) -> None:
        """Packs weights at addresses of a GPU, unchecked: contiguous, in the manifest's order, all float32, float16 or
        bfloat16; 0: zeros. ``optional``: only what gradients of first states need (True), or all else (False)."""
        parts = NEEDED | OPTIONAL if optional is None else OPTIONAL if optional else NEEDED
        self._pack_at(pointers, dtype, None, parts, stream)

    def repack_here(self, pointers: Sequence[int], dtype: str, changed: Collection[int] | None = None) -> bool:
        """Packs weights at addresses of a CPU, unchecked: contiguous, all of ``dtype``, in manifest order; only
        ``changed`` numbers again. False, and nothing done, where the module's code cannot pack all that it reads."""
        flags = None if changed is None else bytes(n in changed for n in range(len(pointers)))
        return self._pack_at(pointers, dtype, flags, NEEDED | OPTIONAL, 0)

    def _pack_at(self, pointers: Sequence[int], dtype: str, flags: bytes | None, parts: int, stream: int) -> bool:
        at, kind, error = (ctypes.c_int64 * len(pointers))(*pointers), DLDataType(*DLPACK[dtype], 1), _Error()
        code = self._api.pack_at(self._layer, at, kind, flags, parts, stream, ctypes.byref(error))
        if code != _UNSUPPORTED:
            _check(code, error)
        return not code

    def pack_call(self, dtype: str) -> tuple[int, ...]:
        """The address of the function behind ``repack_at``, its first argument, and a data type's code and bits."""
        code, bits = DLPACK[dtype]
        function = ctypes.cast(self._api.pack_at, _POINTER).value
        return int(function or 0), int(self._layer.value or 0), int(code), int(bits)

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
            memory: Memory = (host := HostMemory(nbytes))
            host.bytes[:] = 0
            if self._manifest.device.kind == "cuda":
                memory = DeviceMemory(self._library, self._device, nbytes)
                self._library.copy(self._device, memory.pointer, host.pointer, nbytes, 0)
                self._library.synchronize(self._device, 0)  # any stream may read
            pointer = memory.pointer
            self._zeros = nbytes, pointer, [*kept, memory]
        return pointer


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


def read_weights(manifest: Manifest, weights: Mapping[str, Any], library: Library, device: int) -> dict[str, Any]:
    """Weights by name: NumPy arrays of floats, or Torch tensors where all are on the module's GPU. Raises
    :class:`WeightsError` for other names, :class:`ShapeError`, :class:`DTypeError`, :class:`ArgumentError` and, for
    infinite ones of products that need others, :class:`NotFiniteError`."""
    if not isinstance(weights, Mapping):
        raise ArgumentError("weights", type(weights), "a dict of arrays by PyTorch's names")
    expected = [parameter.name for parameter in manifest.parameters]
    missing = [name for name in expected if name not in weights]
    extra = [str(name) for name in weights if name not in expected]
    if missing or extra:
        wrong = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unexpected", extra)) if names]
        raise WeightsError(f"weights of {manifest.workload.cell}: {'; '.join(wrong)}; expected "
                           f"{', '.join(expected)}", [*missing, *extra])
    there = manifest.device.kind == "cuda" and all(
        arrays_of(value, f"weights[{name!r}]").packs(value, f"cuda:{device}") for name, value in weights.items())
    found = {p.name: _read(p, weights[p.name], library, there) for p in manifest.parameters}
    packings = [b.packing for b in manifest.buffers if b.packing is not None and b.packing.dtype in FINITE]
    finite = {key for packing in packings for key, _ in packing.sources}
    for parameter in manifest.parameters:
        if parameter.key in finite and _infinite(found[parameter.name]):
            raise NotFiniteError(f"weights[{parameter.name!r}]", "an array with an infinite number", "finite numbers, "
                                 "or a module without products of pairs and weights of integers")
    return found


def _infinite(array: Any) -> bool:
    if not isinstance(array, np.ndarray):
        return bool(array.float().isinf().any())
    with np.errstate(over="ignore"):
        return bool(np.isinf(array.astype(np.float32, copy=False)).any())


def _read(parameter: Parameter, value: Any, library: Library, there: bool) -> Any:
    name = f"weights[{parameter.name!r}]"
    try:
        shape = tuple(getattr(value, "shape", ()))
    except (RuntimeError, TypeError) as error:  # torch's nested and uninitialized ones have none
        raise ArgumentError(name, type(value), f"an array with a shape ({str(error).splitlines()[0]})") from error
    array = value.detach() if there else arrays_of(value, name).to_host(value, name, library)
    if shape != parameter.shape:
        raise ShapeError(f"{name}.shape", shape, str(parameter.shape))
    if there:
        return array
    if array.dtype.kind != "f":
        raise DTypeError(f"{name}.dtype", str(array.dtype), "a floating-point type")
    return array.astype(np.float64) if array.dtype.itemsize > 8 or not array.dtype.isnative else array
