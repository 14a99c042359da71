"""Whether weights have changed since they were bound."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from ecornn.torch.sample import Sample


class Snapshot:
    """Weights as they were: the very tensors, at these addresses, with these versions.

    Writes that versions do not tell are seen by a sample of the values, on a CPU.

    The tensors may go; then these are other weights. Their memory stays, since its address could otherwise be that of
    other weights one day. Fused optimizers change weights and not their versions: those of a backward pass are
    suspects from then on.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._kept = [w.detach() for w in weights]
        # tensors made in inference mode count no versions
        self._state = [(weakref.ref(w), w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        self._sample = Sample(self._kept)
        self._suspects: set[int] = set()
        self.ids = [*map(id, weights)]
        with _lock:
            _snapshots.add(self)

    def holds(self, weights: Sequence[torch.Tensor], with_suspects: bool = False) -> bool:
        """Whether every weight is the one that it was, and as it was, as far as a tensor tells; and whether none is
        suspected, unless ``with_suspects``."""
        state = self._state
        if len(weights) != len(state) or (self._suspects and not with_suspects):
            return False
        for w, (tensor, pointer, count) in zip(weights, state, strict=True):
            changed = w.data_ptr() != pointer or (0 if w.is_inference() else w._version) != count
            if changed or tensor() is not w:
                return False
        return self._sample.holds()

    def changed(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of the weights that may not be as they were."""
        if len(weights) != len(self._state):
            return [*range(len(weights))]
        return [n for n, (w, (tensor, pointer, count)) in enumerate(zip(weights, self._state, strict=True))
                if n in self._suspects or w.data_ptr() != pointer
                or (0 if w.is_inference() else w._version) != count or tensor() is not w or self._sample.differs(n)]

    def suspect(self, ids: set[int]) -> None:
        """Those of these ids may have changed from now on."""
        self._suspects |= {n for n, known in enumerate(self.ids) if known in ids}

    def outdate(self) -> None:
        """From now on they are taken for changed."""
        self._kept, self._state, self._sample = [], [], Sample(())


_snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
_lock = threading.Lock()


def suspect(weights: Sequence[torch.Tensor]) -> None:
    """Has all that was bound from these weights, of those that take gradients, be bound again before it is used."""
    ids = {id(w) for w in weights if w.requires_grad}
    with _lock:
        known = [*_snapshots]
    for snapshot in known:
        if not ids.isdisjoint(snapshot.ids):
            snapshot.suspect(ids)
