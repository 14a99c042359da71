"""The data that the parts of a kernel of all steps share."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored
from ecornn.schedules.timeline import Timeline


@dataclass(frozen=True)
class SequenceKernel:
    """A kernel of all steps: what it is made for, and what it is called with.

    Attributes
    ----------
    task : the sequence
    hoisted : how the hoisted values lie in memory
    math : of the scalars, one of ``MATH``
    arguments : parameters by name, flat: ``hoisted`` as its layout says, ``vectors`` (V*H,), ``<state>_in`` and
        ``<state>_out`` (B*H,), ``y`` (T*B*D*H,) or, of an adjoint, ``outputs`` (T*B*O*H,), masks as ``timeline`` says,
        ``<state>_kept``, ``value<n>_kept`` (T*B*H,), ``values_kept`` (T*B*V*H,), and the schedule's own
    steps, batch : T and B of the call
    kept : what it stores of each step, beside y
    early : whether it may begin before what it reads of other launches is there: these are waited for
    """

    task: Task
    hoisted: Hoisted
    math: str
    arguments: dict[str, TirBuffer]
    steps: Expr
    batch: Expr
    kept: Stored = NOTHING
    early: bool = False

    @property
    def timeline(self) -> Timeline:
        """The timeline of its steps."""
        return Timeline(self.task.traversal, self.arguments, self.steps, self.batch)


def written_by(task: Task) -> tuple[str, ...]:
    """The argument that each step is written to: ``y``, or of an adjoint ``outputs``, if it has any but states."""
    if not task.traversal.backward:
        return ("y",)
    return ("outputs",) if task.graph.outputs else ()
