"""A part of a function that goes over all rows of a chunk of time, or of the batch, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable

from ecornn.analysis import StepGraph
from ecornn.analysis.liveness import levels
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Product, Statistic
from ecornn.schedules.builder import Expr, Var
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.stages import Stage, StepPlan
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.worker import Worker
from ecornn.workload import ALONE

_Part = tuple[tuple[Product, ...], tuple[Statistic, ...], tuple[Assign, ...]]
SLACK = 512  # elements behind the last row that a tile may read


class Pass(Worker):
    """``rooms``: rows that its values have room for, those of a tile past the last one among them."""

    def __init__(self, name: str, plan: StepPlan, shape: Shape, e: Emitter, rooms: int) -> None:
        super().__init__(plan, shape, ALONE, f"{name}_", e)
        self.rooms = rooms
        self.totals = {v: i for i, v in enumerate(v for s in plan.steps for t in s.statistics for v in t.made)}
        self.hoisted_totals = {}

    def room(self, stage: Stage) -> int:
        return self.rooms

    def every_step(self, stage: Stage) -> bool:
        return False

    def row_of_chunk(self, first: Expr, t: Expr, row: Expr) -> Expr:
        return row

    def declare(self, other: Worker) -> None:
        """Declares its buffers; ``other`` has the function's scalars, and x."""
        self.share_scalars(other)
        if "x" in other.data:
            self.data["x"] = other.data["x"]
        self.declare_step(self.rooms, SLACK)
        self.declare_statistics(self.rooms)

    @property
    def places(self) -> dict[Var, Place]:
        """The places of its values."""
        return {v: Place(data, self.shape.width) for v, data in self.kept.items()}

    def run(self, first: Expr, rows: Expr, wait: bool = True) -> None:
        """Runs all stages over ``rows`` rows, of x from step ``first`` on; each ends with a barrier, the last one only
        where the threads are to ``wait`` for what it made."""
        for number, part in enumerate(self.plan.parts, 1):
            self.part(part, first, self.e.index(0), rows)
            if wait or number < len(self.plan.parts):
                self.e.call("ecornn_barrier")


def pass_plan(name: str, graph: StepGraph, wanted: Iterable[Var]) -> StepPlan:
    """The stages of a graph without states, which go over all rows one after the other; ``wanted`` is kept."""
    parts: list[_Part] = [(graph.hoisted_products, (), graph.hoisted),
                          ((), graph.hoisted_statistics, graph.normalized), ((), (), graph.prologue)]
    parts += [(p.products, p.statistics, p.assigns) for p in graph.phases]
    level: dict[Var, int] = dict.fromkeys((v for v, at in levels(graph).items() if at == -3), -3)
    for number, (products, statistics, assigns) in enumerate(parts):
        level.update((p.var, number) for p in products)
        level.update((v, number) for s in statistics for v in s.made)
        level.update((a.var, number) for a in assigns)
    rows = (*graph.given, *graph.inputs.values(), *([graph.x] if graph.x is not None else []))
    level.update((v, 0) for v in rows if v not in level)
    later = set(wanted)
    for number, (products, statistics, assigns) in enumerate(parts):
        read = [t.operand for p in products for t in p.terms] + [v for s in statistics for v in s.operands]
        read += [v for a in assigns for v in variables(a.value)]
        later.update(v for v in read if level.get(v, number) < number)
    stages = []
    for number, (products, statistics, assigns) in enumerate(parts):
        # a statistic is one number a row; it is kept as such, and for all units where it is wanted
        totals = {v for s in statistics for v in s.made} - set(wanted)
        made = (*(p.var for p in products), *(v for s in statistics for v in s.made), *(a.var for a in assigns))
        keep = tuple(v for v in made if v in later and v not in totals)
        if statistics:
            stages.append(Stage(f"{name}_rows{number}", number, (), () if products else keep, statistics=statistics,
                                by_row=True, finishes=not products))
        if products or (keep and not statistics):
            stages.append(Stage(f"{name}_{number}", number, products, keep))
    definition = {a.var: a.value for assigns in (graph.invariants, *(p[2] for p in parts)) for a in assigns}
    return StepPlan(graph, (), tuple((stage,) for stage in stages), definition, level, (), barriers=True)
