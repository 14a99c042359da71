"""The adjoint of a cell's step, a step like any other: products with transposed weights, statistics, scalars.

Derivatives of scalars depend on the forward pass alone, so they are hoisted out of the adjoint's recurrence, in which
gradients are only multiplied by factors and added. A product becomes a term of the one that gives its operand's
gradient; a statistic becomes sums. Where the forward step exchanges what states alone determine, the adjoint is
rotated: its states are what it exchanges, gradients of the first products of the step that follows in time, so that it
begins with an exchange and has as many as the forward step. Its first values are zeros; ``finish`` is what remains
after the last step. Gradients of states that go around the exchange are states of their own, which begin with those of
the final states. Other adjoints compute what they exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ecornn.analysis.liveness import levels, needed, opening
from ecornn.analysis.operators import number, variable
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Level, OuterProduct, Phase, Product, StepGraph, Sum, Term, Vector
from ecornn.analysis.sweep import Factor, Partials, Sweep, unique

if TYPE_CHECKING:
    from tvm.tirx import Var


@dataclass(frozen=True)
class Adjoint:
    """The gradients of a layer, in four graphs."""

    forward: StepGraph
    # the adjoint step, from the last step of time to the first. `given`: `dys` and values of the forward step, by their
    # forward variables; `outputs`: gradients of what the forward step read of its hoisted part, and of its products
    recurrence: StepGraph
    rotated: bool  # True where it begins with the exchange
    # state of the forward step -> state of the recurrence that begins with the gradient of its final value; all others
    # begin with zeros
    first: dict[str, str]
    # after the last step, from the recurrence's states: `gradients` and what remains of the sums
    finish: StepGraph
    gradients: dict[str, Var]  # state -> its gradient before the first step, a variable of `finish`
    inputs: StepGraph  # of all steps at once, from `outputs` of the recurrence: gradients of the products of x
    dx: Var | None  # the gradient of x, an output of `inputs`, (T, B, I); None where x is not read
    # leaf of a sequence beside x -> its gradient, an output of `inputs`, (T, B, H); None where it is zero
    dinputs: dict[Var, Var | None]
    once: StepGraph  # of parameters alone, from the sums of the other graphs (H,)
    # gradients of parameter vectors, outputs of `once`; one that is listed twice has the sum
    vectors: tuple[Vector, ...]
    dys: tuple[Var, ...]  # the leaves of the gradients of the outputs; mostly of one, y

    @property
    def needed(self) -> tuple[Var, ...]:
        """Forward variables, one value for each step, row and unit, that any of the graphs reads."""
        of_step = levels(self.forward)
        read = [*self.recurrence.given, *self.inputs.given]
        read += [v for g in (self.recurrence, self.inputs) for o in g.outer_products for v in (o.value, o.operand)]
        return unique(v for v in read if v in of_step)


def adjoint(forward: StepGraph, hidden: int, starts_anew: bool = False) -> Adjoint:
    """The adjoint of the step of a cell with H = ``hidden``. ``starts_anew``: states may become zeros between steps,
    and the adjoint's with them: it is not rotated where sums that it has left would be lost so."""
    rotated = rotates(forward)
    result = _Builder(forward, hidden, rotated).run()
    return _Builder(forward, hidden, False).run() if rotated and starts_anew and result.finish.sums else result


def rotates(graph: StepGraph) -> bool:
    """True where states and parameters determine all values that the first exchange of a step reads."""
    if not graph.phases:
        return False
    known = {*graph.states.values(), *(a.var for a in opening(graph))}
    first = graph.phases[0]
    return known.issuperset((*first.operands, *(o for s in first.statistics for o in s.operands)))


def gates_of_x(graph: StepGraph) -> dict[Var, int]:
    """The gate of x's weights that each hoisted value is computed with, where it is one gate alone: gradients that lie
    in this order are multiplied by all gates at once, as the parameter has them."""
    gate_of = {p.var: p.term.gate for p in graph.hoisted_products}
    read = {a.var: {gate_of[v] for v in variables(a.value) if v in gate_of} for a in graph.hoisted}
    return gate_of | {v: min(gates) for v, gates in read.items() if len(gates) == 1}


