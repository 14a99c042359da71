"""Compiled layers that are bound to weights, one for each kind of call, and packed again where these change."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch

from ecornn.errors import ArgumentError, DeviceError, NotFiniteError, ScheduleError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.layer import Layer
from ecornn.runtime.loader import Module
from ecornn.runtime.memory import Memory
from ecornn.runtime.torch_arrays import address
from ecornn.torch import compiling
from ecornn.torch.by_address import LayerStep, Spare
from ecornn.torch.compiling import KEPT, NAMES, PendingError, about, compiled, few_steps, precision_of
from ecornn.torch.kind import Kind
from ecornn.torch.snapshot import Snapshot

GRAPHS = "graphs"  # in place of a stream: the layers that CUDA graphs have captured
SEVERAL = "several"  # in place of a stream: more than one of them
LEAST = 16  # rows of a module on a GPU once batches differ: less than that is hardly faster
NEAR = 16  # times the batch of a call, the largest batch of a module that stands in for the call's own
MOST = 64  # training steps that a layer keeps, by T and B
OFTEN = 32  # calls of few steps on a GPU that the module of longer ones serves before their own is compiled
TRAINING = -1  # in place of steps: modules that train, as long as they stand in for others

# the kind of a call: device, data type, masks, precision, and 1, 2, 4 or 8 steps on a GPU, or 0 for any number
Alike = tuple[torch.device, torch.dtype, str, "str | None", int]


class Shared(ctypes.Structure):
    """The numbers of a bound layer that ``native.cc`` shares. Each has one writer, who has Python's lock: ``packs`` and
    ``busy`` count for Python, the two after them for C++, how often weights were packed and the calls under way.
    ``due``: the weights that only gradients of first states need have not been packed. ``given_up``: C++ is to leave
    the layer alone."""

    _fields_ = [(name, ctypes.c_int64) for name in ("packs", "busy", "packed_here", "busy_here", "due", "given_up")]


class DeviceWeights:
    """Packs the weights of a module in ``layer`` on a GPU, on the current stream. Those that only gradients of first
    states need wait for :meth:`pack_for_states`, since most steps of training want none."""

    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor], shared: Shared) -> None:
        self._kind, self._layer, self._shared = kind, layer, shared
        self._names = [p.name for p in layer.manifest.parameters]
        self._read(weights)

    def pack(self, weights: Sequence[torch.Tensor], same: bool, _: Snapshot) -> None:
        """Packs all weights. ``same``: they are the very tensors of the last time, where they were, unchecked."""
        if same and self._dtype:
            self._pack(False)
            self._shared.due = bool(self._layer.manifest.packed_for_optional)
            return
        self._layer.repack(self._kind.parameters(weights))
        self._shared.due = False
        self._read(weights)

    def pack_for_states(self) -> None:
        """Packs the weights that wait, if any. Each CUDA graph does: it may be replayed without the one before it."""
        if self._shared.due:
            self._pack(True)
            self._shared.due = torch.cuda.is_current_stream_capturing()

    def _pack(self, optional: bool) -> None:
        queue = torch._C._cuda_getCurrentRawStream(self._layer.device)
        self._layer.repack_at(self._at, self._dtype, queue, optional)

    def _read(self, weights: Sequence[torch.Tensor]) -> None:
        """Notes the addresses of weights and their data type, which is empty if they must be rearranged first."""
        known, dtype = dict(zip(self._kind.names, weights, strict=True)), weights[0].dtype
        plain = not self._kind.projection and all(w.dtype == dtype and w.is_contiguous() and not w.is_neg()
                                                  for w in weights)
        self._dtype = NAMES[dtype] if plain and compiling.serves(weights[0].device, dtype) else ""
        self._at = [known[name].data_ptr() if name in known else 0 for name in self._names]  # 0: zeros, of no bias

    def readable(self, weights: Sequence[torch.Tensor]) -> tuple[str, list[int], Any]:
        """The data type and the addresses of weights, in the manifest's order, as the layer packs them, as long as the
        last value lives; the type is empty where they must be rearranged first."""
        self._read(weights)
        return self._dtype, self._at, weights


class HostWeights:
    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor], _: Shared) -> None:
        self._kind, self._layer = kind, layer
        self._parameters = [(p.name, torch.Size(p.shape)) for p in layer.manifest.parameters]

    def pack(self, weights: Sequence[torch.Tensor], same: bool, snapshot: Snapshot) -> None:
        """Packs weights, again those that have changed since the ``snapshot``; see :meth:`DeviceWeights.pack`."""
        names = {self._kind.names[n] for n in snapshot.changed(weights)}
        numbers = [n for n, (name, _) in enumerate(self._parameters) if name in names]
        dtype, pointers, _kept = self.readable(weights)
        if not dtype or not self._layer.repack_here(pointers, dtype, numbers):
            self._layer.repack(self._kind.parameters(weights))

    def readable(self, weights: Sequence[torch.Tensor]) -> tuple[str, list[int], Any]:
        """See :meth:`DeviceWeights.readable`."""
        known = self._kind.parameters(weights)
        tensors = [known[name] for name, _ in self._parameters]
        kind = tensors[0].dtype
        plain = all(w.shape == shape and w.dtype == kind and w.is_cpu and w.is_contiguous() and not w.is_neg()
                    for w, (_, shape) in zip(tensors, self._parameters, strict=True))
        pointers = [address(w) for w in tensors] if plain else [0]  # 0: it has no memory
        # no module's code packs float64
        return NAMES[kind] if all(pointers) and kind is not torch.float64 else "", pointers, tensors

    def pack_for_states(self) -> None:
        """Does nothing: no weights wait."""


class BoundLayer:
    """A layer with weights packed in it. ``place``: the one that has read them, if these are noted; ``packed_in``: the
    one that has packed them again; ``native_steps``: how many were made for it."""

    def __init__(self, kind: Kind, module: Module, weights: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        device, threads = (None, torch.get_num_threads()) if x.is_cpu else (x.device.index, None)
        self.layer: Layer = module.bind(kind.parameters(weights), device or 0, threads=threads)
        self.layer.whole_rows = True  # operators have one tensor for y
        self.shared, self.native_steps = Shared(), 0
        self._workspace: Memory | None = None
        self.place: Any = None
        self.packed_in: Any = None
        self._kind, self._steps, self._spare = kind, dict[tuple[int, int], LayerStep](), Spare()
        self.snapshot = Snapshot(weights)
        self.packing: HostWeights | DeviceWeights = (HostWeights if x.is_cpu else DeviceWeights)(
            kind, self.layer, weights, self.shared)

    @property
    def busy(self) -> int:
        """How many calls are under way."""
        return int(self.shared.busy + self.shared.busy_here)

    @property
    def packs(self) -> int:
        """How often it has packed."""
        return int(self.shared.packs + self.shared.packed_here)

    def workspace(self, nbytes: int, make: Callable[[int], Memory]) -> Memory:
        """Memory of at least ``nbytes`` for native steps, which never run at the same time; in it is room for more."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            self._workspace = make(1 << max(0, nbytes - 1).bit_length())
        return self._workspace

    def step(self, steps: int, batch: int) -> LayerStep | None:
        """A training step for this T and B, kept for the next time; None for more steps than the module takes."""
        found = self._steps.get((steps, batch))
        if found is None and steps <= self.layer.manifest.longest:
            if len(self._steps) >= MOST:
                self._steps.clear()
            found = self._steps[steps, batch] = LayerStep(self._kind, self.layer, steps, batch, self._spare)
        return found

    def holds(self, weights: Sequence[torch.Tensor], place: Any = None, with_suspects: bool = False) -> bool:
        """Tells whether it has these weights, and notes the stream that reads them, ``place``, if it does not train."""
        if not self.snapshot.holds(weights, with_suspects):
            return False
        if place != self.place:
            if self.packed_in not in (None, place) and place != GRAPHS:  # whose captures wait for all streams
                return False  # they were packed in a stream that this one does not wait for
            self.place = SEVERAL
        return True

    def pack(self, weights: Sequence[torch.Tensor]) -> None:
        snapshot = self.snapshot
        same = snapshot.same(weights)
        self.shared.packs += 1
        try:
            self.packing.pack(weights, same, snapshot)
        except BaseException:
            snapshot.outdate()  # some may be packed
            raise
        if same:
            snapshot.renew(weights)
        else:
            self.snapshot = Snapshot(weights)


