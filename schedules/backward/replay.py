"""The values of the forward pass that the recurrence reads, computed for all steps at once from those that were
kept."""

from __future__ import annotations

from ecornn.program import WORKSPACE
from ecornn.schedules.backward.memory import Memory, Place, Workspaces
from ecornn.schedules.backward.passes import Item, RowPass, Wanted, items_of, unique_invariants
from ecornn.schedules.base import Component, joined
from ecornn.schedules.builder import Var
from ecornn.schedules.gemm.job import STEPS
from ecornn.schedules.hoisted import Hoisted


def replay(memory: Memory, layout: Hoisted) -> Component:
    """``hoisted``, as ``layout`` says, from x, ``before_<state>``, states after each step, dy and the weights; and
    ``replayed``, what else a later pass reads of the forward step."""
    graph, forward = memory.adjoint.recurrence, memory.kept.replay
    items: list[Item] = [*items_of(forward), *(i for i in (graph.hoisted, graph.hoisted_statistics, graph.normalized)
                                               if i)]
    multiplied, read = materialized(memory)
    passes = RowPass(memory, "replay", memory.leaves(), unique_invariants(memory.adjoint.forward, graph))
    stores = tuple((v, p) for space in (multiplied, read) for v, p in space.places().items())
    made = passes.component(items, Wanted(stores, graph.hoisted_outputs, layout))
    batch = memory.task.workload.batch
    spaces = Component(buffers=(*multiplied.buffers(batch, STEPS), *read.buffers(batch, STEPS)))
    hoisted = Component(buffers=(layout.buffer(batch),)) if graph.hoisted_outputs else Component()
    return joined(hoisted, spaces, made)


def materialized(memory: Memory) -> tuple[Workspaces, Workspaces]:
    """Forward values that passes after the recurrence read, and that are not in memory before: those that are factors
    of outer products, in the layer's data type, and others, in float32."""
    back, H = memory.adjoint, memory.task.workload.hidden
    multiplied = Workspaces("replayed", memory.dtype, H, WORKSPACE)
    read = Workspaces("replayed_values", "float32", H, WORKSPACE)
    known = memory.leaves().keys() | memory.outputs().keys()
    replayed = set(memory.kept.replay.outputs)
    outers = (*back.recurrence.outer_products, *back.inputs.outer_products)
    multiplied.add(v for o in outers for v in (o.value, o.operand) if v is not None and v in replayed - known)
    read.add(v for v in back.inputs.given if v in replayed - known)
    return multiplied, read


def replayed(memory: Memory) -> dict[Var, Place]:
    """The places of the values of :func:`materialized`."""
    multiplied, read = materialized(memory)
    return {**multiplied.places(), **read.places()}

