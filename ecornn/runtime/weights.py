"""The weights that a user passes: names, shapes, and the cell's view of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ecornn.errors import ArgumentError, DTypeError, NotFiniteError, ShapeError, WeightsError
from ecornn.manifest import Manifest, Parameter
from ecornn.program import FINITE
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.library import Library


def read_weights(manifest: Manifest, weights: Mapping[str, Any], library: Library, device: int) -> dict[str, Any]:
    """The weights, (G*H, K) or (G*H,), by name: NumPy arrays, float16, float32 or float64. Torch tensors, where all are
    on the GPU that the module is bound for.

    Raises :class:`WeightsError` for missing or unexpected names, :class:`ShapeError`,
    :class:`DTypeError` for what is not floating point, :class:`NotFiniteError` for infinite ones of products that need
    others, :class:`ArgumentError` for what is no array.
    """
    if not isinstance(weights, Mapping):
        raise ArgumentError("weights", type(weights), "a dict of arrays by PyTorch's names")
    expected = [parameter.name for parameter in manifest.parameters]
    missing = [name for name in expected if name not in weights]
    extra = [str(name) for name in weights if name not in expected]
    if missing or extra:
        wrong = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unexpected", extra))
                 if names]
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
    """Whether a value is infinite in float32."""
    if not isinstance(array, np.ndarray):
        return bool(array.float().isinf().any())
    with np.errstate(over="ignore"):
        return bool(np.isinf(array.astype(np.float32, copy=False)).any())


def _shape(value: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(getattr(value, "shape", ()))
    except (RuntimeError, TypeError) as error:  # torch's nested and uninitialized ones have none
        raise ArgumentError(name, type(value), f"an array with a shape ({str(error).splitlines()[0]})") from error


def _read(parameter: Parameter, value: Any, library: Library, there: bool) -> Any:
    name = f"weights[{parameter.name!r}]"
    shape = _shape(value, name)
    if there:
        if shape != parameter.shape:
            raise ShapeError(f"{name}.shape", shape, str(parameter.shape))
        return value.detach()
    array = arrays_of(value, name).to_host(value, name, library)
    if shape != parameter.shape:
        raise ShapeError(f"{name}.shape", shape, str(parameter.shape))
    if array.dtype.kind != "f":
        raise DTypeError(f"{name}.dtype", str(array.dtype), "a floating-point type")
    if array.dtype.itemsize > 8 or not array.dtype.isnative:
        array = array.astype(np.float64)
    return array
