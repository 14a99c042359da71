"""Weights that have changed, packed where they were before: by the module's own code where that knows how, without
memory of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.manifest import Manifest
from ecornn.program import WHOLE, Packing
from ecornn.runtime.library import Library
from ecornn.runtime.memory import HostMemory, address
from ecornn.runtime.packing import pack

RUN = 8  # columns, or rows, that module code copies together
FROM = 1  # where a job has the address of its source


class Repacking:
    """A packing, and the memory of the host that has what it made.

    Where no axis of ``split`` has elements of two of ``pad``, the place of an element is a sum: of its gate's, its
    row's and its column's.
    """

    def __init__(self, packing: Packing, memory: HostMemory) -> None:
        self.packing, self.memory = packing, memory

    @cached_property
    def _at(self) -> list[NDArray[np.int64]] | None:
        """The places of the gates, the rows and the columns (of vectors one row), or None."""
        split, order, pad = self.packing.split, self.packing.order, self.packing.pad
        inner = {*accumulate(reversed(split), lambda a, b: a * b, initial=1)}
        borders = [prod(pad[axis:]) for axis in range(len(pad) + 1)]
        if self.packing.dtype != "float32" or not inner.issuperset(borders) or len(pad) not in (2, 3):
            return None
        sizes = [split[axis] for axis in order]
        steps = np.empty(len(split), np.int64)
        steps[list(order)] = [prod(sizes[n + 1:]) for n in range(len(sizes))]

        def places(count: int, stride: int) -> NDArray[np.int64]:
            digits = np.unravel_index(np.arange(count) * stride, split)
            return np.sum([d * s for d, s in zip(digits, steps, strict=True)], axis=0, dtype=np.int64)

        found = [places(size, stride) for size, stride in zip(pad, borders[1:], strict=True)]
        return found if len(found) == 3 else [found[0], np.zeros(1, np.int64), found[1]]

    @cached_property
    def _run(self) -> int:
        """RUN where so many columns lie side by side, -RUN where rows do, else 1."""
        _, rows, columns = self._at or [np.zeros(2, np.int64)] * 3
        return RUN if _side_by_side(columns) else -RUN if _side_by_side(rows) else 1

    @cached_property
    def _places(self) -> tuple[list[int], int, int] | None:
        """Where the sources go, and where the tables of rows and columns are."""
        if self._at is None:
            return None
        gates, rows, columns = self._at
        return [self.memory.pointer + 4 * int(gate) for gate in gates], address(rows), address(columns)

    def jobs(self, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int, tuple[int, ...]]] | None:
        """What ``pack`` of a module is to do for parameters, contiguous float32, of these shapes by key, (G, H, K) or
        (G, H): the parameter, where the source lies in it, and the job without its address. None where it cannot."""
        if self._places is None:
            return None
        to, rows, columns = self._places
        found = []
        for number, (name, gate) in enumerate(self.packing.sources):
            if name:
                gates, *shape = shapes[name] if len(shapes[name]) == 3 else (shapes[name][0], 1, *shapes[name][1:])
                if gate == WHOLE:
                    gate, shape = 0, [gates * shape[0], shape[1]]
                found.append((name, 4 * gate * prod(shape), (to[number], 0, *shape, rows, columns, self._run)))
        return found

    def by_numpy(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """The same by way of new memory."""
        self.memory.bytes[:] = pack(self.packing, parameters).reshape(-1).view(np.uint8)


def _side_by_side(places: NDArray[np.int64]) -> bool:
    number = np.arange(len(places)) % RUN
    return bool(np.all(places == places[np.arange(len(places)) - number] + number))


class HostPacking:
    """Packings of a layer on a CPU by its module's own code: a table that lacks the addresses of weights alone.

    Attributes
    ----------
    rest : packings that it does not know
    """

    def __init__(self, manifest: Manifest, all_of: Iterable[Repacking], library: Library, threads: int) -> None:
        self._pack, self._threads = library.pack, threads
        shapes = {p.key: (p.gates, p.shape[0] // p.gates, *p.shape[1:]) for p in manifest.parameters}
        numbers = {p.key: number for number, p in enumerate(manifest.parameters)}
        known = [(one, one.jobs(shapes) if library.pack is not None else None) for one in all_of]
        self.rest = [one for one, jobs in known if jobs is None]
        jobs = [job for _, found in known for job in found or ()]
        self._table = np.array([fields for _, _, fields in jobs], np.int64).reshape(-1, 7)
        self._numbers = np.array([numbers[name] for name, _, _ in jobs], np.intp)
        self._starts = np.array([start for _, start, _ in jobs], np.int64)

    def __bool__(self) -> bool:
        return bool(len(self._table))

    def __call__(self, pointers: Sequence[int], changed: Collection[int] | None = None) -> None:
        """Packs contiguous float32 parameters at these addresses, in the manifest's order; ``changed``: the numbers of
        those that are not as they were, default: all."""
        table = self._table.copy()
        table[:, FROM] = np.array(pointers, np.int64)[self._numbers] + self._starts
        if changed is not None and len(changed) < len(pointers):
            table = table[np.isin(self._numbers, [*changed])]
        if len(table) and self._pack is not None:
            self._pack(address(table), len(table), self._threads)
