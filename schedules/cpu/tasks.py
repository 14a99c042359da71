"""The work of a thread of the team: on one tile of units and rows, products, then the cell's pointwise part; or on one
row, statistics over all of its units, then what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce

from ecornn.analysis import Statistic
from ecornn.analysis.step import Term
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu import matrix
from ecornn.schedules.cpu.emit import vector
from ecornn.schedules.cpu.memory import Group, Memory, Place, Span, Stage, groups
from ecornn.schedules.cpu.product import STORED, Ahead, accumulators, multiply, multiply_pairs, restore
from ecornn.schedules.cpu.tiling import Tile


class TileTask:
    """One (unit tile, row tile): products into registers, then the pointwise values of each vector."""

    def __init__(self, owner: Memory, stage: Stage, tile: Tile, span: Span, units: Expr, top: Expr,
                 ahead: tuple[Expr, Expr, int] | None = None) -> None:
        """``units``: the unit tile; ``top``: its first row; ``ahead``: unit tile to ask for, part, of how many."""
        self.o, self.e, self.s, self.plan = owner, owner.e, owner.shape, owner.plan
        self.stage, self.tile, self.first, self.t, self.rows = stage, tile, span.first, span.t, span.rows
        self.units, self.top, self.ahead = units, top, ahead
        self.products: dict[Var, Callable[[int | Expr, int], Expr]] = {}  # row variable -> (row, vector) -> the sum
        self.source: dict[Var, tuple[int, int]] = {}  # row variable -> (group, gate)
        self.values: dict[Var, Expr] = {}

    def run(self) -> None:
        e, s, tile = self.e, self.s, self.tile
        for group in groups(self.stage.rows, tile.gates):
            if tile.matrix:
                self.by_matrix(group)
                continue
            columns = len(group.products) * tile.vectors
            into: list[list[TirBuffer]] = []
            for number, (operand, terms) in enumerate(group.parts, group.first):
                add = (self.pairs if tile.pairs else self.plain)(number, terms[0], columns)
                into = into or accumulators(e, tile.rows, columns, f"sum{number}", s.weights)
                with self.needed(operand, terms[0]):
                    add(into)
            for gate, row in enumerate(group.products):
                self.products[row.var] = partial(self.of_registers, into, gate * tile.vectors)
                self.source[row.var] = group.first, gate
        if tile.matrix:
            with e.loop("m", e.tirx.Min(e.index(tile.rows), self.rows - self.top)) as m:
                for v in range(tile.vectors):
                    self.pointwise(m, v)
            return
        for m in range(tile.rows):
            for v in range(tile.vectors):
                self.pointwise(m, v)

    def of_registers(self, into: list[list[TirBuffer]], first: int, m: int, v: int) -> Expr:
        return self.e.vload(into[m][first + v], 0)

    def needed(self, operand: Var | None, term: Term) -> AbstractContextManager[None]:
        """A block for a product that is due: some row of a state's takes part, and the units have weights."""
        e, some = self.e, None
        if operand is not None:
            some = self.o.timeline.any_live(self.t, self.top, self.tile.rows)
        if term.rows:  # units beyond them have no weights
            has = e.let("has", self.units < e.index(-(-term.rows // (self.tile.vectors * self.s.lanes))))
            some = has if some is None else e.tirx.And(has, some)
        return nullcontext() if some is None else e.when(some)

    def by_matrix(self, group: Group) -> None:
        """The products of a group, in tile registers, and from there in memory."""
        e, tile, lanes = self.e, self.tile, self.s.lanes
        columns = len(group.products) * tile.vectors
        matrix.clear(e, tile.rows, columns)
        for number, (operand, terms) in enumerate(group.parts, group.first):
            k, (data, apart) = self.o.depth(terms[0]), self.o.copied[self.stage.name, operand]
            head = e.index(0)
            if terms[0].heads > 1:  # that of the tile's units
                head = e.let("head", e.div(self.units, k // (tile.vectors * lanes)) * k)
            starts = [e.let("start", (self.top + r) * apart + head) for r in range(0, tile.rows, matrix.ROWS)]
            size = STORED[self.s.weights].size(-(-k // matrix.DEPTH) * matrix.DEPTH, columns * lanes)
            with self.needed(operand, terms[0]):
                matrix.multiply(e, columns, data, starts, apart, self.o.data[f"{self.stage.name}_weights_{number}"],
                                e.let("weight_start", self.units * size), -(-k // matrix.DEPTH))
        sums = e.local(f"sums{group.first}", size=tile.rows * columns * lanes)
        matrix.keep(e, sums, tile.rows, columns)
        for gate, row in enumerate(group.products):
            self.products[row.var] = partial(self.of_memory, sums, columns, gate * tile.vectors)
            self.source[row.var] = group.first, gate

    def of_memory(self, sums: TirBuffer, columns: int, first: int, m: Expr, v: int) -> Expr:
        return self.e.vload(sums, (m * columns + first + v) * self.s.lanes)

    def plain(self, number: int, term: Term, columns: int) -> Callable[[list[list[TirBuffer]]], None]:
        e, s, k = self.e, self.s, self.o.depth(term)
        data, starts = self.operand(number, term.operand)
        if term.heads > 1:  # that of the tile's units
            head = e.let("head", e.div(self.units, k // (self.tile.vectors * s.lanes)) * k)
            starts = [e.let("start", start + head) for start in starts]
        weights = self.o.data[f"{self.stage.name}_weights_{number}"]
        size = STORED[s.weights].size(k, columns * s.lanes)

        def add(into: list[list[TirBuffer]]) -> None:
            multiply(e, into, data, starts, weights, e.let("weight_start", self.units * size), k,
                     self.tile.unroll, s.weights, self.asked(size))

        return add

    def asked(self, size: int) -> Ahead | None:
        if self.ahead is None:
            return None
        e, (units, part, parts) = self.e, self.ahead
        share = -(-size // parts)
        return Ahead(e.let("ahead", units * size + part * share), share)

    def pairs(self, number: int, term: Term, columns: int) -> Callable[[list[list[TirBuffer]]], None]:
        e, s, data = self.e, self.s, self.o.data
        copy, stage, vectors = self.o.paired[self.stage.name, number], self.stage.name, self.tile.vectors
        size, units = copy.pairs * copy.length * columns * s.lanes, s.units(self.tile) * vectors * s.lanes

        def add(into: list[list[TirBuffer]]) -> None:
            places = (e.index(column // vectors * units) + (self.units * vectors + column % vectors) * s.lanes
                      for column in range(columns))
            products = [e.let("product", e.vload(data[f"{stage}_products_{number}"], at)) for at in places]
            multiply_pairs(e, into, copy, self.top, self.rows, data[f"{stage}_weights_{number}"],
                           e.let("weight_start", self.units * size), products)

        return add

    def operand(self, number: int, operand: Var | None) -> tuple[TirBuffer, list[Expr]]:
        """Elements of an operand and where each row of the tile starts."""
        e, rows = self.e, range(self.tile.rows)
        if self.s.weights == "int8":
            integers = self.o.integers[self.stage.name, number]
            words = integers.width // STORED["int8"].group
            return integers.words, [e.let("operand", (self.top + m) * words) for m in rows]
        if (self.stage.name, operand) in self.o.copied:
            data, stride = self.o.copied[self.stage.name, operand]
            return data, [e.let("operand", (self.top + m) * stride) for m in rows]
        data, start, stride = self.o.operand(operand, self.first, self.t)
        if operand is not None:
            start = e.let("operand", start + self.top * stride)
            return data, [start + m * stride for m in rows]
        # rows past the last one read the last one again, never past the end of x
        return data, [e.let("x_row", start + e.tirx.Min(self.top + m, self.rows - 1) * stride) for m in rows]

    def locate(self, m: int | Expr, v: int) -> None:
        e, s = self.e, self.s
        self.values, self.m, self.v = {}, m, v
        self.at_row = e.let("row", self.top + m)
        self.unit = e.let("unit", (self.units * self.tile.vectors + v) * s.lanes)
        self.at = e.let("at", self.at_row * s.width + self.unit)

    def pointwise(self, m: int | Expr, v: int) -> None:
        self.locate(m, v)
        self.compute()

    def compute(self) -> None:
        """Computes and stores the values of the stage at the row and vector that :meth:`locate` has set."""
        e, stage = self.e, self.stage
        kept = [(var, self.value(var)) for var in stage.keep]
        results = {n: self.value(r) for n, r in self.o.graph.results.items()} if stage.last else {}
        if stage.last:
            self.outputs = [self.value(var) for var in self.o.graph.outputs]  # in place of a state
        for var, value in kept:
            if stage.level < 0:
                place = self.hoisted(self.at_row, (self.o.projected if stage.level == -2 else self.o.place)[var])
                e.vstore(self.o.data["hoisted"], place, value)
            else:
                e.vstore(self.o.kept[var], self.at, value)
        if stage.last:
            self.finish(results)

    def finish(self, results: dict[str, Expr]) -> None:
        e, o, timeline = self.e, self.o, self.o.timeline
        live = timeline.live(self.t, self.at_row)
        if live is not None:
            results = {n: timeline.masked(live, r, self.value(o.graph.states[n])) for n, r in results.items()}
        after = self.t + 1
        for name, value in timeline.started(after, self.at_row, results).items():
            e.vstore(o.data[f"{name}_state"], o.slot(name, after) + self.at, value)
        self.publish(live, results)

    def publish(self, live: Expr | None, results: dict[str, Expr]) -> None:
        """Stores y; zero where the row takes no part."""
        e, s, o, timeline, traversal = self.e, self.s, self.o, self.o.timeline, self.o.traversal
        own, y_row = o.graph.written * s.hidden, timeline.at(self.t) * o.batch + self.at_row
        start = y_row * traversal.y_width(own) + self.unit + traversal.y_offset(own)
        valid = e.tirx.Select(self.at_row < o.batch, e.index(s.hidden) - self.unit, e.index(0))
        outputs = [timeline.masked(live, v, e.splat(0.0)) for v in self.outputs or [results[o.graph.output]]]
        at, valid = e.let("y_at", start), e.let("valid", valid)
        for number, output in enumerate(outputs):
            e.vstore_part("y_part", o.data["y"], at + number * s.hidden, output, valid)

    def leave(self, row: Expr, values: Sequence[tuple[Place, Expr]]) -> None:
        """Stores values of a ``row`` of the chunk: one past the batch is one of another step."""
        with self.e.when(self.at_row < self.o.batch):
            for place, value in values:
                self.e.vstore(place.data, place.at(self.e, row) + self.unit, value)

    def hoisted(self, row: Expr, place: int) -> Expr:
        width = self.e.index(self.s.width)
        return (row * self.e.index(len(self.o.graph.hoisted_outputs)) + self.e.index(place)) * width + self.unit

    def value(self, var: Var) -> Expr:
        """The vector of ``var``, loaded or computed where it was not before."""
        if var not in self.values:
            self.values[var] = self.e.let(var.name, self.make(var))
        return self.values[var]

    def make(self, var: Var) -> Expr:
        e, o = self.e, self.o
        if var in o.given:
            return self.read(o.given[var])
        level = self.plan.level[var]
        if var in self.products:
            return self.real(var, self.products[var](self.m, self.v))
        if var in o.numbers:
            return e.cast(o.shape.real, e.ramp(self.unit))
        if level == -3:
            source = o.data["vectors" if var in o.vectors else "invariants"]
            return e.vload(source, e.index(o.row[var] * self.s.width) + self.unit)
        if var in o.totals or (var in o.hoisted_totals and self.stage.level < 0):  # steps find it among hoisted values
            return e.splat(e.load(*self.total(var)))
        if level == -2 and self.stage.level == -1:
            return e.vload(o.data["hoisted"], self.hoisted(self.at_row, o.projected[var]))
        if level in (-2, -1) and self.stage.level >= 0:
            row = (o.timeline.at(self.t) - self.first) * o.batch + self.at_row
            return e.vload(o.data["hoisted"], self.hoisted(row, o.place[var]))
        if var in o.kept and level < self.stage.level:
            return e.vload(o.kept[var], self.at)
        if var in self.plan.definition:
            return vector(e, self.plan.definition[var], self.value)
        leaves = {o.graph.x: 0} | o.graph.input_offsets(o.x_stride, self.s.hidden)
        if var in leaves:  # H values of the row of x
            row = self.first * o.batch + e.tirx.Min(self.at_row, self.rows - 1)
            start = e.let("x_at", row * o.x_stride + self.unit + leaves[var])
            return e.vload_part("x_part", o.data["x"], start, e.let("x_valid", self.s.hidden - self.unit))
        name = next(n for n, v in o.graph.states.items() if v.same_as(var))
        return e.vload(o.data[f"{name}_state"], o.slot(name, self.t) + self.at)

    def read(self, place: Place) -> Expr:
        """The vector of a value that other parts made, or the caller has."""
        e, o = self.e, self.o
        if not place.units:
            return e.vload(place.data, place.at(e, o.row_of_chunk(self.first, self.t, self.at_row)) + self.unit)
        inside = e.tirx.Min(self.at_row, self.rows - 1)
        row = e.let("caller_row", self.first * o.batch + o.row_of_chunk(self.first, self.t, inside))
        start = e.let("caller_at", place.at(e, row) + self.unit)
        if place.units % self.s.lanes == 0 and self.s.width == place.units:
            return e.vload(place.data, start)
        return e.vload_part("caller", place.data, start, e.let("caller_valid", e.index(place.units) - self.unit))

    def total(self, var: Var) -> tuple[TirBuffer, Expr]:
        o = self.o
        name, places = ("statistics", o.totals) if var in o.totals else ("hoisted_statistics", o.hoisted_totals)
        return o.data[name], self.at_row * len(places) + places[var]

    def real(self, var: Var, product: Expr) -> Expr:
        """A product of float32, from one of integers or of scaled factors."""
        e, stage, (number, gate) = self.e, self.stage.name, self.source[var]
        at = e.index(gate * self.s.units(self.tile) * self.tile.vectors * self.s.lanes) + self.unit
        if self.tile.pairs:
            factor = e.splat(e.load(self.o.paired[stage, number].factors, self.at_row))
            return product * (factor * e.vload(self.o.data[f"{stage}_units_{number}"], at))
        if not STORED[self.s.weights].scaled:
            return product
        scales = e.vload(self.o.data[f"{stage}_scales_{number}"], at)
        if self.s.weights != "int8":
            return product * scales
        return restore(e, product, self.o.integers[stage, number], self.at_row, scales)


ONE = Tile(1, 1, 1)  # a vector of units of the row
LOWEST = {"float32": -3.4028234663852886e38, "float64": -1.7976931348623157e308}  # no number is below


class RowTask:
    """One row of the batch, or of the chunk where the stage is of the hoisted projection."""

    def __init__(self, owner: Memory, stage: Stage, span: Span, row: Expr, kind: type[TileTask] = TileTask) -> None:
        self.o, self.e, self.stage, self.span = owner, owner.e, stage, span
        self.row, self.lanes, self.hidden, self.kind = row, owner.shape.lanes, owner.shape.hidden, kind

    def run(self) -> None:
        for s in self.stage.statistics:
            self.summarize(s)
        if self.stage.finishes:
            with self.e.loop("vector", -(-self.hidden // self.lanes)) as vector:
                self.task(vector).pointwise(0, 0)

    def task(self, vector: Expr) -> TileTask:
        return self.kind(self.o, self.stage, ONE, self.span, vector, self.row)

    def summarize(self, s: Statistic) -> None:
        """The total, and in a second pass the squares."""
        e, count = self.e, s.count(self.hidden)
        self.keep(s.total, total := self.over(s, lambda value: value))
        if s.squares is not None:
            mean = e.let("mean", e.splat(total * e.number(1.0 / count)))

            def squared(value: Expr) -> Expr:
                apart = e.let("apart", value - mean)
                return apart * apart

            self.keep(s.squares, self.over(s, squared))

    def over(self, s: Statistic, function: Callable[[Expr], Expr]) -> Expr:
        """The sum of a function of all operands and of the statistic's units; or the largest."""
        e, lanes = self.e, self.lanes
        first, end = (0, self.hidden) if s.units is None else (s.units[0], sum(s.units))
        start = -(-first // lanes)  # of whole vectors
        nothing = LOWEST[self.o.shape.real] if s.largest else 0.0
        sums = e.local("sums")
        e.vstore(sums, 0, e.splat(nothing))

        def combined(a: Expr, b: Expr) -> Expr:
            return e.tirx.Max(a, b) if s.largest else a + b

        def add(vector: Expr, inside: Expr | None) -> None:
            values = self.task(vector)
            values.locate(0, 0)
            for operand in s.operands:
                value = e.let("term", function(values.value(operand)))
                value = value if inside is None else e.tirx.Select(inside, value, e.splat(nothing))
                e.vstore(sums, 0, combined(e.vload(sums, 0), value))

        def edge(vector: int) -> None:
            """One of the vectors that are of other units as well."""
            lane, before, bounds = e.ramp(0), vector * lanes, []
            if before < first:
                bounds.append(e.tirx.GE(lane, e.splat(first - before, "int64")))
            if before + lanes > end:
                bounds.append(e.tirx.LT(lane, e.splat(end - before, "int64")))
            add(e.index(vector), reduce(e.tirx.And, bounds))

        if first % lanes:
            edge(first // lanes)
        with e.loop("vector", max(end // lanes - start, 0)) as vector:
            add(vector if first == 0 else e.let("own_vector", vector + start), None)
        if end % lanes and (end // lanes != first // lanes or not first % lanes):
            edge(end // lanes)
        total = e.local("total")
        e.store(total, 0, e.number(nothing))
        with e.loop("lane", self.lanes) as lane:
            e.store(total, 0, combined(e.load(total, 0), e.load(sums, lane)))
        return e.let("total_value", e.load(total, 0))

    def keep(self, var: Var, value: Expr) -> None:
        """Stores a statistic where other threads, and this one, will find it."""
        place = self.task(self.e.index(0))
        place.locate(0, 0)
        buffer, at = place.total(var)
        self.e.store(buffer, at, value)
