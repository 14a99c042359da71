"""Whether weights have changed since they were bound."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ecornn.torch.sample import Sample


class Snapshot:
    """Weights as they were: the very tensors, at these addresses, with these versions.

    Writes that versions do not tell are seen by a sample of the values, on a CPU.

    The tensors may go; then these are other weights. Their memory stays, since its address could otherwise be that of
    other weights one day. Fused optimizers change weights and not their versions: those of a backward pass are
    suspects from then on. Those of a backward pass that a CUDA graph has captured always are: it may be replayed.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._kept = [w.detach() for w in weights]
        self._tensors = [(weakref.ref(w), w.data_ptr()) for w in weights]
        self._sample = Sample(self._kept)
        self._note(weights)
        self.ids = [*map(id, weights)]
        with _lock:
            _snapshots.add(self, self.ids)

    def same(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether every weight is the tensor that it was, where it was."""
        if len(weights) != len(self._tensors):
            return False
        for w, (tensor, pointer) in zip(weights, self._tensors, strict=True):
            if w.data_ptr() != pointer or tensor() is not w:
                return False
        return True

    def holds(self, weights: Sequence[torch.Tensor], with_suspects: bool = False) -> bool:
        """Whether every weight is the one that it was, and as it was, as far as a tensor tells; and whether none is
        suspected, unless ``with_suspects``."""
        if (not with_suspects and (self._suspects or replayed(weights))) or len(weights) != len(self._known):
            return False
        for w, (tensor, pointer, version) in zip(weights, self._known, strict=True):
            alive: Any = tensor()
            if alive is not w or w.data_ptr() != pointer or (version is not None and w._version != version):
                return False
        return self._sample.holds()

    def changed(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of the weights that may not be as they were."""
        if len(weights) != len(self.versions):
            return [*range(len(weights))]
        known = zip(weights, self._tensors, self.versions, strict=True)
        return [n for n, (w, (tensor, pointer), version) in enumerate(known)
                if n in self._suspects or w.data_ptr() != pointer or tensor() is not w or _version(w) != version
                or self._sample.differs(n)]

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """The same tensors have been read again."""
        self._sample.renew()
        self._note(weights)

    def _note(self, weights: Sequence[torch.Tensor]) -> None:
        """What tensors tell."""
        self._suspects, self.versions = set[int](), [*map(_version, weights)]
        # all in one place, since short calls ask, too
        self._known: list[tuple[weakref.ref[torch.Tensor], int, int | None]] = [
            (*place, None if w.is_inference() else w._version)
            for w, place in zip(weights, self._tensors, strict=True)]

    def suspect(self, ids: set[int]) -> None:
        """Those of these ids may have changed from now on."""
        self._suspects |= {n for n, known in enumerate(self.ids) if known in ids}

    def outdate(self) -> None:
        """From now on they are taken for changed."""
        self.versions, self._known = [], []


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version  # tensors made in inference mode count no versions


class Snapshots:
    """Those that there are of each weight, by its id, which later tensors take over."""

    LEAST = 256  # ids

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.WeakSet[Snapshot]] = {}
        self._most = self.LEAST

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, snapshot: Snapshot, ids: Sequence[int]) -> None:
        """One of the weights with these ids."""
        if len(self._by_id) >= self._most:  # where weights come and go, so do ids
            self._by_id = {weight: those for weight, those in self._by_id.items() if those}
            self._most = max(self.LEAST, 2 * len(self._by_id))
        for weight in ids:
            self._by_id.setdefault(weight, weakref.WeakSet()).add(snapshot)

    def of(self, ids: set[int]) -> set[Snapshot]:
        """Those of any of these weights."""
        return {snapshot for weight in ids for snapshot in self._by_id.get(weight, ())}


_snapshots = Snapshots()
_replayed = WeakIdKeyDictionary()  # weights whose backward pass a CUDA graph has captured
_lock = threading.Lock()


def suspect(weights: Sequence[torch.Tensor]) -> None:
    """Has all that was bound from these weights, of those that take gradients, be bound again before it is used."""
    ids = {id(w) for w in weights if w.requires_grad}
    with _lock:
        known = _snapshots.of(ids)
        if weights and weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            _replayed.update((w, None) for w in weights if w.requires_grad)
    for snapshot in known:
        snapshot.suspect(ids)


def replayed(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a CUDA graph may change weights without a trace, whenever it is replayed."""
    return bool(_replayed.data) and any(w in _replayed for w in weights)
