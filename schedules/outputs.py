"""Rows of ``outputs``, what the recurrence of a backward pass writes: how long they are, and which of forward's values
lie as they do, for them to be written over these; and how their values are stored."""

from __future__ import annotations

from ecornn.analysis.adjoint import Adjoint
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, Var, ceil_div
from ecornn.schedules.cuda.isa.tensor_core import raised

LINE = 128  # bytes
LINES = 16  # of a row, at least, for which others fill up the last one


def written(adjoint: Adjoint) -> tuple[Var, ...]:
    """The values that the recurrence writes of each step to ``outputs``: the graph's, and what is summed over steps
    besides."""
    graph = adjoint.recurrence
    return tuple(dict.fromkeys((*graph.outputs, *(s.value for s in graph.sums))))


def outputs_row(task: Task, adjoint: Adjoint) -> int:
    """Values from one row of what the recurrence writes to the next. Products copy 128 bytes of each row at a time:
    where rows begin within lines that is twice as many lines. A product of 700 rows of 2600 values of 16 bits takes
    24 us on an H100, of 2624 values 15.5."""
    values, line = len(written(adjoint)) * task.workload.hidden, LINE // task.workload.itemsize
    return ceil_div(values, line) * line if values >= LINES * line else values


def together(task: Task, adjoint: Adjoint, count: int) -> int:
    """How many of ``count`` values that forward keeps lie beside each other: as many as the recurrence writes, if there
    are so many, and nothing lies behind those; else none."""
    several = len(written(adjoint))
    return several if several <= count and several * task.workload.hidden == outputs_row(task, adjoint) else 0


def for_products(output: Expr, task: Task) -> Expr:
    """A step's output as it is stored. What an adjoint's recurrence writes is an operand of dx, whose products cut off
    what TF32 has no bits for (gemm/rows_wgmma.py): always towards zero, which adds up where gradients are of one sign.
    Of values that are raised they cut off what rounding does, and the gradients of two LSTM layers of 64 units (T =
    100, of the mean of y) are 3.7e-4 from float64's in place of 5.6e-4, by a model of these roundings in float64;
    cuDNN's were 3.0e-4. Sums over all steps, the gradients of biases, have the values before any rounding."""
    backward = task.traversal.backward and task.workload.arithmetic == "tf32"
    return raised(output) if backward else output
