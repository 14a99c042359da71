"""The values that forward keeps for backward: states after each step, beside y, which has the output state, and with
``keep="gates"`` other values of the step; and rows of ``outputs``, what the recurrence of a backward pass writes: how
long they are, how their values are stored, and which of forward's values lie as they do, to be written over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import structs

from ecornn.analysis.adjoint import Adjoint, adjoint
from ecornn.analysis.kept import kept
from ecornn.program import Buffer, Extent
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa.tensor_core import raised

LINE = 128  # bytes
LINES = 16  # of a row, at least, for which others fill up the last one


def written(adjoint: Adjoint) -> tuple[Var, ...]:
    """The values of each step that the recurrence writes to ``outputs``: the graph's, and others summed over steps."""
    graph = adjoint.recurrence
    return tuple(dict.fromkeys((*graph.outputs, *(s.value for s in graph.sums))))


def outputs_row(task: Task, adjoint: Adjoint) -> int:
    """Values from one row of what the recurrence writes to the next. Products copy 128 bytes of a row at a time, of two
    lines where rows begin within lines: of 700 rows of 2600 16-bit values one takes 24 us on an H100, of 2624 15.5."""
    values, line = len(written(adjoint)) * task.workload.hidden, LINE // task.workload.itemsize
    return ceil_div(values, line) * line if values >= LINES * line else values


def together(task: Task, adjoint: Adjoint, count: int) -> int:
    """How many of ``count`` values that forward keeps lie beside each other: as many as the recurrence writes, if there
    are so many, and nothing lies behind those; else none."""
    several = len(written(adjoint))
    return several if several <= count and several * task.workload.hidden == outputs_row(task, adjoint) else 0


def for_products(output: Expr, task: Task) -> Expr:
    """A step's output as it is stored. An adjoint's are an operand of dx, whose products cut off what TF32 has no bits
    for (gemm/rows_wgmma.py): always towards zero, which adds up where gradients are of one sign; of raised values that
    is rounding. By a float64 model the gradients of two LSTM layers of 64 units (T = 100, of the mean of y) are 3.7e-4
    off then, not 5.6e-4; cuDNN's were 3.0e-4. Sums over all steps, the gradients of biases, are of unrounded values."""
    return raised(output) if task.traversal.backward and task.workload.arithmetic == "tf32" else output


MOST = 1 << 30  # bytes of gates that are kept where nobody says what is
VALUES = "values_kept"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Spot:
    """The place of a kept value: a row of ``buffer`` has ``count`` times H values, and it has those of ``number``."""

    buffer: str
    number: int = 0
    count: int = 1

    def at(self, row: Expr, unit: Expr, hidden: int) -> Expr:
        first = row * (self.count * hidden) + unit
        return first + self.number * hidden if self.number else first


@dataclass(frozen=True)
class Stored:
    """The values that GPU kernels store of each step besides y: states, by name, and values of the step. The first
    ``together`` of the values lie in ``values_kept`` (T, B, V, H), where backward may write its outputs over them."""

    states: tuple[str, ...] = ()
    values: tuple[Var, ...] = ()
    together: int = 0

    def __bool__(self) -> bool:
        return bool(self.states or self.values)

    def buffers(self, batch: int, hidden: int, dtype: str) -> list[Buffer]:
        """The buffers: ``<state>_kept`` (T, B, H), at a step's place in x's time, 0 where a row is out;
        ``values_kept``, if values lie together; and ``value<number>_kept`` (T, B, H) of the others."""
        def made(tensor: str, of: str, name: str, count: int = 1) -> Buffer:
            return structs.replace(Buffer.of(tensor, dtype, of), name=name, extent=Extent(0, batch * count * hidden))
        return [*(made("state_kept", s, f"{s}_kept") for s in self.states),
                *[made(VALUES, "0", VALUES, self.together)] * bool(self.together),
                *(made("value_kept", str(n), f"value{n}_kept") for n in range(self.together, len(self.values)))]

    def arguments(self, dtype: str) -> dict[str, TirBuffer]:
        return {b.name: T.pointer(b.name, dtype) for b in self.buffers(1, 1, dtype)}

    def found(self, after: Mapping[str, Value], env: Mapping[Var, Value]) -> dict[Spot, Value]:
        """The values to store by their spot, from the states after a step and the step's values."""
        return {**{Spot(f"{s}_kept"): after[s] for s in self.states},
                **{self.spot(n): env[v] for n, v in enumerate(self.values)}}

    def spot(self, number: int) -> Spot:
        return spot(number, self.together)  # the spot of the value of this number


NOTHING = Stored()


def spot(number: int, several: int) -> Spot:
    """The spot of the value of this number, if the first ``several`` values lie together."""
    return Spot(VALUES, number, several) if number < several else Spot(f"value{number}_kept")


def stored(task: Task) -> Stored:
    """The values that the kernels of ``forward`` store, of a task that trains."""
    keep, graph = task.traversal.keep, task.graph
    assert keep is not None
    made = adjoint(graph, task.workload.hidden, starts_anew=task.traversal.resets)
    found = kept(made, keep, by_steps=True)
    return Stored(tuple(name for name in found.states if name != graph.output), found.values,
                  together(task, made, len(found.values)))


def usual_keep(task: Task, count: int) -> str:
    """The default of ``keep`` for a layer of ``count`` sequences, of which one is the task, which trains: ``gates``,
    which makes backward faster, unless they take more than ``MOST`` bytes at the expected T."""
    work = task.workload
    made = adjoint(task.graph, work.hidden, starts_anew=task.traversal.resets)
    size = count * kept(made, "gates").units * work.itemsize * work.seq * work.batch * work.hidden
    return "gates" if size <= MOST else "states"


def keeping(kernel: str, kept: Stored) -> str:
    """The name of a kernel; one that stores kept values has a name of its own."""
    return f"{kernel}_keeping" if kept else kernel
