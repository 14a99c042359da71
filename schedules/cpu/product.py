"""The register-tiled product: ``rows`` batch rows times ``columns`` vectors of weights.

    for k: load the weights of k, one vector for each gate and vector of units
           for each row: broadcast operand[row, k], one fma for each vector

Accumulators and weights stay in registers; weights are packed as the loop reads them, (tile, k, gate, vector, lane).
A lane of a vector holds some weights that are neighbours in k, as words of 32 bits, or 64 in a float64 layer:

    float32   one weight; float64 alike
    bfloat16  a pair; each is the upper half of a float32
    int16     a pair of integers
    int21     three integers in two words: the upper 21 bits of each are one, the lower 11 of both are the third
    int8      four integers, for an instruction that multiplies them with four of the operand

int16 and int21 are multiples of a step of their unit, with which the product is multiplied in the end. A unit's largest
magnitude is 2**15 or 2**20 steps, less one; a weight is off by half a step at most. int21 is fast as two of three
weights are a word as it lies there: what the lower 11 bits add was subtracted before rounding (ecornn/build/c_pack.h).

For int8 weights each row of the operand becomes 8-bit integers, too, by its largest magnitude:

    scale = max_k |v[k]| / 127,  q[k] = round(v[k] / scale),  v[k] ~ scale * q[k]

Weights are quantized alike, unit by unit, and stored with 128 added, as the instruction wants an unsigned factor: the
product is sum_k (w[k] + 128) q[k] - 128 sum_k q[k], times both scales. The roundings cost about 1e-2 relative.

Products of float32 may take fewer multiplications, where pairs of k share one (Winograd 1968):

    x1 w1 + x2 w2 = (x1 + w2) (x2 + w1) - x1 x2 - w1 w2

The last two terms are sums over k: one a row, computed with a copy of the operand, and one a unit, packed. Each pair
costs one multiply-add and two additions, which pays on CPUs that add in other units than those that multiply (AMD's
since Zen). K is cut into ``pairs`` = 3 or 4 sections; the k-th values of the first two are a pair. Every other pair has
the opposite sign, -(w2 - x1) (w1 - x2) + x1 x2 + w1 w2, so that the sums stay small where an operand has a mean.

Both factors are scaled by powers of two to a mean magnitude of 1 to 2, row by row and unit by unit; then the error is
at most eps ||x|| ||w||, as that of a plain sum, for dense factors. Rows whose largest magnitude is more than SPREAD
times the mean, or not finite, are multiplied in the plain way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, product

from ecornn.analysis.step import Term
from ecornn.program import Packing
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.emit import Emitter

LINE = 64  # bytes of a cache line
UPPER = 0xFFFF0000  # of a pair
THIRD = 0x001FFC00  # bits 10 to 20 of a third weight
LARGEST, OFFSET = 127.0, 128
TINY = 1e-30  # instead of dividing by zero in a row of zeros


@dataclass(frozen=True)
class Stored:
    group: int  # weights of a lane
    words: int  # that they take
    element: str  # how code sees a word
    scaled: bool = False  # whether the product has to be multiplied with the units' steps
    word: int = 4  # its bytes

    @property
    def bytes(self) -> float:
        return self.word * self.words / self.group  # bytes of one weight

    def size(self, k: int, columns: int) -> int:
        return -(-k // self.group) * self.words * columns  # words of ``columns`` columns of ``k`` weights


STORED = {
    "float64": Stored(1, 1, "float64", word=8),
    "float32": Stored(1, 1, "float32"),
    "bfloat16": Stored(2, 1, "uint32"),
    "float16": Stored(2, 1, "uint32"),
    "int16": Stored(2, 1, "uint32", scaled=True),
    "int21": Stored(3, 2, "uint32", scaled=True),
    "int8": Stored(4, 1, "int32", scaled=True),
}


def widen(e: Emitter, words: Sequence[Expr], place: int, kind: str) -> Expr:
    """The weights number ``place`` of each lane, as float32; float64, float32 and int8 as they are."""
    if kind in ("float64", "float32", "int8"):
        return words[0]
    if kind == "bfloat16":
        bits = words[0] & e.splat(UPPER, "uint32") if place else words[0] << e.splat(16, "uint32")
        return e.let("weight", e.tirx.reinterpret(e.vector_type, bits))
    if kind == "float16":
        half = e.cast("uint16", words[0] >> e.splat(16, "uint32") if place else words[0])
        return e.let("weight", e.cast("float32", e.tirx.reinterpret(e.lanes_of("float16"), half)))
    if kind == "int16":
        bits = words[0] if place else words[0] << e.splat(16, "uint32")
    elif place < 2:
        bits = words[place]
    else:
        bits = words[0] << e.splat(21, "uint32") | (words[1] << e.splat(10, "uint32") & e.splat(THIRD, "uint32"))
    return e.let("weight", e.cast("float32", e.tirx.reinterpret(e.lanes_of("int32"), bits)))


@dataclass(frozen=True)
class Ahead:
    """Weights to ask for while others are multiplied: ``share`` words from the word ``start`` on."""

    start: Expr
    share: int


def packing(terms: Sequence[Term], hidden: int, k: int, vectors: int, lanes: int, kind: str,
            depth: int = 1) -> Packing:
    """(tile, K / group, gate, vector, lane, group), int16 and int21 (..., vector, word, lane), from (H, K), transposed
    (K, H); with heads K is one head's, which has whole tiles, and transposed ones are blocks (K, K). K is padded to a
    multiple of ``depth``."""
    tiles, gates, group = -(-hidden // (vectors * lanes)), len(terms), STORED[kind].group
    groups, sources = -(-k // max(group, depth)) * max(group, depth) // group, tuple(t.source for t in terms)
    if terms[0].heads > 1:
        assert k % (vectors * lanes) == 0 and hidden == k * terms[0].heads
    if terms[0].transposed and terms[0].heads > 1:
        assert group == 1  # what trains has whole words
        split = gates, terms[0].heads, k, k // (vectors * lanes), vectors, lanes
        return Packing(sources, pad=(gates, hidden, k), split=split, order=(1, 3, 2, 0, 4, 5), dtype=kind)
    if terms[0].transposed:
        return Packing(sources, pad=(gates, groups * group, tiles * vectors * lanes),
                       split=(gates, groups, group, tiles, vectors, lanes), order=(3, 1, 0, 4, 5, 2), dtype=kind)
    return Packing(sources, pad=(gates, tiles * vectors * lanes, groups * group),
                   split=(gates, tiles, vectors, lanes, groups, group), order=(1, 4, 0, 2, 3, 5), dtype=kind)


def accumulators(e: Emitter, rows: int, columns: int, name: str, kind: str) -> list[list[TirBuffer]]:
    """Zeroed registers, [row][column]: int32 for int8 weights, else of the layer's type."""
    dtype = "int32" if kind == "int8" else e.real
    made = [[e.local(f"{name}_{m}_{n}", dtype) for n in range(columns)] for m in range(rows)]
    for register in chain(*made):
        e.vstore(register, 0, e.splat(0, dtype))
    return made


