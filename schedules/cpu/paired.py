"""Products with fewer multiplications: pairs of k share one (Winograd 1968).

    x1 w1 + x2 w2 = (x1 + w2) (x2 + w1) - x1 x2 - w1 w2

The last two terms are sums over k of a row of the operand, and of a unit's weights, alone: one number a row, computed
with a copy of the operand, and one a unit, packed. What is left for each pair is one multiply-add and two additions,
which pays on CPUs that add in other units than those that multiply (AMD's since Zen), where the additions of pairs run
beside the multiply-adds of the others: of ``pairs`` = 3 or 4 values of k two are a pair, so that 2 or 3 multiply-adds
and 2 additions take the place of 3 or 4 multiply-adds.

K is cut into ``pairs`` sections; the k-th values of the first two are a pair. Every other pair enters with the
opposite sign, -(w2 - x1) (w1 - x2) + x1 x2 + w1 w2, so that the sums stay small where an operand has a mean.

Rounding: both factors are scaled by powers of two to a mean magnitude of 1 to 2, each row and each unit for itself;
then the error is bounded by eps ||x|| ||w|| as that of a plain sum is for dense factors. Rows whose largest
magnitude is more than SPREAD times the mean, or not finite, are multiplied in the plain way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product

from ecornn.analysis.step import Term
from ecornn.program import Packing
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.product import across

SPREAD = 32.0
PLAIN = 1e38  # not NaN: TVM takes "not a < b" for "b <= a"
EXPONENT, ONE_OVER = 0x7F800000, 0x7F000000  # bits of a float32's power of two; minus those of 2**n: those of 2**-n
UNROLL = 2  # one pair of each sign


def section(k: int, pairs: int) -> int:
    return -(-k // (UNROLL * pairs)) * UNROLL  # values of k in a section: even


@dataclass(frozen=True)
class Paired:
    """An operand's rows, scaled: ``copies``, the same memory by several names; ``factors``, what a row must be
    multiplied with in the end; ``sums``, of a row's pairs, negative, PLAIN where the row is for the plain way."""

    copies: Sequence[TirBuffer]
    factors: TirBuffer
    sums: TirBuffer
    k: int
    pairs: int
    lanes: int

    @property
    def length(self) -> int:
        return section(self.k, self.pairs)

    @property
    def width(self) -> int:
        return width_of(self.k, self.pairs, self.lanes)

    @property
    def stride(self) -> int:
        return self.width // self.pairs  # elements from one section of a row to the next: whole vectors


