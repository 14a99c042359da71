"""A step graph carried out for all rows at once: products over all rows, and scalars of each row and unit.

What lies between two products is one kernel: scalars that follow a product are computed on its sums, unless they need
statistics of whole rows. Products of what memory holds at the beginning are one kernel, whatever they multiply. Values
that a later kernel reads are left in workspaces: in float32, or, where they are multiplied, in the layer's type.

Two of these passes are here: the gradient of x, from the gradients of what a step reads of x, in most cells one product
with several terms; and what only a layer's outputs need, after its loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ecornn.analysis.liveness import needed
from ecornn.analysis.operators import number
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Product, Statistic, StepGraph
from ecornn.analysis.sums import merged
from ecornn.program import RUN, WHOLE, WORKSPACE, Buffer, Entry, Extent, Program
from ecornn.schedules.backward.memory import Memory, Place, Workspaces, replayed
from ecornn.schedules.backward.scalars import Pointwise, Scalars, scalar_pass
from ecornn.schedules.base import Component, Task, joined, renamed
from ecornn.schedules.builder import Var
from ecornn.schedules.gemm.job import CHUNK, STEPS, Columns, Job, Operand
from ecornn.schedules.gemm.projection import over_rows
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import MATH_FOR
from ecornn.schedules.timeline import rows_mask

LINE = 128  # bytes of K of a stage of a product: operands side by side are one where they fill whole ones
Item = tuple[Product, ...] | tuple[Statistic, ...] | tuple[Assign, ...]


def items_of(graph: StepGraph) -> list[Item]:
    found: list[Item] = [graph.hoisted_products, graph.hoisted, graph.hoisted_statistics, graph.normalized,
                         graph.prologue]
    for phase in graph.phases:
        found += [phase.statistics, phase.products, phase.assigns]
    return [item for item in found if item]


@dataclass
class _Stage:
    """One kernel: products and what follows them, or scalars with statistics before them."""

    products: tuple[Product, ...] = ()
    statistics: list[tuple[Statistic, ...]] = field(default_factory=list)
    assigns: tuple[Assign, ...] = ()

    @property
    def made(self) -> dict[Var, None]:
        return dict.fromkeys((*(p.var for p in self.products), *(a.var for a in self.assigns),
                              *(v for those in self.statistics for s in those for v in s.made)))

    @property
    def operands(self) -> list[Var]:
        return [t.operand for p in self.products for t in p.terms if t.operand is not None]

    def reads(self, wanted: set[Var]) -> set[Var]:
        """Drops what ``wanted`` does not need; returns the variables that are read of earlier stages and of memory."""
        self.statistics = [kept for those in self.statistics if (kept := tuple(
            s for s in those if needed(self.assigns, self._wanted(wanted))[1].intersection(s.made)))]
        self.assigns, read = needed(self.assigns, self._wanted(wanted))
        self.products = tuple(p for p in self.products if p.var in read)
        return {*read, *self.operands} - self.made.keys()

    def _wanted(self, wanted: set[Var]) -> set[Var]:
        return wanted | {o for those in self.statistics for s in those for o in s.operands}


@dataclass(frozen=True)
class Wanted:
    """Results of a pass: ``stores``, values and places; ``hoisted``, in ``layout``; ``instead`` of :class:`Scalars`."""

    stores: tuple[tuple[Var, Place], ...] = ()
    hoisted: tuple[Var, ...] = ()
    layout: Hoisted | None = None
    instead: Mapping[Var, Var] = field(default_factory=dict)

    @property
    def variables(self) -> tuple[Var, ...]:
        """Each once, in an order that generated code may follow."""
        return tuple(dict.fromkeys((*(v for v, _ in self.stores), *self.hoisted)))


@dataclass(frozen=True)
class RowPass:
    task: Task
    forward: StepGraph  # the step whose parameter vectors it reads
    x: Columns  # the columns that it reads as x
    name: str  # its kernels and workspaces begin with it
    leaves: Mapping[Var, Place]  # where what it reads lies
    invariants: tuple[Assign, ...]  # what parameters determine
    each: str = STEPS  # what it goes over, as of a :class:`~ecornn.schedules.gemm.job.Job`
    # of :func:`~ecornn.schedules.timeline.rows_mask`: where a row takes no part in the step zeros are stored
    mask: str | None = None
    units: int | None = None  # of the last product, where these are not hidden units

    def component(self, items: Sequence[Item], wanted: Wanted) -> Component:
        stages, after = self._stages(items), set(wanted.variables)
        for stage in reversed(stages):
            after = (after - stage.made.keys()) | stage.reads(after & stage.made.keys())
        return self._kernels(stages, wanted)

    def _stages(self, items: Sequence[Item]) -> list[_Stage]:
        """Products of what memory holds are in the first one, unless their units are others than those of scalars."""
        products = [p for item in items for p in item if isinstance(p, Product)]
        apart = self.units not in (None, self.task.workload.hidden)
        first = tuple(p for p in products if not apart and all(self._at_hand(t.operand) for t in p.terms))
        stages = [_Stage(first)]
        for item in items:
            if isinstance(item[0], Product):
                rest = tuple(p for p in item if p not in first)
                stages += [_Stage(rest)] if rest else []
            elif isinstance(item[0], Statistic):
                stages += [_Stage()] if stages[-1].products else []
                stages[-1].statistics.append(item)  # type: ignore[arg-type]
            else:
                stages[-1].assigns += item  # type: ignore[operator]
        return stages[1:] if apart and stages[1:] and not stages[0].made else stages

    def _at_hand(self, operand: Var | None) -> bool:
        return operand is None or (operand in self.leaves and self.leaves[operand].dtype == self.task.workload.dtype)

    def _kernels(self, stages: Sequence[_Stage], wanted: Wanted) -> Component:
        w, batch = self.task.workload, self.task.workload.batch
        values = Workspaces(f"{self.name}_values", "float32", w.hidden, WORKSPACE)
        operands = Workspaces(f"{self.name}_operands", w.dtype, w.hidden, WORKSPACE)
        operands.add(v for s in stages for v in s.operands if not self._at_hand(v))
        for n, stage in enumerate(stages):
            later = stages[n + 1:]
            read = set(wanted.hoisted if later else ()).union(*(s._wanted(set()) for s in later))
            read |= {v for s in later for a in s.assigns for v in variables(a.value)}
            values.add(v for v in stage.made if v in read)
        at, multiplied = values.places(), operands.places()
        made = {v for stage in stages for v in stage.made}
        parts = [Component(buffers=(*values.buffers(batch, self.each), *operands.buffers(batch, self.each)))]
        for n, stage in enumerate(stages):
            last = n == len(stages) - 1
            stores = [(v, p) for places in (at, multiplied) for v, p in places.items()
                      if v in stage.made or (n == 0 and v not in made)]
            stores += [(v, p) for v, p in wanted.stores if v in stage.made or (last and v not in made)]
            own = Wanted(tuple(stores), wanted.hoisted if last else (), wanted.layout, wanted.instead)
            if own.variables:
                places = [{**self.leaves, **more} for more in (at, multiplied)]
                parts.append(self._kernel(f"{self.name}_{n}", stage, own, *places))
        return joined(*parts)

    def _kernel(self, name: str, stage: _Stage, wanted: Wanted, leaves: Mapping[Var, Place],
                operands: Mapping[Var, Place]) -> Component:
        task, forward = self.task, self.forward
        products, assigns = merged(stage.products, stage.assigns, wanted.variables)
        made = {*(a.var for a in assigns), *(p.var for p in products)}
        math = MATH_FOR[task.workload.dtype][min(1, len(MATH_FOR[task.workload.dtype]) - 1)]
        scalars = Scalars(forward.vectors, self.invariants, assigns, {v: p for v, p in leaves.items() if v not in made},
                          wanted.stores, wanted.hoisted, wanted.layout, self.mask, wanted.instead, math)
        if not products:
            return scalar_pass(name, task.device.cores, scalars, stage.statistics, task.workload.hidden, self.each)
        job = self._job(name, products, operands, len(forward.vectors) if scalars.reads_vectors else 0)
        span = wanted.layout.span if wanted.hoisted and wanted.layout else 4  # 16-bit ones of a quad: a sector
        return over_rows(job, Pointwise(scalars, products, span))

    def _job(self, name: str, products: Sequence[Product], operands: Mapping[Var, Place], vectors: int) -> Job:
        w = self.task.workload
        columns = {v: p.columns for v, p in operands.items()} | {None: self.x}
        gates = {n: shape[0] for n, shape in self.forward.parameters.items() if shape[1] == w.hidden}
        expected = w.seq * w.batch if self.each == STEPS else w.batch
        multiplied = operands_of(name, products, columns, w.itemsize, gates)
        return Job(name, self.task.device, w.dtype, w.arithmetic, multiplied, len(products), self.units or w.hidden,
                   vectors, self.each, expected)


def operands_of(name: str, products: Sequence[Product], columns: Mapping[Var | None, Columns], itemsize: int,
                gates: Mapping[str, int]) -> tuple[Operand, ...]:
    """Operands, each once if multiplied once; neighbours in memory are one if whole stages, or better aligned so."""
    slots: list[tuple[Columns, bool, int, list[tuple[str, int]]]] = []
    for r, product in enumerate(products):
        taken: set[int] = set()
        for term in product.terms:
            kind = columns[term.operand], term.transposed, term.heads
            s = next((s for s, slot in enumerate(slots) if slot[:3] == kind and s not in taken), len(slots))
            if s == len(slots):
                slots.append((*kind, [("", 0)] * len(products)))
            slots[s][3][r] = term.source
            taken.add(s)
    if len(products) == 1 and len(slots) > 1 and all(slot[2] == 1 for slot in slots):
        slots.sort(key=lambda slot: (slot[0].name, slot[0].offset))
        whole = replace(slots[0][0], width=sum(slot[0].width for slot in slots))
        beside = all(a[0].offset + a[0].width == b[0].offset and a[0].name == b[0].name for a, b in pairwise(slots))
        if beside and all(slot[1] for slot in slots) and whole.width * itemsize % LINE == 0:
            return (Operand(whole, f"{name}_weights", tuple(s for slot in slots for s in slot[3]), True, len(slots)),)
        parameter, most = slots[0][3][0][0], CHUNK // itemsize
        every = [(True, 1, [(parameter, gate)]) for gate in range(gates.get(parameter, 0))]
        better = whole.copied(most) > min(slot[0].copied(most) for slot in slots)
        if beside and better and [slot[1:] for slot in slots] == every:
            return (Operand(whole, f"{name}_weights", ((parameter, WHOLE),), True),)
    return tuple(Operand(where, f"{name}_weights_{n}", tuple(sources), transposed, heads=heads)
                 for n, (where, transposed, heads, sources) in enumerate(slots))


def unique_invariants(*graphs: StepGraph) -> tuple[Assign, ...]:
    return tuple({a.var: a for g in graphs for a in g.invariants}.values())


SPACE = "read_out"


def with_read_out(task: Task, program: Program) -> Program:
    """``y`` (T, B, W) after the loop from ``read_out`` (T, B, N, H), which has zeros where a row takes no part."""
    assert task.after is not None
    w, graph, y = task.workload, task.after.graph, task.after.traversal
    H, count = w.hidden, len(task.graph.outputs)
    x = Columns("x", task.own_input, w.input)
    places = {v: Columns(SPACE, H, count * H, n * H) for n, v in enumerate(task.graph.outputs)}
    places |= {} if graph.x is None else {graph.x: x}
    places |= {var: Columns("x", H, w.input, at) for var, at in graph.input_offsets(w.input, H).items()}
    leaves = {v: Place(columns, w.dtype) for v, columns in places.items()}
    own = len(graph.outputs) * H
    stores = tuple((v, Place(Columns("y", H, y.y_width(own), y.y_offset(own) + n * H), w.dtype))
                   for n, v in enumerate(graph.outputs))
    passes = RowPass(task, task.graph, x, SPACE, leaves, graph.invariants, mask=rows_mask(task.traversal))
    made = passes.component(items_of(graph), Wanted(stores))
    space = Buffer(SPACE, WORKSPACE, w.dtype, Extent(0, w.batch * count * H))
    calls = (*(renamed(call, {"y": SPACE}) for call in program.entries[RUN].calls), *made.calls)
    buffers = (*program.buffers, space, *made.buffers)
    return replace(program, functions={**program.functions, **made.functions}, buffers=buffers,
                   entries={RUN: Entry(calls, tuple(b.name for b in buffers))})


def input_gradients(memory: Memory, add: bool = False, dtype: str | None = None) -> Component:
    """``dx`` (T, B, I), then the cell's inputs', added if ``add``; and workspaces of :func:`made_of_inputs`."""
    of_x, back = _gradient_of_x(memory, add, dtype), memory.adjoint
    # what is made on the way to dx is made without it, too, where x has no gradient
    return joined(of_x, _gradients_beside(memory, add, dtype)) if back.dinputs or back.dx is None else of_x


def _scalar(name: str) -> Var:
    from tvm import tirx

    return tirx.Var(name, "float32")


def _gradient_of_x(memory: Memory, add: bool, dtype: str | None) -> Component:
    back, own = memory.adjoint, memory.task.own_input
    graph, total = back.inputs, back.dx
    items: list[Item] = items_of(graph)
    place = Place(Columns("dx", own, memory.task.workload.input), dtype or memory.dtype)
    if total is None:
        zero = _scalar("zero")
        scalars = Scalars((), (), (Assign(zero, number(0.0)),), {}, ((zero, place),))
        zeros = scalar_pass("inputs_0", memory.task.device.cores, scalars, (), own, STEPS)
        return _spaces(memory) if add else joined(_spaces(memory), zeros)
    leaves = memory.leaves() | memory.outputs() | replayed(memory)
    instead: dict[Var, Var] = {}
    if add:
        before, whole = _scalar("dx_before"), _scalar("dx_whole")
        leaves[before] = place
        items.append((Assign(whole, before + total),))
        total, instead = whole, {whole: before}
    stores = () if back.dinputs else _made(memory)  # a product of x's units may be their kernel
    mask = rows_mask(memory.task.traversal) if graph.hoisted or graph.x is not None or replayed(memory) else None
    passes = RowPass(memory.task, memory.forward, memory.x, "inputs", leaves,
                     unique_invariants(back.forward, graph), mask=mask, units=own)
    return joined(_spaces(memory), passes.component(items, Wanted((*stores, (total, place)), instead=instead)))


def _gradients_beside(memory: Memory, add: bool, dtype: str | None) -> Component:
    """The gradients of the cell's inputs, without a product, and values made on the way: a pass over hidden units."""
    back, graph, zero = memory.adjoint, memory.adjoint.inputs, _scalar("zero")
    items = [item for item in items_of(graph) if not isinstance(item[0], Product)]
    leaves, instead = memory.leaves() | memory.outputs() | replayed(memory), dict[Var, Var]()
    stores, sums = list(_made(memory)), list[Assign]()
    for var, place in memory.inputs("dx", dtype or memory.dtype).items():
        total = back.dinputs[var]
        if total is None and add:
            continue
        total = zero if total is None else total
        if add:
            before, whole = _scalar(f"{var.name}_before"), _scalar(f"{var.name}_whole")
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
    first, second, whole = map(_scalar, ("first", "second", "whole"))
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
    return tuple((v, p) for space in made_of_inputs(memory) for v, p in space.places().items())


def _spaces(memory: Memory) -> Component:
    batch = memory.task.workload.batch
    return Component(buffers=tuple(b for space in made_of_inputs(memory) for b in space.buffers(batch, STEPS)))
