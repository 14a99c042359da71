"""Positions of arguments of an entry, by role and tensor, found once; and calls by addresses alone, unchecked."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any

from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import BACKWARD, ENTRIES, FORWARD, KEPT, PACKED, RUN, TENSORS, WORKSPACE, Buffer
from ecornn.runtime.memory import HostMemory, Memory, layout
from ecornn.runtime.turns import in_turns

SCALARS = 4  # T, B, device, queue come before the pointers
MASKS = tuple(name for name, kind in TENSORS.items() if kind.optional)
SHORT = 1 << 18  # multiply-adds, of about 10 us: a thread that gives Python's lock away may wait longer to get it back
TURNS = 1 << 20  # up to which threads take turns: they would wait for Python's lock for longer than such a call takes
_IDLE = 0  # key of the layer's workspaces, as other calls have it

_Key = tuple[str, str | None, int]  # tensor, state, part


@dataclass(frozen=True, eq=False)
class EntryPlan:
    """Positions in an entry's arguments of a tensor: one or none, or one for each state and sequence, by state first,
    or for each parameter, in the manifest's order."""

    count: int  # arguments in all
    at: Mapping[str, tuple[int, ...]]  # tensor -> its positions
    packed: tuple[tuple[int, Buffer], ...]  # weights
    kept: tuple[tuple[int, Buffer], ...]  # by forward
    scratch: tuple[tuple[int, Buffer], ...]  # workspaces

    def offsets(self, steps: int, elsewhere: Container[str] = ()) -> tuple[tuple[int, ...], int]:
        """Offsets of workspace buffers at T = ``steps``, except those ``elsewhere``, and the bytes of all."""
        return layout([0 if b.name in elsewhere else b.nbytes(steps) for _, b in self.scratch])

    def order(self, positions: Sequence[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """A function that orders values for all positions, in less than 1 us; a list by position takes two."""
        assert sorted(positions) == [*range(self.count)] and self.count > SCALARS
        return itemgetter(*sorted(range(self.count), key=positions.__getitem__))


class Order:
    """How a call's addresses become arguments of ``run``; ``zeros`` gives an address of so many zero bytes, in place of
    first states, None where a call has these."""

    def __init__(self, plan: EntryPlan, manifest: Manifest, packed: Mapping[str, int], device: int,
                 zeros: Callable[[int], int] | None) -> None:
        at, masks = plan.at, [position for name in MASKS for position in plan.at[name]]
        self._device, self._packed, self._zeros = device, tuple(packed[b.name] for _, b in plan.packed), zeros
        self._parts, self._row = manifest.stack.count, manifest.workload.hidden * manifest.workload.itemsize
        absent, before = ((), at["state_in"]) if zeros is None else (at["state_in"], ())
        self._order = plan.order([*range(SCALARS), *(p for p, _ in plan.packed), *absent, *(p for p, _ in plan.scratch),
                                  *at["x"], *before, *masks, *at["y"], *at["state_out"]])
        self._absent, self._before = len(absent), 1 + len(before) // self._parts
        self._after = self._before + len(masks) + 1

    def of(self, sizes: tuple[int, int, int], queue: int, given: Sequence[int],
           scratch: Sequence[int]) -> tuple[int, ...]:
        """The arguments for T, B and rows of states; ``given``: x, states unless they are zero, masks, y and states."""
        (steps, batch, rows), parts = sizes, self._parts
        size = rows * self._row  # from one sequence's part of a state to the next one's
        zeros = () if self._zeros is None else (self._zeros(size * parts),) * self._absent
        known = (steps, batch, self._device, queue, *self._packed, *zeros, *scratch)
        if parts > 1:
            offsets = [part * size for part in range(parts)]
            given = (given[0], *(start + o for start in given[1:self._before] for o in offsets),
                     *given[self._before:self._after], *(start + o for start in given[self._after:] for o in offsets))
        return self._order(known + tuple(given))


def entry_plan(manifest: Manifest, entry: str) -> EntryPlan:
    """Sorts the buffers that an entry takes; :class:`ModuleError` where one is missing, doubled or unknown."""
    taken = _taken(manifest, entry)
    places = {(b.tensor, b.state, b.part): i for i, b in taken if b.tensor is not None and b.role != KEPT}
    kept = tuple((i, b) for i, b in taken if b.role == KEPT)
    packed, scratch = (tuple((i, b) for i, b in taken if b.role == role and b.tensor is None)
                       for role in (PACKED, WORKSPACE))
    wanted = {name: _keys(manifest, name) for name in ENTRIES[entry] if TENSORS[name].role != KEPT}
    wanted |= {name: [key for key in wanted[name] if key in places] for name in wanted if TENSORS[name].switch}
    fits = (set(places) == {key for keys in wanted.values() for key in keys}
            and len(places) + len(packed) + len(scratch) + len(kept) == len(taken) and not (kept and entry == RUN)
            and all(b.tensor in TENSORS and TENSORS[b.tensor].role == b.role for _, b in taken if b.tensor is not None))
    if not fits:
        listed = ", ".join(f"{b.name} ({' '.join(filter(None, (b.role, b.tensor, b.state)))})" for _, b in taken)
        raise ModuleError(f"the module's buffers do not fit states {manifest.states}: {listed}")
    at = {name: tuple(places[key] for key in keys) for name, keys in wanted.items()}
    return EntryPlan(len(taken) + SCALARS, at, packed, kept, scratch)


def kept_layout(manifest: Manifest, steps: int, batch: int) -> tuple[dict[str, int], int]:
    """Offsets of the buffers that forward keeps, by name, and the bytes of all, at this T and B, perhaps symbols.
    What the gradient of x may lie in is the last one. Rows of the batch that a call does not have are not kept."""
    taken = {name for entry in (FORWARD, BACKWARD) for name in manifest.entries.get(entry, ())}
    kept = sorted((b for b in manifest.buffers if b.role == KEPT and b.name in taken),
                  key=lambda b: b.name == manifest.dx_in)
    offsets, total = layout([-(-b.extent.at(steps) * batch // manifest.workload.batch) * b.itemsize for b in kept])
    return {b.name: start for b, start in zip(kept, offsets, strict=True)}, total


def _taken(manifest: Manifest, entry: str) -> list[tuple[int, Buffer]]:
    buffers = {b.name: b for b in manifest.buffers}
    names = manifest.entries.get(entry)
    if names is None:
        raise ModuleError(f"the module has no entry {entry!r}; it has {', '.join(manifest.entries) or 'none'}")
    if strangers := [name for name in names if name not in buffers]:
        raise ModuleError(f"the module has no buffer {', '.join(strangers)} for its entry {entry!r}")
    return [(i, buffers[name]) for i, name in enumerate(names, SCALARS)]


def _keys(manifest: Manifest, tensor: str) -> list[_Key]:
    """The keys of a tensor's arguments, (tensor, state or parameter, part), by state and then by part."""
    kind, stack = TENSORS[tensor], manifest.stack
    if kind.optional and not getattr(stack, tensor):
        return []
    if kind.by_parameter:
        each = len(manifest.parameters) // stack.count  # they are listed by sequence, as many of each
        return [(tensor, p.key, n // each) for n, p in enumerate(manifest.parameters)]
    if not kind.by_state:
        return [(tensor, None, 0)]
    return [(tensor, state, part) for state in manifest.states for part in range(stack.count)]


class AddressedCall:
    """An entry of a :class:`~ecornn.runtime.caller.Caller` for one T and B; ``tensors``: in the order of addresses, of
    the others that the entry may go without there are none. ``add``: gradients of parameters are added to."""

    def __init__(self, layer: Any, entry: str, steps: int, batch: int, tensors: Sequence[str],
                 add: bool = True) -> None:
        plan, manifest, library = entry_plan(layer.manifest, entry), layer.manifest, layer.library
        self.work = work = steps * batch * sum(prod(p.shape) for p in manifest.parameters)
        function = (library.held if work <= SHORT else {}).get(entry) or getattr(library, entry)
        self._on_cpu, self._pool = layer.threads is not None, layer.workspaces
        self._function = in_turns(function) if self._on_cpu and SHORT < work <= TURNS else function
        starts, self.kept_bytes = kept_layout(manifest, steps, batch) if plan.kept else ({}, 0)
        self._kept = [starts[b.name] for _, b in plan.kept]
        self._offsets, self.room = plan.offsets(steps)
        scalars, queue = (steps, batch, layer.device, layer.threads), [] if self._on_cpu else [SCALARS - 1]
        fixed = {position: value for position, value in enumerate(scalars) if position not in queue}
        fixed |= {position: layer.packed[b.name] for position, b in plan.packed}
        left_out = [name for name in manifest.optional or () if name not in tensors]
        fixed |= {position: 0 for name in left_out for position in plan.at.get(name, ())}
        fixed |= dict.fromkeys(plan.at.get("existing", ()), int(add))
        self._fixed = (*fixed.values(),)
        count, size = manifest.stack.count, batch * manifest.workload.hidden * manifest.workload.itemsize
        given: list[int] = []  # positions
        parts: list[tuple[int, int]] = []  # of each the number of an array, and how far behind its begin it points
        arrays = 0
        for name in tensors:
            positions, each = plan.at[name], count if TENSORS[name].by_state else 1
            parts += [(arrays + n // each, n % each * size) for n in range(len(positions))]
            arrays += len(positions) // each
            given += positions
        self._parts = None if all(number == n and not offset for n, (number, offset) in enumerate(parts)) else parts
        # what is fixed, workspaces, a GPU's queue, what is given, what is kept
        self._order = plan.order([*fixed, *(p for p, _ in plan.scratch), *queue, *given, *(p for p, _ in plan.kept)])
        self._at: dict[Any, tuple[Any, ...]] = {}  # a workspace -> all that is known with it

    def __call__(self, addresses: tuple[int, ...], kept: int = 0) -> None:
        """``addresses``: of contiguous arrays, aligned to 16 bytes; of a tensor that there is for each state, or each
        parameter, one for each. ``kept``: of the memory that forward keeps, which has ``kept_bytes``. With T = 1 y and
        the output state after it may be the same memory."""
        memory = self._pool.take(_IDLE, self.room)  # calls of other threads have their own
        if memory is None:
            memory = HostMemory(self.room)
        self._function(*self.arguments(addresses, kept, memory.pointer))
        self._pool.give(_IDLE, memory)

    def on(self, queue: int, addresses: tuple[int, ...], workspace: Callable[[int], Memory], kept: int = 0) -> None:
        """The same on a GPU's stream, which no CUDA graph captures; ``workspace`` makes so many bytes there."""
        memory = self._pool.take(queue, self.room) or workspace(self.room)
        self._function(*self.arguments(addresses, kept, memory.pointer, (queue,)))
        self._pool.give(queue, memory)

    def arguments(self, addresses: tuple[Any, ...], kept: Any, workspace: Any, queue: tuple[Any, ...] = ()) -> Any:
        """The arguments of the entry, in order, for such a call with a ``workspace`` of ``room`` bytes. Addresses are
        numbers, or stand for numbers, to which offsets can be added."""
        if self._parts is not None:
            addresses = tuple([addresses[number] + offset for number, offset in self._parts])
        if self._kept:
            addresses += tuple([kept + start for start in self._kept])
        return self._order((*(self._at.get(workspace) or self._known(workspace)), *queue, *addresses))

    def _known(self, workspace: Any) -> tuple[Any, ...]:
        if len(self._at) >= 64:
            self._at.clear()
        found = self._at[workspace] = (*self._fixed, *(workspace + offset for offset in self._offsets))
        return found
