"""A few values of weights in host memory, to see writes that PyTorch does not count.

Through ``.data``, NumPy, another process that shares them, and in inference mode weights change without a version. All
of their values would take longer to look at than a call takes; a few take a microsecond or two, and whatever writes a
weight as a whole changes one of them. A write to single values may be missed, and on a GPU a look would wait for it.
Of float64 all values are looked at: who checks gradients in that type, as torch.autograd.gradcheck does, moves single
values through ``.data``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PLACES, BYTES = 8, 128  # of a weight, evenly: 256 values of float32; of float64 all
EDGE = 16  # of each axis of one with gaps


class Sample:
    """Values of the weights as they were, of those that lie in host memory.

    It reads their memory: whoever asks knows that the weights are still where they were.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._each = [_views(w) if w.is_cpu and w.is_contiguous() else [] for w in weights]
        self._apart = {n: _apart(w) for n, w in enumerate(weights)
                       if w.is_cpu and not w.is_contiguous() and w.data_ptr()}
        self._all = [view for views in self._each for view in views]
        self._were = [*map(self._now, range(len(weights)))]
        self._values = self._now_all()

    def holds(self) -> bool:
        """Whether they are what they were."""
        return (b"".join(self._all) if not self._apart else self._now_all()) == self._values

    def differs(self, number: int) -> bool:
        """Whether those of this weight are not."""
        return self._now(number) != self._were[number]

    def _now(self, number: int) -> bytes:
        return self._apart[number].tobytes() if number in self._apart else b"".join(self._each[number])

    def _now_all(self) -> bytes:
        return b"".join([*self._all, *(values.tobytes() for values in self._apart.values())])


def _apart(weight: torch.Tensor) -> NDArray[Any]:
    """Of one with gaps, as a slice of a larger tensor: as many values, evenly."""
    # .numpy() would forbid for ever that its memory be given back
    values = np.from_dlpack(torch._neg_view(weight) if weight.is_neg() else weight)
    if weight.dtype == torch.float64:
        return values
    return values[tuple(slice(None, None, max(1, size // EDGE)) for size in values.shape)]


def _views(weight: torch.Tensor) -> list[memoryview]:
    size = weight.numel() * weight.element_size()
    pointer = weight.data_ptr()
    if not pointer or not size:
        return []
    memory = memoryview((ctypes.c_char * size).from_address(pointer)).cast("B")
    if size <= PLACES * BYTES or weight.dtype == torch.float64:
        return [memory]
    starts = [(size - BYTES) * place // (PLACES - 1) for place in range(PLACES)]
    return [memory[start:start + BYTES] for start in starts]
