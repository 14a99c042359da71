"""The backward pass as one function that every thread of the team runs.

    begin with the gradients of the final states; compute invariants; barrier
    for each chunk of time steps, against the layer's way:
        gather what forward left; replay what it did not keep
        the recurrence, step by step
        gradients of the inputs; products with x and states, and sums, over the chunk's rows, added to gradients
    gradients of the first states, and of parameter vectors

Gradients of parameters are added to what is there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ecornn.analysis.step import OuterProduct, Sum
from ecornn.program import BACKWARD, ENTRIES, KEPT, TENSORS, WORKSPACE, Extent
from ecornn.schedules.assemble import tensor_buffers
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, Var
from ecornn.schedules.cpu import matrix
from ecornn.schedules.cpu.emit import Emitter, vector
from ecornn.schedules.cpu.memory import Place, Stage, pass_plan
from ecornn.schedules.cpu.tasks import TileTask
from ecornn.schedules.cpu.tiling import Shape, registers_of
from ecornn.schedules.cpu.training.matrix_outer import MatrixOuterProducts
from ecornn.schedules.cpu.training.parts import Backward, Copy, Outer, OuterProducts, Recurrence, gather
from ecornn.schedules.cpu.worker import SLACK, Pass, Worker
from ecornn.schedules.keeping import Stored


class DxTask(TileTask):
    o: DxPass

    def compute(self) -> None:
        e, o, width = self.e, self.o, self.o.shape.hidden
        value, row = self.value(o.dx), self.first * o.batch + self.at_row
        valid = e.tirx.Select(self.at_row < self.rows, width - self.unit, e.index(0))
        at, valid = e.let("dx_at", row * o.stride + self.unit), e.let("valid", valid)
        if o.adds:
            value = value + e.vload_part("dx_before", o.data["dx"], at, valid)
        e.vstore_part("dx_part", o.data["dx"], at, value, valid)


class DxPass(Pass):
    """The gradient of x: units are x's, rows ``stride`` apart. ``adds``: to that of the layer's other direction."""

    task = DxTask

    def __init__(self, plans: Backward, shape: Shape, e: Emitter, rooms: int, inner: int, stride: int,
                 adds: bool) -> None:
        assert plans.dx is not None
        super().__init__("dx", plans.dx, shape, e, rooms)
        self.dx, self.inner, self.stride, self.adds = plans.adjoint.dx, inner, stride, adds

    def length(self, operand: Var | None) -> int:
        return self.inner

    def one_by_one(self, stage: Stage) -> bool:
        return True


class BackwardWorker(Worker):
    """Writes the backward pass, ``shape.chunk`` steps at a time; ``shape`` is of H units, ``dx_shape`` of x."""

    def __init__(self, task: Task, plans: Backward, shape: Shape, dx_shape: Shape) -> None:
        super().__init__(pass_plan("once", plans.adjoint.once, ()), shape, task.traversal, "backward_")
        self.layer, self.plans, self.forward, self.copies = task, plans, task.graph, list[Copy]()
        adjoint, e = plans.adjoint, self.e
        self.outer_products = (*adjoint.recurrence.outer_products, *adjoint.inputs.outer_products)
        self.row_sums = (*adjoint.recurrence.sums, *adjoint.inputs.sums)  # over the rows of all steps
        self.summed = (*self.row_sums, *adjoint.finish.sums)
        self.total_row = {v: i for i, v in enumerate(dict.fromkeys(s.var for s in self.summed))}
        # tiles of rows may reach past the last row of a chunk
        self.rooms = shape.chunk * shape.batch + max(t.rows for s in (shape, dx_shape) for t in s.tiles.values())
        self.adds = task.traversal.reverse and task.traversal.directions > 1  # the second one of a layer
        self.replay = Pass("replay", plans.replay, shape, e, self.rooms)
        self.recurrence = Recurrence(plans.recurrence, shape, task.traversal, e, plans.written, self.rooms)
        self.inputs = Pass("inputs", plans.inputs, shape, e, self.rooms)
        self.stride, made = task.workload.input, plans.dx is not None
        self.dx = DxPass(plans, dx_shape, e, self.rooms, shape.hidden, self.stride, self.adds) if made else None
        self.finish = Pass("finish", plans.finish, shape, e, shape.padded_batch)
        self.passes = [p for p in (self.replay, self.inputs, self.dx, self.finish) if p is not None]

    def function(self, name: str) -> PrimFunc:
        self.declare()
        if tiles := self.shape.by_matrix or (self.dx is not None and self.dx.shape.by_matrix):
            matrix.configure(self.e)
        self.prelude()
        self.e.call("ecornn_barrier")
        with self.recurrence.chunks() as (first, low, count):
            self.chunk(first, low, count)
        self.epilogue()
        if tiles:
            matrix.release(self.e)
        self.buffers += [b for part in (self.recurrence, *self.passes) for b in part.buffers]
        return self.e.function(name)

    @property
    def work(self) -> int:
        outer = sum(o.heads * o.rows * o.columns for o in map(self.outer, self.outer_products))
        return sum(part.work for part in (self.recurrence, *self.passes)) + outer

    def declare(self) -> None:
        s, task = self.shape, self.layer
        self.declare_scalars()
        tensors = [t for t in ENTRIES[BACKWARD] if TENSORS[t].role != KEPT and not TENSORS[t].switch]  # it always adds
        for b in tensor_buffers(tensors, task.traversal, s.dtype, self.forward.states, self.forward.parameters):
            self.add(b)
        states = tuple(name for name in self.plans.kept.states if name != self.forward.output)
        for b in Stored(states, self.plans.kept.values).buffers(s.batch, s.hidden, s.dtype):
            self.add(b)
        self.declare_constants()
        self.recurrence.declare(self)
        for part in self.passes:
            part.declare(self)
        if self.dx is not None:
            self.dx.data["dx"] = self.data["dx"]
        self.places: dict[Var, Place] = {}
        self.declare_rows()
        makers: tuple[Pass | Recurrence, ...] = (self.replay, self.recurrence, self.inputs)
        for maker in makers:
            self.places.update(maker.places)
        for reader in (*makers, self.dx):
            if reader is not None:
                own = set(reader.places)
                reader.given.update({v: p for v, p in self.places.items() if v not in own})
        self.finish.given.update({v: self.recurrence.last(n) for n, v in self.plans.recurrence.graph.states.items()})
        if self.total_row:  # (number, unit)
            self.buffer("totals", WORKSPACE, Extent(len(self.total_row) * s.width))
        outers, rows = [self.outer(o) for o in self.outer_products], s.chunk * s.batch
        self.outers = (MatrixOuterProducts(self, outers, rows) if s.by_matrix else
                       OuterProducts(self, outers, rows, registers_of(task.device)))

    def declare_rows(self) -> None:
        """Declares the rows in which the parts find what forward left, and dy."""
        adjoint, forward, units = self.plans.adjoint, self.forward, self.shape.hidden
        graphs, pairs = (self.plans.kept.replay, adjoint.recurrence, adjoint.inputs), self.outer_products
        read = {v for g in graphs for v in g.given} | {v for o in pairs for v in (o.value, o.operand) if v is not None}
        own, traversal = forward.written * units, self.layer.traversal
        y_width, y_offset = traversal.y_width(own), traversal.y_offset(own)
        for name, leaf in forward.states.items():
            after = (Place(self.data["y"], y_width, y_offset, units) if name == forward.output
                     else Place(self.data.get(f"{name}_kept"), units, 0, units))
            if leaf in read:
                self.bring(leaf, f"before_{name}", "before", after, Place(self.data[f"{name}_in"], units))
            if (result := forward.results[name]) in read and result not in self.places:
                self.bring(result, f"after_{name}", "at", after)
        for number, var in enumerate(self.plans.kept.values):
            self.bring(var, f"value_{number}", "at", Place(self.data[f"value{number}_kept"], units, 0, units))
        for number, var in enumerate(adjoint.dys):
            if var in read:
                at = Place(self.data["dy"], y_width, y_offset + number * units, units)
                self.bring(var, f"{var.name}_rows", "live", at)
        for var, offset in forward.input_offsets(self.stride, units).items():
            self.bring(var, f"{var.name}_rows", "at", Place(self.data["x"], self.stride, offset, units))
        self.x = None
        if (forward.x is not None and forward.x in read) or any(None in (o.value, o.operand) for o in pairs):
            lanes, length = self.shape.lanes, self.shape.input
            wide = self.shape.width if forward.x is not None else 0
            self.x = self.row_place("x_rows", max(-(-length // lanes) * lanes, wide))
            self.copies.append(Copy("at", self.x, Place(self.data["x"], self.stride), length))
            if forward.x is not None:
                self.places[forward.x] = self.x

    def bring(self, var: Var, name: str, kind: str, source: Place, first: Place | None = None) -> None:
        """A value's place: the caller's arrays; a copy, if it is multiplied or summed, or not there as it is read."""
        there = kind == "at" or (kind == "live" and not self.layer.traversal.lengths)
        if there and var not in self.multiplied:
            self.places[var] = source
            return
        self.places[var] = self.row_place(name, self.shape.width)
        self.copies.append(Copy(kind, self.places[var], source, self.shape.hidden, first))

    @cached_property
    def multiplied(self) -> set[Var | None]:
        """The values that are operands of products, or summed over rows."""
        parts = self.recurrence, self.replay, self.inputs, self.finish
        found = {t.operand for p in parts for s in p.plan.steps for q in s.rows for t in q.terms}
        found |= {v for o in self.outer_products for v in (o.value, o.operand)}
        return found | {s.value for s in self.summed}

    def row_place(self, name: str, width: int) -> Place:
        return Place(self.buffer(name, WORKSPACE, Extent(self.rooms * width + SLACK)), width)

    def prelude(self) -> None:
        e = self.e
        self.recurrence.begin("begin", {self.plans.adjoint.first[name]: self.data[f"d{name}_out"]
                                        for name in self.forward.states})
        for part in self.passes:
            part.invariants()
        if self.total_row:
            lanes = self.shape.lanes
            with self.tasks("zero", e.index(len(self.total_row) * self.shape.width // lanes)) as task:
                e.vstore(self.data["totals"], task * lanes, e.splat(0.0))

    def chunk(self, first: Expr, low: Expr, count: Expr) -> None:
        e, rows = self.e, self.e.let("rows", count * self.batch)
        gather(self, low, rows, self.copies)
        e.call("ecornn_barrier")
        self.replay.run(low, rows)
        self.recurrence.steps_of(first, low, count)
        self.inputs.run(low, rows)
        self.outers.copy(rows)
        if self.dx is not None:
            self.dx.run(low, rows, wait=False)  # nobody reads dx
        elif not self.adds:
            self.no_dx(low, rows)
        if self.plans.adjoint.dinputs:
            self.input_gradients(low, rows)
        self.outers.add(rows)
        self.add_up(self.row_sums, self.places, rows)
        if not self.settled:
            e.call("ecornn_barrier")

    @property
    def settled(self) -> bool:
        """True if nobody reads :func:`gather`'s rows after the barrier before outer products: it may write the next."""
        copied = [copy.to.data for copy in self.copies]
        summed = [self.places[s.value].data for s in self.row_sums]
        return bool(self.outer_products) and not any(data.same_as(c) for data in summed for c in copied)

    def no_dx(self, low: Expr, rows: Expr) -> None:
        e, length = self.e, self.shape.input
        with self.tasks("no_dx", rows) as row:
            start = e.let("start", (low * self.batch + row) * self.stride)
            with e.loop("k", length) as k:
                e.store(self.data["dx"], start + k, e.number(0.0))

    def input_gradients(self, low: Expr, rows: Expr) -> None:
        """Writes the gradients of the cell's inputs, behind that of x; zeros where a row takes no part."""
        e, s, dx = self.e, self.shape, self.data["dx"]
        with self.vectors_of("inputs", rows, "row") as (row, unit):
            there, valid = e.let("there", low * self.batch + row), e.let("valid", e.index(s.hidden) - unit)
            live = self.live_row(low, row)
            for var, offset in self.forward.input_offsets(self.stride, s.hidden).items():
                gradient, value = self.plans.adjoint.dinputs[var], e.splat(0.0)
                if gradient is not None:
                    place = self.places[gradient]
                    start = place.at(e, there if place.units else row) + unit
                    value = e.let(var.name, e.vload_part(f"d_{var.name}", place.data, start, valid))
                    value = self.timeline.masked(live, value, e.splat(0.0))
                at = e.let("at", there * self.stride + offset + unit)
                if self.adds:
                    value = value + e.vload_part(f"{var.name}_before", dx, at, valid)
                e.vstore_part(f"{var.name}_part", dx, at, value, valid)

    def add_up(self, sums: tuple[Sum, ...], places: Mapping[Var, Place], rows: Expr) -> None:
        e, lanes, width = self.e, self.shape.lanes, self.shape.width
        for s in sums:
            place, totals = places[s.value], self.data["totals"]
            with self.tasks("sum", e.index(width // lanes)) as task:
                unit, total = e.let("unit", task * lanes), e.local("total")
                e.vstore(total, 0, e.splat(0.0))
                with e.loop("row", rows) as row:
                    e.vstore(total, 0, e.vload(total, 0) + e.vload(place.data, place.at(e, row) + unit))
                at = e.let("at", e.index(self.total_row[s.var] * width) + unit)
                e.vstore(totals, at, e.vload(totals, at) + e.vload(total, 0))

    def outer(self, o: OuterProduct) -> Outer:
        rows, columns = (self.shape.input if v is None else self.shape.hidden for v in (o.value, o.operand))
        value, operand = (self.x if v is None else self.places[v] for v in (o.value, o.operand))
        assert value is not None and operand is not None
        rows, columns = o.rows or rows, (o.columns or columns) // o.heads
        rows, gate = rows // o.heads, rows * columns
        return Outer(self.data[f"gradient_{o.parameter}"], o.gate * gate, rows, columns, value, operand, o.heads)

    def epilogue(self) -> None:
        """Writes gradients of the first states, and adds those of parameter vectors."""
        e, s, adjoint = self.e, self.shape, self.plans.adjoint
        self.finish.run(e.index(0), self.batch)
        places = {**self.finish.given, **self.finish.places}
        with self.vectors_of("final", self.batch) as (b, unit):
            valid = e.let("valid", e.index(s.hidden) - unit)
            for name, var in adjoint.gradients.items():
                value = e.splat(0.0) if var is None else e.vload(places[var].data, places[var].at(e, b) + unit)
                e.vstore_part(f"d_{name}", self.data[f"d{name}_in"], b * s.hidden + unit, value, valid)
        self.add_up(adjoint.finish.sums, places, self.batch)
        e.call("ecornn_barrier")
        self.add_vectors()

    def add_vectors(self) -> None:
        """Adds to gradients of parameter vectors, which follow from parameters and totals."""
        e, s = self.e, self.shape
        if not self.plans.adjoint.vectors:
            return
        with self.tasks("vectors", e.index(-(-s.hidden // s.lanes))) as task:
            unit, values = e.let("unit", task * s.lanes), dict[Var, Expr]()
            valid = e.let("valid", s.hidden - unit)

            def value(var: Var) -> Expr:
                if var not in values:
                    name, row = ("totals", self.total_row[var]) if var in self.total_row else ("vectors", self.row[var])
                    values[var] = e.let(var.name, e.vload(self.data[name], e.index(row * s.width) + unit))
                return values[var]

            for a in self.graph.invariants:
                values[a.var] = e.let(a.var.name, vector(e, a.value, value))
            for v in self.plans.adjoint.vectors:
                data, at = self.data[f"gradient_{v.parameter}"], e.let("gradient_at", e.index(v.gate * s.hidden) + unit)
                total = e.vload_part("gradient", data, at, valid) + value(v.var)
                e.vstore_part("gradient_part", data, at, total, valid)
