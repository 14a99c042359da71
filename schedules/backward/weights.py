"""Gradients of matrices of weights: outer products added up over all rows, a kernel for each pair of operands.

Values that lie side by side are taken together: all gates of an LSTM are the columns of one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from ecornn.analysis.step import OuterProduct, StepGraph
from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.backward.memory import Memory, Place
from ecornn.schedules.base import Component, joined
from ecornn.schedules.builder import Expr, PrimFunc, T, Var, ceil_div
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.gemm.outer import THREADS, Into, OuterJob, adding_kernel
from ecornn.schedules.gemm.outer_mma import outer_kernel, outer_shape
from ecornn.schedules.gemm.outer_wgmma import THREADS as HOPPER_THREADS
from ecornn.schedules.gemm.outer_wgmma import hopper_shape, outer_wgmma_kernel
from ecornn.schedules.timeline import rows_mask


@dataclass(frozen=True)
class Group:
    """Outer products of neighbouring ``values`` and one operand: one gate of ``parameter`` for each of these. With
    ``heads`` the operand's columns are those of the first head."""

    parameter: str
    gates: tuple[int, ...]
    values: Columns
    operand: Columns
    first: bool  # to write these gates
    heads: int = 1


def weight_gradients(memory: Memory, places: Mapping[Var, Place], add: bool = False) -> Component:
    """``d_<parameter>`` of every matrix (G, H, K), float32; ``add``: to what is there, where the scalar ``add`` is not
    0. Zeros where a gate is not used.

    ``places`` has what is multiplied, all of the layer's data type, beside x.
    """
    back, forward = memory.adjoint, memory.adjoint.forward
    groups = groups_of(memory, (*back.recurrence.outer_products, *back.inputs.outer_products), places)
    first = None if add else False
    made = [_outer(memory, n, group, first if group.first else True) for n, group in enumerate(groups)]
    largest = max((b for part in made for b in part.buffers), key=lambda b: b.extent.fixed, default=None)
    parts = Component() if largest is None else Component(buffers=(largest,))
    whole = joined(*made)
    used = {(g.parameter, gate) for g in groups for gate in g.gates}
    unused = [(n, g) for n, s in forward.parameters.items() if len(s) == 3 for g in range(s[0]) if (n, g) not in used]
    return joined(parts, Component(whole.functions, calls=whole.calls),
                  zeros(forward, unused, memory.task.device.cores, add))


