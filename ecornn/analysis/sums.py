"""Products of different operands that are only ever added up are one product: of x and of h, in most cells.

:func:`summed` makes them so in each exchange of a step, with half as many weights on a chip, where each product has
room for each operand; :func:`one_by_one` goes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations
from operator import add
from typing import TYPE_CHECKING

from ecornn.analysis.operators import variable
from ecornn.analysis.scalar import children, is_leaf, rebuild, terms, variables
from ecornn.analysis.step import Assign, Phase, Product, StepGraph

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var


def summed(graph: StepGraph) -> StepGraph:
    """The graph with as few products as there may be."""
    return replace(graph, phases=tuple(_fewest(phase, _read_later(graph, n)) for n, phase in enumerate(graph.phases)))


def _fewest(phase: Phase, wanted: list[Var]) -> Phase:
    """The phase with pairs of products as one, and pairs of these, unless one would multiply a value twice."""
    while True:
        products, assigns = merged(phase.products, phase.assigns, wanted)
        twice = any(len({t.operand for t in p.terms}) < len(p.terms) for p in products)
        if twice or len(products) == len(phase.products):
            return phase
        phase = replace(phase, products=products, assigns=assigns)


def _read_later(graph: StepGraph, number: int) -> list[Var]:
    """The values of a phase that later phases read, or that are results."""
    made, read = {*graph.phases[number].made}, [*graph.results.values()]
    for later in graph.phases[number + 1:]:
        read += [*later.operands, *(o for s in later.statistics for o in s.operands)]
        read += [v for a in later.assigns for v in variables(a.value)]
    return [v for v in dict.fromkeys(read) if v in made]


def one_by_one(graph: StepGraph) -> StepGraph:
    """The graph with products of one operand each, for kernels that know no others."""
    return replace(graph, phases=tuple(_apart(phase) for phase in graph.phases))


def _apart(phase: Phase) -> Phase:
    products: list[Product] = []
    sums: list[Assign] = []
    for product in phase.products:
        if len(product.terms) == 1:
            products.append(product)
            continue
        parts = [variable(f"{product.var.name}_{n}") for n in range(len(product.terms))]
        products += [Product(var, (term,)) for var, term in zip(parts, product.terms, strict=True)]
        sums.append(Assign(product.var, reduce(add, parts)))
    return replace(phase, products=tuple(products), assigns=(*sums, *phase.assigns)) if sums else phase


def merged(products: Sequence[Product], assigns: Iterable[Assign],
           wanted: Iterable[Var]) -> tuple[tuple[Product, ...], tuple[Assign, ...]]:
    """Products and assignments that give ``wanted``, with fewer products where that is possible."""
    wanted, assigns = list(wanted), tuple(assigns)
    if len({_operand(p) for p in products}) < 2:
        return tuple(products), assigns
    sums = _Sums(products, assigns)
    sums.rewrite(wanted, {})
    pairs: dict[Var, Var] = {}
    for p, q in combinations(products, 2):
        if not {p.var, q.var} & {*pairs, *pairs.values()} and _operand(p) != _operand(q) and all(
                (p.var in those) == (q.var in those) for those in sums.found):
            pairs[p.var] = q.var
    second = {q: p for p, q in pairs.items()}
    by_var = {p.var: p for p in products}
    left = tuple(Product(p.var, (*p.terms, *by_var[pairs[p.var]].terms)) if p.var in pairs else p
                 for p in products if p.var not in second)
    return left, tuple(_Sums(products, assigns).rewrite(wanted, second)) if pairs else assigns


def _operand(product: Product) -> tuple[Var | None, ...]:
    return tuple(t.operand for t in product.terms)


class _Sums:
    """Sums taken apart. ``found``: the products that are in each, or alone in an expression."""

    def __init__(self, products: Sequence[Product], assigns: Iterable[Assign]) -> None:
        self.products = {p.var for p in products}
        self.value = {a.var: a.value for a in assigns}
        self.found: list[set[Var]] = []

    def rewrite(self, wanted: Iterable[Var], left_out: dict[Var, Var]) -> list[Assign]:
        """The assignments that ``wanted`` needs, whole sums in one expression, without the products ``left_out``."""
        self.left_out = left_out
        self.made: dict[Var, Assign] = {}
        for var in wanted:
            self._visit(var)
        return list(self.made.values())

    def _visit(self, var: Var) -> None:
        if var in self.products:
            self.found.append({var})
        elif var in self.value and var not in self.made:
            self.made[var] = Assign(var, self._expression(self.value[var]))

    def _expression(self, e: Expr) -> Expr:
        if type(e).__name__ in ("Add", "Sub"):
            return self._sum(e)
        if is_leaf(e):
            if type(e).__name__ == "Var":
                self._visit(e)
            return e
        return rebuild(e, [self._expression(c) for c in children(e)])

    def _sum(self, e: Expr) -> Expr:
        parts = self._addends(e)
        added = [t for negated, t in parts if not negated and self._is_product(t)]
        once = {t for t in added if sum(t.same_as(o) for o in added) == 1}
        self.found.append(once)
        total = None
        for negated, t in sorted(parts, key=lambda part: part[0]):  # the first one is not negated, if there is such
            merges = self._is_product(t) and t in once
            if merges and t in self.left_out:
                continue
            value = t if merges else self._expression(t)
            total = (-value if negated else value) if total is None else total - value if negated else total + value
        return total

    def _addends(self, e: Expr) -> list[tuple[bool, Expr]]:
        """The terms of a sum, with sums that have a product in them in place of their variables."""
        addends: list[tuple[bool, Expr]] = []
        for negated, t in terms(e):
            inner = self._addends(self.value[t]) if self._is_sum(t) else [(False, t)]
            addends += [(negated != other, part) for other, part in inner]
        return addends

    def _is_sum(self, e: Expr) -> bool:
        """True for the variable of a sum that has a product in it."""
        if type(e).__name__ != "Var" or e not in self.value:
            return False
        value = self.value[e]
        return type(value).__name__ in ("Add", "Sub") and any(
            self._is_product(t) or self._is_sum(t) for _, t in terms(value))

    def _is_product(self, e: Expr) -> bool:
        return type(e).__name__ == "Var" and e in self.products
