"""A kernel of all steps: what its parts have in common, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored
from ecornn.schedules.timeline import Timeline, piece_arguments, row_arguments


@dataclass(frozen=True)
class SequenceKernel:
    """A kernel of all steps: what it is made for, and what it is called with."""

    task: Task  # the sequence
    hoisted: Hoisted  # how the hoisted values lie in memory
    math: str  # of the scalars, one of ``MATH``
    # parameters by name, flat: ``hoisted`` as its layout says, ``vectors`` (V*H,), ``<state>_in`` and ``<state>_out``
    # (B*H,), ``y`` (T*B*D*H,) or, of an adjoint, ``outputs`` (T*B*O*H,), masks as ``timeline`` says, ``<state>_kept``,
    # ``value<n>_kept`` (T*B*H,), ``values_kept`` (T*B*V*H,), and the schedule's own
    arguments: dict[str, TirBuffer]
    steps: Expr  # steps, batch: T and B of the call
    batch: Expr
    kept: Stored = NOTHING  # what it stores of each step, beside y
    early: bool = False  # whether it may begin before what it reads of other launches is there: these are waited for

    @classmethod
    def declare(cls, task: Task, hoisted: Hoisted, math: str, own: Mapping[str, str], kept: Stored = NOTHING,
                early: bool = False, before: Callable[[], dict[str, TirBuffer]] = dict) -> SequenceKernel:
        """Declares a kernel's parameters, in order: ``T, B``, those of ``before``, ``[hoisted,] [row_sums,] vectors,
        <state>_in, <state>_out``, the schedule's ``own``, ``y`` or ``outputs``, what is ``kept``, masks, pieces."""
        graph, dtype = task.graph, task.workload.dtype
        kinds = {"hoisted": hoisted.dtype} if graph.hoisted_outputs else {}
        kinds |= ({"row_sums": "float32"} if graph.row_inputs else {}) | {"vectors": "float32"}
        kinds |= {f"{state}_{end}": dtype for state in graph.states for end in ("in", "out")}
        kinds |= {**own, **dict.fromkeys(written_by(task), dtype)}
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = before() | {name: T.pointer(name, kind) for name, kind in kinds.items()}
        arguments |= kept.arguments(dtype) | row_arguments(task.traversal) | piece_arguments(task.traversal)
        return cls(task, hoisted, math, arguments, steps, batch, kept, early)

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.task.traversal, self.arguments, self.steps, self.batch)


def written_by(task: Task) -> tuple[str, ...]:
    """The argument that each step is written to: ``y``, or of an adjoint ``outputs``, if it has any but states."""
    if not task.traversal.backward:
        return ("y",)
    return ("outputs",) if task.graph.outputs else ()
