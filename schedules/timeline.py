"""The place of a sequence's step in time, and the batch rows that take part in it: for CUDA kernels.

The loop counts t = 0 .. T-1; a reverse sequence is at step T-1-t of x and y then. A row that takes no part in a step
keeps its state, and its y is zero. What a row computes there is thrown away by a select, never multiplied by zero: x
beyond a row's length may hold anything.

``resets[t, b]`` clears a layer's state between steps t-1 and t of x: the first one clears what a layer begins with, or
nothing in one that goes backwards. The recurrence of its adjoint crosses the same borders in the opposite direction, so
that the first one clears what it ends with, or nothing.

Where a traversal has ``sequences``, a row is a column in which sequences of the caller lie end to end: a table says
which one a step belongs to. Each begins with its own state, and leaves its last state where it belongs. One in two
pieces, in neighbouring columns of a group, hands its state over through ``pieces``: float32, in global memory, since
few steps need it and shared memory is scarce. The block that stores a value also loads it, and the barrier of all its
threads in every step lies between: a piece ends in step e, its state is stored before the barrier of step e + 1, and
loaded behind that of step b - 2 if the other piece begins in step b. So b - e is 3 at least, with ``PIECES_APART``
steps between."""

from __future__ import annotations

from ecornn.program import EARLIER, LATER, TENSORS, WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, name_of
from ecornn.workload import Traversal, Workload


def row_arguments(traversal: Traversal) -> dict[str, TirBuffer]:
    """Kernel parameters for the optional tensors that the traversal reads: ``lengths``, ``resets``, ``sequences``."""
    return {name: T.pointer(name, kind.dtype) for name, kind in TENSORS.items()
            if kind.optional and kind.dtype and getattr(traversal, name)}


def piece_arguments(traversal: Traversal) -> dict[str, TirBuffer]:
    """The parameter that a kernel with ``sequences`` has besides: the buffer of :func:`piece_buffers`."""
    return {"pieces": T.pointer("pieces", "float32")} if traversal.sequences else {}


def piece_buffers(traversal: Traversal, work: Workload, states: int) -> list[Buffer]:
    """The states that pieces of sequences hand over, (states, B, H)."""
    return [Buffer("pieces", WORKSPACE, "float32", Extent(states * work.batch * work.hidden))
            ] if traversal.sequences else []


def together(traversal: Traversal, groups: int, rows: int) -> int:
    """:attr:`Program.together` of a kernel with groups of ``rows``; one group bounds nothing."""
    return 1 if not traversal.sequences else 0 if groups == 1 else rows


def rows_mask(traversal: Traversal) -> str | None:
    """The tensor that says which rows of T*B take part in their step; None where all do."""
    return next((name for name in ("lengths", "sequences") if getattr(traversal, name)), None)


def takes_part(mask: str, values: TirBuffer, row: Expr, batch: Expr, there: Expr | None = None) -> Expr:
    """True if a row of T*B, in x's time, takes part in its step. ``mask``: the tensor that ``values`` are of, as
    :func:`rows_mask` names it; ``there``: true if there is such a row, where that is not sure."""
    place = row % batch if mask == "lengths" else row
    value = values[place if there is None else T.Select(there, place, 0)]
    return row // batch < value if mask == "lengths" else value >= 0


_BLOCKS, _THREADS = 64, 256


