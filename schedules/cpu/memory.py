"""Where everything lies that a step reads and writes: what the tasks of a thread know of their function."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.program import Buffer
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu import paired
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.quantize import Integers
from ecornn.schedules.cpu.stages import StepPlan
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.timeline import Timeline
from ecornn.workload import Traversal


@dataclass(frozen=True)
class Span:
    """What a stage goes over: ``rows`` of x from the chunk's ``first`` step on (hoisted), or of the batch in step
    ``t``."""

    first: Expr
    t: Expr
    rows: Expr


class Memory:
    """Buffers by name, and the place of each value of the step in them."""

    timeline: Timeline
    batch: Expr  # B of the call

    def __init__(self, plan: StepPlan, shape: Shape, traversal: Traversal) -> None:
        self.plan, self.shape, self.graph, self.traversal = plan, shape, plan.graph, traversal
        self.e = Emitter(shape.lanes)
        self.buffers: list[Buffer] = []
        self.data: dict[str, TirBuffer] = {}  # buffer name -> its elements
        self.integers: dict[tuple[str, int], Integers] = {}  # (stage, group of rows) -> its operand as integers
        self.paired: dict[tuple[str, int], paired.Paired] = {}  # ... as copies for products of pairs
        self.aliases: dict[str, str] = {}  # further pointer parameters -> their buffer
        self.kept: dict[Var, TirBuffer] = {}  # value carried between stages -> its buffer
        self.place = {v: i for i, v in enumerate(self.graph.hoisted_outputs)}
        self.projected = {v: i for i, v in enumerate(self.graph.projected)}  # where statistics of them are due
        self.totals = {v: i for i, v in enumerate(v for s in self.graph.statistics for v in s.made)}
        self.hoisted_totals = {v: i for i, v in enumerate(v for s in self.graph.hoisted_statistics for v in s.made)}
        self.row = {v.var: i for i, v in enumerate(self.graph.vectors)}
        self.row.update((a.var, i) for i, a in enumerate(self.graph.invariants))
        self.vectors = {v.var for v in self.graph.vectors}

    def slot(self, state: str, t: Expr) -> Expr:
        """Where a state before step ``t`` starts in its workspace."""
        if state not in self.plan.doubled:
            return self.e.index(0)
        return self.e.mod(t, 2) * self.e.index(self.shape.padded_batch * self.shape.width)

    def operand(self, operand: Var | None, first: Expr, t: Expr) -> tuple[TirBuffer, Expr, int]:
        """Elements of an operand, where its first row starts, and how far its rows are apart."""
        e, s = self.e, self.shape
        if operand is None:
            return self.data["x"], e.let("x_first", first * self.batch * e.index(s.input)), s.input
        name = next((n for n, v in self.graph.states.items() if v.same_as(operand)), None)
        if name is None:
            return self.kept[operand], e.index(0), s.width
        return self.data[f"{name}_state"], self.slot(name, t), s.width
