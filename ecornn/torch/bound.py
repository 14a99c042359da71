"""Compiled layers for weights, one for each kind of call: weights that have changed are packed where the last ones
were."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ecornn.errors import ArgumentError, DeviceError, NotFiniteError
from ecornn.runtime.loader import Layer, Module
from ecornn.torch.compiling import KEPT, NAMES, compiled, few_steps, fitting, precision_of
from ecornn.torch.kind import Kind
from ecornn.torch.packed_weights import DeviceWeights, HostWeights
from ecornn.torch.parameters import parameters
from ecornn.torch.snapshot import Snapshot

GRAPHS = "graphs"  # in place of a stream: the layers that CUDA graphs have captured


class BoundLayer:
    """A layer, and the weights that are packed in it; ``packs`` counts how often they were."""

    def __init__(self, kind: Kind, module: Module, weights: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        device, threads = (None, torch.get_num_threads()) if x.is_cpu else (x.device.index, None)
        self.layer: Layer = module.bind(parameters(kind, weights), device or 0, threads=threads)
        self.layer.whole_rows = True  # operators have one tensor for y
        self.busy = self.packs = 0  # calls that are under way
        self.snapshot = Snapshot(weights)
        there = HostWeights if x.is_cpu else DeviceWeights
        self._packing: HostWeights | DeviceWeights = there(kind, self.layer, weights)

    def pack(self, weights: Sequence[torch.Tensor]) -> None:
        """Packs weights where the last ones were; on a GPU on the current stream."""
        same, snapshot = self.snapshot.same(weights), self.snapshot
        changed = snapshot.changed(weights)
        snapshot.outdate()  # until all is packed
        self.packs += 1
        self._packing.pack(weights, same, changed)
        if same:
            snapshot.renew(weights)
        else:
            self.snapshot = Snapshot(weights)

    @property
    def lacks_states(self) -> bool:
        """Whether gradients of first states need weights that are not packed."""
        return self._packing.due

    def pack_for_states(self) -> None:
        """Packs these."""
        self._packing.pack_for_states()


class BoundLayers:
    """Those of an engine that train, or those that do not.

    On a CPU, and where they train, weights are packed in place. On a GPU each stream has its own layers that train, so
    that packing comes before its use in the order of the stream. CUDA graphs have one that no stream uses any more: it
    was packed and called before, as PyTorch asks for, and belongs to them since the first capture. Each forward pass in
    a graph packs, since weights change between its replays. Layers that do not train are bound anew on a GPU, and serve
    all streams.
    """

    def __init__(self, kind: Kind, trains: bool = True) -> None:
        self._kind, self._trains = kind, trains
        # what a call is like, and where it runs -> the batch it was compiled for -> the layer
        self._bound: dict[tuple[Any, ...], dict[int, BoundLayer]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def layer(self, weights: Sequence[torch.Tensor], x: Any, masks: str, again: bool = False,
              states: bool = True) -> Iterator[Layer]:
        """A layer for x (T, B, I), with the weights as they are now; ``again``: as an earlier call had it, no optimizer
        has come since; ``states``: it may be asked for gradients of first states. It keeps its weights until this ends,
        and no longer."""
        one = self.take(weights, x, x.shape[:2], masks, again, states)
        try:
            yield one.layer
        finally:
            self.give(one)

    def take(self, weights: Sequence[torch.Tensor], x: Any, sizes: tuple[int, int], masks: str = "",
             again: bool = False, states: bool = True) -> BoundLayer:
        """As :meth:`layer`, until :meth:`give`, for T and B of these ``sizes``, whatever shape x has."""
        with self._lock:
            one = self._take(weights, x, sizes, masks, again)
            if states and one.lacks_states:
                one.pack_for_states()
            one.busy += 1
        return one

    def take_this(self, one: BoundLayer, weights: Sequence[torch.Tensor], packs: int | None = None) -> bool:
        """The same of one that was taken before; False where its weights are not these any more, or have been packed
        since there were so many ``packs``."""
        with self._lock:
            fits = one.snapshot.holds(weights) if packs is None else one.packs == packs
            fits = fits and not one.lacks_states
            one.busy += fits
        return fits

    def give(self, one: BoundLayer) -> None:
        """It may be packed again."""
        with self._lock:
            one.busy -= 1

    def outdate(self) -> None:
        """Has the next call of every kind read the weights again."""
        with self._lock:
            for bound in self._bound.values():
                for one in bound.values():
                    one.snapshot.outdate()

    def _take(self, weights: Sequence[torch.Tensor], x: Any, sizes: tuple[int, int], masks: str,
              again: bool) -> BoundLayer:
        steps, batch = sizes
        precision = precision_of(self._kind, x)
        few = 0 if self._trains or x.is_cpu else few_steps(steps)
        alike, where = (x.device, x.dtype, masks, precision, few), _where(x) if self._trains or x.is_cpu else None
        bound = self._bound.setdefault((*alike, where), {})
        room = fitting(bound, batch, _most(batch, masks))
        known = bound.get(room)
        if known is None and where == GRAPHS:
            room, known = self._for_graphs(alike, batch)
            bound[room] = known
        if known is not None and (again or where != GRAPHS) and known.snapshot.holds(weights, again):
            return known
        if wrong := [w for w in weights if w.device != x.device]:
            raise DeviceError("weights.device", str(wrong[0].device), f"{x.device}, as the input's")
        target = "cpu" if x.is_cpu else "cuda"
        keep = (self._kind.keep or KEPT[target]) if self._trains else None
        # made where something is compiled alone: the identity of a cell of one's own takes its analysis, 50 ms
        spec = partial(self._kind.spec, room, few or steps, NAMES[x.dtype], masks, keep, precision)
        try:
            if known is not None and not known.busy and where is not None:
                known.pack(weights)
                return known
            made = BoundLayer(self._kind, compiled(spec(), target) if known is None else known.layer.module, weights, x)
        except NotFiniteError:
            made = BoundLayer(self._kind, compiled(spec(), target, infinite=True), weights, x)
        bound[room] = made
        return made

    def _for_graphs(self, alike: tuple[Any, ...], batch: int) -> tuple[int, BoundLayer]:
        """A layer that was bound for a stream, and is not any more."""
        for key, bound in self._bound.items():
            room = fitting(bound, batch, _most(batch, alike[2]))
            if key[:-1] == alike and room in bound and not bound[room].busy:
                found = bound.pop(room)
                found.snapshot.outdate()
                return room, found
        raise ArgumentError("x", "an input of the first call", "a call that no CUDA graph captures: run a training "
                            "step before the capture, as PyTorch asks for")


def _most(batch: int, masks: str) -> int:
    """The largest batch of a layer that serves this one; columns are few of themselves."""
    return batch if masks == "sequences" else 4 * batch


def _where(x: torch.Tensor) -> Any:
    """What orders calls: the threads of a CPU, a stream of a GPU."""
    if x.is_cpu:
        return torch.get_num_threads()
    if torch.cuda.is_current_stream_capturing():
        return GRAPHS
    return torch._C._cuda_getCurrentRawStream(x.device.index)
