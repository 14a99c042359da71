"""Sums of products in each exchange of a step: products of different operands that are only ever added up become one,
with half as many weights on a chip, where each product has room for each operand; and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ecornn.analysis.merging import merged
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Phase, Product, StepGraph

if TYPE_CHECKING:
    from tvm.tirx import Var


def summed(graph: StepGraph) -> StepGraph:
    """The graph with as few products as there may be."""
    phases = []
    for number, phase in enumerate(graph.phases):
        phases.append(_fewest(phase, _read_later(graph, number)))
    return replace(graph, phases=tuple(phases))


def _fewest(phase: Phase, wanted: list[Var]) -> Phase:
    """Two products become one, and two of these, until there are no more, or one would multiply a value twice."""
    while True:
        products, assigns = merged(phase.products, phase.assigns, wanted)
        twice = any(len({t.operand for t in p.terms}) < len(p.terms) for p in products)
        if twice or len(products) == len(phase.products):
            return phase
        phase = replace(phase, products=products, assigns=assigns)


def _read_later(graph: StepGraph, number: int) -> list[Var]:
    """Of a phase's values those that later phases read, or that are results."""
    phase = graph.phases[number]
    made = {*(p.var for p in phase.products), *(a.var for a in phase.assigns)}
    read = [*graph.results.values()]
    for later in graph.phases[number + 1:]:
        read += [*later.operands, *(o for s in later.statistics for o in s.operands)]
        read += [v for a in later.assigns for v in variables(a.value)]
    return [v for v in dict.fromkeys(read) if v in made]


def one_by_one(graph: StepGraph) -> StepGraph:
    """The graph with products of one operand each, for kernels that know no others."""
    return replace(graph, phases=tuple(_apart(phase) for phase in graph.phases))


def _apart(phase: Phase) -> Phase:
    from tvm import tirx

    products: list[Product] = []
    sums: list[Assign] = []
    for product in phase.products:
        if len(product.terms) == 1:
            products.append(product)
            continue
        parts = [tirx.Var(f"{product.var.name}_{n}", "float32") for n in range(len(product.terms))]
        products += [Product(var, (term,)) for var, term in zip(parts, product.terms, strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        sums.append(Assign(product.var, total))
    return phase if not sums else replace(phase, products=tuple(products), assigns=(*sums, *phase.assigns))
