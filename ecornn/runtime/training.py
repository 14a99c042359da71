"""A training step of a module: forward, which keeps what the backward pass reads, and that pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import BACKWARD, FORWARD, KEPT
from ecornn.runtime.arrays import Arrays, Placed
from ecornn.runtime.inputs import Widths
from ecornn.runtime.memory import GivenMemory, Memory, Pool, layout
from ecornn.runtime.plan import SCALARS, EntryPlan, entry_plan


@dataclass
class Kept:
    """What a call of :meth:`Layer.forward` keeps for :meth:`Layer.backward`, which takes it once. x and y belong to it:
    they must not be written before.

    Attributes
    ----------
    steps, batch, rows : T and B of the call, and the rows of states: B, or S with ``sequences``
    widths : of the sequences beside x that were passed, see inputs.py
    room : what the gradient of x may be written over, if it is not a part of ``memory``: it goes on living as that
    nbytes : bytes of both, what is kept besides x, y and the first states
    """

    owner: Any
    arrays: Arrays
    x: Placed
    y: Placed
    states: list[Placed]
    masks: dict[str, Placed]
    memory: Memory | None
    steps: int
    batch: int
    rows: int
    widths: Widths = field(default_factory=dict)
    taken: bool = field(default=False)
    room: Memory | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.memory, self.room) if part is not None)


@dataclass(frozen=True)
class Gradients:
    """What :meth:`Layer.backward` gives.

    Attributes
    ----------
    x : (T, B, I), of the module's data type
    weights : by name, of the weights' shapes, float32; of a module of float64 that
    state : of the first states, as they were passed to ``forward``: (B, H), or (L*D, B, H); S rows with ``sequences``.
        () where they were not wanted
    inputs : of the sequences beside x that were passed as ``inputs``, by name, each of its shape
    """

    x: Any
    weights: dict[str, Any]
    state: tuple[Any, ...]
    inputs: dict[str, Any] = field(default_factory=dict)


def kept_layout(manifest: Manifest, steps: int, batch: int) -> tuple[dict[str, int], int]:
    """Where each buffer that forward keeps starts, by name, and the bytes of all, at this T and B, perhaps symbols.
    What the gradient of x may lie in is the last one.

    Rows of the batch that a call does not have are not kept.
    """
    taken = {name for entry in (FORWARD, BACKWARD) for name in manifest.entries.get(entry, ())}
    kept = sorted((b for b in manifest.buffers if b.role == KEPT and b.name in taken),
                  key=lambda b: b.name == manifest.dx_in)
    most = manifest.workload.batch
    sizes = [-(-b.extent.at(steps) * batch // most) * b.itemsize for b in kept]
    offsets, total = layout(sizes)
    return {b.name: start for b, start in zip(kept, offsets, strict=True)}, total


class Training:
    """The two entries of a module, for a :class:`~ecornn.runtime.caller.Caller`, which has this, and whose weights they
    read."""

    def __init__(self, caller: Any) -> None:
        self._caller, manifest = caller, caller.manifest
        if FORWARD not in manifest.entries:
            raise ModuleError("the module was compiled without training=True: it has no backward pass")
        self._forward, self._backward = entry_plan(manifest, FORWARD), entry_plan(manifest, BACKWARD)
        self._arguments = {id(plan): self._packed(plan) for plan in (self._forward, self._backward)}
        # plan, T, what lies elsewhere -> offsets, bytes
        self._scratch: dict[tuple[int, int, bool], tuple[tuple[int, ...], int]] = {}
        self._pool, self._kept = Pool(), Pool()
        self._dx_in = "" if manifest.dx_in is msgspec.UNSET else manifest.dx_in
        self._in_place: dict[str, str] = {} if manifest.in_place is msgspec.UNSET else manifest.in_place
        self._last = (0, 0, *kept_layout(manifest, 0, 0))

    @property
    def writes(self) -> bool:
        """Whether ``backward`` can write gradients of parameters, in place of adding to what is there."""
        return bool(self._backward.at["existing"])

    def kept_bytes(self, steps: int, batch: int) -> int:
        """As :func:`kept_layout` has them."""
        return self._layout(steps, batch)[1]

    def _layout(self, steps: int, batch: int) -> tuple[dict[str, int], int]:
        last = self._last  # one tuple, so that a thread never sees halves of two
        if last[:2] != (steps, batch):
            last = self._last = (steps, batch, *kept_layout(self._caller.manifest, steps, batch))
        return last[2:]

    def workspace_bytes(self, steps: int) -> int:
        """The most bytes of workspace that one of the two calls takes; ``backward`` of a caller's memory takes more."""
        return max(self._room(plan, steps, True)[1] for plan in (self._forward, self._backward))

    def _packed(self, plan: EntryPlan) -> list[int]:
        """The arguments of an entry that are the same in every call; 0 in place of all others."""
        arguments = [0] * plan.count
        for position, buffer in plan.packed:
            arguments[position] = self._caller.packed[buffer.name]
        return arguments

    def _room(self, plan: EntryPlan, steps: int, own: bool) -> tuple[tuple[int, ...], int]:
        """Where workspace buffers start at this T, and the bytes of all. ``own``: what is kept is the layer's, in which
        some lie."""
        found = self._scratch.get((id(plan), steps, own))
        if found is None:
            if len(self._scratch) >= 64:
                self._scratch.clear()
            sizes = [0 if own and b.name in self._in_place else b.nbytes(steps) for _, b in plan.scratch]
            found = self._scratch[id(plan), steps, own] = layout(sizes)
        return found

    def forward(self, arrays: Arrays, x: Placed, states: Sequence[Placed], masks: Mapping[str, Placed], y: Placed,
                after: Sequence[Placed], steps: int, batch: int, rows: int, memory: Memory | None = None) -> Kept:
        """Runs ``forward``; arguments are checked, ``states`` and ``after`` as a call has them."""
        offsets, total = self._layout(steps, batch)
        room, begin = None, offsets.get(self._dx_in)
        if memory is None and begin is not None:  # apart: of what is kept this alone lives as long as the gradient of x
            room, total = arrays.workspace(total - begin, x[0], self._caller.library), begin
        if memory is None and total:
            memory = self._kept.take(0, total) or arrays.workspace(total, x[0], self._caller.library)
        kept = Kept(self._caller, arrays, x, y, list(states), dict(masks), memory, steps, batch, rows, room=room)
        given = {"x": [x[1]], "y": [y[1]], "state_in": self._by_part(states, rows),
                 "state_out": self._by_part(after, rows), **{name: [at] for name, (_, at) in masks.items()}}
        self._run(self._caller.library.forward, self._forward, kept, offsets, given)
        return kept

    def backward(self, kept: Kept, dy: Placed, dstates: Sequence[Placed], dx: Placed, before: Sequence[Placed],
                 gradients: Iterable[Placed], add: bool = True) -> None:
        """Runs ``backward``; ``before`` gets the gradients of the first states, unless it is empty, ``gradients``, in
        the order of the manifest's parameters, theirs: ``add``: to what is there. Else that must be zeros, but where
        the module :attr:`writes`."""
        rows, work = kept.rows, self._caller.manifest
        states = self._by_part(before, rows) if before else [0] * (len(work.states) * work.stack.count)
        given = {"x": [kept.x[1]], "y": [kept.y[1]], "state_in": self._by_part(kept.states, rows), "dy": [dy[1]],
                 "dstate_out": self._by_part(dstates, rows), "dx": [dx[1]],
                 "dstate_in": states, "gradient": [at for _, at in gradients],
                 **{name: [at] for name, (_, at) in kept.masks.items()}}
        if self.writes:
            given["existing"] = [int(add)]
        offsets, _ = self._layout(kept.steps, kept.batch)
        self._run(self._caller.library.backward, self._backward, kept, offsets, given)
        memory, kept.memory, kept.room = kept.memory, None, None
        # The system takes about as long to give a CPU new memory as its cores to fill it.
        if self._caller.threads is not None and memory is not None and not isinstance(memory, GivenMemory):
            self._kept.give(0, memory)

    def room_for_dx(self, kept: Kept) -> Placed | None:
        """The place of what is kept, for the gradient of x, where the program says that nobody reads it by then."""
        if kept.room is None:
            return None
        return kept.arrays.over(kept.room, kept.x[0], (kept.steps, kept.batch, self._caller.manifest.workload.input))

    def _by_part(self, states: Sequence[Placed], rows: int) -> list[int]:
        """Pointers by state and then by sequence."""
        work, count = self._caller.manifest.workload, self._caller.manifest.stack.count
        size = rows * work.hidden * work.itemsize
        return [at + part * size for _, at in states for part in range(count)]

    def _run(self, function: Any, plan: EntryPlan, kept: Kept, offsets: Mapping[str, int],
             given: Mapping[str, Sequence[int]]) -> None:
        caller, arrays, steps = self._caller, kept.arrays, kept.steps
        queue = caller.threads or arrays.queue(caller.device)
        arguments = self._arguments[id(plan)].copy()
        arguments[:SCALARS] = steps, kept.batch, caller.device, queue
        places: dict[str, int] = {}
        for position, buffer in plan.kept:
            if kept.room is not None and buffer.name == self._dx_in:
                places[buffer.name] = kept.room.pointer
            else:
                assert kept.memory is not None
                places[buffer.name] = kept.memory.pointer + offsets[buffer.name]
            arguments[position] = places[buffer.name]
        for tensor, positions in plan.at.items():
            for position, pointer in zip(positions, given.get(tensor, ()), strict=True):
                arguments[position] = pointer
        own = not isinstance(kept.memory, GivenMemory)  # backward writes into no other
        starts, total = self._room(plan, steps, own)
        key = 0 if caller.threads is not None else queue
        keep = caller.threads is not None or arrays.keeps_workspace()
        memory = (self._pool.take(key, total) if keep else None) or arrays.workspace(total, kept.x[0], caller.library)
        for (position, buffer), start in zip(plan.scratch, starts, strict=True):
            place = self._in_place.get(buffer.name) if own else None
            arguments[position] = memory.pointer + start if place is None else places[place]
        function(*arguments)
        if keep:
            self._pool.give(key, memory)
