"""A short name for what a cell computes, whatever it is called.

It is the digest of a canonical text of the step graph. Records name users' cells by it, so the text must stay as it is;
the one for people is ``ecornn/cli/step_text.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ecornn.analysis.declared import Source
from ecornn.analysis.graph import analyse
from ecornn.analysis.step import Assign, Product, Statistic, StepGraph, Term
from ecornn.errors import CellError

# (I, H) of all orders of magnitude, since a step may be another where H is large; a cell that reads x at [b, j] needs
# I = H, one with heads or groups a multiple of their number.
SIZES = ((2, 3), (3, 3), (8, 8), (64, 64), (384, 384), (1024, 1024), (4096, 4096), (16384, 16384))
OTHERWISE = ((5040, 5040),)  # a multiple of 5, 7, 9, 10: of a cell that can have none of these sizes


def digest(cell: Source) -> str:
    """Eight hexadecimal digits, equal for equal step graphs at all of ``SIZES`` that the cell can have. Raises
    :class:`CellError` where the step cannot be analysed."""
    errors: list[CellError] = []
    graphs: dict[tuple[int, int], StepGraph] = {}
    for input, hidden in (*SIZES, *OTHERWISE):
        if (input, hidden) in OTHERWISE and graphs:
            continue
        try:
            graphs[input, hidden] = analyse(cell, input + len(cell.inputs) * hidden, hidden, sums=False)
        except CellError as error:
            errors.append(error)
    if not graphs:
        raise errors[0]
    texts = [canonical(graph) for graph in graphs.values()]
    if len({_without_sizes(graph) for graph in graphs.values()}) > 1:  # else the smallest says it all
        texts[0] = "\n".join(f"{input} {hidden}\n{text}" for (input, hidden), text in zip(graphs, texts, strict=True))
    return hashlib.sha256(texts[0].encode()).hexdigest()[:8]


def _without_sizes(graph: StepGraph) -> str:
    shapes = [f"parameter {n}{s}" for n, s in graph.parameters.items()]
    gates = [f"parameter {n} {s[0]} {len(s)}" for n, s in graph.parameters.items()]
    return "\n".join(gates + [line for line in canonical(graph).splitlines() if line not in shapes])


def canonical(graph: StepGraph) -> str:
    """The step of a cell as text, one assignment a line; equal for equal cells."""
    lines = [f"cell {graph.cell}({', '.join(graph.states)}) -> {graph.output}"]
    lines += [f"parameter {n}{s}" for n, s in graph.parameters.items()]
    lines += [f"input {n}" for n in graph.inputs]
    lines += [f"  {v.var.name} = " + ("j" if v.numbers else f"{v.parameter}[{v.gate}, j]") for v in graph.vectors]
    lines += _block("once:", (), graph.invariants)
    lines += _block("hoisted out of time:", graph.hoisted_products, graph.hoisted)
    lines += _block("hoisted, statistics:", (), graph.normalized, graph.hoisted_statistics)
    lines += _block("step:", (), graph.prologue)
    for number, phase in enumerate(graph.phases, 1):
        names = ", ".join(dict.fromkeys(v.name for v in (
            *phase.operands, *(o for s in phase.statistics for o in s.operands))))
        lines += _block(f"phase {number}, exchange of {names or 'nothing'}:", phase.products, phase.assigns,
                        phase.statistics)
    lines.append("states: " + ", ".join(f"{n} = {v.name}" for n, v in graph.results.items()))
    lines += ["written: " + ", ".join(v.name for v in graph.outputs)] if graph.outputs else []
    return "\n".join(lines)


def _block(title: str, products: Iterable[Product], assigns: Iterable[Assign],
           statistics: Iterable[Statistic] = ()) -> list[str]:
    lines = [f"  {p.var.name} = sum_k {' + '.join(_term(t) for t in p.terms)}" for p in products]
    for s in statistics:
        kind = ("shift, " if s.shift else "") + ("maximum" if s.largest else "sum")
        lines.append(f"  {s.total.name} = {kind} of {', '.join(v.name for v in s.operands)} over {s.over}")
        if s.squares is not None:
            lines.append(f"  {s.squares.name} = sum of the squares of their deviations from its mean")
    for a in assigns:  # in TVM's notation, on one line
        lines.append(f"  {a.var.name} = {' '.join(a.value.script(show_meta=False).replace('T.', '').split())}")
    return [title, *lines] if lines else []


def _term(term: Term) -> str:
    source = "x" if term.operand is None else term.operand.name
    text = f"{source}[b, k] * {term.parameter}[{term.gate}, {'k, j' if term.transposed else 'j, k'}]"
    return text if term.heads == 1 else f"{text} in {term.heads} heads"