def remaining_lengths(batch: int) -> tuple[PrimFunc, Buffer, Launch]:
    """``remaining``: a kernel, the workspace (T, B) that it fills, and its launch: ``lengths[b] - t``, for a chunk that
    starts at step t; below zero where a row has ended."""
    with T.kernel("remaining") as made:
        steps, rows = T.arg("T", T.int32()), T.arg("B", T.int32())
        lengths, remaining = (T.pointer(name, "int32") for name in ("lengths", "remaining"))
        T.device_entry()
        first = T.let("first", T.block(_BLOCKS) * _THREADS + T.thread(_THREADS))
        total = T.let("total", steps * rows)
        T.note("a thread an element: lengths as seen from each step")
        with T.serial("turn", 0, T.let("turns", (total + (_BLOCKS * _THREADS - 1)) // (_BLOCKS * _THREADS))) as turn:
            place = T.let("place", turn * (_BLOCKS * _THREADS) + first)
            with T.when(place < total):
                T.buffer_store(remaining, lengths[place % rows] - place // rows, [place])
    return made(), Buffer("remaining", WORKSPACE, "int32", Extent(0, batch)), Launch("remaining", _BLOCKS, _THREADS)


def cleared_between(traversal: Traversal, hidden: int, dtype: str, behind: bool) -> tuple[PrimFunc, Launch]:
    """A kernel, and its launch, that clears a state (B, H), the parameter ``state``, where a sequence starts behind the
    last step of a chunk of time, or before the first one: for what a chunk of a layer that goes backwards leaves, or of
    its adjoint, whose ``resets`` lie between the steps of one chunk: such a border is in none."""
    name = "cleared_behind" if behind else "cleared_before"
    with T.kernel(name) as made:
        steps, batch, first, whole = (T.arg(n, T.int32()) for n in ("T", "B", "first_step", "all_steps"))
        masks, state = row_arguments(traversal), T.pointer("state", dtype)
        T.device_entry()
        border = steps if behind else T.int32(0)
        there = T.let("there", first + steps < whole if behind else first > 0)
        item = T.let("first_item", T.block(_BLOCKS) * _THREADS + T.thread(_THREADS))
        count = T.let("count", T.Select(there, batch * hidden, 0))
        turns = T.let("turns", (count - item + (_BLOCKS * _THREADS - 1)) // (_BLOCKS * _THREADS))
        T.note("the rows in which a sequence starts at the border of the chunk: their state to zero")
        with T.serial("turn", 0, turns) as turn:
            place = T.let("place", turn * (_BLOCKS * _THREADS) + item)
            row = T.let("row", place // hidden)
            starts: Expr = masks["resets"][T.cast(border * batch + row, "int64")] != T.uint8(0)
            if traversal.lengths:
                starts = T.And(border < masks["lengths"][row], starts)
            with T.when(starts):
                T.buffer_store(state, T.cast(T.float32(0), dtype), [place])
    return made(), Launch(name, _BLOCKS, _THREADS)


class Timeline:
    """Emits the predicates of a traversal, if it has any; ``arguments`` has ``lengths``, ``resets`` and ``sequences``
    if it asks for them; rows must be below B."""

    def __init__(self, traversal: Traversal, arguments: dict[str, TirBuffer], steps: Expr, batch: Expr) -> None:
        self.traversal, self.arguments, self.steps, self.batch = traversal, arguments, steps, batch

    def at(self, t: Expr) -> Expr:
        return self.steps - 1 - t if self.traversal.reverse else t

    def limit(self, row: Expr) -> Expr:
        """The number of steps that a row takes part in."""
        return T.min(self.arguments["lengths"][row], self.steps) if self.traversal.lengths else self.steps

    def live(self, t: Expr, limit: Expr) -> Expr | None:
        """True if a row takes part in step ``t``; None: always."""
        return T.let("live", self.at(t) < limit) if self.traversal.lengths else None

    def number(self, t: Expr, row: Expr) -> Expr:
        """The sequence that a column works on in step ``t``; -1 where there is none. ``sequences`` only."""
        step = T.let("step", self.at(T.min(t, self.steps - 1)))
        return T.Select(t < self.steps, self.arguments["sequences"][step * self.batch + row], -1)

    def sequence(self, number: Expr) -> Expr:
        """The sequence of a number that is not below 0: without what marks a piece."""
        return T.bitwise_and(number, LATER - 1)

    def continues(self, number: Expr) -> Expr:
        """True if ``number``, at least 0, is of a piece that continues from the state of the other piece."""
        return T.bitwise_and(number, EARLIER if self.traversal.reverse else LATER) != 0

    def hands_over(self, number: Expr) -> Expr:
        """True if ``number``, at least 0, is of a piece that the other piece continues from."""
        return T.bitwise_and(number, LATER if self.traversal.reverse else EARLIER) != 0

    @property
    def other(self) -> int:
        """Columns from a piece that continues to the other: 1, as in x's time the first lies behind; -1 in reverse."""
        return -1 if self.traversal.reverse else 1

    def masked(self, live: Expr | None, value: Expr, otherwise: Expr) -> Expr:
        return value if live is None else T.let(name_of(value), T.Select(live, value, otherwise))

    def fresh(self, t: Expr, row: Expr, limit: Expr) -> Expr | None:
        """True if a row's new sequence starts before step ``t``, which may be T, behind the last one; None: never."""
        if not self.traversal.resets:
            return None
        step, inside = self._start(t, limit)
        return T.let("fresh", T.And(inside, self._mark(T.Select(inside, step, 0), row) != T.uint8(0)))

    def mark(self, t: Expr, row: Expr) -> Expr:
        """The element of ``resets`` that :meth:`starts` needs for step ``t`` < T: only loaded. With ``resets`` only."""
        return self._mark(T.min(self.steps - t, self.steps - 1) if self.traversal.reverse else t, row)

    def starts(self, t: Expr, limit: Expr, mark: Expr) -> Expr:
        """:meth:`fresh` for step ``t`` < T, from the mark that was loaded before."""
        return T.let("starts", T.And(self._start(t, limit)[1], mark != 0))

    def _start(self, t: Expr, limit: Expr) -> tuple[Expr, Expr]:
        """The step of ``resets`` that counts before step ``t``, and whether there is one."""
        step = T.let("step", self.at(t) + 1 if self.traversal.reverse else t)
        least = int(self.traversal.reverse != self.traversal.backward)
        return step, T.let("start", T.And(step >= least, step < limit))

    def _mark(self, step: Expr, row: Expr) -> Expr:
        return self.arguments["resets"][T.cast(step * self.batch + row, "int64")]

    def started(self, fresh: Expr | None, values: list[Expr]) -> list[Expr]:
        """States before a step, zero where a new sequence starts there."""
        return values if fresh is None else [T.let(name_of(value), T.Select(fresh, T.float32(0), value))
                                             for value in values]
