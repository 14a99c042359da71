"""Operands as 8-bit integers, for int8 weights: each row of a product's operand, by its largest magnitude.

    scale = max_k |v[k]| / 127,  q[k] = round(v[k] / scale),  v[k] ~ scale * q[k]

Weights are quantized alike, unit by unit, when they are packed, and stored with 128 added, as the
instruction wants one unsigned factor. So sum_k (w[k] + 128) q[k] - 128 sum_k q[k] is the integer product,
which the scales of row and unit make a float32. Both roundings together cost about 1e-2 relative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.emit import Emitter

LARGEST, OFFSET = 127.0, 128
TINY = 1e-30  # instead of dividing by zero in a row of zeros


@dataclass(frozen=True)
class Integers:
    """Buffers of an operand's rows: ``words`` int32, four values each, ``scales`` float32, ``sums`` int32 (of the
    values of a row, times 128); ``width``: values of a row with its padding."""

    words: TirBuffer
    scales: TirBuffer
    sums: TirBuffer
    width: int


def quantize_row(e: Emitter, into: Integers, row: Expr, load: Callable[[Expr], Expr]) -> None:
    """Writes one row; ``load`` gives the vector from an index on, zero past the end of the operand."""
    magnitudes, spoilt, sums = e.local("magnitudes"), e.local("spoilt"), e.local("sums", "int32")
    e.vstore(magnitudes, 0, e.splat(0.0))
    e.vstore(spoilt, 0, e.splat(0.0))
    e.vstore(sums, 0, e.splat(0, "int32"))
    with e.loop("part", into.width // e.lanes) as part:
        value = load(part * e.index(e.lanes))
        e.vstore(magnitudes, 0, e.tirx.Max(e.vload(magnitudes, 0), e.intrinsic("fabs", value)))
        e.vstore(spoilt, 0, e.fma(value, e.splat(0.0), e.vload(spoilt, 0)))  # NaN once there is NaN or infinity
    largest = across(e, magnitudes, e.tirx.Max)
    inverse = e.let("inverse", e.splat(LARGEST) / e.splat(e.tirx.Max(largest, e.tirx.const(TINY, "float32"))))
    e.store(into.scales, row, largest / e.tirx.const(LARGEST, "float32") + across(e, spoilt, lambda a, b: a + b))
    with e.loop("part", into.width // e.lanes) as part:
        at = e.let("at", part * e.index(e.lanes))
        # Max returns its second operand for NaN, of which no integer may be made
        bounded = e.tirx.Min(e.tirx.Max(load(at) * inverse, e.splat(-LARGEST)), e.splat(LARGEST))
        whole = e.let("whole", e.cast("int32", e.intrinsic("nearbyint", bounded)))
        e.vstore(sums, 0, e.vload(sums, 0) + whole)
        words = e.lanes // 4
        first = e.div(row * e.index(into.width) + at, 4)
        packed = e.tirx.reinterpret(f"int32x{words}", e.cast("int8", whole))
        e.add(e.tirx.BufferStore(into.words, packed, [e.tirx.Ramp(first, e.index(1), words)]))
    e.store(into.sums, row, across(e, sums, lambda a, b: a + b) * e.tirx.const(OFFSET, "int32"))


def across(e: Emitter, vector: TirBuffer, join: Callable[[Expr, Expr], Expr], lanes: range | None = None) -> Expr:
    """All lanes of a local vector, or those given, joined."""
    first, *others = lanes or range(e.lanes)
    total = e.load(vector, first)
    for lane in others:
        total = e.let("joined", join(total, e.load(vector, lane)))
    return total


def restore(e: Emitter, product: Expr, integers: Integers, row: Expr, unit_scales: Expr) -> Expr:
    """A vector of the float32 product, from that of the integers."""
    exact = product - e.splat(e.load(integers.sums, row))
    return e.cast("float32", exact) * (e.splat(e.load(integers.scales, row)) * unit_scales)
