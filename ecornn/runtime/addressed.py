"""Calls by addresses alone, for callers that call often and have checked all there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ecornn.program import TENSORS
from ecornn.runtime.memory import HostMemory, Memory
from ecornn.runtime.plan import entry_plan, kept_layout
from ecornn.runtime.turns import in_turns

SHORT = 1 << 18  # multiply-adds, of about 10 us: a thread that gives Python's lock away may wait longer to get it back
TURNS = 1 << 20  # up to which threads take turns: they would wait for Python's lock for longer than such a call takes
WORKSPACE = 0  # the layer's workspaces, as other calls have them


class AddressedCall:
    """An entry of a layer, for one T and B.

    Parameters
    ----------
    layer : a :class:`~ecornn.runtime.caller.Caller`
    entry : ``run``, ``forward`` or ``backward``
    steps, batch : T and B
    tensors : names of all that the entry exchanges, in the order in which their addresses will be given
    """

    def __init__(self, layer: Any, entry: str, steps: int, batch: int, tensors: Sequence[str]) -> None:
        plan, manifest = entry_plan(layer.manifest, entry), layer.manifest
        work = steps * batch * sum(prod(p.shape) for p in manifest.parameters)
        library = layer.library
        function = (library.held if work <= SHORT else {}).get(entry) or getattr(library, entry)
        self._on_cpu = layer.threads is not None
        self._function = in_turns(function) if self._on_cpu and SHORT < work <= TURNS else function
        self._pool = layer.workspaces
        starts, self.kept_bytes = kept_layout(manifest, steps, batch) if plan.kept else ({}, 0)
        self._kept = [starts[b.name] for _, b in plan.kept]
        self._offsets, self._room = plan.offsets(steps)
        scalars = (steps, batch, layer.device, layer.threads)
        queue = [] if self._on_cpu else [len(scalars) - 1]
        fixed = {position: value for position, value in enumerate(scalars) if position not in queue}
        fixed |= {position: layer.packed[b.name] for position, b in plan.packed}
        fixed |= dict.fromkeys(plan.at.get("existing", ()), 1)  # gradients are added to
        self._fixed = (*fixed.values(),)
        given, parts = self._parts_of(layer, plan.at, batch, tensors)
        self._parts = None if all(number == n and not offset for n, (number, offset) in enumerate(parts)) else parts
        # what is fixed, workspaces, a GPU's queue, what is given, what is kept
        positions = [*fixed, *(p for p, _ in plan.scratch), *queue, *given, *(p for p, _ in plan.kept)]
        self._order = plan.order(positions)
        self._at: dict[int, tuple[int, ...]] = {}  # a workspace -> all that is known with it

    @staticmethod
    def _parts_of(layer: Any, at: Any, batch: int, tensors: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Positions; and for each of them the number of an array, and how many bytes behind its begin it points."""
        count, (*_, hidden) = layer.manifest.stack.count, layer.state_shape(batch)
        size, positions, parts, first = batch * hidden * layer.manifest.workload.itemsize, [], [], 0
        for name in tensors:
            each = count if TENSORS[name].by_state else 1
            parts += [(first + n // each, n % each * size) for n in range(len(at[name]))]
            first += len(at[name]) // each
            positions += at[name]
        return positions, parts

    def __call__(self, addresses: tuple[int, ...], kept: int = 0) -> None:
        """``addresses``: of contiguous arrays, aligned to 16 bytes; of a tensor that there is for each state, or each
        parameter, one for each. ``kept``: of the memory that forward keeps, which has ``kept_bytes``. With T = 1 y and
        the output state after it may be the same memory."""
        if self._parts is not None:
            addresses = tuple([addresses[number] + offset for number, offset in self._parts])
        if self._kept:
            addresses += tuple([kept + start for start in self._kept])
        memory = self._pool.take(WORKSPACE, self._room)  # calls of other threads have their own
        if memory is None:
            memory = HostMemory(self._room)
        known = self._at.get(memory.pointer) or self._known(memory.pointer)
        self._function(*self._order(known + addresses))
        self._pool.give(WORKSPACE, memory)

    def on(self, queue: int, addresses: tuple[int, ...], workspace: Callable[[int], Memory]) -> None:
        """The same on a GPU, put on this stream, which no CUDA graph captures; ``workspace`` makes memory of so many
        bytes there."""
        if self._parts is not None:
            addresses = tuple([addresses[number] + offset for number, offset in self._parts])
        memory = self._pool.take(queue, self._room) or workspace(self._room)
        known = self._at.get(memory.pointer) or self._known(memory.pointer)
        self._function(*self._order((*known, queue, *addresses)))
        self._pool.give(queue, memory)

    def _known(self, workspace: int) -> tuple[int, ...]:
        if len(self._at) >= 64:
            self._at.clear()
        found = self._at[workspace] = (*self._fixed, *(workspace + offset for offset in self._offsets))
        return found
