"""The register-tiled product: ``rows`` batch rows times ``columns`` vectors of weights.

    for k: load the weights of k, one vector for each gate and vector of units
           for each row: broadcast operand[row, k], one fma for each vector

Accumulators and weights stay in registers; weights are packed in the order in which the loop
reads them, (tile, k, gate, vector, lane).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecornn.analysis import Row
from ecornn.program import Packing
from ecornn.schedules.cpu.emit import Emitter

Expr = Any  # tvm.ir.PrimExpr


def packing(rows: Sequence[Row], hidden: int, k: int, vectors: int, lanes: int) -> Packing:
    """Weights of ``rows``, each (H, K), as (tile, K, gate, vector, lane)."""
    tiles = -(-hidden // (vectors * lanes))
    gates = len(rows)
    return Packing(sources=tuple((r.weight, r.gate) for r in rows),
                   pad=(gates, tiles * vectors * lanes, k), split=(gates, tiles, vectors, lanes, k),
                   order=(1, 4, 0, 2, 3), dtype="float32")


def accumulators(e: Emitter, rows: int, columns: int, name: str) -> list[list[Any]]:
    """Zeroed registers, [row][column]."""
    made = [[e.local(f"{name}_{m}_{n}") for n in range(columns)] for m in range(rows)]
    for row in made:
        for register in row:
            e.vstore(register, 0, e.splat(0.0))
    return made


def multiply(e: Emitter, into: list[list[Any]], operand: Any, starts: Sequence[Expr], weights: Any,
             weight_start: Expr, k: int, unroll: int) -> None:
    """Adds products over ``k`` values to the registers ``into``.

    ``starts``: where each row of ``operand`` starts; ``weight_start``: where the tile's weights start.
    """
    columns = len(into[0])
    width = columns * e.lanes

    def one(at: Expr) -> None:
        vectors = [e.let(f"w{n}", e.vload(weights, weight_start + at * e.index(width) + e.index(n * e.lanes)))
                   for n in range(columns)]
        for start, row in zip(starts, into, strict=True):
            value = e.let("value", e.splat(e.load(operand, start + at)))
            for register, vector in zip(row, vectors, strict=True):
                e.vstore(register, 0, e.fma(value, vector, e.vload(register, 0)))

    unroll = min(unroll, k)
    with e.loop("k", k // unroll) as block:
        base = e.let("k_first", block * e.index(unroll))
        for u in range(unroll):
            one(base + e.index(u))
    for rest in range(k - k % unroll, k):
        one(e.index(rest))