def multiply(e: Emitter, into: list[list[TirBuffer]], operand: TirBuffer, starts: Sequence[Expr], weights: TirBuffer,
             weight_start: Expr, k: int, unroll: int, kind: str, ahead: Ahead | None = None) -> None:
    """Adds products over ``k`` values to ``into``; ``starts``: of the rows in ``operand``, which is of the layer's
    type, or for int8 weights int32 of four values each. ``ahead`` is asked for line by line, spread over the loop."""
    columns, stored, group = len(into[0]), STORED[kind], STORED[kind].group

    def one(at: Expr, values: int = group) -> None:
        first = e.let("group", weight_start + at * (columns * stored.words * e.lanes))
        loaded = [[e.let("words", e.vload(weights, first + (n * stored.words + word) * e.lanes))
                   for word in range(stored.words)] for n in range(columns)]
        for place in range(1 if kind == "int8" else values):
            vectors = [widen(e, words, place, kind) for words in loaded]
            index = at if kind == "int8" else at * group + place
            for start, row in zip(starts, into, strict=True):
                value = e.let("value", e.splat(e.load(operand, start + index)))
                for register, vector in zip(row, vectors, strict=True):
                    total = e.vload(register, 0)
                    product = e.fma(value, vector, total) if kind != "int8" else dot(e, total, vector, value)
                    e.vstore(register, 0, product)

    groups = -(-k // group)
    whole = groups if kind == "int8" else k // group  # integer operands are padded with zeros
    unroll = max(1, min(unroll, whole))
    blocks, line, asked = whole // unroll, LINE // stored.word, ahead or Ahead(e.index(0), 0)
    lines = -(-asked.share // (line * max(1, blocks)))  # in each block
    with e.loop("k", blocks) as block:
        base = e.let("k_first", block * unroll)
        for u in range(unroll):
            one(base + u)
            for number in range(u * lines // unroll, (u + 1) * lines // unroll):
                e.prefetch(weights, asked.start + (block * lines + number) * line)
    for rest in range(whole - whole % unroll, whole):
        one(e.index(rest))
    if whole < groups:
        one(e.index(whole), k % group)


def dot(e: Emitter, total: Expr, unsigned: Expr, signed: Expr) -> Expr:
    """``total`` plus, in each lane, four products of an unsigned with a signed 8-bit integer (VNNI)."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}"
    factors = (e.tirx.reinterpret(f"int8x{4 * e.lanes}", v) for v in (unsigned, signed))
    return e.tirx.call_llvm_pure_intrin(f"int32x{e.lanes}", name, total, *factors)


@dataclass(frozen=True)
class Integers:
    """Rows: ``words`` (int32, four values each), ``sums`` (times 128); ``k`` values a row, ``width`` with padding."""

    words: TirBuffer
    scales: TirBuffer
    sums: TirBuffer
    k: int
    width: int


def quantize_row(e: Emitter, into: Integers, row: Expr, load: Callable[[Expr, Expr], Expr]) -> None:
    """Writes one row; ``load`` gives the vector from an index on, of which so many values count, zeros after them."""
    magnitudes, spoilt, sums = e.local("magnitudes"), e.local("spoilt"), e.local("sums", "int32")
    for register, kind in ((magnitudes, e.real), (spoilt, e.real), (sums, "int32")):
        e.vstore(register, 0, e.splat(0, kind))
    with e.loop("part", into.width // e.lanes) as part:
        at = part * e.lanes
        value = load(at, e.index(into.k) - at)
        e.vstore(magnitudes, 0, e.tirx.Max(e.vload(magnitudes, 0), e.intrinsic("fabs", value)))
        e.vstore(spoilt, 0, e.fma(value, e.splat(0.0), e.vload(spoilt, 0)))  # NaN once there is NaN or infinity
    largest = across(e, magnitudes, e.tirx.Max)
    inverse = e.let("inverse", e.splat(LARGEST) / e.splat(e.tirx.Max(largest, e.tirx.const(TINY, "float32"))))
    e.store(into.scales, row, largest / e.tirx.const(LARGEST, "float32") + across(e, spoilt, lambda a, b: a + b))
    with e.loop("part", into.width // e.lanes) as part:
        at = e.let("at", part * e.lanes)
        # Max returns its second operand for NaN, of which no integer may be made
        bounded = e.tirx.Min(e.tirx.Max(load(at, e.index(into.k) - at) * inverse, e.splat(-LARGEST)), e.splat(LARGEST))
        whole = e.let("whole", e.cast("int32", e.intrinsic("nearbyint", bounded)))
        e.vstore(sums, 0, e.vload(sums, 0) + whole)
        words, first = e.lanes // 4, e.div(row * into.width + at, 4)
        packed = e.tirx.reinterpret(f"int32x{words}", e.cast("int8", whole))
        e.add(e.tirx.BufferStore(into.words, packed, [e.tirx.Ramp(first, e.index(1), words)]))
    e.store(into.sums, row, across(e, sums, lambda a, b: a + b) * e.tirx.const(OFFSET, "int32"))


def across(e: Emitter, vector: TirBuffer, join: Callable[[Expr, Expr], Expr], lanes: range | None = None) -> Expr:
    """All lanes of a local vector, or those given, joined."""
    values = (e.load(vector, lane) for lane in lanes or range(e.lanes))
    return reduce(lambda total, value: e.let("joined", join(total, value)), values)


def restore(e: Emitter, product: Expr, integers: Integers, row: Expr, unit_scales: Expr) -> Expr:
    """A vector of the float32 product, from that of the integers."""
    exact = product - e.splat(e.load(integers.sums, row))
    return e.cast("float32", exact) * (e.splat(e.load(integers.scales, row)) * unit_scales)


SPREAD = 32.0
PLAIN = 1e38  # not NaN: TVM takes "not a < b" for "b <= a"
EXPONENT, ONE_OVER = 0x7F800000, 0x7F000000  # bits of a float32's power of two; minus those of 2**n: those of 2**-n
SIGNS = 2  # one pair of each sign


def section(k: int, pairs: int) -> int:
    return -(-k // (SIGNS * pairs)) * SIGNS  # values of k in a section: even


@dataclass(frozen=True)
class Paired:
    """Scaled rows. ``copies``: one memory; ``factors``: of the results; ``sums``: of pairs, negative, or PLAIN."""

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
        return paired_width(self.k, self.pairs, self.lanes)

    @property
    def stride(self) -> int:
        return self.width // self.pairs  # elements from one section of a row to the next: whole vectors


def paired_width(k: int, pairs: int, lanes: int) -> int:
    return pairs * -(-section(k, pairs) // lanes) * lanes  # elements of a row's copy


def paired_packings(terms: Sequence[Term], hidden: int, k: int, vectors: int, lanes: int,
                    pairs: int) -> dict[str, Packing]:
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


def multiply_pairs(e: Emitter, into: list[list[TirBuffer]], operand: Paired, top: Expr, rows: Expr, weights: TirBuffer,
             weight_start: Expr, products: Sequence[Expr]) -> None:
    """Adds products of rows ``top`` .. ``rows`` - 1 to zeros; ``products``: sums of pairs, a vector a column."""
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
        """One element in all lanes; a pointer of the column's own makes it a memory operand, no instruction more."""
        place = starts[n] + (m * width + part * stride) + k
        return e.splat(e.load(operand.copies[n % len(operand.copies)], place))

    def add(m: int, n: int, a: Expr, b: Expr) -> None:
        e.vstore(into[m][n], 0, e.fma(a, b, e.vload(into[m][n], 0)))

    with e.when(paired):
        for m, n in cells:
            e.vstore(into[m][n], 0, e.splat(sums[m]) + products[n])
        with e.loop("k", length // SIGNS) as block:
            base = e.let("k_first", block * SIGNS)
            for u in range(SIGNS):
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
            one = e.let("value", e.splat(e.load(operand.copies[0], starts[0] + m * width + part * stride + k)))
            for n in range(columns):
                add(m, n, one, loaded[n])
