"""Matrix products on tensor cores, in words, so that one kernel text serves every dtype.

A word is 32 bits: two float16 or bfloat16 values, or one float32. A k-tile is 8 words; in words the fragments of
``mma.m16n8k16`` (16-bit) and ``mma.m16n8k8`` (tf32) are the same:

    A (16 rows x 8 words), lane l:  a0 = [l/4, l%4]  a1 = [l/4 + 8, l%4]  a2, a3: word + 4
    B (8 words x 8 columns), lane l: b0 = [l%4, l/4]  b1 = [l%4 + 4, l/4]
    C (16 rows x 8 columns), lane l: c0, c1 = [l/4, 2 (l%4) + {0, 1}]  c2, c3: row + 8

float32 is exact to about 2e-7: each operand is split in two tf32 numbers, and three of the four partial products are
added (the "3xTF32" of NVIDIA's CUTLASS). With ``tf32`` arithmetic each operand is rounded to one tf32 number.

Weights of 8-bit integers, in offset binary, q + 128, become operands of 16-bit products exactly. A byte u below a
constant one is a number of 16 bits that is linear in u,

    float16   0x64u = 1024 + u        so that one subtraction makes q of it
    bfloat16  0x43u = 128 + u         where u < 128
                      256 + 2 (u - 128)   beyond, where the byte's upper bit is one of the exponent

and with t = 0x43u - 256, which is q or 2 q, q = t - max(t, 0) / 2. The permutation of bytes for two integers is
volatile: computed ahead of the loop over steps, integers that stay in registers would take twice as many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa.functions import call

WORDS, PAIR = 8, 16  # of a k-tile, and of a pair of them
_KIND = {"float16": "m16n8k16.row.col.f32.f16.f16.f32", "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
         "float32": "m16n8k8.row.col.f32.tf32.tf32.f32", "tf32": "m16n8k8.row.col.f32.tf32.tf32.f32"}


def per_word(dtype: str) -> int:
    """Values in a word."""
    return 1 if dtype in ("float32", "tf32") else 2


def words(count: int, dtype: str) -> int:
    """Words that hold ``count`` values."""
    return ceil_div(count, per_word(dtype))


def pack_pair(low: Expr, high: Expr, dtype: str, *, finite: bool = False) -> Expr:
    """Two float32 values as a word of a 16-bit type; with ``finite`` the largest float16 in place of infinity."""
    kind = "f16" if dtype == "float16" else "bf16"
    name, kind = (f"finite_{kind}", f"satfinite.{kind}") if finite and kind == "f16" else (kind, kind)
    return T.let("word", call(f"unsigned ecornn_pack_{name}(float low, float high)", f"""
        unsigned r;
        asm("cvt.rn.{kind}x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;""", low, high))


def pack(values: Sequence[Expr], dtype: str, *, finite: bool = False) -> list[Expr]:
    """Float32 values, as many as fill words of a 16-bit type, as these words."""
    return [pack_pair(low, high, dtype, finite=finite) for low, high in zip(values[::2], values[1::2], strict=True)]


