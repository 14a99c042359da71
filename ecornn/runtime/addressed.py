"""Calls by addresses alone, for callers that call often and have checked all there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecornn.runtime.memory import HostMemory, layout
from ecornn.runtime.plan import SCALARS, entry_plan
from ecornn.runtime.training import kept_layout


class AddressedCall:
    """An entry of a layer on a CPU, for one T and B. Lists of arguments are made once, each with a workspace of its
    own; a call writes into one what it is given.

    Parameters
    ----------
    layer : a :class:`~ecornn.runtime.loader.Layer`
    entry : ``run``, ``forward`` or ``backward``
    steps, batch : T and B
    tensors : names of all that the entry exchanges, in the order in which their addresses will be given
    """

    def __init__(self, layer: Any, entry: str, steps: int, batch: int, tensors: Sequence[str]) -> None:
        plan, manifest = entry_plan(layer.manifest, entry), layer.manifest
        self._function = getattr(layer.library, entry)
        self._given = [position for name in tensors for position in plan.at[name]]
        starts, self.kept_bytes = kept_layout(manifest, steps, batch) if plan.kept else ({}, 0)
        self._kept = [(position, starts[b.name]) for position, b in plan.kept]
        self._template = [0] * plan.count
        self._template[:SCALARS] = steps, batch, layer.device, layer.threads
        for position, b in plan.packed:
            self._template[position] = layer.packed[b.name]
        self._scratch = [position for position, _ in plan.scratch]
        self._offsets, self._room = layout([b.nbytes(steps) for _, b in plan.scratch])
        self._idle: list[tuple[list[int], HostMemory]] = []

    def __call__(self, addresses: Sequence[int], kept: int = 0) -> None:
        """``addresses``: of contiguous arrays, aligned to 16 bytes; those of a tensor follow each other, as
        :class:`~ecornn.runtime.plan.EntryPlan` has its positions. ``kept``: of the memory that forward keeps, which has
        ``kept_bytes``. With T = 1 y and the output state after it may be the same memory."""
        try:
            one = self._idle.pop()  # calls of other threads have their own
        except IndexError:
            one = self._made()
        arguments = one[0]
        for position, at in zip(self._given, addresses, strict=True):
            arguments[position] = at
        for position, start in self._kept:
            arguments[position] = kept + start
        self._function(*arguments)
        self._idle.append(one)

    def _made(self) -> tuple[list[int], HostMemory]:
        arguments, memory = self._template.copy(), HostMemory(self._room)
        for position, offset in zip(self._scratch, self._offsets, strict=True):
            arguments[position] = memory.pointer + offset
        return arguments, memory
