"""Sorts assignments of an adjoint into a step graph: which are constant, which are known before the steps begin, which
follow which exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ecornn.analysis.liveness import levels, needed
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import (
    INPUT,
    INVARIANT,
    NORMALIZED,
    STATE,
    Assign,
    OuterProduct,
    Phase,
    Product,
    Statistic,
    StepGraph,
    Sum,
)
from ecornn.analysis.sweep import unique

if TYPE_CHECKING:
    from tvm.tirx import Var


@dataclass(frozen=True)
class Exchange:
    """Products and statistics that come before the assignments of a level."""

    products: tuple[Product, ...] = ()
    statistics: tuple[Statistic, ...] = ()


def constants(forward: StepGraph, factors: Iterable[Assign]) -> set[Var]:
    """The variables of the forward step, and of ``factors``, that depend on parameters only."""
    known = {v for v, at in levels(forward).items() if at == INVARIANT}
    for a in factors:
        if known.issuperset(variables(a.value)):
            known.add(a.var)
    return known


class Parts:
    """A step graph in the making, beside the ``forward`` one whose variables it may read.

    Parameters
    ----------
    factors : assignments that gradients are multiplied by, of forward variables alone
    assigns : those of gradients, with the ``level`` of each
    exchanges : level -> the exchange before its assignments
    """

    def __init__(self, forward: StepGraph, factors: Iterable[Assign], assigns: Iterable[Assign],
                 level: Mapping[Var, int], exchanges: Mapping[int, Exchange]) -> None:
        self.forward, self.exchanges = forward, dict(exchanges)
        self.level, self.factors = levels(forward), tuple(factors)
        known = constants(forward, self.factors)
        self.level.update((a.var, INVARIANT if a.var in known else INPUT) for a in self.factors)
        self.assigns, self.own = tuple(assigns), dict(level)

    def graph(self, name: str, states: Mapping[str, Var], results: Mapping[str, Var], outputs: Iterable[Var] = (),
              sums: Iterable[Sum] = (), outer_products: Iterable[OuterProduct] = ()) -> StepGraph:
        """The graph of ``results``, ``outputs`` and ``sums``, and of no more."""
        outputs, sums = unique(outputs), tuple(sums)
        exchanged = [v for e in self.exchanges.values() for s in e.statistics for v in s.operands]
        exchanged += [t.operand for e in self.exchanges.values() for p in e.products for t in p.terms]
        wanted = {*results.values(), *outputs, *(s.value for s in sums), *exchanged}
        assigns, wanted = needed((*self.factors, *self.assigns), wanted)
        invariants, wanted = needed(self.forward.invariants, wanted)
        made = {a.var for a in assigns} | {v for e in self.exchanges.values() for s in e.statistics for v in s.made}
        made |= {p.var for e in self.exchanges.values() for p in e.products} | set(states.values())
        given = unique(v for v in self._in_order(wanted) if v not in made and self._level(v) > INVARIANT)
        at = {level: tuple(a for a in assigns if self._level(a.var) == level)
              for level in range(INVARIANT, max((STATE, *self.exchanges)) + 1)}
        last = max((0, *self.exchanges))
        late = [v for level, those in at.items() if level >= STATE for a in those for v in variables(a.value)]
        exchanges = [e for level, e in self.exchanges.items() if level > 0]
        late += [v for e in exchanges for s in e.statistics for v in s.operands]
        late += [t.operand for e in exchanges for p in e.products for t in p.terms]
        late += [*results.values(), *outputs, *(s.value for s in sums)]
        before = self.exchanges.get(NORMALIZED, Exchange())
        hoisted = unique(v for v in late if v not in states.values() and self._level(v) in (INPUT, NORMALIZED))
        vectors = tuple(v for v in self.forward.vectors if v.var in wanted)
        exchanged_at = {p for p, e in self.exchanges.items() if e.products or e.statistics}
        prologue, phases = at[STATE], list[Phase]()
        for p in range(1, last + 1):
            if p in exchanged_at:
                phases.append(self._phase(p, at[p]))
            elif phases:  # where nothing is exchanged a phase goes on
                phases[-1] = replace(phases[-1], assigns=(*phases[-1].assigns, *at[p]))
            else:
                prologue += at[p]
        return StepGraph(
            cell=name, parameters=self.forward.parameters, states=dict(states), results=dict(results), output="",
            x=None, vectors=vectors, invariants=(*invariants, *at[INVARIANT]), hoisted_products=(), hoisted=at[INPUT],
            hoisted_outputs=hoisted, projected=hoisted, hoisted_statistics=before.statistics, normalized=at[NORMALIZED],
            invariant_outputs=unique(v for v in late if self._level(v) == INVARIANT), prologue=prologue,
            phases=tuple(phases), given=given, outputs=outputs, sums=sums, outer_products=tuple(outer_products))

    def _phase(self, p: int, assigns: tuple[Assign, ...]) -> Phase:
        exchange = self.exchanges[p]
        operands = unique(t.operand for product in exchange.products for t in product.terms)
        return Phase(operands, exchange.products, assigns, exchange.statistics)

    def _level(self, var: Var) -> int:
        """The level of a variable in the new graph, where forward values are inputs, or constant."""
        if var in self.own:
            return self.own[var]
        return INVARIANT if self.level.get(var, INPUT) == INVARIANT else INPUT

    def _in_order(self, wanted: set[Var]) -> list[Var]:
        """Forward variables in the order of the forward step, then the others as they were made."""
        ranks = {v: n for n, v in enumerate((*self.level, *self.own))}
        return sorted((v for v in wanted if v in ranks), key=ranks.__getitem__)