def unpack(words: Sequence[Expr], count: int, dtype: str) -> list[Expr]:
    """The first ``count`` values of words of a 16-bit type, in float32."""
    return [unpack_half(words[e // 2], e % 2 == 1, dtype) for e in range(count)]


def unpack_half(word: Expr, upper: bool, dtype: str) -> Expr:
    """The lower or upper value of a word of a 16-bit type, in float32."""
    if dtype == "bfloat16":
        bits = T.bitwise_and(word, T.uint32(0xFFFF0000)) if upper else T.shift_left(word, T.uint32(16))
        return T.let("value", T.reinterpret("float32", bits))
    name = "high" if upper else "low"
    return T.let("value", call(f"float ecornn_{name}_f16(unsigned word)", f"""
        float r;
        asm("{{.reg .b16 low, high; mov.b32 {{low, high}}, %1; cvt.f32.f16 %0, {name};}}" : "=f"(r) : "r"(word));
        return r;""", word))


def raised(value: Expr) -> Expr:
    """A float32 value with half a unit of TF32's last place added to its bits: products that cut off the bits beyond
    TF32's then round it to nearest, and :func:`lowered` still has all of it."""
    return T.let("raised", call("float ecornn_raised(float value)", """
        // NaN may have all bits, and would be -0 then
        return value != value ? value : __uint_as_float(__float_as_uint(value) + 0x1000u);""", value))


def lowered(value: Expr) -> Expr:
    """The value that was ``raised``."""
    return T.let("lowered", T.reinterpret("float32", T.reinterpret("uint32", value) - T.uint32(0x1000)))


def split(word: Expr, arithmetic: str, cut: Expr | bool = False) -> tuple[Expr, ...]:
    """A word as the parts that are multiplied: itself, rounded, or its high and low tf32 halves. ``cut``: whether
    cutting off rounds it, as it is :func:`raised`."""
    if arithmetic == "tf32":
        whole = T.bitwise_and(word, T.uint32(0xFFFFE000))
        if cut is True:
            return (T.let("rounded", whole),)
        rounded = call("unsigned ecornn_tf32(unsigned word)", """
            unsigned r;
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(word)));
            return r;""", word)
        return (T.let("rounded", rounded if cut is False else T.Select(cut, whole, rounded)),)
    if arithmetic != "float32":
        return (word,)
    high = T.let("high", T.bitwise_and(word, T.uint32(0xFFFFE000)))
    low = T.let("low", T.reinterpret("uint32", T.reinterpret("float32", word) - T.reinterpret("float32", high)))
    return high, low


def ldmatrix(into: Iterable[Expr], address: Expr, *, transposed: bool = False) -> None:
    """Loads four matrices of 8 x 8 16-bit values from shared memory, one word of each a thread; lane l has the address
    of row l % 8 of matrix l / 8. ``transposed``: rows come as columns."""
    T.evaluate(T.ptx[f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"](*into, address))


def mma(acc: list[Expr], a: list[tuple[Expr, ...]], b: list[tuple[Expr, ...]], arithmetic: str, *, apart: bool) -> None:
    """``acc += a b`` for one k-tile; acc: 4 loads of a local buffer, a: 4 and b: 2 split words.

    Tensor cores cut off the sums that they keep, always towards zero, so that the error of a float32 sum grows with its
    length: to 1e-5 where K is 2000. With ``apart`` a k-tile has a sum of its own; other units, which round, add it."""
    instruction = T.ptx[f"mma.sync.aligned.{_KIND[arithmetic]}"]
    if arithmetic != "float32":
        T.evaluate(instruction(*acc, *(w[0] for w in a), *(w[0] for w in b), *acc))
        return
    part = T.local("part", (4,), "float32") if apart else None  # fragment C
    sums = acc if part is None else [part[i] for i in range(4)]
    for step, (i, j) in enumerate(((1, 0), (0, 1), (0, 0))):  # small terms first
        before = sums if step or not apart else [T.float32(0)] * 4
        T.evaluate(instruction(*sums, *(w[i] for w in a), *(w[j] for w in b), *before))
    for to, value in zip(acc, sums, strict=True) if apart else ():
        T.buffer_store(to.source, to + value, list(to.indices))


def zeros(name: str, *shape: int) -> TirBuffer:
    """An array of float32 zeros in registers."""
    made = T.local(name, shape, "float32")
    for index in product(*map(range, shape)):
        T.buffer_store(made, T.float32(0), list(index))
    return made


def multiply_pair(acc: TirBuffer, number: int, rows: Sequence[Callable[[int], Expr]],
                  columns: Sequence[Sequence[Expr]], arithmetic: str, *, apart: bool = False) -> None:
    """Adds the products of pair ``number`` of k-tiles. ``acc``: sums, (chain, m16 tile, n8 tile, 4 of fragment C);
    k-tiles take chains in turn; ``apart`` as of :func:`mma`. ``rows``: of each octet of weight rows word 0 to 3, two of
    a k-tile; two octets make an m16 tile, the last may be one. ``columns``: of each n8 tile of state the same."""
    chains, nothing = int(acc.shape[0]), (T.uint32(0), T.uint32(0))
    for tile in range(2):
        right = [[split(column[tile * 2 + half], arithmetic) for half in range(2)] for column in columns]
        for m in range(ceil_div(len(rows), 2)):  # a0, a1: word 0 of the lower and upper octet; a2, a3: word 1
            left = [split(rows[v](tile * 2 + half), arithmetic) if v < len(rows) else nothing
                    for half in range(2) for v in (2 * m, 2 * m + 1)]
            for n in range(len(columns)):
                sums = [acc[(2 * number + tile) % chains, m, n, i] for i in range(4)]
                mma(sums, left, right[n], arithmetic, apart=apart)


UNPACKED = {"float16": 2, "bfloat16": 4}  # instructions for a word of two
_LOWER, _UPPER = 0x4140, 0x4342  # which bytes of the word, and of the constant, make the lower and upper two


def unpacked(word: Expr, upper: bool, dtype: str) -> Expr:
    """The lower or upper two of a word's four integers, as a word of that 16-bit type."""
    which = T.uint32(_UPPER if upper else _LOWER)
    if dtype == "float16":
        name, body = "f16", """
            unsigned above, r;
            asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(above) : "r"(word), "r"(0x64646464u), "r"(bytes));
            asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(above), "r"(0x64806480u));
            return r;"""
    else:
        name, body = "bf16", """
            unsigned above, t, positive, r;
            asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(above) : "r"(word), "r"(0x43434343u), "r"(bytes));
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(t) : "r"(above), "r"(0x3F803F80u), "r"(0xC380C380u));
            asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(positive) : "r"(above), "r"(0x3F803F80u), "r"(0xC380C380u));
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(positive), "r"(0xBF00BF00u), "r"(t));
            return r;"""
    return T.let("integers", call(f"unsigned ecornn_integers_{name}(unsigned word, unsigned bytes)", body, word, which))