class _Builder:
    def __init__(self, forward: StepGraph, hidden: int, rotated: bool) -> None:
        self.forward, self.hidden, self.levels = forward, hidden, levels(forward)
        self.rotated, count = rotated, forward.written
        self.unit = next((v.var for v in forward.vectors if v.numbers), None)
        self.dys = tuple(variable("dy" if count == 1 else f"dy{n}") for n in range(count))
        self.sums: dict[Var, Var] = {}  # variable of parameters alone -> its gradient, (H,)

    def run(self) -> Adjoint:
        self.recur()
        self.invert_inputs()
        once, vectors = self.invert_parameters()
        return Adjoint(self.forward, self.recurrence, self.rotated, self.first, self.finish, self.gradients,
                       self.inputs, self.dx, self.dinputs, once, vectors, self.dys)

    # -- the recurrence -------------------------------------------------------------------------
    def recur(self) -> None:
        forward, phases = self.forward, self.forward.phases
        self.partials = Partials()
        self.states: dict[str, Var] = {}
        self.zeros: list[Assign] = []
        self.carried: dict[Var, str] = {}  # factor -> the state that has it in the step after
        self.exchanges: dict[int, Phase] = {}
        own = [self.state(f"{'rest' if self.rotated else 'd'}_{name}") for name in forward.states]
        self.first = dict(zip(forward.states, own, strict=True))
        tail = Sweep(self.partials, self.hidden, self.carry, self.unit)
        for name in self.states:
            tail.level[self.states[name]] = Level.STATE
        waiting: dict[Var, str] = {}  # of the first exchange of the forward step, and the states that they are
        if self.rotated:
            waiting = {v: self.state(f"d_{v.name}") for v in made_by(phases[0])}
            exchanged = {v: self.states[name] for v, name in waiting.items()}
            tail.level.update((v, Level.STATE) for v in exchanged.values())
            self.exchange(tail, 1, phases[0], exchanged)
            tail.reverse(opening(forward))
        for name, var in forward.states.items():
            tail.add(var, 1.0, self.states[self.first[name]])
        self.gradients = {name: tail.total(var) for name, var in forward.states.items()}
        body, outer = self.body(tail, waiting)
        results = {self.first[name]: body.total(var) for name, var in forward.states.items()}
        results |= {name: body.total(v) for v, name in waiting.items()}
        self.finish_recurrence(tail, body, results, outer)

    def body(self, tail: Sweep, waiting: dict[Var, str]) -> tuple[Sweep, list[OuterProduct]]:
        """Goes from gradients of a step's results to those of what it read, if rotated but for the first exchange."""
        forward, body, outer = self.forward, Sweep(self.partials, self.hidden, unit=self.unit), list[OuterProduct]()
        body.level.update(tail.level)
        for var, dy in zip(forward.outputs or (forward.results[forward.output],), self.dys, strict=True):
            body.add(var, 1.0, dy, Level.INPUT)
        for name, var in forward.results.items():
            body.add(var, 1.0, self.gradients[name])
        for p in range(len(forward.phases) - 1, -1, -1):
            phase = forward.phases[p]
            body.reverse(phase.assigns)
            gradients = body.totals(made_by(phase))
            outer += outer_products(phase.products, gradients)
            if gradients and not (self.rotated and p == 0):
                self.exchange(body, 1 + max((0, *self.exchanges)), phase, gradients)
        body.reverse(forward.prologue)
        return body, outer

    def finish_recurrence(self, tail: Sweep, body: Sweep, results: dict[str, Var | None],
                          outer: list[OuterProduct]) -> None:
        """Builds the graph of the recurrence, and ``finish``, which follows its last step."""
        forward = self.forward
        read = unique((*forward.hoisted_outputs, *((forward.x,) if forward.x is not None else ()),
                       *forward.inputs.values()))
        self.hoisted = body.totals(read)
        multiplied = unique(v for o in outer for v in (o.value, o.operand) if v not in self.levels)
        own = list(self.hoisted.values())
        if set(multiplied) <= set(own):  # else values of one parameter would not lie side by side
            gates = gates_of_x(forward)
            own = [d for _, d in sorted(self.hoisted.items(), key=lambda item: gates.get(item[0], len(gates)))]
        left, sums = [], []
        for var in (v for v, at in self.levels.items() if at == Level.INVARIANT):
            remains, whole = tail.total(var), list(body.parts.get(var, []))
            if remains is not None:
                body.level.update(tail.level)
                whole.append((1.0, remains))
                left.append(Sum(self.sum_of(var), remains))
            if whole:
                sums.append(Sum(self.sum_of(var), body.named(whole, f"d_{var.name}")))
        factors, assigns = list(self.partials.assigns), [*tail.assigns, *body.assigns]
        level = {**body.level, **tail.level, **dict.fromkeys(self.states.values(), Level.STATE),
                 **dict.fromkeys(self.dys, Level.INPUT)}
        after = _Parts(forward, factors, tail.assigns, level, {1: self.exchanges[1]} if self.rotated else {})
        finished = {name: self.fill(gradient) for name, gradient in self.gradients.items()}
        self.finish = after.graph(f"{forward.cell}_finish", {}, {}, finished.values(), left)
        whole_results = {name: self.fill(results.get(name)) for name in self.states}
        whole_results |= {name: factor for factor, name in self.carried.items()}
        parts = _Parts(forward, [*factors, *self.zeros], assigns, level, self.exchanges)
        self.recurrence = parts.graph(f"{forward.cell}_adjoint", self.states, whole_results,
                                      unique((*own, *multiplied)), sums, outer)

    def state(self, name: str) -> str:
        self.states[name] = variable(name)
        return name

    def carry(self, factor: Factor) -> Factor:
        """A factor as the step after has it: one of parameters alone as it is, others from a state."""
        if isinstance(factor, float) or factor in _constants(self.forward, self.partials.assigns):
            return factor
        if factor not in self.carried:
            self.carried[factor] = self.state(f"{factor.name}_before")
        return self.states[self.carried[factor]]

    def fill(self, var: Var | None) -> Var:
        """``var``, or a zero where a result does not depend on anything."""
        if var is None and not self.zeros:
            self.zeros.append(Assign(variable("zero"), number(0.0)))
        return self.zeros[0].var if var is None else var

    def exchange(self, sweep: Sweep, level: int, phase: Phase, gradients: dict[Var, Var]) -> None:
        products = sweep.products(phase.products, gradients, level)
        self.exchanges[level] = Phase.of(products, (), sweep.statistics(phase.statistics, gradients, level))

    def sum_of(self, var: Var) -> Var:
        """The gradient, over all steps and rows, of a value that parameters alone determine."""
        return self.sums.setdefault(var, variable(f"d_{var.name}"))

    # -- around it ------------------------------------------------------------------------------
    def invert_inputs(self) -> None:
        """Goes from gradients of hoisted values to those of x, and of the weights and vectors that these read."""
        forward, partials = self.forward, Partials()
        sweep, exchanges = Sweep(partials, self.hidden, unit=self.unit), dict[int, Phase]()
        for var, gradient in self.hoisted.items():
            sweep.add(var, 1.0, gradient, Level.INPUT)
        sweep.reverse(forward.normalized)
        statistics = sweep.totals(v for s in forward.hoisted_statistics if not s.shift for v in s.made)
        if statistics:
            exchanges[Level.NORMALIZED] = Phase.of((), (), sweep.statistics(
                forward.hoisted_statistics, statistics, Level.NORMALIZED))
        sweep.reverse(forward.hoisted)
        gradients = sweep.totals(p.var for p in forward.hoisted_products)
        if products := sweep.products(forward.hoisted_products, gradients, 1):
            exchanges[1] = Phase.of(products)
        parts = [*((1.0, p.var) for p in products), *(sweep.parts.get(forward.x, []) if forward.x is not None else [])]
        self.dx = sweep.named(parts, "d_x") if parts else None
        self.dinputs = {v: sweep.total(v) for v in forward.inputs.values()}
        invariant = sweep.totals(v for v, level in self.levels.items() if level == Level.INVARIANT)
        graph = _Parts(forward, partials.assigns, sweep.assigns, sweep.level, exchanges)
        self.inputs = graph.graph(f"{forward.cell}_inputs", {}, {},
                                  [d for d in (self.dx, *self.dinputs.values()) if d is not None],
                                  [Sum(self.sum_of(v), d) for v, d in invariant.items()],
                                  outer_products(forward.hoisted_products, gradients))

    def invert_parameters(self) -> tuple[StepGraph, tuple[Vector, ...]]:
        forward, partials = self.forward, Partials()
        sweep = Sweep(partials, self.hidden)
        for var, total in self.sums.items():
            sweep.add(var, 1.0, total, Level.INVARIANT)
        sweep.reverse(forward.invariants)
        gradients = sweep.totals(v.var for v in forward.vectors)
        vectors = tuple(Vector(gradients[v.var], v.parameter, v.gate) for v in forward.vectors if v.var in gradients)
        graph = _Parts(forward, partials.assigns, sweep.assigns, sweep.level, {})
        return graph.graph(f"{forward.cell}_parameters", {}, {}, (v.var for v in vectors)), vectors


