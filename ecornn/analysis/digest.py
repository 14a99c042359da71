"""A short name for what a cell computes, whatever it is called."""

from __future__ import annotations

import hashlib

from ecornn.analysis.graph import analyse
from ecornn.analysis.source import Source
from ecornn.analysis.step import StepGraph
from ecornn.errors import CellError

# Of all orders of magnitude, since a step may be another where H is large; a cell that reads x at [b, j] needs I = H,
# one with heads or groups a multiple of their number.
SIZES = ((2, 3), (3, 3), (8, 8), (64, 64), (384, 384), (1024, 1024), (4096, 4096), (16384, 16384))
OTHERWISE = ((5040, 5040),)  # a multiple of 5, 7, 9, 10: of a cell that can have none of these sizes


def digest(cell: Source) -> str:
    """Eight hexadecimal digits, equal for cells of equal step graphs at all of ``SIZES`` that they can have.

    Raises :class:`CellError` where the cell's step cannot be analysed.
    """
    first: CellError | None = None
    found: dict[tuple[int, int], StepGraph] = {}
    for size in (*SIZES, *OTHERWISE):
        if size in OTHERWISE and found:
            continue
        try:
            found[size] = analyse(cell, size[0] + len(cell.inputs) * size[1], size[1], sums=False)
        except CellError as error:
            first = first or error
    if not found:
        assert first is not None
        raise first
    texts = [graph.describe() for graph in found.values()]
    if len({_scalars(graph) for graph in found.values()}) > 1:  # else the smallest says it all
        texts[0] = "\n".join(f"{input} {hidden}\n{text}" for (input, hidden), text in zip(found, texts, strict=True))
    return hashlib.sha256(texts[0].encode()).hexdigest()[:8]


def _scalars(graph: StepGraph) -> str:
    """A step without its sizes."""
    shapes = [f"parameter {n}{s}" for n, s in graph.parameters.items()]
    gates = [f"parameter {n} {s[0]} {len(s)}" for n, s in graph.parameters.items()]
    lines = graph.describe().splitlines()
    return "\n".join(gates + [line for line in lines if line not in shapes])