class BoundLayers:
    """The bound layers of an engine that train, or those that do not; the latter know the former, ``trained``.

    On a CPU, and where they train, weights are packed in place. On a GPU each stream has its own layers that train, so
    that packing comes before use. CUDA graphs have one that no stream uses any more, as of their first capture; it was
    called before, as PyTorch asks for. Each forward pass in a graph packs, since weights change between replays. Layers
    that do not train are bound on a GPU for all streams, and packed in place where one stream alone has read them; on a
    CPU those that train serve these calls, too."""

    def __init__(self, kind: Kind, trained: BoundLayers | None = None) -> None:
        self._kind, self._trains, self._trained = kind, trained is None, trained
        # the kind of a call and where it runs -> the batch that was compiled for -> the layer
        self._bound: dict[tuple[Any, ...], dict[int, BoundLayer]] = {}
        # the kind of a call -> the batch -> the module, wherever it runs; and what is compiled in the background
        self._modules: dict[Alike, dict[int, Module]] = {}
        self._pending: dict[Alike, dict[int, LayerSpec]] = {}
        # the kind of a call -> the T of the first one; and, of few steps, the number of calls without their own module
        self._first: dict[Alike, int] = {}
        self._calls: dict[Alike, int] = {}
        self.lock: threading.Lock = threading.Lock() if trained is None else trained.lock

    @contextmanager
    def layer(self, weights: Sequence[torch.Tensor], x: Any, masks: str, again: bool = False,
              states: bool = True) -> Iterator[Layer]:
        """A layer for x (T, B, I) with the weights of now, kept until the context ends. ``masks``: none, ``lengths`` or
        ``sequences``; ``again``: no optimizer has come since; ``states``: their gradients may be asked for."""
        one = self.take(weights, x, x.shape[:2], masks, again, states)
        try:
            yield one.layer
        finally:
            self.give(one)

    def take(self, weights: Sequence[torch.Tensor], x: Any, sizes: tuple[int, int], masks: str = "",
             again: bool = False, states: bool = True) -> BoundLayer:
        """Does what :meth:`layer` does, until :meth:`give`, for T and B of ``sizes``, whatever shape x has."""
        with self.lock:
            one = self._take(weights, x, sizes, masks, again)
            if states and one.shared.due:
                one.packing.pack_for_states()
            one.shared.busy += 1
        return one

    def take_this(self, one: BoundLayer, weights: Sequence[torch.Tensor], packs: int | None = None,
                  place: Any = None) -> bool:
        """Takes a layer that was taken before; False if its weights are not these, or it has packed since ``packs``.
        ``place``: a stream, if the layer does not train."""
        with self.lock:
            fits = one.holds(weights, place) if packs is None else one.packs == packs
            fits = fits and not one.shared.due
            one.shared.busy += fits
        return fits

    def take_again(self, one: BoundLayer, weights: Sequence[torch.Tensor], x: Any, packs: int,
                   states: bool) -> BoundLayer:
        """Takes for a backward pass the layer of its forward pass, ``one``, which had packed ``packs`` times. If it
        has others' weights by now it packs these again, or another layer of the same module does."""
        with self.lock:
            if one.packs != packs:
                where = place_of(x)
                here = [each for key, bound in self._bound.items() if key[-1] == where for each in bound.values()]
                if one.busy or one not in here:
                    one = BoundLayer(self._kind, one.layer.module, weights, x)
                else:
                    one.pack(weights)
            if states and one.shared.due:
                one.packing.pack_for_states()
            one.shared.busy += 1
        return one

    def give(self, one: BoundLayer) -> None:
        with self.lock:
            one.shared.busy -= 1

    def outdate(self) -> None:
        with self.lock:
            for bound in self._bound.values():
                for one in bound.values():
                    one.snapshot.outdate()

    def serves(self, x: Any, sizes: tuple[int, int]) -> bool:
        """Tells whether calls like this one have the module that they should, and not one that stands in for it."""
        alike, batch = self._alike(x, sizes[0], ""), sizes[1]
        return self._has(alike, batch) or self._by_trained(x, alike, batch)

    def _has(self, alike: Alike, batch: int, pending: bool = False) -> bool:
        """Tells whether there is a module for such calls, or also whether one is ``pending``."""
        rooms = {*self._modules.get(alike, ()), *(self._pending.get(alike, ()) if pending else ())}
        return _room(rooms, batch, alike) in rooms

    def _by_trained(self, x: Any, alike: Alike, batch: int) -> bool:
        """Tells whether the layers that train have such calls as well."""
        return (self._trained is not None and x.is_cpu and not self._has(alike, batch)
                and self._trained._has(alike, batch, pending=True))

    def _take(self, weights: Sequence[torch.Tensor], x: Any, sizes: tuple[int, int], masks: str,
              again: bool) -> BoundLayer:
        steps, batch = sizes
        alike, place = self._alike(x, steps, masks), place_of(x)
        where, reader = (place, None) if self._trains or x.is_cpu else (None, place)  # None: all streams
        if self._trained is not None and self._by_trained(x, alike, batch):
            try:
                return self._trained._take(weights, x, sizes, masks, again)
            except ScheduleError:
                pass  # of gradients
            except PendingError as pending:
                if pending.job is None or not pending.job.error:
                    raise
        bound, modules = self._bound.setdefault((*alike, where), {}), self._modules.setdefault(alike, {})
        room = _room(bound if where == GRAPHS else modules, batch, alike)
        known = bound.get(room)
        if known is None and where == GRAPHS:
            room, known = self._for_graphs(alike, batch)
            bound[room] = known
        if known is not None and (again or where != GRAPHS) and known.holds(weights, reader, again):
            return known
        if wrong := [w for w in weights if w.device != x.device]:
            raise DeviceError("weights.device", str(wrong[0].device), f"{x.device}, as the input's")
        if known is None and compiling.accepts():
            if not x.is_cpu and torch.cuda.is_current_stream_capturing():
                raise PendingError(None)  # a graph keeps what is called in it
            alike, room = self._served(alike, batch, steps)
            bound, modules = self._bound.setdefault((*alike, where), {}), self._modules[alike]
            known = bound.get(room)
            if known is not None and known.holds(weights, reader, again):
                return known
        try:
            if known is not None and not known.busy and (reader is None or known.place == reader != GRAPHS):
                known.pack(weights)
                known.packed_in = reader
                return known
            if known is not None:
                module = known.layer.module
            elif room in modules:
                module = modules[room]
            else:
                module = modules[room] = compiled(self._spec(alike, room, steps), x.device.type)
            one = bound[room] = BoundLayer(self._kind, module, weights, x)
        except NotFiniteError:
            module = compiled(self._spec(alike, room, steps), x.device.type, infinite=True)
            one = bound[room] = BoundLayer(self._kind, module, weights, x)
        one.place = reader
        return one

    def _alike(self, x: Any, steps: int, masks: str) -> Alike:
        few = 0 if self._trains or x.is_cpu else few_steps(steps)
        return x.device, x.dtype, masks, precision_of(self._kind, x), few

    def _spec(self, alike: Alike, room: int, steps: int) -> LayerSpec:
        """The layer to compile for calls that are ``alike``, by the T of the first of them."""
        device, dtype, masks, precision, few = alike
        keep = (self._kind.keep or KEPT[device.type]) if self._trains else None
        steps = few or about(self._first.setdefault(alike, steps))
        return self._kind.spec(room, steps, NAMES[dtype], masks, keep, precision)

    def _served(self, alike: Alike, batch: int, steps: int) -> tuple[Alike, int]:
        """The kind and room of the module for this call, or of one that stands in while that is compiled. Raises
        :class:`PendingError` without one, :class:`ScheduleError` if there will be none."""
        device, dtype, masks, precision, few = alike
        modules, pending = self._modules.setdefault(alike, {}), self._pending.setdefault(alike, {})
        room = _room({*modules, *pending}, batch, alike)
        if room in modules:
            return alike, room
        if room not in pending:
            pending[room] = self._spec(alike, room, steps)
        many: Alike = (device, dtype, masks, precision, 0)
        if few and masks != "sequences" and (pending[room], device.type, False) not in compiling.outcomes and (
                self._modules.get(many) or self._pending.get(many)):
            self._calls[alike] = count = self._calls.get(alike, 0) + 1
            if count < OFTEN:
                return self._served(many, batch, steps)
        try:
            modules[room] = compiling.start(pending[room], device.type).module()
        except PendingError:
            kinds = [many, alike] if few else [alike]
            if self._trained is not None:
                training: Alike = (device, dtype, masks, precision, TRAINING)
                self._modules[training] = self._trained._modules.get(many, {})
                kinds.append(training)
            near = self._near(kinds, batch) if masks != "sequences" else None
            if near is None:
                raise
            return near
        del pending[room]
        return alike, room

    def _near(self, kinds: Sequence[Alike], batch: int) -> tuple[Alike, int] | None:
        """The kind of call, of these, and the batch of the smallest module that is there and takes this batch."""
        for kind in kinds:  # a module may have come since the last call of its own kind
            for room, spec in [*self._pending.get(kind, {}).items()]:
                if isinstance(module := compiling.outcomes.get((spec, kind[0].type, False)), Module):
                    self._modules[kind][room] = module
                    del self._pending[kind][room]
        near = [(kind, room) for kind in kinds for room in self._modules.get(kind, ()) if batch <= room <= NEAR * batch]
        return min(near, key=itemgetter(1), default=None)

    def _for_graphs(self, alike: Alike, batch: int) -> tuple[int, BoundLayer]:
        """Takes a layer from a stream that it was bound for, and gives it to CUDA graphs."""
        for key, bound in self._bound.items():
            room = _room(bound, batch, alike)
            if key[:-1] == alike and room in bound and not bound[room].busy:
                one = bound.pop(room)
                one.snapshot.outdate()
                one.shared.given_up = True
                return room, one
        if compiling.accepts():
            raise PendingError(None)
        raise ArgumentError("x", "an input of the first call", "a call outside of a CUDA graph's capture: run a "
                            "training step before the capture, as PyTorch's documentation says")


def _room(bound: Collection[int], batch: int, alike: Alike) -> int:
    """The smallest batch of the ``bound`` layers that takes ``batch`` without much waste. If there is none, the batch
    to compile for: that of the first call, or, once calls differ, the next power of 2."""
    if batch in bound:
        return batch
    device, _, masks, *_ = alike
    columns = masks == "sequences"  # which are few anyway
    least = LEAST if device.type == "cuda" and not columns else 1
    most = batch if columns else max(4 * batch, least)
    return min((room for room in bound if batch <= room <= most),
               default=max(1 << (batch - 1).bit_length(), least) if bound else batch)


def place_of(x: torch.Tensor) -> Any:
    """The place that orders calls: the threads of a CPU, a stream of a GPU."""
    if x.is_cpu:
        return torch.get_num_threads()
    if torch.cuda.is_current_stream_capturing():
        return GRAPHS
    return torch._C._cuda_getCurrentRawStream(x.device.index)
