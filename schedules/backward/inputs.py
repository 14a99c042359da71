"""The gradient of x, from the gradients of what a step reads of x: one product with several terms, in most cells."""

from __future__ import annotations

from ecornn.analysis.derivatives import number
from ecornn.analysis.step import Assign, Product
from ecornn.program import WORKSPACE
from ecornn.schedules.backward.memory import Memory, Place, Workspaces, replayed
from ecornn.schedules.backward.passes import Item, RowPass, Wanted, items_of, unique_invariants
from ecornn.schedules.backward.scalars import Scalars, scalar_pass
from ecornn.schedules.base import Component, joined
from ecornn.schedules.builder import Var
from ecornn.schedules.gemm.job import STEPS, Columns
from ecornn.schedules.timeline import rows_mask


def input_gradients(memory: Memory, add: bool = False, dtype: str | None = None) -> Component:
    """``dx`` (T, B, I), with gradients of the cell's inputs behind it in its rows, or with ``add`` these and what is
    there, of ``dtype`` (default: the layer's); and workspaces of :func:`made_of_inputs`."""
    of_x, back = _gradient_of_x(memory, add, dtype), memory.adjoint
    # what is made on the way to dx is made without it, too, where x has no gradient
    return joined(of_x, _gradients_beside(memory, add, dtype)) if back.dinputs or back.dx is None else of_x


def _gradient_of_x(memory: Memory, add: bool, dtype: str | None) -> Component:
    from tvm import tirx

    back, w = memory.adjoint, memory.task.workload
    graph, total = back.inputs, back.dx
    items: list[Item] = items_of(graph)
    own = memory.task.own_input
    place = Place(Columns("dx", own, w.input), dtype or memory.dtype)
    if total is None:
        return _spaces(memory) if add else joined(_spaces(memory), _zeros(memory, place))
    leaves = memory.leaves() | memory.outputs() | replayed(memory)
    instead: dict[Var, Var] = {}
    if add:
        before, whole = tirx.Var("dx_before", "float32"), tirx.Var("dx_whole", "float32")
        leaves[before] = place
        items.append((Assign(whole, before + total),))
        total, instead = whole, {whole: before}
    stores = () if back.dinputs else _made(memory)  # a product of x's units may be their kernel
    needed = graph.hoisted or graph.x is not None or replayed(memory)
    mask = rows_mask(memory.task.traversal) if needed else None
    passes = RowPass(memory.task, memory.forward, memory.x, "inputs", leaves,
                     unique_invariants(back.forward, graph), mask=mask, units=own)
    return joined(_spaces(memory), passes.component(items, Wanted((*stores, (total, place)), instead=instead)))


def _gradients_beside(memory: Memory, add: bool, dtype: str | None) -> Component:
    """The gradients of the cell's inputs, without a product, and values made on the way: a pass over hidden units."""
    from tvm import tirx

    back = memory.adjoint
    graph, zero = back.inputs, tirx.Var("zero", "float32")
    items = [item for item in items_of(graph) if not isinstance(item[0], Product)]
    leaves, instead = memory.leaves() | memory.outputs() | replayed(memory), dict[Var, Var]()
    stores, sums = list(_made(memory)), list[Assign]()
    for var, place in memory.inputs("dx", dtype or memory.dtype).items():
        total = back.dinputs[var]
        if total is None and add:
            continue
        total = zero if total is None else total
        if add:
            before, whole = tirx.Var(f"{var.name}_before", "float32"), tirx.Var(f"{var.name}_whole", "float32")
            leaves[before] = place
            sums.append(Assign(whole, before + total))
            total, instead = whole, {**instead, whole: before}
        stores.append((total, place))
    items.append((Assign(zero, number(0.0)), *sums))
    passes = RowPass(memory.task, memory.forward, memory.x, "beside", leaves,
                     unique_invariants(back.forward, graph), mask=rows_mask(memory.task.traversal))
    return passes.component(items, Wanted(tuple(stores), instead=instead))


def summed_directions(cores: int, units: int, dtype: str) -> Component:
    """``dx`` (T, B, units) += ``dx_second``, a second direction's, in float32; on ``cores`` multiprocessors."""
    from tvm import tirx

    first, second, whole = (tirx.Var(name, "float32") for name in ("first", "second", "whole"))
    places = {first: Place(Columns("dx", units, units), dtype),
              second: Place(Columns("dx_second", units, units), "float32")}
    scalars = Scalars((), (), (Assign(whole, first + second),), places, ((whole, places[first]),))
    return scalar_pass("sum_directions", cores, scalars, (), units, STEPS)


def made_of_inputs(memory: Memory) -> tuple[Workspaces, Workspaces]:
    """Values that the pass makes besides: factors of outer products, in the layer's type; what is summed, float32."""
    graph, H = memory.adjoint.inputs, memory.task.workload.hidden
    known = memory.leaves() | memory.outputs() | replayed(memory)
    multiplied = Workspaces("inputs_factors", memory.dtype, H, WORKSPACE)
    summed = Workspaces("inputs_summed", "float32", H, WORKSPACE)
    multiplied.add(v for o in graph.outer_products for v in (o.value, o.operand) if v is not None and v not in known)
    summed.add(s.value for s in graph.sums if s.value not in known)
    return multiplied, summed


def places_of_inputs(memory: Memory) -> dict[Var, Place]:
    """The places of the values of :func:`made_of_inputs`; of a value in both workspaces, that of the factor."""
    multiplied, summed = made_of_inputs(memory)
    return {**summed.places(), **multiplied.places()}


def _made(memory: Memory) -> tuple[tuple[Var, Place], ...]:
    """Values that the pass leaves on the way, and where."""
    return tuple((v, p) for space in made_of_inputs(memory) for v, p in space.places().items())


def _spaces(memory: Memory) -> Component:
    batch = memory.task.workload.batch
    return Component(buffers=tuple(b for space in made_of_inputs(memory) for b in space.buffers(batch, STEPS)))


def _zeros(memory: Memory, place: Place) -> Component:
    from tvm import tirx

    zero = tirx.Var("zero", "float32")
    scalars = Scalars((), (), (Assign(zero, number(0.0)),), {}, ((zero, place),))
    return scalar_pass("inputs_0", memory.task.device.cores, scalars, (), memory.task.own_input, STEPS)
