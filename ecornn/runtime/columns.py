"""Sequences of different lengths laid end to end in the columns of a batch, so that few columns are ever idle."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.errors import ArgumentError, DTypeError, ShapeError

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Columns:
    """Where S sequences lie in T steps of C columns.

    With them x (T, C, I) of a call is ``rows[columns.inside, columns.table]`` of rows (steps, S, I), and step t of
    sequence s is in ``y[columns.start[s] + t, columns.column[s]]``. What lies at places of no sequence is not used.

    Attributes
    ----------
    table : (T, C), the number of the sequence at each place, 0 to S-1; -1 where there is none
    start, column : (S,), the step and the column in which a sequence begins
    """

    table: Ints
    start: Ints
    column: Ints
    copies: dict[Any, Any] = field(default_factory=dict, repr=False)  # of the table, by device: a call's, for the next

    @property
    def count(self) -> int:
        """S."""
        return len(self.start)

    @property
    def inside(self) -> Ints:
        """(T, C), the step of its sequence at each place; 0 where there is none."""
        steps = np.arange(len(self.table), dtype=np.int32)[:, None] - self.start[self.table]
        return np.where(self.table < 0, 0, steps).astype(np.int32)

    @classmethod
    def of(cls, lengths: Any, width: int) -> Columns:
        """Lays sequences of ``lengths`` (S,), each >= 1, in at most ``width`` columns, the longest first, each where
        most room is: never more than 4/3 of the fewest steps in which it can be done.

        Raises :class:`ArgumentError`, :class:`ShapeError` or :class:`DTypeError` for other lengths or widths.
        """
        found = _integers("lengths", lengths)
        if found.ndim != 1 or not found.size:
            raise ShapeError("lengths.shape", found.shape, "(S,) with S >= 1")
        if int(found.min()) < 1:
            raise ArgumentError("lengths", found.tolist(), "integers of 1 or more")
        if not 1 <= width <= 1 << 20:
            raise ArgumentError("width", width, "an integer from 1 to 1048576")
        whole = found.tolist()
        places, steps = _lay(whole, width)
        table = np.full((min(width, len(whole)), steps), -1, np.int32)  # columns as rows, for whole pieces
        for s, ((first, c), n) in enumerate(zip(places, whole, strict=True)):
            table[c, first:first + n] = s
        start, column = np.array(places, np.int32).T
        return cls(np.ascontiguousarray(table.T), start, column)

    @classmethod
    def given(cls, table: Any) -> Columns:
        """From a table of one's own.

        Raises :class:`ArgumentError`, :class:`ShapeError` or :class:`DTypeError` where it is no (T, C) of integers in
        which each number from 0 on has one place: steps of one column, with no gap.
        """
        found = _integers("sequences", table)
        if found.ndim != 2 or not found.size:
            raise ShapeError("sequences.shape", found.shape, "(T, C)")
        begins = found >= 0
        begins[1:] &= found[1:] != found[:-1]
        start, column = np.nonzero(begins)
        numbers = found[start, column]
        order = np.argsort(numbers)
        if not numbers.size or not np.array_equal(numbers[order], np.arange(numbers.size)):
            raise ArgumentError("sequences", np.unique(found).tolist(), "-1, or the numbers 0, 1, ... each in steps of "
                                "one column that follow each other")
        return cls(np.maximum(found, -1).astype(np.int32), *(part[order].astype(np.int32) for part in (start, column)))


def steps_of(lengths: Any, width: int) -> int:
    """T of :meth:`Columns.of`."""
    return _lay(np.asarray(lengths).tolist(), width)[1]


def _lay(lengths: list[int], width: int) -> tuple[list[tuple[int, int]], int]:
    """(start, column) of each sequence, and the steps of the longest column."""
    free = [(0, c) for c in range(min(width, len(lengths)))]  # the step from which on a column is free; a heap
    places = [(0, 0)] * len(lengths)
    for s in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        places[s] = step, c = free[0]
        heapreplace(free, (step + lengths[s], c))
    return places, max(free)[0]


def _integers(name: str, value: Any) -> NDArray[Any]:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(name, type(value), f"an array of the host or a list ({error})") from error
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise DTypeError(f"{name}.dtype", found.dtype.name, "an integer type")
    return found
