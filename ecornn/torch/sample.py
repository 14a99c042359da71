"""A few values of weights in host memory, to see writes that PyTorch does not count.

Through ``.data``, NumPy, another process that shares them, and in inference mode weights change without a version. All
of their values would take longer to look at than a call takes; one of every row and every column of a matrix, and all
of a bias, take a microsecond or two. Of twice :data:`PLACES` places of a weight, or more, a look visits every n-th, and
the next look the next ones: n rows on end are seen at once, and a single one, or a column, within n looks. A write to
single values of a matrix may be missed, and on a GPU a look would wait for it. Of float64 all values are looked at each
time: who checks gradients in that type, as torch.autograd.gradcheck does, moves single values through ``.data``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from math import ceil, gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PLACES = 256  # of a weight, of which a look has at least so many, and less than twice as many

Read = Callable[[], bytes]


class Sample:
    """Values of the weights as they were, of those that lie in host memory.

    It reads their memory: whoever asks knows that the weights are still where they were.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights, self._places = weights, list[int]()
        self.renew()

    def renew(self) -> None:
        """They are what they are now, and where they are now."""
        places = [w.data_ptr() for w in self._weights]
        if places != self._places or not places:
            self._places = places
            self._each = [_looks(w) if w.is_cpu else [] for w in self._weights]  # as many as a power of 2, or none
            count = max(map(len, self._each), default=0)
            self._looks = [[looks[n % len(looks)] for looks in self._each if looks] for n in range(count)]
        self._were = [[read() for read in looks] for looks in self._each]
        self._turns = cycle([(looks, [were[n % len(were)] for were in self._were if were])
                             for n, looks in enumerate(self._looks)] or [([], [])])

    def holds(self) -> bool:
        """Whether they are what they were, at the places whose turn it is."""
        looks, were = next(self._turns)
        return [read() for read in looks] == were

    def differs(self, number: int) -> bool:
        """Whether those of this weight are not, at all places."""
        return [read() for read in self._each[number]] != self._were[number]


def _looks(weight: torch.Tensor) -> list[Read]:
    """What reads the places of a weight, all in a power of 2 of looks."""
    if not weight.data_ptr() or not weight.numel():
        return []
    step = 1 if weight.dtype == torch.float64 else _step(weight.shape)
    places = ceil(weight.numel() / step)
    count = 1 if weight.dtype == torch.float64 else 1 << (max(1, places // PLACES).bit_length() - 1)
    if weight.is_contiguous():
        flat = _memory(weight)[::step]
        return [flat[n::count].tobytes for n in range(count)]
    # .numpy() would forbid for ever that its memory be given back
    values = np.from_dlpack(torch._neg_view(weight) if weight.is_neg() else weight)
    if step == 1:
        return [values.tobytes]
    return [partial(_at, values, np.unravel_index(np.arange(n, places, count) * step, values.shape))
            for n in range(count)]


def _step(shape: torch.Size) -> int:
    """From place to place: at most a row, or a column, apart and in every column before one comes again."""
    if len(shape) < 2:
        return 1
    return next(step for step in range(min(shape), 0, -1) if gcd(step, shape[-1]) == 1)


def _memory(weight: torch.Tensor) -> NDArray[Any]:
    """Of a contiguous one, as whole numbers of its values' size."""
    size = weight.element_size()
    memory = (ctypes.c_char * (weight.numel() * size)).from_address(weight.data_ptr())
    return np.frombuffer(memory, np.dtype(f"u{size}"))


def _at(values: NDArray[Any], places: Any) -> bytes:
    return bytes(values[places].tobytes())
