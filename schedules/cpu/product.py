"""The register-tiled product: ``rows`` batch rows times ``columns`` vectors of weights.

    for k: load the weights of k, one vector for each gate and vector of units
           for each row: broadcast operand[row, k], one fma for each vector

Accumulators and weights stay in registers; weights are packed in the order in which the loop
reads them, (tile, k, gate, vector, lane). Some kinds of weights have more than one in a lane, see stored.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.analysis.step import Term
from ecornn.program import Packing
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.stored import STORED, widen

LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Ahead:
    """Weights to ask for while others are multiplied: ``share`` words from the word ``start`` on."""

    start: Expr
    share: int


def packing(terms: Sequence[Term], hidden: int, k: int, vectors: int, lanes: int, kind: str) -> Packing:
    """Weights of ``terms``, each (H, K), or (K, H) where transposed; with heads (H, K) of the K of a head, in which a
    whole number of tiles lies, and blocks (K, K) where transposed; as (tile, K / group, gate, vector, lane, group);
    of int16 and int21 as (..., vector, word, lane)."""
    tiles, gates, group = -(-hidden // (vectors * lanes)), len(terms), STORED[kind].group
    groups, sources = -(-k // group), tuple(t.source for t in terms)
    if terms[0].heads > 1:
        assert k % (vectors * lanes) == 0 and hidden == k * terms[0].heads
    if terms[0].transposed and terms[0].heads > 1:
        assert group == 1  # what trains has whole words
        each = k // (vectors * lanes)
        return Packing(sources, pad=(gates, hidden, k), split=(gates, terms[0].heads, k, each, vectors, lanes),
                       order=(1, 3, 2, 0, 4, 5), dtype=kind)
    if terms[0].transposed:
        return Packing(sources, pad=(gates, groups * group, tiles * vectors * lanes),
                       split=(gates, groups, group, tiles, vectors, lanes), order=(3, 1, 0, 4, 5, 2), dtype=kind)
    return Packing(sources, pad=(gates, tiles * vectors * lanes, groups * group),
                   split=(gates, tiles, vectors, lanes, groups, group), order=(1, 4, 0, 2, 3, 5), dtype=kind)


def accumulators(e: Emitter, rows: int, columns: int, name: str, kind: str) -> list[list[TirBuffer]]:
    """Zeroed registers, [row][column]: int32 for int8 weights, else of the layer's type."""
    dtype = "int32" if kind == "int8" else e.real
    made = [[e.local(f"{name}_{m}_{n}", dtype) for n in range(columns)] for m in range(rows)]
    for row in made:
        for register in row:
            e.vstore(register, 0, e.splat(0, dtype))
    return made


def multiply(e: Emitter, into: list[list[TirBuffer]], operand: TirBuffer, starts: Sequence[Expr], weights: TirBuffer,
             weight_start: Expr, k: int, unroll: int, kind: str, ahead: Ahead | None = None) -> None:
    """Adds products over ``k`` values to the registers ``into``.

    ``starts``: where each row of ``operand`` starts; ``weight_start``: where the tile's weights start. The
    operand is of the layer's type, for int8 weights int32 of four values each. ``ahead`` is asked for line by line,
    spread over the loop.
    """
    columns, stored = len(into[0]), STORED[kind]
    group = stored.group

    def one(at: Expr, values: int = group) -> None:
        first = e.let("group", weight_start + at * e.index(columns * stored.words * e.lanes))
        loaded = [[e.let("words", e.vload(weights, first + e.index((n * stored.words + word) * e.lanes)))
                   for word in range(stored.words)] for n in range(columns)]
        for place in range(1 if kind == "int8" else values):
            vectors = [widen(e, words, place, kind) for words in loaded]
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
    line = LINE // stored.word
    lines = -(-asked.share // (line * max(1, blocks)))  # in each block
    with e.loop("k", blocks) as block:
        base = e.let("k_first", block * e.index(unroll))
        for u in range(unroll):
            one(base + e.index(u))
            for number in range(u * lines // unroll, (u + 1) * lines // unroll):
                e.prefetch(weights, asked.start + (block * e.index(lines) + e.index(number)) * e.index(line))
    for rest in range(whole - whole % unroll, whole):
        one(e.index(rest))
    if whole < groups:
        one(e.index(whole), k % group)


def dot(e: Emitter, total: Expr, unsigned: Expr, signed: Expr) -> Expr:
    """``total`` plus, in each lane, four products of an unsigned with a signed 8-bit integer (VNNI)."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}"
    factors = (e.tirx.reinterpret(f"int8x{4 * e.lanes}", v) for v in (unsigned, signed))
    return e.tirx.call_llvm_pure_intrin(f"int32x{e.lanes}", name, total, *factors)