def width_of(k: int, pairs: int, lanes: int) -> int:
    return pairs * -(-section(k, pairs) // lanes) * lanes  # elements of a row's copy


def packings(terms: Sequence[Term], hidden: int, k: int, vectors: int, lanes: int, pairs: int) -> dict[str, Packing]:
    """Weights of (H, K) ``terms`` as (tile, k, section, gate, vector, lane); their rows' factors and sums of pairs."""
    tiles, gates, length = -(-hidden // (vectors * lanes)), len(terms), section(k, pairs)
    sources, units = tuple(t.source for t in terms), tiles * vectors * lanes
    pad = (gates, units, pairs * length)
    split = (gates, tiles, vectors, lanes, pairs, length)
    return {"weights": Packing(sources, pad, split, (1, 5, 4, 0, 2, 3), "balanced"),
            "units": Packing(sources, pad, pad, (0, 1, 2), "balance"),
            "products": Packing(sources, pad, (gates, units, pairs, length), (0, 1, 2, 3), "pairs")}


def prepare_row(e: Emitter, into: Paired, row: Expr, load: Callable[[Expr, Expr], Expr]) -> None:
    """Writes one row; ``load`` gives the vector from an index on, of which so many values count, zeros after them."""
    total, largest = e.local("total"), e.local("largest")
    vectors, start, memory = into.stride // e.lanes, e.let("start", row * into.width), into.copies[0]
    e.vstore(total, 0, e.splat(0.0))
    e.vstore(largest, 0, e.splat(0.0))
    for part in range(into.pairs):
        with e.loop("part", vectors) as number:
            inside = e.let("inside", number * e.lanes)
            first = e.let("first", e.index(part * into.length) + inside)
            value = load(first, e.let("count", e.tirx.Min(into.length - inside, into.k - first)))
            e.vstore(memory, start + part * into.stride + inside, value)
            size = e.let("size", e.intrinsic("fabs", value))
            e.vstore(total, 0, e.vload(total, 0) + size)
            e.vstore(largest, 0, e.tirx.Max(e.vload(largest, 0), size))
    mean = e.let("mean", across(e, total, lambda a, b: a + b) * e.number(1.0 / into.k))
    most = e.let("most", across(e, largest, e.tirx.Max))
    zero = e.let("zero", most + mean <= e.number(0.0))
    # also False where the mean is NaN or infinite
    finite = e.tirx.And(mean > e.number(1e-30), mean < e.number(1e30))
    dense = e.let("dense", e.tirx.And(most <= mean * e.number(SPREAD), finite))
    power = e.let("power", e.tirx.reinterpret("uint32", mean) & e.tirx.const(EXPONENT, "uint32"))
    one, plain = e.number(1.0), e.tirx.Select(zero, e.number(0.0), e.number(1.0))
    factor = e.let("factor", e.tirx.Select(dense, e.tirx.reinterpret("float32", power), plain))
    inverse = e.tirx.reinterpret("float32", e.tirx.const(ONE_OVER, "uint32") - power)
    scale = e.let("scale", e.splat(e.tirx.Select(dense, inverse, one)))
    sums, values = e.local("sums"), []
    e.vstore(sums, 0, e.splat(0.0))
    with e.loop("part", vectors) as number:
        at = e.let("at", start + number * e.lanes)
        for place in (at + part * into.stride for part in range(into.pairs)):
            values.append(e.let("scaled", e.vload(memory, place) * scale))
            e.vstore(memory, place, values[-1])
        e.vstore(sums, 0, e.fma(values[0], values[1], e.vload(sums, 0)))
    # the lanes of even pairs, and those of odd ones
    even, odd = (across(e, sums, lambda a, b: a + b, range(first, e.lanes, 2)) for first in (0, 1))
    e.store(into.sums, row, e.tirx.Select(e.tirx.Or(dense, zero), odd - even, e.number(PLAIN)))
    e.store(into.factors, row, factor)


def multiply(e: Emitter, into: list[list[TirBuffer]], operand: Paired, top: Expr, rows: Expr, weights: TirBuffer,
             weight_start: Expr, products: Sequence[Expr]) -> None:
    """Adds products to the registers ``into``, which must be zero, of the rows from ``top`` on; there are ``rows``.
    ``products``: a vector of the units' sums of pairs for each column."""
    columns, length, stride, width = len(into[0]), operand.length, operand.stride, operand.width
    cells = list(product(range(len(into)), range(columns)))
    starts = [e.let("operand", top * width) for _ in range(columns)]
    sums = [e.let("sum", e.load(operand.sums, top + m)) for m in range(len(into))]
    # rows past the last may hold anything
    fine = [e.tirx.Or(total < e.number(PLAIN), top + m >= rows) for m, total in enumerate(sums)]
    paired = e.let("paired", reduce(e.tirx.And, fine))

    def weight(k: Expr, part: Expr | int) -> list[Expr]:
        first = weight_start + (k * operand.pairs + part) * (columns * e.lanes)
        return [e.let(f"w{n}", e.vload(weights, first + n * e.lanes)) for n in range(columns)]

    def value(m: int, n: int, k: Expr, part: int) -> Expr:
        """One element of a row in all lanes. Loaded through a pointer of the column's own, it is an operand in
        memory of one instruction; else it would be one instruction more, in the units that add."""
        place = starts[n] + (m * width + part * stride) + k
        return e.splat(e.load(operand.copies[n % len(operand.copies)], place))

    def add(m: int, n: int, a: Expr, b: Expr) -> None:
        e.vstore(into[m][n], 0, e.fma(a, b, e.vload(into[m][n], 0)))

    with e.when(paired):
        for m, n in cells:
            e.vstore(into[m][n], 0, e.splat(sums[m]) + products[n])
        with e.loop("k", length // UNROLL) as block:
            base = e.let("k_first", block * UNROLL)
            for u in range(UNROLL):
                k = base + u
                first, second = weight(k, 0), weight(k, 1)
                for m, n in cells:
                    if u % 2 == 0:
                        add(m, n, e.let("a", second[n] + value(m, n, k, 0)), e.let("b", first[n] + value(m, n, k, 1)))
                    else:
                        add(m, n, e.let("a", second[n] - value(m, n, k, 0)) * e.splat(-1.0),
                            e.let("b", first[n] - value(m, n, k, 1)))
                for part in range(2, operand.pairs):
                    single = weight(k, part)
                    for m, n in cells:
                        add(m, n, value(m, n, k, part), single[n])
    with e.when(e.tirx.Not(paired)), e.loop("part", operand.pairs) as part, e.loop("k", length) as k:
        loaded = weight(k, part)
        for m in range(len(into)):
            place = starts[0] + m * width + part * stride + k
            one = e.let("value", e.splat(e.load(operand.copies[0], place)))
            for n in range(columns):
                add(m, n, one, loaded[n])
