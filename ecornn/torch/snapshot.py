"""Snapshots of weights, which tell whether the weights have changed since they were bound.

Tensors count most writes by their version. A sample of the values in host memory sees others: through ``.data``, NumPy,
another process, and in inference mode. It has a value of every row and column of a matrix, and all of a bias, which
take 1 or 2 us. Where a weight has twice :data:`PLACES` places or more, a look visits every n-th: n adjacent rows are
seen at once, a single row or column within n looks, single values perhaps never. On a GPU a look would wait. Of float64
weights it reads all values: gradient checkers, which use that type, move single ones through ``.data``."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from math import ceil, gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakIdKeyDictionary

from ecornn.runtime.torch_arrays import address

renewals = ctypes.c_int64()  # how often weights have been noted; native.cc reads it
PLACES = 256  # of a weight; a look has at least so many, and less than twice as many

Read = Callable[[], bytes]


class Snapshot:
    """Weights as they were, until a tensor dies: addresses, versions and sampled values. Its memory stays, since its
    address could be another's one day. Fused optimizers change weights and not versions: the weights of a backward pass
    are suspects from then on, and always those of one in a CUDA graph, which may be replayed."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._memory = [w.detach() for w in weights]
        self._tensors = [(weakref.ref(w), w.data_ptr()) for w in weights]
        # on a GPU a look would wait
        self._sample = Sample(self._memory) if any(w.is_cpu for w in weights) else None
        self._note(weights)
        self.ids = [*map(id, weights)]
        with _lock:
            _snapshots.add(self, self.ids)

    def same(self, weights: Sequence[torch.Tensor]) -> bool:
        if len(weights) != len(self._tensors):
            return False
        for w, (tensor, pointer) in zip(weights, self._tensors, strict=True):
            if w.data_ptr() != pointer or tensor() is not w:
                return False
        return True

    def holds(self, weights: Sequence[torch.Tensor], with_suspects: bool = False) -> bool:
        """Tells whether every weight is the same tensor, with the same values as far as can be seen."""
        if (not with_suspects and (self._suspects or replayed(weights))) or len(weights) != len(self.versions):
            return False
        for w, (tensor, pointer), version in zip(weights, self._tensors, self.versions, strict=True):
            alive: Any = tensor()
            if alive is not w or w.data_ptr() != pointer or (version is not None and w._version != version):
                return False
        return self._sample is None or self._sample.holds()

    def changed(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of the weights that may have changed."""
        if len(weights) != len(self.versions):
            return [*range(len(weights))]
        known = zip(weights, self._tensors, self.versions, _versions(weights), strict=True)
        return [n for n, (w, (tensor, pointer), was, version) in enumerate(known)
                if n in self._suspects or w.data_ptr() != pointer or tensor() is not w or version != was
                or (self._sample is not None and self._sample.differs(n))]

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        if self._sample is not None:
            self._sample.renew()
        self._note(weights)

    def _note(self, weights: Sequence[torch.Tensor]) -> None:
        """Notes versions, and suspects no weight any more."""
        renewals.value += 1
        self._suspects, self.versions = frozenset[int](), _versions(weights)

    def suspect(self, numbers: frozenset[int]) -> None:
        """Takes the weights with these numbers for possibly changed from now on."""
        self._suspects |= numbers

    def outdate(self) -> None:
        self.versions = []


def _versions(weights: Sequence[torch.Tensor]) -> list[int | None]:
    """The versions of weights; None for tensors made in inference mode, which count none."""
    try:
        return [w._version for w in weights]
    except RuntimeError:
        return [None if w.is_inference() else w._version for w in weights]


class Sample:
    """Values of the weights in host memory, as they were. Callers know that they still are where they were."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights, self._places = weights, list[int]()
        self.renew()

    def renew(self) -> None:
        """Takes the sample again, wherever the weights are now."""
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
        """Tells whether values are unchanged at the places whose turn it is."""
        looks, were = next(self._turns)
        return [read() for read in looks] == were

    def differs(self, number: int) -> bool:
        """Tells whether values of this weight have changed, looking at all places."""
        return [read() for read in self._each[number]] != self._were[number]


def _looks(weight: torch.Tensor) -> list[Read]:
    """Functions that read the places of a weight, all places in a power of 2 of looks."""
    if not address(weight) or not weight.numel():
        return []
    step = 1 if weight.dtype == torch.float64 else _step(weight.shape)
    places = ceil(weight.numel() / step)
    count = 1 if weight.dtype == torch.float64 else 1 << (max(1, places // PLACES).bit_length() - 1)
    if weight.is_contiguous():
        size = weight.element_size()
        memory = (ctypes.c_char * (weight.numel() * size)).from_address(weight.data_ptr())
        flat: NDArray[Any] = np.frombuffer(memory, np.dtype(f"u{size}"))[::step]
        return [flat[n::count].tobytes for n in range(count)]
    # .numpy() would forbid for ever that its memory be given back
    values = np.from_dlpack(torch._neg_view(weight) if weight.is_neg() else weight)
    if step == 1:
        return [values.tobytes]
    return [partial(_at, values, np.unravel_index(np.arange(n, places, count) * step, values.shape))
            for n in range(count)]


def _step(shape: torch.Size) -> int:
    """The distance of places: at most a row, or a column, apart and in every column before one comes again."""
    if len(shape) < 2:
        return 1
    return next(step for step in range(min(shape), 0, -1) if gcd(step, shape[-1]) == 1)


def _at(values: NDArray[Any], places: Any) -> bytes:
    return bytes(values[places].tobytes())


class Snapshots:
    """The snapshots of each weight, by the weight's id, which later tensors take over."""

    LEAST = 256  # ids

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.WeakSet[Snapshot]] = {}
        self._most = self.LEAST
        # ids -> the snapshots of these, with the weights' numbers; each training step asks for the same
        self._of: dict[tuple[int, ...], list[tuple[weakref.ref[Snapshot], frozenset[int]]]] = {}

    def add(self, snapshot: Snapshot, ids: Sequence[int]) -> None:
        """Adds a snapshot of the weights with these ids."""
        if len(self._by_id) >= self._most:  # where weights come and go, so do ids
            self._by_id = {weight: those for weight, those in self._by_id.items() if those}
            self._most = max(self.LEAST, 2 * len(self._by_id))
        for weight in ids:
            self._by_id.setdefault(weight, weakref.WeakSet()).add(snapshot)
        self._of.clear()

    def of(self, ids: tuple[int, ...]) -> list[tuple[Snapshot, frozenset[int]]]:
        """The snapshots of weights with these ids, and the numbers that these weights have there."""
        found = self._of.get(ids)
        if found is None:
            if len(self._of) >= self._most:
                self._of.clear()
            snapshots = {snapshot for weight in ids for snapshot in self._by_id.get(weight, ())}
            found = self._of[ids] = [
                (weakref.ref(one), frozenset(n for n, known in enumerate(one.ids) if known in ids))
                for one in snapshots]
        return [(one, numbers) for ref, numbers in found if (one := ref()) is not None]


_snapshots = Snapshots()
_replayed = WeakIdKeyDictionary()  # weights whose backward pass a CUDA graph has captured
_lock = threading.Lock()


def suspect(weights: Sequence[torch.Tensor]) -> None:
    """Has all layers that were bound to these weights bind those that take gradients again before their next use."""
    ids = tuple([id(w) for w in weights if w.requires_grad])
    with _lock:
        known = _snapshots.of(ids)
        if weights and weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            _replayed.update((w, None) for w in weights if w.requires_grad)
    for snapshot, numbers in known:
        snapshot.suspect(numbers)


def replayed(weights: Sequence[torch.Tensor]) -> bool:
    """Tells whether a CUDA graph may change weights without a trace, whenever it is replayed."""
    return bool(_replayed.data) and any(w in _replayed for w in weights)
