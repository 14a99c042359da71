"""The whole sequence as one function that every thread of the team runs.

    copy initial states to workspace, compute invariants; barrier
    for each chunk of time steps:
        hoisted projection of the chunk's rows; barrier
        for each step: the stages of the step, a barrier after each
    copy states to the caller

Work is divided into (unit tile, row tile) tasks, tile by tile, and each thread always takes the
same part, so that its weights stay in its cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ecornn.program import Buffer, Extent, Packing, Parallel, Program
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.math import vector
from ecornn.schedules.cpu.product import accumulators, multiply, packing
from ecornn.schedules.cpu.stages import Plan, Stage, groups
from ecornn.schedules.cpu.tiling import Shape, Tile

Expr = Any  # tvm.ir.PrimExpr
Var = Any  # tvm.tirx.Var


def sequence(plan: Plan, shape: Shape) -> Program:
    """The program of a plan."""
    return _Sequence(plan, shape).program()


class _Sequence:
    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.plan, self.shape, self.graph = plan, shape, plan.graph
        self.e = Emitter(shape.lanes)
        self.buffers: list[Buffer] = []
        self.data: dict[str, Any] = {}  # buffer name -> its elements
        self.kept: dict[Var, Any] = {}  # value carried between stages -> its buffer
        self.place = {v: i for i, v in enumerate(self.graph.hoisted_outputs)}
        self.row = {v.var: i for i, v in enumerate(self.graph.vectors)}
        self.row.update((a.var, i) for i, a in enumerate(self.graph.invariants))
        self.vectors = {v.var for v in self.graph.vectors}

    # -- buffers --------------------------------------------------------------------------------
    def buffer(self, name: str, role: str, extent: Extent | None = None, pack: Packing | None = None) -> None:
        self.buffers.append(Buffer(name, role, "float32", extent or Extent(), pack))
        self.data[name] = self.e.pointer(name)

    def declare(self) -> None:
        e, s, graph = self.e, self.shape, self.graph
        self.thread, self.threads = e.scalar("thread"), e.scalar("threads")
        self.steps, self.batch = e.scalar("T"), e.scalar("B")
        self.buffer("x", "x")
        self.buffer("y", "y")
        for name in graph.states:
            self.buffer(f"{name}_in", "state_in")
        for name in graph.states:
            self.buffer(f"{name}_out", "state_out")
        for stage in (self.plan.hoisted, *self.plan.steps):
            k = s.input if stage.name == "hoisted" else s.hidden
            for number, (_, rows) in enumerate(groups(stage.rows)):
                pack = packing(rows, s.hidden, k, s.tiles[stage.name].vectors, s.lanes)
                size = 1
                for n in pack.split:
                    size *= n
                self.buffer(f"{stage.name}_weights_{number}", "packed", Extent(size), pack)
        if graph.vectors:
            pack = Packing(tuple((v.parameter, v.gate) for v in graph.vectors),
                           (len(graph.vectors), s.width), (len(graph.vectors), s.width), (0, 1), "float32")
            self.buffer("vectors", "packed", Extent(len(graph.vectors) * s.width), pack)
        if graph.invariants:
            self.buffer("invariants", "workspace", Extent(len(graph.invariants) * s.width))
        plane = s.padded_batch * s.width
        for name in graph.states:
            self.buffer(f"{name}_state", "workspace", Extent(plane * (1 + (name in self.plan.doubled))))
        for stage in self.plan.steps:
            for number, var in enumerate(stage.keep):
                self.buffer(f"{stage.name}_kept_{number}", "workspace", Extent(plane))
                self.kept[var] = self.data[f"{stage.name}_kept_{number}"]
        if self.place:
            # a tile of rows may reach past the chunk's last row, in either direction of use
            rows = s.chunk * s.batch + max(t.rows for t in s.tiles.values())
            self.buffer("hoisted", "workspace", Extent(rows * len(self.place) * s.width))

    # -- control --------------------------------------------------------------------------------
    def program(self) -> Program:
        e = self.e
        self.declare()
        self.prelude()
        e.call("ecornn_barrier")
        chunk = e.index(self.shape.chunk)
        with e.loop("chunk", e.ceildiv(self.steps, self.shape.chunk)) as number:
            first = e.let("first", number * chunk)
            count = e.let("count", e.tirx.Min(chunk, self.steps - first))
            if self.place:
                self.stage(self.plan.hoisted, first, first, e.let("rows", count * self.batch))
                e.call("ecornn_barrier")
            with e.loop("step", count) as step:
                t = e.let("t", first + step)
                for stage in self.plan.steps:
                    self.stage(stage, first, t, self.batch)
                    if self.plan.barriers:
                        e.call("ecornn_barrier")
            if not self.plan.barriers:
                e.call("ecornn_barrier")
        self.epilogue()
        return Program({"worker": e.function("worker")}, tuple(self.buffers), (Parallel("worker"),))

    @contextmanager
    def tasks(self, name: str, total: Expr) -> Iterator[Any]:
        """This thread's part of tasks 0 .. total - 1, a contiguous one."""
        e = self.e
        begin = e.let(f"{name}_begin", e.div(total * self.thread, self.threads))
        end = e.let(f"{name}_end", e.div(total * (self.thread + e.index(1)), self.threads))
        with e.loop(name, end - begin) as offset:
            yield e.let(f"{name}_task", begin + offset)

    def prelude(self) -> None:
        e, s = self.e, self.shape
        columns = -(-s.hidden // s.lanes)
        with self.tasks("initial", e.index(s.padded_batch * columns)) as task:
            b = e.let("b", e.div(task, columns))
            unit = e.let("unit", e.mod(task, columns) * e.index(s.lanes))
            inside = e.tirx.Select(b < self.batch, e.index(s.hidden) - unit, e.index(0))
            valid = e.let("valid", inside)
            for name in self.graph.states:
                at = b * e.index(s.hidden) + unit
                value = e.vload_part(f"{name}_first", self.data[f"{name}_in"], at, valid)
                e.vstore(self.data[f"{name}_state"], b * e.index(s.width) + unit, value)
        if not self.graph.invariants:
            return
        with self.tasks("invariant", e.index(s.width // s.lanes)) as task:
            unit = e.let("unit", task * e.index(s.lanes))
            values: dict[Var, Expr] = {}

            def value(var: Var) -> Expr:
                if var not in values:
                    at = e.index(self.row[var] * s.width) + unit
                    values[var] = e.let(var.name, e.vload(self.data["vectors"], at))
                return values[var]

            for a in self.graph.invariants:
                values[a.var] = e.let(a.var.name, vector(e, a.value, value))
                e.vstore(self.data["invariants"], e.index(self.row[a.var] * s.width) + unit, values[a.var])

    def epilogue(self) -> None:
        e, s = self.e, self.shape
        columns = -(-s.hidden // s.lanes)
        with self.tasks("final", self.batch * e.index(columns)) as task:
            b = e.let("b", e.div(task, columns))
            unit = e.let("unit", e.mod(task, columns) * e.index(s.lanes))
            valid = e.let("valid", e.index(s.hidden) - unit)
            for name in self.graph.states:
                at = self.slot(name, self.steps) + b * e.index(s.width) + unit
                value = e.let(name, e.vload(self.data[f"{name}_state"], at))
                e.vstore_part(f"{name}_last", self.data[f"{name}_out"], b * e.index(s.hidden) + unit,
                              value, valid)

    def slot(self, state: str, t: Expr) -> Expr:
        """Where a state before step ``t`` starts in its workspace."""
        if state not in self.plan.doubled:
            return self.e.index(0)
        return self.e.mod(t, 2) * self.e.index(self.shape.padded_batch * self.shape.width)

    # -- a stage --------------------------------------------------------------------------------
    def stage(self, stage: Stage, first: Expr, t: Expr, rows: Expr) -> None:
        """All tasks of a stage; ``rows``: how many of x (hoisted) or of the batch there are."""
        e, tile = self.e, self.shape.tiles[stage.name]
        row_tiles = e.let("row_tiles", e.ceildiv(rows, tile.rows))
        with self.tasks(stage.name, row_tiles * e.index(self.shape.units(tile))) as task:
            units = e.let("tile", e.div(task, row_tiles))
            top = e.let("top", e.mod(task, row_tiles) * e.index(tile.rows))
            _Task(self, stage, tile, first, t, rows, units, top).run()


class _Task:
    """One (unit tile, row tile): products into registers, then the pointwise values of each vector."""

    def __init__(self, owner: _Sequence, stage: Stage, tile: Tile, first: Expr, t: Expr, rows: Expr,
                 units: Expr, top: Expr) -> None:
        self.o, self.e, self.s, self.plan = owner, owner.e, owner.shape, owner.plan
        self.stage, self.tile, self.first, self.t = stage, tile, first, t
        self.rows, self.units, self.top = rows, units, top
        self.products: dict[Var, list[list[Any]]] = {}  # row variable -> registers [row][vector]
        self.values: dict[Var, Expr] = {}

    def run(self) -> None:
        e, s, tile = self.e, self.s, self.tile
        for number, (operand, rows) in enumerate(groups(self.stage.rows)):
            k = s.input if operand is None else s.hidden
            data, starts = self.operand(operand)
            weights = self.o.data[f"{self.stage.name}_weights_{number}"]
            columns = len(rows) * tile.vectors
            into = accumulators(e, tile.rows, columns, f"sum{number}")
            multiply(e, into, data, starts, weights,
                     e.let("weight_start", self.units * e.index(k * columns * s.lanes)), k, tile.unroll)
            for gate, row in enumerate(rows):
                first = gate * tile.vectors
                self.products[row.var] = [r[first:first + tile.vectors] for r in into]
        for m in range(tile.rows):
            for v in range(tile.vectors):
                self.pointwise(m, v)

    def operand(self, operand: Var | None) -> tuple[Any, list[Expr]]:
        """Elements of an operand and where each row of the tile starts."""
        e, s = self.e, self.s
        if operand is None:
            # rows past the last one read the last one again, never past the end of x
            last = self.rows - e.index(1)
            base = e.let("x_first", self.first * self.o.batch)
            return self.o.data["x"], [
                e.let("x_row", (base + e.tirx.Min(self.top + e.index(m), last)) * e.index(s.input))
                for m in range(self.tile.rows)]
        name = next((n for n, v in self.o.graph.states.items() if v.same_as(operand)), None)
        data = self.o.kept[operand] if name is None else self.o.data[f"{name}_state"]
        slot = e.index(0) if name is None else self.o.slot(name, self.t)
        start = e.let("operand", slot + self.top * e.index(s.width))
        return data, [start + e.index(m * s.width) for m in range(self.tile.rows)]

    def pointwise(self, m: int, v: int) -> None:
        e, s, stage = self.e, self.s, self.stage
        self.values, self.m, self.v = {}, m, v
        self.at_row = e.let("row", self.top + e.index(m))
        self.unit = e.let("unit", (self.units * e.index(self.tile.vectors) + e.index(v)) * e.index(s.lanes))
        self.at = e.let("at", self.at_row * e.index(s.width) + self.unit)
        kept = [(var, self.value(var)) for var in stage.keep]
        results = {n: self.value(r) for n, r in self.o.graph.results.items()} if stage.last else {}
        for var, value in kept:
            if stage.name == "hoisted":
                place = self.hoisted(self.at_row, self.o.place[var])
                e.vstore(self.o.data["hoisted"], place, value)
            else:
                e.vstore(self.o.kept[var], self.at, value)
        after = self.t + e.index(1)
        for name, value in results.items():
            e.vstore(self.o.data[f"{name}_state"], self.o.slot(name, after) + self.at, value)
        if stage.last:
            y_row = self.t * self.o.batch + self.at_row
            valid = e.tirx.Select(self.at_row < self.o.batch, e.index(s.hidden) - self.unit, e.index(0))
            e.vstore_part("y_part", self.o.data["y"], e.let("y_at", y_row * e.index(s.hidden) + self.unit),
                          results[self.o.graph.output], e.let("valid", valid))

    def hoisted(self, row: Expr, place: int) -> Expr:
        """Where a hoisted value of a row of the chunk is."""
        width = self.e.index(self.s.width)
        return (row * self.e.index(len(self.o.place)) + self.e.index(place)) * width + self.unit

    def value(self, var: Var) -> Expr:
        """The vector of ``var``, loaded or computed where it was not before."""
        if var not in self.values:
            self.values[var] = self.e.let(var.name, self.make(var))
        return self.values[var]

    def make(self, var: Var) -> Expr:
        e, o, level = self.e, self.o, self.plan.level[var]
        if var in self.products:
            return e.vload(self.products[var][self.m][self.v], 0)
        if level == -2:
            source = o.data["vectors" if var in o.vectors else "invariants"]
            return e.vload(source, e.index(o.row[var] * self.s.width) + self.unit)
        if level == -1 and self.stage.name != "hoisted":
            row = (self.t - self.first) * o.batch + self.at_row
            return e.vload(o.data["hoisted"], self.hoisted(row, o.place[var]))
        if var in o.kept and level < self.stage.level:
            return e.vload(o.kept[var], self.at)
        if var in self.plan.definition:
            return vector(e, self.plan.definition[var], self.value)
        if o.graph.x is not None and var.same_as(o.graph.x):
            return self.x_leaf()
        name = next(n for n, v in o.graph.states.items() if v.same_as(var))
        return e.vload(o.data[f"{name}_state"], o.slot(name, self.t) + self.at)

    def x_leaf(self) -> Expr:
        e, s = self.e, self.s
        row = self.first * self.o.batch + e.tirx.Min(self.at_row, self.rows - e.index(1))
        start = e.let("x_at", row * e.index(s.input) + self.unit)
        valid = e.let("x_valid", e.index(s.hidden) - self.unit)
        return e.vload_part("x_part", self.o.data["x"], start, valid)
