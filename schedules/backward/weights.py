"""Gradients of parameters. Those of matrices are outer products added up over all rows, a kernel for each pair of
operands. Values that lie side by side are taken together: all gates of an LSTM are the columns of one product.

Vectors' gradients are sums over all rows, first of ``CHUNKS`` parts, then of these in order, so that bits repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd, prod
from operator import itemgetter

from ecornn.analysis.step import OuterProduct, StepGraph
from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.backward.memory import Memory, Place, finish_summed
from ecornn.schedules.backward.passes import places_of_inputs
from ecornn.schedules.base import Component, joined
from ecornn.schedules.builder import Expr, PrimFunc, T, Var, ceil_div
from ecornn.schedules.cuda.isa import sync_block
from ecornn.schedules.gemm.job import STEPS, Columns, counted, rows_of
from ecornn.schedules.gemm.mma_mainloop import THREADS
from ecornn.schedules.gemm.outer import Into, OuterJob, adding_kernel, outer_kernel, outer_shape, with_existing
from ecornn.schedules.gemm.outer_wgmma import THREADS as HOPPER_THREADS
from ecornn.schedules.gemm.outer_wgmma import hopper_shape, outer_wgmma_kernel
from ecornn.schedules.scalars.pointwise import emit, vectors_at
from ecornn.schedules.timeline import rows_mask


@dataclass(frozen=True)
class Group:
    """Outer products of neighbouring ``values``, a gate each, with an operand, of the first head if ``heads``."""

    parameter: str
    gates: tuple[int, ...]
    values: Columns
    operand: Columns
    first: bool  # to write these gates
    heads: int = 1


def weight_gradients(memory: Memory, places: Mapping[Var, Place], add: bool = False,
                     apart: bool = False) -> list[Component]:
    """``d_<parameter>`` of matrices (G, H, K), float32, 0 of unused gates; ``add``: where scalar ``add`` is not 0. One
    component after the other; ``apart``: of each parameter, at the same time, which takes more memory."""
    back, forward = memory.adjoint, memory.adjoint.forward
    groups = groups_of(memory, (*back.recurrence.outer_products, *back.inputs.outer_products), places)
    first = None if add else False
    made = [(group.parameter, _outer(memory, n, group, first if group.first else True, apart))
            for n, group in enumerate(groups)]
    used = {(g.parameter, gate) for g in groups for gate in g.gates}
    unused = [(n, g) for n, s in forward.parameters.items() if len(s) == 3 for g in range(s[0]) if (n, g) not in used]
    rest = zeros(forward, unused, memory.task.device.cores, add)
    if apart:
        return [*(joined(*(part for _, part in those)) for _, those in groupby(made, key=itemgetter(0))), rest]
    largest = max((b for _, part in made for b in part.buffers), key=lambda b: b.extent.fixed, default=None)
    return [replace(joined(*(part for _, part in made)), buffers=() if largest is None else (largest,)), rest]


def groups_of(memory: Memory, outers: Sequence[OuterProduct], places: Mapping[Var, Place]) -> list[Group]:
    """The groups, one for each kernel: values one behind the other in memory, with one operand, for one parameter."""
    def columns(var: Var | None, width: int, parts: int = 1) -> Columns:
        whole = memory.x if var is None else places[var].columns
        return replace(whole, width=width or whole.width // parts)

    def again(parameter: str, gate: int) -> bool:
        return any(g.parameter == parameter and gate in g.gates for g in found)

    heads = {o.parameter: o.heads for o in outers}
    found_items = {(o.parameter, columns(o.operand, o.columns, o.heads), columns(o.value, o.rows), o.gate)
                   for o in outers}
    items = sorted(found_items, key=lambda i: (i[0], i[1].name, i[1].offset, i[2].name, i[2].offset, i[3]))
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


def _outer(memory: Memory, number: int, group: Group, add: bool | None, apart: bool) -> Component:
    """The sums of all rows; or two kernels: sums of parts of the rows, in memory that is ``apart`` or shared, and their
    sum."""
    w, task = memory.task.workload, memory.task
    job = OuterJob(f"outer_{number}", task.device, w.dtype, w.arithmetic, group.values, group.operand, w.seq * w.batch,
                   rows_mask(task.traversal), group.heads)
    hopper, adder, blocks = hopper_shape(job), f"add_outer_{number}", 2 * task.device.cores
    shape, height, width = hopper or outer_shape(job), job.values.width, job.operand.width
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
    parts = f"outer_{number}_parts" if apart else "outer_parts"
    names["into"] = target if shape.parts == 1 else parts
    product = Launch(job.name, grid, threads, shape.shared, names=names)
    if shape.parts == 1:
        return Component({job.name: kernel}, (), (product,))
    functions = {job.name: kernel, adder: adding_kernel(adder, height, width, shape.parts, blocks, into)}
    sums = Buffer(parts, WORKSPACE, "float32", Extent(shape.parts * height * width))
    add_up = Launch(adder, blocks, THREADS, names={"parts": parts, "into": target})
    return Component(functions, (sums,), (product, add_up))


def zeros(forward: StepGraph, gates: Sequence[tuple[str, int]], blocks: int, add: bool,
          prefix: str = "no_matrix") -> Component:
    """Zeros as the gradients of ``gates`` of parameters; ``add``: only where the scalar ``add`` is 0."""
    found = []
    for number, (parameter, gate) in enumerate(gates):
        name, size = f"{prefix}_{number}", prod(forward.parameters[parameter][1:])
        found.append(Component({name: zero_kernel(name, gate * size, size, blocks, add)}, (),
                               (Launch(name, blocks, THREADS, names={"into": f"d_{parameter}"}),)))
    return joined(*found)


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


CHUNKS = 32  # of the rows
UNROLL = 4  # rows of a warp that are read at once


@dataclass(frozen=True)
class _Group:
    """Values in one buffer, with the variables of their sums; ``each``: what there is a row of."""

    values: tuple[tuple[Var, Place], ...]
    each: str

    @property
    def name(self) -> str:
        return self.values[0][1].columns.name


def step_sums(memory: Memory, accumulate: bool = False) -> list[Component]:
    """The first passes over the rows of every step; ``accumulate``: added to the sums that are there."""
    return [_partial(f"sums_{g.name}", g, memory.task.workload.hidden, accumulate)
            for g in _groups(memory) if g.each == STEPS]


def vector_gradients(memory: Memory, add: bool = False) -> Component:
    """``d_<parameter>`` of every vector (G, H), as :func:`weight_gradients` of matrices, after :func:`step_sums`."""
    H, parts = memory.task.workload.hidden, []
    at: dict[Var, list[tuple[str, int, int]]] = {}  # of a sum: its places in the buffers of partial sums
    for group in _groups(memory):
        name, count = f"sums_{group.name}", len(group.values)
        if group.each != STEPS:
            parts.append(_partial(name, group, H))
        for s, (var, _) in enumerate(group.values):
            at.setdefault(var, []).append((name, s, count))
    gradients: dict[tuple[str, int], list[Var]] = {}
    for vector in memory.adjoint.vectors:
        gradients.setdefault((vector.parameter, vector.gate), []).append(vector.var)
    once = Component()
    if gradients:
        blocks = ceil_div(H, THREADS)
        once = Component({"once": _once(memory, at, gradients, blocks, add)}, (), (Launch("once", blocks, THREADS),))
    unused = [(n, g) for n, s in memory.adjoint.forward.parameters.items() if len(s) == 2 for g in range(s[0])
              if (n, g) not in gradients]
    return joined(*parts, once, zeros(memory.adjoint.forward, unused, memory.task.device.cores, add, "no_vector"))


def _groups(memory: Memory) -> list[_Group]:
    back = memory.adjoint
    places = memory.leaves() | memory.outputs() | places_of_inputs(memory)
    found: dict[str, list[tuple[Var, Place]]] = {}
    for s in (*back.recurrence.sums, *back.inputs.sums):
        found.setdefault(places[s.value].columns.name, []).append((s.var, places[s.value]))
    groups = [_Group(tuple(values), STEPS) for values in found.values()]
    left = finish_summed(memory).places()
    if back.finish.sums:
        groups.append(_Group(tuple((s.var, left[s.value]) for s in back.finish.sums), memory.each_state))
    return groups


def _partial(name: str, group: _Group, hidden: int, accumulate: bool = False) -> Component:
    span = gcd(*(p.columns.together(4) for _, p in group.values))
    blocks, shared = len(group.values) * ceil_div(hidden, 32 * span) * CHUNKS, THREADS * span * 4
    kernel = _partial_kernel(name, group, hidden, span, blocks, accumulate)
    parts = Buffer(f"{name}_parts", WORKSPACE, "float32", Extent(CHUNKS * len(group.values) * hidden))
    return Component({name: kernel}, (parts,), (Launch(name, blocks, THREADS, shared, names={"parts": parts.name}),))


def _partial_kernel(name: str, group: _Group, hidden: int, span: int, blocks: int, accumulate: bool) -> PrimFunc:
    """``(T, B, values, parts)``: ``parts[chunk, s, j]``. A warp has 32 spans of units, and every eighth row."""
    place, count, across = group.values[0][1], len(group.values), ceil_div(hidden, 32 * span)
    warps = THREADS // 32
    with T.kernel(name) as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = {n: T.pointer(n, kind) for n, kind in ({group.name: place.dtype} | counted(group.each)).items()}
        parts = T.pointer("parts", "float32")
        T.device_entry()
        block, thread = T.block(blocks), T.thread(THREADS)
        memory = T.shared(THREADS * span)
        rows = T.let("rows", rows_of(group.each, arguments, steps, batch))
        chunk, column = T.let("chunk", block // (count * across)), T.let("column", block % (count * across))
        s = T.let("s", column // across)
        lane, warp = T.let("lane", thread % 32), T.let("warp", thread // 32)
        unit = T.let("unit", column % across * (32 * span) + lane * span)
        each = T.let("each", (rows + (CHUNKS - 1)) // CHUNKS)
        end = T.let("end", T.min(rows, (chunk + 1) * each))
        T.note("a warp adds every eighth row of its chunk, a lane some neighbouring units")
        total = T.local("total", (span,), "float32")
        for e in range(span):
            T.buffer_store(total, T.float32(0), [e])
        offset: Expr = T.int32(group.values[-1][1].columns.offset)
        for k in reversed(range(count - 1)):
            offset = T.Select(s == k, T.int32(group.values[k][1].columns.offset), offset)
        first = T.let("first", offset + unit)  # of the row
        whole = replace(place, columns=replace(place.columns, width=place.columns.stride, offset=0))
        turns = T.let("turns", (each + (warps * UNROLL - 1)) // (warps * UNROLL))
        with T.when(unit < hidden), T.serial("turn", 0, turns) as turn:
            for k in range(UNROLL):
                row = T.let("row", chunk * each + (turn * UNROLL + k) * warps + warp)
                with T.when(row < end):
                    values = whole.load(arguments, row, first, lambda at, e: at + e, span, aligned=True)
                    for e, value in enumerate(values):
                        T.buffer_store(total, total[e] + value, [e])
        T.note("the sums of all warps, through shared memory, to the chunk's partial sums")
        for e in range(span):
            T.buffer_store(memory, total[e], [thread * span + e])
        sync_block()
        with T.when(T.And(warp == 0, unit < hidden)):
            for e in range(span):
                others = (memory[(other * 32 + lane) * span + e] for other in range(1, warps))
                value = sum(others, memory[thread * span + e])
                into = (chunk * count + s) * hidden + unit + e
                T.buffer_store(parts, parts[into] + value if accumulate else value, [into])
    return made()


def _once(memory: Memory, at: Mapping[Var, Sequence[tuple[str, int, int]]],
          gradients: Mapping[tuple[str, int], Sequence[Var]], blocks: int, add: bool) -> PrimFunc:
    """``(add, vectors, partial sums, gradients)``: a thread has a unit."""
    back, H = memory.adjoint, memory.task.workload.hidden
    buffers = ["vectors", *dict.fromkeys(f"{name}_parts" for places in at.values() for name, _, _ in places),
               *dict.fromkeys(f"d_{parameter}" for parameter, _ in gradients)]
    used = {v.var for v in back.once.vectors}
    with T.kernel("once") as made:
        added = T.arg("add", T.int32()) != 0 if add else False
        a = {n: T.pointer(n, "float32") for n in buffers}
        T.device_entry()
        unit = T.let("unit", T.block(blocks) * THREADS + T.thread(THREADS))
        T.note("a thread a unit: partial sums of all chunks, then the gradients of vectors")
        with T.when(unit < H):
            env = vectors_at(back.forward.vectors, a["vectors"], H, unit, used)
            for var, places in at.items():
                total = T.variable("total", "float32", T.float32(0))
                for name, s, count in places:
                    with T.unroll("chunk", CHUNKS) as chunk:  # all loads are under way at once
                        T.buffer_store(total, total[0] + a[f"{name}_parts"][(chunk * count + s) * H + unit], [0])
                env[var] = T.let(var.name, total[0])
            env = emit(back.once.invariants, env)
            for (parameter, gate), those in gradients.items():
                value = sum((env[var] for var in those[1:]), env[those[0]])
                into, place = a[f"d_{parameter}"], gate * H + unit
                T.buffer_store(into, with_existing(added, into[place], value), [place])
    return made()