def groups_of(memory: Memory, outers: Sequence[OuterProduct], places: Mapping[Var, Place]) -> list[Group]:
    """The groups, one for each kernel: values one behind the other in memory, with one operand, for one parameter."""
    def columns(var: Var | None) -> Columns:
        return memory.x if var is None else places[var].columns

    def multiplied(o: OuterProduct) -> Columns:
        whole = columns(o.operand)
        return replace(whole, width=o.columns or whole.width // o.heads)

    def made(o: OuterProduct) -> Columns:
        whole = columns(o.value)
        return replace(whole, width=o.rows or whole.width)

    def again(parameter: str, gate: int) -> bool:
        return any(g.parameter == parameter and gate in g.gates for g in found)

    heads = {o.parameter: o.heads for o in outers}
    items = sorted({(o.parameter, multiplied(o), made(o), o.gate) for o in outers},
                   key=lambda i: (i[0], i[1].name, i[1].offset, i[2].name, i[2].offset, i[3]))
    found: list[Group] = []
    for (parameter, operand, _), those in groupby(items, key=lambda i: (i[0], i[1], i[2].name)):
        run: list[tuple[Columns, int]] = []
        for value, gate in [(v, g) for _, _, v, g in those]:
            apart = run and (value.offset != run[-1][0].offset + run[-1][0].width or gate in [g for _, g in run])
            # one gate is written, the other one added to
            if apart or (run and again(parameter, gate) != again(parameter, run[-1][1])):
                found.append(_group(parameter, operand, run, found, heads[parameter]))
                run = []
            run.append((value, gate))
        found.append(_group(parameter, operand, run, found, heads[parameter]))
    return found


def _group(parameter: str, operand: Columns, run: Sequence[tuple[Columns, int]], before: Sequence[Group],
           heads: int) -> Group:
    values = replace(run[0][0], width=sum(v.width for v, _ in run))
    gates = tuple(g for _, g in run)
    return Group(parameter, gates, values, operand,
                 not any(g.parameter == parameter and set(g.gates) & set(gates) for g in before), heads)


def _outer(memory: Memory, number: int, group: Group, add: bool | None) -> Component:
    """The sums of all rows; or two kernels: sums of parts of the rows, and their sum."""
    w, task = memory.task.workload, memory.task
    job = OuterJob(f"outer_{number}", task.device, w.dtype, w.arithmetic, group.values, group.operand, w.seq * w.batch,
                   rows_mask(task.traversal), group.heads)
    hopper, adder, blocks = hopper_shape(job), f"add_outer_{number}", 2 * task.device.cores
    shape = hopper or outer_shape(job)
    height, width = job.values.width, job.operand.width
    own = height // len(group.gates)

    def row(m: Expr) -> Expr:
        gate = T.int64(group.gates[-1])
        for k in reversed(range(len(group.gates) - 1)):
            gate = T.Select(m // own == k, T.int64(group.gates[k]), gate)
        return (gate * own + m % own) * width

    into, target = Into(row, add), f"d_{group.parameter}"
    kernel = (outer_wgmma_kernel if hopper else outer_kernel)(job, shape, into)
    grid, threads = (task.device.cores, HOPPER_THREADS) if hopper else (shape.tiles * shape.parts, THREADS)
    names = {"values": group.values.name, "operand": group.operand.name}
    product = Launch(job.name, grid, threads, shape.shared,
                     names={**names, "into": target if shape.parts == 1 else "outer_parts"})
    if shape.parts == 1:
        return Component({job.name: kernel}, (), (product,))
    functions = {job.name: kernel, adder: adding_kernel(adder, height, width, shape.parts, blocks, into)}
    sums = Buffer("outer_parts", WORKSPACE, "float32", Extent(shape.parts * height * width))
    return Component(functions, (sums,), (
        product, Launch(adder, blocks, THREADS, names={"parts": "outer_parts", "into": target})))


def zeros(forward: StepGraph, gates: Sequence[tuple[str, int]], blocks: int, add: bool,
          prefix: str = "no_matrix") -> Component:
    """Zeros as the gradients of ``gates`` of parameters; ``add``: only where the scalar ``add`` is 0."""
    def one(number: int, gate: tuple[str, int]) -> Component:
        name, (parameter, which) = f"{prefix}_{number}", gate
        size = prod(forward.parameters[parameter][1:])
        return Component({name: zero_kernel(name, which * size, size, blocks, add)}, (),
                         (Launch(name, blocks, THREADS, names={"into": f"d_{parameter}"}),))

    return joined(*(one(n, gate) for n, gate in enumerate(gates)))


def zero_kernel(name: str, first: int, size: int, blocks: int, add: bool) -> PrimFunc:
    """``(add, into)``: zeros from element ``first`` on."""
    with T.kernel(name) as made:
        wanted = T.arg("add", T.int32()) == 0 if add else True
        into = T.pointer("into", "float32")
        T.device_entry()
        T.note("gradients of matrices that nothing flows into: zeros")
        thread = T.let("first_item", T.block(blocks) * THREADS + T.thread(THREADS))
        with T.serial("turn", 0, ceil_div(size, blocks * THREADS)) as turn:
            item = T.let("item", T.cast(turn * (blocks * THREADS) + thread, "int64"))
            with T.when(T.And(item < size, wanted)):
                T.buffer_store(into, T.float32(0), [item + first])
    return made()
