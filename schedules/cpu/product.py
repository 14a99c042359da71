"""The register-tiled product: ``rows`` batch rows times ``columns`` vectors of weights.

    for k: load the weights of k, one vector for each gate and vector of units
           for each row: broadcast operand[row, k], one fma for each vector

Accumulators and weights stay in registers; weights are packed in the order in which the loop
reads them, (tile, k, gate, vector, lane). A lane is 32 bits wide: one float32 weight, or a pair of bfloat16 that
is widened to two vectors, or four 8-bit integers that one instruction multiplies with four of the operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ecornn.analysis import Row
from ecornn.program import Packing
from ecornn.schedules.cpu.emit import Emitter

Expr = Any  # tvm.ir.PrimExpr
GROUP = {"float32": 1, "bfloat16": 2, "int8": 4}  # weights of a lane, neighbours in k
LINE = 16  # lanes in a cache line
ELEMENT = {"float32": "float32", "bfloat16": "uint32", "int8": "int32"}  # how code sees a lane


@dataclass(frozen=True)
class Ahead:
    """Weights to ask for while others are multiplied: ``share`` lanes from the lane ``start`` on."""

    start: Expr
    share: int


def packing(rows: Sequence[Row], hidden: int, k: int, vectors: int, lanes: int, kind: str) -> Packing:
    """Weights of ``rows``, each (H, K), as (tile, K / group, gate, vector, lane, group)."""
    tiles, gates, group = -(-hidden // (vectors * lanes)), len(rows), GROUP[kind]
    groups = -(-k // group)
    return Packing(sources=tuple((r.weight, r.gate) for r in rows),
                   pad=(gates, tiles * vectors * lanes, groups * group),
                   split=(gates, tiles, vectors, lanes, groups, group), order=(1, 4, 0, 2, 3, 5), dtype=kind)


def accumulators(e: Emitter, rows: int, columns: int, name: str, kind: str) -> list[list[Any]]:
    """Zeroed registers, [row][column]: int32 for int8 weights, else float32."""
    dtype = "int32" if kind == "int8" else "float32"
    made = [[e.local(f"{name}_{m}_{n}", dtype) for n in range(columns)] for m in range(rows)]
    for row in made:
        for register in row:
            e.vstore(register, 0, e.splat(0, dtype))
    return made


def multiply(e: Emitter, into: list[list[Any]], operand: Any, starts: Sequence[Expr], weights: Any,
             weight_start: Expr, k: int, unroll: int, kind: str, ahead: Ahead | None = None) -> None:
    """Adds products over ``k`` values to the registers ``into``.

    ``starts``: where each row of ``operand`` starts; ``weight_start``: where the tile's weights start. The
    elements of both are those of :data:`ELEMENT`; an operand for bfloat16 weights is float32. ``ahead`` is asked for
    line by line, spread over the loop.
    """
    columns, group = len(into[0]), GROUP[kind]
    width = columns * e.lanes

    def one(at: Expr, values: int = group) -> None:
        loaded = [e.let(f"w{n}", e.vload(weights, weight_start + at * e.index(width) + e.index(n * e.lanes)))
                  for n in range(columns)]
        for place in range(1 if kind == "int8" else values):
            vectors = [half(e, v, place) for v in loaded] if kind == "bfloat16" else loaded
            index = at if kind == "int8" else at * e.index(group) + e.index(place)
            for start, row in zip(starts, into, strict=True):
                value = e.let("value", e.splat(e.load(operand, start + index)))
                for register, vector in zip(row, vectors, strict=True):
                    total = e.vload(register, 0)
                    product = e.fma(value, vector, total) if kind != "int8" else dot(e, total, vector, value)
                    e.vstore(register, 0, product)

    groups = -(-k // group)
    whole = groups if kind == "int8" else k // group  # integer operands are padded with zeros
    unroll = max(1, min(unroll, whole))
    blocks = whole // unroll
    asked = ahead or Ahead(e.index(0), 0)
    lines = -(-asked.share // (LINE * max(1, blocks)))  # in each block
    with e.loop("k", blocks) as block:
        base = e.let("k_first", block * e.index(unroll))
        for u in range(unroll):
            one(base + e.index(u))
            for line in range(u * lines // unroll, (u + 1) * lines // unroll):
                e.prefetch(weights, asked.start + (block * e.index(lines) + e.index(line)) * e.index(LINE))
    for rest in range(whole - whole % unroll, whole):
        one(e.index(rest))
    if whole < groups:
        one(e.index(whole), k % group)


def half(e: Emitter, pair: Expr, place: int) -> Expr:
    """The first or second bfloat16 of each lane, as float32: it is the upper half of a float32."""
    bits = pair << e.splat(16, "uint32") if place == 0 else pair & e.splat(0xFFFF0000, "uint32")
    return e.let("half", e.tirx.reinterpret(e.vector_type, bits))


def dot(e: Emitter, total: Expr, unsigned: Expr, signed: Expr) -> Expr:
    """``total`` plus, in each lane, four products of an unsigned with a signed 8-bit integer (VNNI)."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}"
    factors = (e.tirx.reinterpret(f"int8x{4 * e.lanes}", v) for v in (unsigned, signed))
    return e.tirx.call_llvm_pure_intrin(f"int32x{e.lanes}", name, total, *factors)