def made_by(phase: Phase) -> list[Var]:
    """The variables of a phase's exchange that have gradients."""
    return [*(p.var for p in phase.products), *(v for s in phase.statistics if not s.shift for v in s.made)]


def outer_products(products: tuple[Product, ...], gradients: dict[Var, Var]) -> list[OuterProduct]:
    """The gradients of the matrices of ``products``, for those that have ``gradients`` themselves."""
    def one(gradient: Var, term: Term) -> OuterProduct:
        value, operand = (term.operand, gradient) if term.transposed else (gradient, term.operand)
        rows, columns = (term.columns, term.rows) if term.transposed else (term.rows, term.columns)
        return OuterProduct(term.parameter, term.gate, value, operand, term.heads, rows, columns)

    return [one(gradients[p.var], term) for p in products if p.var in gradients for term in p.terms]


def _constants(forward: StepGraph, factors: Iterable[Assign]) -> set[Var]:
    """The variables of the forward step, and of ``factors``, that depend on parameters only."""
    known = {v for v, at in levels(forward).items() if at == Level.INVARIANT}
    for a in factors:
        if known.issuperset(variables(a.value)):
            known.add(a.var)
    return known


class _Parts:
    """A step graph in the making, beside the ``forward`` one. ``factors``: assignments that gradients are multiplied
    by, of forward variables alone; ``assigns``: those of gradients, with their ``level``; ``exchanges``: level -> the
    exchange before its assignments, a phase without these."""

    def __init__(self, forward: StepGraph, factors: Iterable[Assign], assigns: Iterable[Assign],
                 level: Mapping[Var, int], exchanges: Mapping[int, Phase]) -> None:
        self.forward, self.exchanges, self.own = forward, dict(exchanges), dict(level)
        self.factors, self.assigns = tuple(factors), tuple(assigns)
        constants = _constants(forward, self.factors)
        self.level = levels(forward) | {
            a.var: Level.INVARIANT if a.var in constants else Level.INPUT for a in self.factors}

    def graph(self, name: str, states: Mapping[str, Var], results: Mapping[str, Var], outputs: Iterable[Var] = (),
              sums: Iterable[Sum] = (), outer_products: Iterable[OuterProduct] = ()) -> StepGraph:
        """The graph of ``results``, ``outputs`` and ``sums``, and of no more."""
        outputs, sums = unique(outputs), tuple(sums)
        last, every = [*results.values(), *outputs, *(s.value for s in sums)], self.exchanges.values()
        wanted = {*last, *(v for e in every for v in (*e.operands, *(o for s in e.statistics for o in s.operands)))}
        assigns, wanted = needed((*self.factors, *self.assigns), wanted)
        invariants, wanted = needed(self.forward.invariants, wanted)
        made = {*states.values(), *(a.var for a in assigns), *(p.var for e in every for p in e.products),
                *(v for e in every for s in e.statistics for v in s.made)}
        given = unique(v for v in self._in_order(wanted) if v not in made and self._level(v) > Level.INVARIANT)
        at = {level: tuple(a for a in assigns if self._level(a.var) == level)
              for level in range(Level.INVARIANT, max((Level.STATE, *self.exchanges)) + 1)}
        late = [v for level, those in at.items() if level >= Level.STATE for a in those for v in variables(a.value)]
        exchanges = [e for level, e in self.exchanges.items() if level > 0]
        late += [v for e in exchanges for s in e.statistics for v in s.operands]
        late += [*(v for e in exchanges for v in e.operands), *last]
        before = self.exchanges.get(Level.NORMALIZED, Phase.of(()))
        hoisted = unique(v for v in late if v not in states.values()
                         and self._level(v) in (Level.INPUT, Level.NORMALIZED))
        prologue, phases = at[Level.STATE], list[Phase]()
        for p in range(1, max((0, *self.exchanges)) + 1):
            exchange = self.exchanges.get(p, before)
            if p in self.exchanges and (exchange.products or exchange.statistics):
                phases.append(replace(exchange, assigns=at[p]))
            elif phases:  # where nothing is exchanged a phase goes on
                phases[-1] = replace(phases[-1], assigns=(*phases[-1].assigns, *at[p]))
            else:
                prologue += at[p]
        return StepGraph(
            cell=name, parameters=self.forward.parameters, states=dict(states), results=dict(results), output="",
            x=None, vectors=tuple(v for v in self.forward.vectors if v.var in wanted),
            invariants=(*invariants, *at[Level.INVARIANT]), hoisted_products=(), hoisted=at[Level.INPUT],
            hoisted_outputs=hoisted, projected=hoisted, hoisted_statistics=before.statistics,
            normalized=at[Level.NORMALIZED],
            invariant_outputs=unique(v for v in late if self._level(v) == Level.INVARIANT), prologue=prologue,
            phases=tuple(phases), given=given, outputs=outputs, sums=sums, outer_products=tuple(outer_products))

    def _level(self, var: Var) -> int:
        """The level of a variable in the new graph, where forward values are inputs, or constant."""
        if var in self.own:
            return self.own[var]
        return Level.INVARIANT if self.level.get(var, Level.INPUT) == Level.INVARIANT else Level.INPUT

    def _in_order(self, wanted: set[Var]) -> list[Var]:
        """Forward variables in the order of the forward step, then the others as they were made."""
        return [v for v in dict.fromkeys((*self.level, *self.own)) if v in wanted]
