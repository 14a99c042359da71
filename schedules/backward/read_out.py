"""The values that only the outputs of a layer need, after its loop: a pass over all rows, from what the loop wrote to
y.

    read_out    (T, B, N, H), what the loop writes in place of y; zero where a row takes no part
    y           (T, B, W), as the layer has it
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ecornn.analysis.step import StepGraph
from ecornn.program import RUN, WORKSPACE, Buffer, Call, Entry, Extent, Leaf, Program, mapped
from ecornn.schedules.backward.memory import Place
from ecornn.schedules.backward.passes import RowPass, Wanted, items_of
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Var
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.timeline import rows_mask

SPACE = "read_out"


@dataclass(frozen=True)
class _Memory:
    """The memory around the pass, as the pass needs it."""

    task: Task
    forward: StepGraph

    @property
    def dtype(self) -> str:
        return self.task.workload.dtype

    @property
    def x(self) -> Columns:
        return Columns("x", self.task.own_input, self.task.workload.input)


def with_read_out(task: Task, program: Program) -> Program:
    """The program of a layer, from that of its loop."""
    assert task.after is not None
    w, graph, y = task.workload, task.after.graph, task.after.traversal
    H, count = w.hidden, len(task.graph.outputs)
    memory = _Memory(task, task.graph)
    leaves: dict[Var, Place] = {v: Place(Columns(SPACE, H, count * H, n * H), w.dtype)
                                for n, v in enumerate(task.graph.outputs)}
    if graph.x is not None:
        leaves[graph.x] = Place(memory.x, w.dtype)
    for var, at in graph.input_offsets(w.input, H).items():
        leaves[var] = Place(Columns("x", H, w.input, at), w.dtype)
    own = len(graph.outputs) * H
    stores = tuple((v, Place(Columns("y", H, y.y_width(own), y.y_offset(own) + n * H), w.dtype))
                   for n, v in enumerate(graph.outputs))
    made = RowPass(memory, SPACE, leaves, graph.invariants, mask=rows_mask(task.traversal)).component(
        items_of(graph), Wanted(stores))
    space = Buffer(SPACE, WORKSPACE, w.dtype, Extent(0, w.batch * count * H))
    calls = (*(_elsewhere(call) for call in program.entries[RUN].calls), *made.calls)
    buffers = (*program.buffers, space, *made.buffers)
    return replace(program, functions={**program.functions, **made.functions}, buffers=buffers,
                   entries={RUN: Entry(calls, tuple(b.name for b in buffers))})


def _elsewhere(call: Call) -> Call:
    """A call of the loop, whose y is the workspace."""
    def leaf(one: Leaf) -> Leaf:
        return replace(one, names={"y": SPACE, **{p: SPACE if b == "y" else b for p, b in one.names.items()}})

    return mapped(call, leaf)
