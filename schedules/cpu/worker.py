"""The work of a thread of the team between barriers: a stage's tasks, and the buffers that their products need.

Work is divided into (unit tile, row tile) tasks, tile by tile, and each thread always takes the same part, so that its
weights stay in its cache; what exceeds it is gone through to and fro. With ``ahead`` the row tiles of a unit tile
each ask for a share of the next one's weights: else L3 idles while all but the first read L2, then the first waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import prod

from ecornn.analysis.step import Term
from ecornn.program import PACKED, WORKSPACE, Buffer, Extent, Packing
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu import matrix, product
from ecornn.schedules.cpu.emit import Emitter, vector
from ecornn.schedules.cpu.memory import Memory, Place, Span, Stage, StepPlan, Timeline, groups, operands
from ecornn.schedules.cpu.product import STORED, Integers, packing, quantize_row
from ecornn.schedules.cpu.tasks import RowTask, TileTask
from ecornn.schedules.cpu.tiling import Shape
from ecornn.workload import ALONE

SLACK = 512  # elements behind the last row that a tile may read


class Worker(Memory):
    """Writes a part of a worker function: its buffers, loops and tasks."""

    task = TileTask

    # -- buffers --------------------------------------------------------------------------------
    def buffer(self, name: str, role: str, extent: Extent, pack: Packing | None = None,
               dtype: str | None = None, element: str | None = None) -> TirBuffer:
        """Declares a buffer, returns its elements; ``element``: what code takes the memory for, if not ``dtype``."""
        own = Buffer(self.prefix + name, role, dtype or self.shape.real, extent, pack)
        self.buffers.append(own)
        self.data[name] = self.e.pointer(own.name, element or own.dtype)
        return self.data[name]

    def add(self, buffer: Buffer) -> None:
        self.buffers.append(buffer)
        self.data[buffer.name] = self.e.pointer(buffer.name, buffer.dtype)

    def declare_scalars(self) -> None:
        e = self.e
        self.thread, self.threads = e.scalar("thread"), e.scalar("threads")
        self.steps, self.batch = e.scalar("T"), e.scalar("B")
        self.timeline = Timeline(e, self.traversal, self.data, self.steps, self.batch)

    def share_scalars(self, other: Worker) -> None:
        """Takes over the parameters, and the masks, of another part of the same function."""
        self.thread, self.threads, self.steps, self.batch = other.thread, other.threads, other.steps, other.batch
        self.timeline = Timeline(self.e, self.traversal, other.data, self.steps, self.batch)

    def declare_step(self, rows: int, slack: int = 0) -> None:
        """Weights, parameter vectors; for ``rows`` rows, and ``slack`` elements behind, states and kept values."""
        self.declare_products()
        self.declare_constants()
        size = rows * self.shape.width + slack
        for name in self.graph.states:
            self.buffer(f"{name}_state", WORKSPACE, Extent(size * (1 + (name in self.plan.doubled))))
        for stage in self.plan.steps:
            for number, var in enumerate(stage.keep):
                self.kept[var] = self.buffer(f"{stage.name}_kept_{number}", WORKSPACE, Extent(size))

    def declare_statistics(self, rows: int) -> None:
        if self.totals:
            self.buffer("statistics", WORKSPACE, Extent(rows * len(self.totals)))

    def declare_products(self) -> None:
        s = self.shape
        for stage in (stage for stage in (*self.plan.hoisted, *self.plan.steps) if stage.rows):
            for group in groups(stage.rows, s.tiles[stage.name].gates):
                for number, (_, terms) in enumerate(group.parts, group.first):
                    k, matrices = self.depth(terms[0]), s.tiles[stage.name].matrix
                    self.declare_copied(stage, terms[0].operand)
                    if s.tiles[stage.name].pairs:
                        self.declare_paired(stage, number, terms, k)
                        continue
                    pack = packing(terms, s.hidden, k, s.tiles[stage.name].vectors, s.lanes, s.weights,
                                   matrix.DEPTH if matrices else 1)
                    stored = STORED[s.weights]
                    words = prod(pack.split) // stored.group * stored.words
                    self.buffer(f"{stage.name}_weights_{number}", PACKED, Extent(words), pack, stored.element)
                    if stored.scaled:  # factors of units, with which products are multiplied
                        kind = "scale" if pack.dtype == "int8" else f"{pack.dtype}_scale"
                        scales = Packing(pack.sources, pack.pad, pack.pad, (0, 1, 2), kind)
                        self.buffer(f"{stage.name}_scales_{number}", PACKED, Extent(prod(pack.pad[:2])), scales)
                    if s.weights == "int8":
                        rows, width = self.room(stage), -(-k // s.lanes) * s.lanes
                        integers = self.workspace(stage, "integers", number, rows * width, "int8", "int32")
                        factors = self.workspace(stage, "factors", number, rows)
                        sums = self.workspace(stage, "sums", number, rows, "int32")
                        self.integers[stage.name, number] = Integers(integers, factors, sums, k, width)

    def declare_constants(self) -> None:
        s, graph = self.shape, self.graph
        if graph.vectors:
            size = len(graph.vectors), s.width
            pack = Packing(tuple(v.source for v in graph.vectors), size, size, (0, 1), s.real)
            self.buffer("vectors", PACKED, Extent(prod(size)), pack)
        if graph.invariants:
            self.buffer("invariants", WORKSPACE, Extent(len(graph.invariants) * s.width))

    def invariants(self) -> None:
        e, s = self.e, self.shape
        if not self.graph.invariants:
            return
        with self.tasks("invariant", e.index(s.width // s.lanes)) as task:
            unit, values = e.let("unit", task * s.lanes), dict[Var, Expr]()

            def at(var: Var) -> Expr:
                return self.row[var] * s.width + unit

            def value(var: Var) -> Expr:
                if var not in values:
                    values[var] = e.let(var.name, e.cast(s.real, e.ramp(unit)) if var in self.numbers
                                        else e.vload(self.data["vectors"], at(var)))
                return values[var]

            for a in self.graph.invariants:
                values[a.var] = e.let(a.var.name, vector(e, a.value, value))
                e.vstore(self.data["invariants"], at(a.var), values[a.var])

    def declare_paired(self, stage: Stage, number: int, terms: Sequence[Term], k: int) -> None:
        """Weights for products of pairs, what belongs to them, and workspace for the operand's rows."""
        e, s, tile = self.e, self.shape, self.shape.tiles[stage.name]
        packs = product.paired_packings(terms, s.hidden, k, tile.vectors, s.lanes, tile.pairs)
        for part, pack in packs.items():
            size = prod(pack.split) if part == "weights" else prod(pack.pad[:-1])
            self.buffer(f"{stage.name}_{part}_{number}", PACKED, Extent(size), pack)
        room, width = self.room(stage), product.paired_width(k, tile.pairs, s.lanes)
        copies = [self.workspace(stage, "copy", number, room * width)]
        factors, sums = (self.workspace(stage, part, number, room) for part in ("factors", "sums"))
        for column in range(1, len(terms) * tile.vectors):
            alias = f"{stage.name}_copy_{number}_{column}"
            copies.append(e.pointer(alias))
            self.aliases[alias] = f"{stage.name}_copy_{number}"
        self.paired[stage.name, number] = product.Paired(copies, factors, sums, k, tile.pairs, s.lanes)

    def declare_copied(self, stage: Stage, operand: Var | None) -> None:
        """Workspace for the rows of an operand that the matrix unit multiplies, or that are narrower than sums."""
        by_matrix, length = self.shape.tiles[stage.name].matrix, self.length(operand)
        if (stage.name, operand) in self.copied or not (by_matrix or (operand is None and self.shape.narrow)):
            return
        apart = matrix.width(length) if by_matrix else -(-length // self.shape.lanes) * self.shape.lanes
        rows = self.workspace(stage, "rows", len(self.copied), self.room(stage) * apart,
                              "bfloat16" if by_matrix else None)
        self.copied[stage.name, operand] = rows, apart

    def workspace(self, stage: Stage, part: str, number: int, size: int, dtype: str | None = None,
                  element: str | None = None) -> TirBuffer:
        return self.buffer(f"{stage.name}_{part}_{number}", WORKSPACE, Extent(size), dtype=dtype, element=element)

    def room(self, stage: Stage) -> int:
        """Rows of a stage for which there must be memory."""
        s = self.shape
        return s.padded_batch if stage.name != "hoisted" else s.chunk * s.batch + s.tiles["hoisted"].rows

    # -- tasks ----------------------------------------------------------------------------------
    def share(self, name: str, total: Expr) -> tuple[Expr, Expr]:
        """First of this thread's tasks among 0 .. total - 1, and one past the last."""
        e = self.e
        begin = e.let(f"{name}_begin", e.div(total * self.thread, self.threads))
        return begin, e.let(f"{name}_end", e.div(total * (self.thread + 1), self.threads))

    @contextmanager
    def tasks(self, name: str, total: Expr, back: Expr | None = None) -> Iterator[Expr]:
        """This thread's part of tasks 0 .. total - 1, a contiguous one; from its end to its begin where ``back``."""
        e = self.e
        begin, end = self.share(name, total)
        with e.loop(name, end - begin) as offset:
            task = begin + offset
            yield e.let(f"{name}_task", task if back is None else e.tirx.Select(back, end - 1 - offset, task))

    @contextmanager
    def taken(self, name: str, total: Expr) -> Iterator[Expr]:
        """Tasks below ``total``, one by one, own share first; once between barriers, for data no other core has."""
        e = self.e
        place = e.local(f"{name}_taken", "int64", size=1)

        def take() -> None:
            e.store(place, 0, e.tirx.call_extern("int64", "ecornn_take", total))

        take()
        e.stack.append([])
        yield e.let(f"{name}_task", e.load(place, 0))
        take()
        e.add(e.tirx.While(e.load(place, 0) < total, e.block()))

    def one_by_one(self, stage: Stage) -> bool:
        return False

    def pooled(self, name: str, totals: Sequence[int]) -> Iterator[AbstractContextManager[Expr]]:
        """Tasks of several kinds, divided together: kind by kind the same threads would have one more of each."""
        e, before = self.e, 0
        begin, end = self.share(name, e.index(sum(totals)))
        for total in totals:
            first, last = (e.let(f"{name}_{which}", e.tirx.Max(e.index(0), e.tirx.Min(e.index(total), at - before)))
                           for which, at in (("first", begin), ("last", end)))
            yield e.loop(name, last - first, first)
            before += total

    @contextmanager
    def vectors_of(self, name: str, rows: Expr, row: str = "b") -> Iterator[tuple[Expr, Expr]]:
        """This thread's vectors of H units of ``rows`` rows: the number of the row, so named, and the first unit."""
        e, columns = self.e, -(-self.shape.hidden // self.shape.lanes)
        with self.tasks(name, rows * columns) as task:
            yield e.let(row, e.div(task, columns)), e.let("unit", e.mod(task, columns) * self.shape.lanes)

    # -- steps ----------------------------------------------------------------------------------
    def begin(self, name: str, first: dict[str, TirBuffer]) -> None:
        """The states before the first step, from elements (B, H) of ``first``, else zeros; and invariants."""
        e, s = self.e, self.shape
        with self.vectors_of(name, e.index(s.padded_batch)) as (b, unit):
            valid = e.let("valid", e.tirx.Select(b < self.batch, s.hidden - unit, e.index(0)))
            at = b * s.hidden + unit
            values = {n: e.vload_part(f"{n}_first", first[n], at, valid) if n in first else e.splat(0.0)
                      for n in self.graph.states}
            for state, value in self.timeline.started(e.index(0), b, values).items():
                e.vstore(self.data[f"{state}_state"], b * s.width + unit, value)
        self.invariants()

    @contextmanager
    def chunks(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Chunks of steps: the first one in the loop's order, the first one of x, and how many. Of fewer sequences than
        the module was compiled for a chunk has more steps, since there is room for their rows."""
        e, s = self.e, self.shape
        chunk = e.index(s.chunk)
        if s.batch > 1:
            chunk = e.let("chunk_steps", e.div(e.index(s.chunk * s.batch), self.batch))
        with e.loop("chunk", e.ceildiv(self.steps, chunk)) as number:
            first = e.let("first", number * chunk)
            count = e.let("count", e.tirx.Min(chunk, self.steps - first))
            yield first, e.let("low", self.steps - first - count) if self.traversal.reverse else first, count

    def steps_of(self, first: Expr, low: Expr, count: Expr) -> None:
        """The steps of a chunk as :meth:`chunks` has it, with a barrier behind them."""
        e = self.e
        with e.loop("step", count) as step:
            t = e.let("t", first + step)
            for part in self.plan.parts:
                self.part(part, low, t, self.batch)
                if self.plan.barriers:
                    e.call("ecornn_barrier")
        if not self.plan.barriers:
            e.call("ecornn_barrier")

    # -- a stage --------------------------------------------------------------------------------
    def part(self, stages: tuple[Stage, ...], first: Expr, t: Expr, rows: Expr) -> None:
        """Writes the code between two barriers: a stage, or stages that go row by row."""
        if not stages[0].by_row:
            return self.stage(stages[0], first, t, rows)
        with self.tasks(stages[0].name, rows) as row:
            for stage in stages:
                RowTask(self, stage, Span(first, t, rows), row, self.task).run()

    def stage(self, stage: Stage, first: Expr, t: Expr, rows: Expr) -> None:
        """Writes a stage's tasks; ``first``: the chunk's first step of x; ``rows``: of x (hoisted), or of the batch."""
        e, tile = self.e, self.shape.tiles[stage.name]
        copied = [key for key in self.copied if key[0] == stage.name]
        if copied or tile.pairs or (self.shape.weights == "int8" and stage.rows):
            self.prepare(stage, first, t, rows)
            e.call("ecornn_barrier")
        row_tiles = e.let("row_tiles", e.ceildiv(rows, tile.rows))
        # Every other step goes from the last tile to the first, so that it begins with the weights that the step before
        # has left in the caches. In one direction, weights of more than a cache push out just what is needed next.
        back = e.tirx.EQ(e.mod(t, 2), e.index(1)) if self.every_step(stage) else None
        total = row_tiles * self.shape.units(tile)
        mine = self.taken(stage.name, total) if self.one_by_one(stage) else self.tasks(stage.name, total, back)
        with mine as task:
            units, number = e.let("tile", e.div(task, row_tiles)), e.let("row_tile", e.mod(task, row_tiles))
            top = e.let("top", number * tile.rows)
            ahead = None
            if tile.ahead and back is not None:
                begin, end = self.share(stage.name, total)
                least, most = e.div(begin, row_tiles), e.div(end - 1, row_tiles)
                following = e.tirx.Select(back, e.tirx.Max(units - 1, least), e.tirx.Min(units + 1, most))
                ahead = e.let("next", following), number, -(-self.shape.batch // tile.rows)

            def run(rows_of_tile: int) -> None:
                self.task(self, stage, replace(tile, rows=rows_of_tile), Span(first, t, rows), units, top, ahead).run()

            short = tile.short(self.shape.batch) if self.every_step(stage) else 0
            if not short:
                return run(tile.rows)
            # the last rows of the batch are a tile of their own
            left = e.let("left", rows - top)
            with e.when(left > short):
                run(tile.rows)
            with e.when(left <= short):
                run(short)

    def prepare(self, stage: Stage, first: Expr, t: Expr, rows: Expr) -> None:
        """Writes the operands of a stage as integers, or copies them for products of pairs."""
        e, tile = self.e, self.shape.tiles[stage.name]
        for (name, operand), (into, apart) in self.copied.items():
            if name == stage.name:
                data, start, stride = self.operand(operand, first, t)
                lanes, used = self.shape.lanes, apart - (matrix.DEPTH if tile.matrix else 0)
                with self.tasks("copy", rows) as row, e.loop("part", used // lanes) as part:
                    at = e.let("at", part * lanes)
                    value = e.vload_part("operand", data, start + row * stride + at, self.length(operand) - at)
                    e.vstore(into, row * apart + at, value)
        for number, term in operands(stage.rows) if self.integers or self.paired else ():
            integers = self.integers.get((stage.name, number))
            data, start, stride = self.operand(term.operand, first, t)
            with self.tasks("quantize" if integers else "prepare", rows) as row:
                base = e.let("base", start + row * stride)

                def load(at: Expr, count: Expr, data: TirBuffer = data, base: Expr = base) -> Expr:
                    return e.vload_part("operand", data, base + at, count)

                if integers:
                    quantize_row(e, integers, row, load)
                else:
                    product.prepare_row(e, self.paired[stage.name, number], row, load)


class Pass(Worker):
    """Stages over all rows of a chunk, or of the batch; ``rooms``: rows there is room for, a tile's beyond, too."""

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
        return {v: Place(data, self.shape.width) for v, data in self.kept.items()}

    def run(self, first: Expr, rows: Expr, wait: bool = True) -> None:
        """Runs all stages on ``rows`` rows of x from step ``first``; the last one ends with a barrier if ``wait``."""
        for number, part in enumerate(self.plan.parts, 1):
            self.part(part, first, self.e.index(0), rows)
            if wait or number < len(self.plan.parts):
                self.e.call("ecornn_barrier")
