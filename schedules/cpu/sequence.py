"""The whole sequence as one function that every thread of the team runs.

    copy initial states to workspace, compute invariants; barrier
    for each chunk of time steps:
        hoisted projection of the chunk's rows; barrier; with statistics of it also their pass; barrier
        for each step: the stages of the step, a barrier after each, or after those that go row by row
    copy states to the caller

Work is divided into (unit tile, row tile) tasks, tile by tile, and each thread always takes the
same part, so that its weights stay in its cache; what is larger than the cache is gone through to and fro. With
``ahead`` the row tiles of a unit tile ask for the weights of the next one, a share each, while they multiply: else L3
idles while all but the first of them read L2, and then the first one waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from ecornn.analysis import Product
from ecornn.program import PACKED, WORKSPACE, Buffer, Extent, Packing, Parallel, Program
from ecornn.schedules.assemble import call_buffers
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu import paired
from ecornn.schedules.cpu.math import vector
from ecornn.schedules.cpu.memory import Memory, Span
from ecornn.schedules.cpu.product import packing
from ecornn.schedules.cpu.quantize import Integers, quantize_row
from ecornn.schedules.cpu.row_task import RowTask
from ecornn.schedules.cpu.stages import Stage, StepPlan, groups
from ecornn.schedules.cpu.stored import STORED
from ecornn.schedules.cpu.tile_task import TileTask
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.timeline import Timeline
from ecornn.workload import Traversal


def sequence(plan: StepPlan, shape: Shape, traversal: Traversal) -> Program:
    """The program of a plan."""
    return Sequence(plan, shape, traversal).program()


class Sequence(Memory):
    """Writes the worker function: its buffers, loops and barriers."""

    # -- buffers --------------------------------------------------------------------------------
    def buffer(self, name: str, role: str, extent: Extent, pack: Packing | None = None,
               dtype: str = "float32", element: str | None = None) -> None:
        """``element``: what the code takes the memory for, where that is not ``dtype``."""
        self.add(Buffer(name, role, dtype, extent, pack), element or dtype)

    def add(self, buffer: Buffer, element: str) -> None:
        """A buffer that the code takes for elements of that type."""
        self.buffers.append(buffer)
        self.data[buffer.name] = self.e.pointer(buffer.name, element)

    def declare(self) -> None:
        e, s, graph = self.e, self.shape, self.graph
        self.thread, self.threads = e.scalar("thread"), e.scalar("threads")
        self.steps, self.batch = e.scalar("T"), e.scalar("B")
        for b in call_buffers(graph.states, self.traversal, "float32"):
            self.add(b, b.dtype)
        self.timeline = Timeline(e, self.traversal, self.data, self.steps, self.batch)
        for stage in (*self.plan.hoisted, *self.plan.steps):
            k = s.input if stage.name == "hoisted" else s.hidden
            for number, (_, rows) in enumerate(groups(stage.rows)):
                name = f"{stage.name}_weights_{number}"
                if s.tiles[stage.name].pairs:
                    self.declare_paired(stage, number, rows, k)
                    continue
                pack = packing(rows, s.hidden, k, s.tiles[stage.name].vectors, s.lanes, s.weights)
                stored = STORED[s.weights]
                words = prod(pack.split) // stored.group * stored.words
                self.buffer(name, PACKED, Extent(words), pack, stored.element)
                if stored.scaled:
                    self.declare_scales(stage, number, pack)
                if s.weights == "int8":
                    self.declare_integers(stage, number, k)
        if graph.vectors:
            pack = Packing(tuple((v.parameter, v.gate) for v in graph.vectors),
                           (len(graph.vectors), s.width), (len(graph.vectors), s.width), (0, 1), "float32")
            self.buffer("vectors", PACKED, Extent(len(graph.vectors) * s.width), pack)
        if graph.invariants:
            self.buffer("invariants", WORKSPACE, Extent(len(graph.invariants) * s.width))
        plane = s.padded_batch * s.width
        for name in graph.states:
            self.buffer(f"{name}_state", WORKSPACE, Extent(plane * (1 + (name in self.plan.doubled))))
        for stage in self.plan.steps:
            for number, var in enumerate(stage.keep):
                self.buffer(f"{stage.name}_kept_{number}", WORKSPACE, Extent(plane))
                self.kept[var] = self.data[f"{stage.name}_kept_{number}"]
        if self.place:
            # a tile of rows may reach past the chunk's last row, in either direction of use
            room = s.chunk * s.batch + max(t.rows for t in s.tiles.values())
            self.buffer("hoisted", WORKSPACE, Extent(room * len(graph.hoisted_outputs) * s.width))
            if self.hoisted_totals:
                self.buffer("hoisted_statistics", WORKSPACE, Extent(room * len(self.hoisted_totals)))
        if self.totals:
            self.buffer("statistics", WORKSPACE, Extent(s.padded_batch * len(self.totals)))

    def declare_scales(self, stage: Stage, number: int, pack: Packing) -> None:
        """What the products with weights that are integers are multiplied with, unit by unit."""
        kind = "scale" if pack.dtype == "int8" else f"{pack.dtype}_scale"
        scales = Packing(pack.sources, pack.pad, pack.pad, (0, 1, 2), kind)
        self.buffer(f"{stage.name}_scales_{number}", PACKED, Extent(prod(pack.pad[:2])), scales)

    def declare_integers(self, stage: Stage, number: int, k: int) -> None:
        """Workspace for the rows of an operand as integers."""
        s = self.shape
        rows = s.padded_batch if stage.name != "hoisted" else s.chunk * s.batch + s.tiles["hoisted"].rows
        width = -(-k // s.lanes) * s.lanes
        names = [f"{stage.name}_{part}_{number}" for part in ("integers", "factors", "sums")]
        self.buffer(names[0], WORKSPACE, Extent(rows * width), dtype="int8", element="int32")
        self.buffer(names[1], WORKSPACE, Extent(rows))
        self.buffer(names[2], WORKSPACE, Extent(rows), dtype="int32")
        words, factors, sums = (self.data[n] for n in names)
        self.integers[stage.name, number] = Integers(words, factors, sums, width)

    def declare_paired(self, stage: Stage, number: int, rows: list[Product], k: int) -> None:
        """Weights for products of pairs, what belongs to them, and workspace for the operand's rows."""
        e, s, tile = self.e, self.shape, self.shape.tiles[stage.name]
        packs = paired.packings(rows, s.hidden, k, tile.vectors, s.lanes, tile.pairs)
        for part, pack in packs.items():
            size = prod(pack.split) if part == "weights" else prod(pack.pad[:-1])
            self.buffer(f"{stage.name}_{part}_{number}", PACKED, Extent(size), pack)
        room = s.padded_batch if stage.name != "hoisted" else s.chunk * s.batch + tile.rows
        names = [f"{stage.name}_{part}_{number}" for part in ("copy", "factors", "sums")]
        made = paired.Paired((), None, None, k, tile.pairs, s.lanes)
        self.buffer(names[0], WORKSPACE, Extent(room * made.width))
        self.buffer(names[1], WORKSPACE, Extent(room))
        self.buffer(names[2], WORKSPACE, Extent(room))
        copies = [self.data[names[0]]]
        for column in range(1, len(rows) * tile.vectors):
            alias = f"{names[0]}_{column}"
            copies.append(e.pointer(alias))
            self.aliases[alias] = names[0]
        self.paired[stage.name, number] = replace(made, copies=copies, factors=self.data[names[1]],
                                                  sums=self.data[names[2]])

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
            # the chunk's first row of x; in reverse, its last step comes first
            low = e.let("low", self.steps - first - count) if self.traversal.reverse else first
            if self.place:
                rows = e.let("rows", count * self.batch)
                for stage in self.plan.hoisted:
                    self.part((stage,), low, low, rows)
                    e.call("ecornn_barrier")
            with e.loop("step", count) as step:
                t = e.let("t", first + step)
                for part in self.plan.parts:
                    self.part(part, low, t, self.batch)
                    if self.plan.barriers:
                        e.call("ecornn_barrier")
            if not self.plan.barriers:
                e.call("ecornn_barrier")
        self.epilogue()
        call = Parallel("worker", self.aliases, self.shape.team)
        return Program.running({"worker": e.function("worker")}, self.buffers, (call,))

    def share(self, name: str, total: Expr) -> tuple[Expr, Expr]:
        """First of this thread's tasks among 0 .. total - 1, and one past the last."""
        e = self.e
        begin = e.let(f"{name}_begin", e.div(total * self.thread, self.threads))
        return begin, e.let(f"{name}_end", e.div(total * (self.thread + e.index(1)), self.threads))

    @contextmanager
    def tasks(self, name: str, total: Expr, back: Expr | None = None) -> Iterator[Expr]:
        """This thread's part of tasks 0 .. total - 1, a contiguous one; from its end to its begin where ``back``."""
        e = self.e
        begin, end = self.share(name, total)
        with e.loop(name, end - begin) as offset:
            task = begin + offset
            if back is not None:
                task = e.tirx.Select(back, end - e.index(1) - offset, task)
            yield e.let(f"{name}_task", task)

    def prelude(self) -> None:
        e, s = self.e, self.shape
        columns = -(-s.hidden // s.lanes)
        with self.tasks("initial", e.index(s.padded_batch * columns)) as task:
            b = e.let("b", e.div(task, columns))
            unit = e.let("unit", e.mod(task, columns) * e.index(s.lanes))
            inside = e.tirx.Select(b < self.batch, e.index(s.hidden) - unit, e.index(0))
            valid = e.let("valid", inside)
            at = b * e.index(s.hidden) + unit
            given = {name: e.vload_part(f"{name}_first", self.data[f"{name}_in"], at, valid)
                     for name in self.graph.states}
            for name, value in self.timeline.started(e.index(0), b, given).items():
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

    # -- a stage --------------------------------------------------------------------------------
    def part(self, stages: tuple[Stage, ...], first: Expr, t: Expr, rows: Expr) -> None:
        """What is between two barriers: a stage, or stages that go row by row."""
        if not stages[0].by_row:
            return self.stage(stages[0], first, t, rows)
        with self.tasks(stages[0].name, rows) as row:
            for stage in stages:
                RowTask(self, stage, Span(first, t, rows), row).run()

    def stage(self, stage: Stage, first: Expr, t: Expr, rows: Expr) -> None:
        """All tasks of a stage; ``first``: the chunk's first step of x; ``rows``: how many of x (hoisted)
        or of the batch there are."""
        e, tile = self.e, self.shape.tiles[stage.name]
        if self.shape.weights == "int8" and stage.rows:
            self.quantize(stage, first, t, rows)
            e.call("ecornn_barrier")
        if tile.pairs:
            self.prepare(stage, first, t, rows)
            e.call("ecornn_barrier")
        row_tiles = e.let("row_tiles", e.ceildiv(rows, tile.rows))
        # Every other step goes from the last tile to the first, so that it begins with the weights that the step before
        # has left in the caches. In one direction, weights of more than a cache push out just what is needed next.
        back = None if stage.name == "hoisted" else e.tirx.EQ(e.mod(t, 2), e.index(1))
        total = row_tiles * e.index(self.shape.units(tile))
        with self.tasks(stage.name, total, back) as task:
            units, number = e.let("tile", e.div(task, row_tiles)), e.let("row_tile", e.mod(task, row_tiles))
            top = e.let("top", number * e.index(tile.rows))
            ahead = None
            if tile.ahead and back is not None:
                begin, end = self.share(stage.name, total)
                nearest = e.div(begin, row_tiles), e.div(end - e.index(1), row_tiles)
                following = e.tirx.Select(back, e.tirx.Max(units - e.index(1), nearest[0]),
                                          e.tirx.Min(units + e.index(1), nearest[1]))
                ahead = e.let("next", following), number, -(-self.shape.batch // tile.rows)

            def run(rows_of_tile: int) -> None:
                TileTask(self, stage, replace(tile, rows=rows_of_tile), Span(first, t, rows), units, top, ahead).run()

            short = tile.short(self.shape.batch) if stage.name != "hoisted" else 0
            if not short:
                return run(tile.rows)
            # the last rows of the batch are a tile of their own
            left = e.let("left", rows - top)
            with e.when(left > e.index(short)):
                run(tile.rows)
            with e.when(left <= e.index(short)):
                run(short)

    def quantize(self, stage: Stage, first: Expr, t: Expr, rows: Expr) -> None:
        """The operands of a stage as integers."""
        e, s = self.e, self.shape
        for number, (operand, _) in enumerate(groups(stage.rows)):
            into, k = self.integers[stage.name, number], s.input if operand is None else s.hidden
            data, start, stride = self.operand(operand, first, t)
            with self.tasks("quantize", rows) as row:
                base = e.let("base", start + row * e.index(stride))

                def load(at: Expr, data: TirBuffer = data, base: Expr = base, k: int = k) -> Expr:
                    return e.vload_part("operand", data, base + at, e.index(k) - at)

                quantize_row(e, into, row, load)

    def prepare(self, stage: Stage, first: Expr, t: Expr, rows: Expr) -> None:
        """The operands of a stage as copies for products of pairs."""
        e = self.e
        for number, (operand, _) in enumerate(groups(stage.rows)):
            into = self.paired[stage.name, number]
            data, start, stride = self.operand(operand, first, t)
            with self.tasks("prepare", rows) as row:
                base = e.let("base", start + row * e.index(stride))

                def load(at: Expr, count: Expr, data: TirBuffer = data, base: Expr = base) -> Expr:
                    return e.vload_part("operand", data, base + at, count)

                paired.prepare_row(e, into, row, load)
