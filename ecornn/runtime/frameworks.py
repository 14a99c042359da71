"""Which framework an array is of. A framework is imported where an array of it is there, and not before."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecornn.errors import ArgumentError
from ecornn.runtime.arrays import Arrays

_KNOWN: dict[type, Arrays] = {}


def arrays_of(value: Any, name: str) -> Arrays:
    """The framework of an array; :class:`ArgumentError` where it is of none. ``name`` is for messages."""
    known = _KNOWN.get(type(value))
    if known is None:
        known = _KNOWN[type(value)] = _find(value, name)
    return known


def _find(value: Any, name: str) -> Arrays:
    if isinstance(value, np.ndarray):
        from ecornn.runtime.numpy_arrays import NumPyArrays

        return NumPyArrays()
    if any(base.__module__.split(".")[0] == "torch" and base.__name__ == "Tensor"
           for base in type(value).__mro__):
        # A torch tensor exists, so torch is imported already.
        from ecornn.runtime.torch_arrays import TorchArrays

        return TorchArrays()
    if hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__"):
        from ecornn.runtime.foreign_arrays import ForeignArrays

        return ForeignArrays(value)
    raise ArgumentError(name, type(value), "a NumPy array, a torch.Tensor, or an array with __dlpack__")
