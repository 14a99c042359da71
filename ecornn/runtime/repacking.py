"""Weights that have changed, packed where they were before: by the module's own code where that knows how, without
memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.program import Packing
from ecornn.runtime.library import Library
from ecornn.runtime.memory import HostMemory, address
from ecornn.runtime.packing import pack

RUN = 8  # columns that module code copies together


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
        """RUN where so many columns lie side by side, else 1."""
        columns = self._at[2] if self._at is not None else np.zeros(2, np.int64)
        number = np.arange(len(columns)) % RUN
        return RUN if bool(np.all(columns == columns[np.arange(len(columns)) - number] + number)) else 1

    @cached_property
    def _places(self) -> tuple[list[int], int, int] | None:
        """Where the sources go, and where the tables of rows and columns are."""
        if self._at is None:
            return None
        gates, rows, columns = self._at
        return [self.memory.pointer + 4 * int(gate) for gate in gates], address(rows), address(columns)

    def jobs(self, parameters: Mapping[str, NDArray[Any]]) -> list[tuple[int, ...]] | None:
        """What ``pack`` of a module is to do; None where it cannot."""
        if self._places is None:
            return None
        to, rows, columns = self._places
        found = []
        for number, (name, gate) in enumerate(self.packing.sources):
            if not name:
                continue
            source = parameters[name]
            if source.dtype != np.float32 or not source.flags.c_contiguous:
                return None
            shape = source.shape[1:] if source.ndim == 3 else (1, *source.shape[1:])
            found.append((to[number], address(source) + gate * source.strides[0], *shape, rows, columns, self._run))
        return found

    def by_numpy(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """The same by way of new memory."""
        self.memory.bytes[:] = pack(self.packing, parameters).reshape(-1).view(np.uint8)


def repack(all_of: Iterable[Repacking], parameters: Mapping[str, NDArray[Any]], library: Library, threads: int) -> None:
    """Packs ``parameters`` (G, H, K) or (G, H), whose sources are the same as before."""
    jobs: list[tuple[int, ...]] = []
    for one in all_of:
        found = one.jobs(parameters) if library.pack is not None else None
        if found is None:
            one.by_numpy(parameters)
        else:
            jobs += found
    if jobs and library.pack is not None:
        table = np.array(jobs, np.int64)
        library.pack(address(table), len(jobs), threads)
