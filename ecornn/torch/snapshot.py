"""Whether weights have changed since they were bound."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch


class Snapshot:
    """Weights as they were: the very tensors, at these addresses, with these versions.

    The tensors may go; then these are other weights. Their memory stays, since its address could otherwise be that of
    other weights one day.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._kept = [w.detach() for w in weights]
        # tensors made in inference mode count no versions
        self._state = [(weakref.ref(w), w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def holds(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether every weight is the one that it was, and as it was."""
        state = self._state
        if len(weights) != len(state):
            return False
        for w, (tensor, pointer, count) in zip(weights, state, strict=True):
            changed = w.data_ptr() != pointer or (0 if w.is_inference() else w._version) != count
            if changed or tensor() is not w:
                return False
        return True

    def outdate(self) -> None:
        """From now on they are taken for changed."""
        self._kept, self._state = [], []
