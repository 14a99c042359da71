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

import torch

PLACES, BYTES = 8, 128  # of a weight, evenly: 256 values of float32; of float64 all


class Sample:
    """Values of the weights as they were, of those that lie in host memory without gaps.

    It reads their memory: whoever asks knows that the weights are still where they were.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._each = [_views(w) if w.is_cpu and w.is_contiguous() else [] for w in weights]
        self._all = [view for views in self._each for view in views]
        self._were = [*map(b"".join, self._each)]
        self._values = b"".join(self._were)

    def holds(self) -> bool:
        """Whether they are what they were."""
        return b"".join(self._all) == self._values

    def differs(self, number: int) -> bool:
        """Whether those of this weight are not."""
        return b"".join(self._each[number]) != self._were[number]


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
