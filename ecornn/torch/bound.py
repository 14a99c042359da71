"""Compiled layers that are bound to weights, one for each kind of call.

Weights that have changed are read where torch has them, and packed where the last ones were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ecornn.errors import ArgumentError, DeviceError, NotFiniteError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.layer import Layer
from ecornn.runtime.loader import Module
from ecornn.torch import background
from ecornn.torch.background import PendingError
from ecornn.torch.compiling import KEPT, NAMES, compiled, few_steps, fitting, precision_of, serves
from ecornn.torch.kind import Kind, parameters
from ecornn.torch.snapshot import Snapshot

GRAPHS = "graphs"  # in place of a stream: the layers that CUDA graphs have captured


class DeviceWeights:
    """Packs the weights of a module of this kind in ``layer`` on a GPU, on the current stream.

    Weights that only gradients of first states need wait for :meth:`pack_for_states`, since most steps of training
    want none; ``due``: they wait.
    """

    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor]) -> None:
        self._kind, self._layer = kind, layer
        self._names = [p.name for p in layer.manifest.parameters]
        self.due = False
        self._read(weights)

    def pack(self, weights: Sequence[torch.Tensor], same: bool, changed: Sequence[int]) -> None:
        """Packs all weights, whichever have ``changed``. ``same``: they are the very tensors of the last time, where
        they were; others are checked, as :meth:`Layer.repack` does."""
        if same and self._dtype:
            self._pack(False)
            self.due = bool(self._layer.manifest.packed_for_optional)
            return
        self._layer.repack(parameters(self._kind, weights))
        self.due = False
        self._read(weights)

    def pack_for_states(self) -> None:
        """Packs the weights that wait, if any. Each CUDA graph does: it may be replayed without the one before it."""
        if self.due:
            self._pack(True)
            self.due = torch.cuda.is_current_stream_capturing()

    def _pack(self, optional: bool) -> None:
        queue = torch._C._cuda_getCurrentRawStream(self._layer.device)
        self._layer.repack_at(self._at, self._dtype, queue, optional)

    def _read(self, weights: Sequence[torch.Tensor]) -> None:
        """Notes the addresses of weights and their data type, which is empty if they must be rearranged first."""
        known, dtype = dict(zip(self._kind.names, weights, strict=True)), weights[0].dtype
        plain = not self._kind.projection and all(w.dtype == dtype and w.is_contiguous() and not w.is_neg()
                                                  for w in weights)
        self._dtype = NAMES[dtype] if plain and serves(weights[0].device, dtype) else ""
        self._at = [known[name].data_ptr() if name in known else 0 for name in self._names]  # 0: zeros, of no bias


class HostWeights:
    """Packs the weights of a module of this kind in ``layer`` on a CPU; none ever wait."""

    due = False

    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor]) -> None:
        self._kind, self._layer = kind, layer
        self._parameters = [(p.name, torch.Size(p.shape)) for p in layer.manifest.parameters]

    def pack(self, weights: Sequence[torch.Tensor], same: bool, changed: Sequence[int]) -> None:
        """Packs weights, again those whose numbers are in ``changed``; see :meth:`DeviceWeights.pack`."""
        known, names = parameters(self._kind, weights), {self._kind.names[n] for n in changed}
        tensors = [known[name] for name, _ in self._parameters]
        plain = all(w.shape == shape and w.dtype == torch.float32 and w.is_cpu and w.is_contiguous() and not w.is_neg()
                    for w, (_, shape) in zip(tensors, self._parameters, strict=True))
        numbers = [n for n, (name, _) in enumerate(self._parameters) if name in names]
        pointers = [w.data_ptr() for w in tensors] if plain else [0]  # 0 of what has no memory, which is refused below
        if not all(pointers) or not self._layer.repack_here(pointers, numbers):
            self._layer.repack(known)

    def pack_for_states(self) -> None:
        """Does nothing: no weights wait."""


class BoundLayer:
    """A layer with weights packed in it; ``busy`` counts the calls under way, ``packs`` how often it has packed."""

    def __init__(self, kind: Kind, module: Module, weights: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        device, threads = (None, torch.get_num_threads()) if x.is_cpu else (x.device.index, None)
        self.layer: Layer = module.bind(parameters(kind, weights), device or 0, threads=threads)
        self.layer.whole_rows = True  # operators have one tensor for y
        self.busy = self.packs = 0
        self.snapshot = Snapshot(weights)
        self.packing: HostWeights | DeviceWeights = (HostWeights if x.is_cpu else DeviceWeights)(
            kind, self.layer, weights)

    def pack(self, weights: Sequence[torch.Tensor]) -> None:
        """Packs weights in place of the last ones; on a GPU on the current stream."""
        same, snapshot = self.snapshot.same(weights), self.snapshot
        changed = snapshot.changed(weights)
        snapshot.outdate()  # until all is packed
        self.packs += 1
        self.packing.pack(weights, same, changed)
        if same:
            snapshot.renew(weights)
        else:
            self.snapshot = Snapshot(weights)


class BoundLayers:
    """The bound layers of an engine that train, or those that do not.

    On a CPU, and where they train, weights are packed in place. On a GPU each stream has its own layers that train, so
    that packing comes before its use in the order of the stream. CUDA graphs have one that no stream uses any more: it
    was packed and called before, as PyTorch asks for, and belongs to them since the first capture. Each forward pass in
    a graph packs, since weights change between its replays. Layers that do not train are bound anew on a GPU, and serve
    all streams.
    """

    def __init__(self, kind: Kind, trains: bool = True) -> None:
        self._kind, self._trains = kind, trains
        # the kind of a call and where it runs -> the batch that was compiled for -> the layer
        self._bound: dict[tuple[Any, ...], dict[int, BoundLayer]] = {}
        # the kind of a call -> the batch -> the module, wherever it runs; and what is compiled in the background
        self._modules: dict[tuple[Any, ...], dict[int, Module]] = {}
        self._pending: dict[tuple[Any, ...], dict[int, LayerSpec]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def layer(self, weights: Sequence[torch.Tensor], x: Any, masks: str, again: bool = False,
              states: bool = True) -> Iterator[Layer]:
        """A layer for x (T, B, I) with the weights as they are now, which it keeps until the context ends.

        ``masks``: nothing, ``lengths`` or ``sequences``; ``again``: an earlier call had the weights so, and no
        optimizer has come since; ``states``: gradients of first states may be asked for.
        """
        one = self.take(weights, x, x.shape[:2], masks, again, states)
        try:
            yield one.layer
        finally:
            self.give(one)

    def take(self, weights: Sequence[torch.Tensor], x: Any, sizes: tuple[int, int], masks: str = "",
             again: bool = False, states: bool = True) -> BoundLayer:
        """Does what :meth:`layer` does, until :meth:`give`, for T and B of ``sizes``, whatever shape x has."""
        with self._lock:
            one = self._take(weights, x, sizes, masks, again)
            if states and one.packing.due:
                one.packing.pack_for_states()
            one.busy += 1
        return one

    def take_this(self, one: BoundLayer, weights: Sequence[torch.Tensor], packs: int | None = None) -> bool:
        """Takes a layer that was taken before. False if its weights are not these any more or, given ``packs``, if it
        has packed since its count was that."""
        with self._lock:
            fits = one.snapshot.holds(weights) if packs is None else one.packs == packs
            fits = fits and not one.packing.due
            one.busy += fits
        return fits

    def give(self, one: BoundLayer) -> None:
        """Ends :meth:`take`: the layer may be packed again."""
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
        bound, modules = self._bound.setdefault((*alike, where), {}), self._modules.setdefault(alike, {})
        room = fitting(bound if where == GRAPHS else modules, batch, _most(batch, masks))
        known = bound.get(room)
        if known is None and where == GRAPHS:
            room, known = self._for_graphs(alike, batch)
            bound[room] = known
        if known is not None and (again or where != GRAPHS) and known.snapshot.holds(weights, again):
            return known
        if wrong := [w for w in weights if w.device != x.device]:
            raise DeviceError("weights.device", str(wrong[0].device), f"{x.device}, as the input's")
        if known is None and background.accepts() and not x.is_cpu and torch.cuda.is_current_stream_capturing():
            raise PendingError(None)  # a graph keeps what is called in it
        target = "cpu" if x.is_cpu else "cuda"
        keep = (self._kind.keep or KEPT[target]) if self._trains else None

        # made only to compile: the identity of a cell of a user's own takes its analysis, 50 ms
        def spec(room: int) -> LayerSpec:
            return self._kind.spec(room, few or steps, NAMES[x.dtype], masks, keep, precision)

        try:
            if known is not None and not known.busy and where is not None:
                known.pack(weights)
                return known
            if known is not None:
                module = known.layer.module
            elif room in modules:
                module = modules[room]
            elif background.accepts():
                room, module = self._compiled_behind(alike, batch, spec, target)
            else:
                module = modules[room] = compiled(spec(room), target)
            one = bound[room] = BoundLayer(self._kind, module, weights, x)
        except NotFiniteError:
            one = bound[room] = BoundLayer(self._kind, compiled(spec(room), target, infinite=True), weights, x)
        return one

    def _compiled_behind(self, alike: tuple[Any, ...], batch: int, spec: Callable[[int], LayerSpec],
                         target: str) -> tuple[int, Module]:
        """The room and the module for a batch that none of the modules takes, if it is compiled.

        Raises :class:`PendingError` if it is not, and :class:`ScheduleError` where no schedule serves the layer."""
        modules, pending = self._modules[alike], self._pending.setdefault(alike, {})
        room = fitting({*modules, *pending}, batch, _most(batch, alike[2]))
        if room not in pending:
            pending[room] = spec(room)
        modules[room] = background.start(pending[room], target).module()
        del pending[room]
        return room, modules[room]

    def _for_graphs(self, alike: tuple[Any, ...], batch: int) -> tuple[int, BoundLayer]:
        """Takes a layer from a stream that it was bound for, and gives it to CUDA graphs."""
        for key, bound in self._bound.items():
            room = fitting(bound, batch, _most(batch, alike[2]))
            if key[:-1] == alike and room in bound and not bound[room].busy:
                one = bound.pop(room)
                one.snapshot.outdate()
                return room, one
        if background.accepts():
            raise PendingError(None)
        raise ArgumentError("x", "an input of the first call", "a call that no CUDA graph captures: run a training "
                            "step before the capture, as PyTorch asks for")


def _most(batch: int, masks: str) -> int:
    """The largest compiled batch that may serve this one; columns are few anyway."""
    return batch if masks == "sequences" else 4 * batch


def _where(x: torch.Tensor) -> Any:
    """The place that orders calls: the threads of a CPU, a stream of a GPU."""
    if x.is_cpu:
        return torch.get_num_threads()
    if torch.cuda.is_current_stream_capturing():
        return GRAPHS
    return torch._C._cuda_getCurrentRawStream(x.device.index)
