"""Gradients of parameter vectors: values summed over all rows, in two passes, then what depends on parameters alone.

The first pass leaves sums of ``CHUNKS`` parts of the rows; the second adds these in order, so that every run has the
same bits, and computes the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.backward.inputs import places_of_inputs
from ecornn.schedules.backward.memory import Memory, Place, finish_summed
from ecornn.schedules.backward.weights import zeros
from ecornn.schedules.base import Component, joined
from ecornn.schedules.builder import Expr, PrimFunc, T, Var, ceil_div
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.gemm.job import STEPS, counted, rows_of
from ecornn.schedules.gemm.outer import with_existing
from ecornn.schedules.scalars.pointwise import emit, vectors_at

THREADS = 256
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


def step_sums(memory: Memory, accumulate: bool = False) -> Component:
    """The first pass over the rows of every step; ``accumulate``: added to the sums that are there."""
    return joined(*(_partial(f"sums_{g.name}", g, memory.task.workload.hidden, accumulate)
                    for g in _groups(memory) if g.each == STEPS))


def vector_gradients(memory: Memory, add: bool = False) -> Component:
    """``d_<parameter>`` of every vector (G, H), float32, after :func:`step_sums`; ``add``: to what is there, where
    the scalar ``add`` is not 0. Zeros where a gate is not used."""
    groups, H, device = _groups(memory), memory.task.workload.hidden, memory.task.device
    parts = []
    at: dict[Var, list[tuple[str, int, int]]] = {}  # of a sum: its places in the buffers of partial sums
    for group in groups:
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
    return joined(*parts, once, zeros(memory.adjoint.forward, unused, device.cores, add, "no_vector"))


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
    return Component({name: kernel}, (Buffer(f"{name}_parts", WORKSPACE, "float32",
                                             Extent(CHUNKS * len(group.values) * hidden)),),
                     (Launch(name, blocks, THREADS, shared, names={"parts": f"{name}_parts"}),))


def _partial_kernel(name: str, group: _Group, hidden: int, span: int, blocks: int, accumulate: bool) -> PrimFunc:
    """``(T, B, values, parts)``: ``parts[chunk, s, j]``. A warp has 32 spans of units, and every eighth row."""
    place, count, across = group.values[0][1], len(group.values), ceil_div(hidden, 32 * span)
    warps = THREADS // 32
    with T.kernel(name) as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        kinds = {group.name: place.dtype} | counted(group.each)
        arguments = {n: T.pointer(n, kind) for n, kind in kinds.items()}
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
                value = memory[thread * span + e]
                for other in range(1, warps):
                    value = value + memory[(other * 32 + lane) * span + e]
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
                total = T.local("total", (1,), "float32")
                T.buffer_store(total, T.float32(0), [0])
                for name, s, count in places:
                    with T.unroll("chunk", CHUNKS) as chunk:  # all loads are under way at once
                        T.buffer_store(total, total[0] + a[f"{name}_parts"][(chunk * count + s) * H + unit], [0])
                env[var] = T.let(var.name, total[0])
            env = emit(back.once.invariants, env)
            for (parameter, gate), those in gradients.items():
                value = env[those[0]]
                for var in those[1:]:
                    value = value + env[var]
                into, place = a[f"d_{parameter}"], gate * H + unit
                T.buffer_store(into, with_existing(added, into[place], value), [place])
    return made()
