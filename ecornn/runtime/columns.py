"""Lengths, resets and sequences of a call, and sequences laid end to end in the columns of a batch.

Where a layer allows it, what does not fit at the end of a column goes to the beginning of the next one (McNaughton's
wrap-around rule): T is the longest sequence, or about the mean of the columns. In x's time the piece in the next column
comes first. Kernels see both in a table with marks, each with a number of its own; the piece that they work on first
leaves its state for the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.boundary import public
from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.program import EARLIER, LATER, PIECES_APART
from ecornn.runtime.arrays import Arrays, Placed
from ecornn.runtime.library import Library
from ecornn.runtime.torch_arrays import address

Ints = NDArray[np.int32]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Columns:
    """The places of S sequences in T steps of C columns.

    With them x (T, C, I) of a call is ``rows[columns.inside, columns.table]`` of rows (steps, S, I), and y of sequence
    s is ``y.reshape(T * C, -1)[columns.of_sequence(s)]``. What lies at places of no sequence is not used.

    Attributes
    ----------
    table : (T, C), the number of the sequence at each place, 0 to S-1; -1 where there is none
    places : (N,), the place t * C + c of every step of sequence 0, then of sequence 1, and so on
    first : (S + 1,), where those of each sequence begin in ``places``, and N
    wrapped : columns that a sequence goes on from to the next column, often none; see :meth:`of`"""

    table: Ints
    places: Places
    first: Places
    wrapped: Places
    marked: Ints = field(repr=False)  # the table as kernels read it: pieces of sequences have marks
    copies: dict[Any, Any] = field(default_factory=dict, repr=False)  # of it, by device: a call's, for the next

    @property
    def count(self) -> int:
        """S."""
        return len(self.first) - 1

    @property
    def inside(self) -> Ints:
        """(T, C), the step of its sequence at each place; 0 where there is none."""
        found, first = np.zeros(self.table.size, np.int32), self.first
        found[self.places] = np.arange(first[-1]) - np.repeat(first[:-1], np.diff(first))  # 0, 1, ... for each
        return found.reshape(self.table.shape)

    def of_sequence(self, number: int) -> Places:
        """(steps of the sequence,), the place t * C + c of each."""
        return self.places[self.first[number]:self.first[number + 1]]

    @classmethod
    @public
    def of(cls, lengths: Any, width: int, together: int = 1) -> Columns:
        """Lays sequences of ``lengths`` (S,), each >= 1, in at most ``width`` columns.

        Whole ones the longest first, each where most room is: never more than 4/3 of the fewest steps in which it can
        be done. With ``together``, :attr:`Layer.together` of the layer that will be called, sequences may wrap around
        from one column to the next of as many neighbours, where that takes fewer steps.

        Raises :class:`ArgumentError`, :class:`ShapeError` or :class:`DTypeError` for other lengths or widths."""
        found = _integers("lengths", lengths)
        if found.ndim != 1 or not found.size:
            raise ShapeError("lengths.shape", found.shape, "(S,) with S >= 1")
        if int(found.min()) < 1:
            raise ArgumentError("lengths", found.tolist(), "integers of 1 or more")
        for name, value in (("width", width), ("together", together)):
            if not 1 <= value <= 1 << 20:
                raise ArgumentError(name, value, "an integer from 1 to 1048576")
        places, steps = _lay(found.tolist(), width, together)
        return cls._laid(found, np.array(places), steps, min(width, len(found)))

    @classmethod
    def _laid(cls, lengths: NDArray[Any], begin: NDArray[Any], steps: int, width: int) -> Columns:
        """With where each begins; what is longer than its column goes on in the next one, and comes first in time."""
        step, column, shape = begin[:, 0], begin[:, 1], (steps, width)
        first, over = np.append(0, np.cumsum(lengths)), np.maximum(step + lengths - steps, 0)
        number, at, split = np.arange(len(lengths)), step * width + column, np.flatnonzero(over)
        if split.size:
            beside = np.stack((split | EARLIER, over[split], column[split] + 1))
            number[split] |= LATER
            number, lengths, at = np.insert(np.stack((number, lengths - over, at)), split, beside, axis=1)
        places = np.arange(first[-1])
        places -= np.repeat(np.cumsum(lengths) - lengths, lengths)  # steps of a piece
        places *= width
        places += np.repeat(at, lengths)
        marked = np.full(steps * width, -1, np.int32)
        marked[places] = np.repeat(number.astype(np.int32), lengths)
        table = np.where(marked < 0, marked, marked & (LATER - 1)) if split.size else marked
        return cls(table.reshape(shape), places, first, column[split], marked.reshape(shape))

    @classmethod
    def given(cls, table: Any) -> Columns:
        """From a table of one's own. Raises :class:`ArgumentError`, :class:`ShapeError` or :class:`DTypeError` where it
        is no (T, C) of integers in which each number from 0 on has one place: steps of one column, with no gap."""
        found = _integers("sequences", table)
        if found.ndim != 2 or not found.size:
            raise ShapeError("sequences.shape", found.shape, "(T, C)")
        begins = found >= 0
        begins[1:] &= found[1:] != found[:-1]
        numbers = found[begins]
        order = np.argsort(numbers)
        if not numbers.size or not np.array_equal(numbers[order], np.arange(numbers.size)):
            raise ArgumentError("sequences", np.unique(found).tolist(), "-1, or the numbers 0, 1, ... each in steps of "
                                "one column that follow each other")
        return cls._laid(np.bincount(found[found >= 0].astype(np.int64)), np.argwhere(begins)[order], *found.shape)


def steps_of(lengths: Any, width: int, together: int = 1) -> int:
    return _lay(np.asarray(lengths).tolist(), width, together)[1]


Begin = Sequence[tuple[int, int]]  # the step and the column in which each sequence begins


def _lay(lengths: list[int], width: int, together: int) -> tuple[Begin, int]:
    width, order = min(width, len(lengths)), sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    whole, steps = _whole(lengths, order, width)
    if together == 1 or steps == max(lengths[order[0]], -(-sum(lengths) // width)):
        return whole, steps
    groups = _groups(lengths, order, width, together)
    least = max(_least([lengths[s] for s in members], columns) for members, _, columns in groups)
    return (_wrapped(lengths, groups, least), least) if least < steps else (whole, steps)


def _whole(lengths: list[int], order: list[int], width: int) -> tuple[Begin, int]:
    """The longest first, each where most room is."""
    free = [(0, c) for c in range(width)]  # the step from which on a column is free; a heap
    places = [(0, 0)] * len(lengths)
    for s in order:
        places[s] = step, c = free[0]
        heapreplace(free, (step + lengths[s], c))
    return places, max(free)[0]


Group = tuple[list[int], int, int]  # sequences, the longest first; the first column, and how many there are


def _groups(lengths: list[int], order: list[int], width: int, together: int) -> list[Group]:
    """Sequences shared out to groups of ``together`` columns, the longest first, each where the columns have least."""
    found: list[Group] = [([], first, min(together, width - first)) for first in range(0, width, together)]
    if len(found) == 1:
        return [(order, 0, width)]
    loads = [(0.0, number) for number in range(len(found))]  # steps of a column in the mean; a heap
    for s in order:
        load, number = loads[0]
        members, _, columns = found[number]
        members.append(s)
        heapreplace(loads, (load + lengths[s] / columns, number))
    return [group for group in found if group[0]]


def _least(lengths: list[int], columns: int) -> int:
    """The fewest steps in which sequences, the longest first, wrap around ``columns`` columns."""
    steps = max(lengths[0], -(-sum(lengths) // columns))
    while (alone := _alone(lengths, steps)) > columns or sum(lengths[alone:]) > (columns - alone) * steps:
        steps += 1
    return steps


def _alone(lengths: list[int], steps: int) -> int:
    """How many are so long that their pieces would be too near to each other: each has a column."""
    return next((i for i, n in enumerate(lengths) if n <= steps - PIECES_APART), len(lengths))


def _wrapped(lengths: list[int], groups: list[Group], steps: int) -> Begin:
    places = [(0, 0)] * len(lengths)
    for members, first, _ in groups:
        alone, at = _alone([lengths[s] for s in members], steps), first * steps
        for i, s in enumerate(members):
            places[s] = at % steps, at // steps
            at += steps if i < alone else lengths[s]
    return places


def _integers(name: str, value: Any) -> NDArray[Any]:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(name, type(value), f"an array of the host or a list ({error})") from error
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise DTypeError(f"{name}.dtype", found.dtype.name, "an integer type")
    return found


def place_lengths(value: Any, steps: int, batch: int, arrays: Arrays, like: Any,
                  library: Library) -> tuple[Placed, int]:
    """int32 lengths beside ``like``, all of T for None, and the longest; T for those on a GPU: nothing waits."""
    if value is None:
        value = np.full(batch, steps, np.int32)
    value, shape, dtype = _facts("lengths", value, like)
    if shape != (batch,):
        raise ShapeError("lengths.shape", shape, f"({batch},): (B,)")
    if not dtype.startswith(("int", "uint")):
        raise DTypeError("lengths.dtype", dtype, "an integer type")
    if isinstance(value, np.ndarray):
        if not 0 <= int(value.min()) <= int(value.max()) <= steps:
            raise ArgumentError("lengths", value.tolist(), f"integers from 0 to T={steps}")
        steps = max(1, int(value.max()))
    return arrays.rows(value, "int32", like, library), steps


def place_resets(value: Any, steps: int, batch: int, arrays: Arrays, like: Any, library: Library) -> Placed:
    """The mask as uint8 on the device of ``like``; all zeros for None."""
    if value is None:
        value = np.zeros((steps, batch), np.uint8)
    value, shape, dtype = _facts("resets", value, like)
    if shape != (steps, batch):
        raise ShapeError("resets.shape", shape, f"{(steps, batch)}: (T, B)")
    if dtype not in ("bool", "uint8"):
        raise DTypeError("resets.dtype", dtype, "bool or uint8")
    return arrays.rows(value, "uint8", like, library)


def place_sequences(value: Any, steps: int, batch: int, together: int, arrays: Arrays, like: Any,
                    library: Library) -> tuple[Placed, int]:
    """The table as int32 on the device of ``like``, and how many sequences there are; for None each column is one."""
    if value is None:
        value = np.broadcast_to(np.arange(batch), (steps, batch))
    columns = value if isinstance(value, Columns) else Columns.given(value.cpu() if hasattr(value, "cpu") else value)
    if columns.table.shape != (steps, batch):
        raise ShapeError("sequences.shape", columns.table.shape, f"{(steps, batch)}: (T, B)")
    apart = columns.wrapped[(columns.wrapped + 1) % together == 0]
    if apart.size:
        raise ArgumentError("sequences", f"sequences that go on in another column than {apart.tolist()}",
                            f"those of Columns.of(lengths, width, together={together}), as layer.together says")
    return arrays.kept(columns.copies, columns.marked, "int32", like, library), columns.count


def _facts(name: str, value: Any, like: Any) -> tuple[Any, tuple[int, ...], str]:
    """A host array of the value with its shape and type; a torch tensor beside ``like`` on a GPU stays."""
    if getattr(value, "is_cuda", False):
        if getattr(like, "is_cuda", False):
            return value, tuple(value.shape), str(value.dtype).removeprefix("torch.")
        value = value.cpu()
    try:
        if hasattr(value, "data_ptr") and value.numel() and not address(value):
            raise ValueError("a tensor without memory of its own")
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(name, type(value), f"an array or a list ({error})") from error
    return found, found.shape, found.dtype.name
