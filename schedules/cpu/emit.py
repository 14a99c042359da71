"""Writes TIR statements in order (bindings, loops, branches, scalar and vector memory access), and scalar expressions
as vector code.

All indices are int64, as T * B * H may exceed 2**31; vectors have ``lanes`` lanes, of the layer's type by default.

Polynomials serve exp, tanh and sigmoid. Largest errors over all of float32, and of float64 (NaN stays NaN):

    tanh     3e-7 relative, exactly +-1 beyond 8; 1e-15, exactly +-1 beyond 20
    sigmoid  1.5e-7 absolute, as 0.5 + 0.5 tanh(x / 2); 3e-16
    exp      2e-7 relative, also where the result is subnormal or infinite; 4e-16"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from ecornn.analysis.operators import CUSTOM, OPERATORS, key_of
from ecornn.analysis.scalar import children, is_constant
from ecornn.schedules.builder import Expr, PrimFunc, TirBuffer, Var

if TYPE_CHECKING:
    from tvm.ir import Op
    from tvm.tirx import Stmt


# Types of elements that are narrower than what is computed -> how LLVM sees them: it has no arithmetic of bfloat16.
NARROW = {"float16": "float16", "bfloat16": "uint16"}


def vector_of(dtype: str, lanes: int) -> str:
    """The type of a vector of ``dtype``; one lane is no vector."""
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


class Emitter:
    """Writes one function; :meth:`scalar` and :meth:`pointer` add parameters; vectors have ``lanes`` of ``real``.
    Elements of 16-bit floating-point buffers are ``real`` outside of memory."""

    def __init__(self, lanes: int, real: str = "float32", rough: bool = False) -> None:
        """``rough``: quotients of functions may have relative errors of 2**-14, as results in 16 bits do not show."""
        from tvm import ir, tirx

        self.rough = rough
        self.ir, self.tirx, self.lanes, self.real = ir, tirx, lanes, real
        self.vector_type = self.lanes_of(real)
        self.parameters: list[Var] = []
        self.stack: list[list[Stmt]] = [[]]
        self.narrow: dict[TirBuffer, str] = {}  # those of 16-bit floating-point elements -> their type

    # -- parameters and the function ------------------------------------------------------------
    def scalar(self, name: str) -> Expr:
        """An int32 parameter, as int64."""
        var = self.tirx.Var(name, "int32")
        self.parameters.append(var)
        return self.let(f"{name}_64", self.tirx.Cast("int64", var))

    def pointer(self, name: str, dtype: str | None = None) -> TirBuffer:
        dtype = dtype or self.real
        element = NARROW.get(dtype, dtype)
        var = self.tirx.Var(name, self.ir.PointerType(self.ir.PrimType(element), "global"))
        self.parameters.append(var)
        # the size is only a bound: raw pointers carry none, and nothing checks it
        buffer = self.tirx.decl_buffer([self.index(1 << 40)], element, f"{name}_data", data=var)
        self.add(self.tirx.DeclBuffer(buffer, data=var))
        if dtype in NARROW:
            self.narrow[buffer] = dtype
        return buffer

    def function(self, name: str) -> PrimFunc:
        """The PrimFunc. It must not be ``noalias``: LLVM would hide what another thread wrote before a barrier."""
        (body,) = self.stack
        return self.tirx.PrimFunc(self.parameters, self.tirx.SeqStmt(body)).with_attr("global_symbol", name)

    # -- statements -----------------------------------------------------------------------------
    def add(self, statement: Stmt) -> None:
        self.stack[-1].append(statement)

    def let(self, name: str, value: Expr) -> Var:
        var = self.tirx.Var(name, str(value.ty))
        self.add(self.tirx.Bind(var, value))
        return var

    def call(self, name: str) -> None:
        """Calls ``extern "C" void name()``."""
        self.add(self.tirx.Evaluate(self.tirx.call_extern("void", name)))

    @contextmanager
    def loop(self, name: str, extent: Expr | int, start: Expr | int = 0) -> Iterator[Var]:
        """``for name in start .. start + extent - 1``."""
        var = self.tirx.Var(name, "int64")
        self.stack.append([])
        yield var
        if (body := self.block()) is not None:
            self.add(self.tirx.For(var, self.index(start), self.index(extent), self.tirx.ForKind.SERIAL, body))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        self.stack.append([])
        yield
        if (body := self.block()) is not None:
            self.add(self.tirx.IfThenElse(condition, body, None))

    def block(self) -> Stmt | None:
        body = self.stack.pop()
        return self.tirx.SeqStmt(body) if len(body) > 1 else body[0] if body else None

    # -- values ---------------------------------------------------------------------------------
    def index(self, value: Expr | int) -> Expr:
        return self.tirx.const(value, "int64") if isinstance(value, int) else value

    def div(self, a: Expr, b: Expr | int) -> Expr:
        """Quotient of non-negative indices."""
        return self.tirx.truncdiv(a, self.index(b))

    def mod(self, a: Expr, b: Expr | int) -> Expr:
        return self.tirx.truncmod(a, self.index(b))

    def ceildiv(self, a: Expr, b: int) -> Expr:
        return self.div(a + self.index(b - 1), b)

    def number(self, value: float, dtype: str | None = None) -> Expr:
        return self.tirx.const(value, dtype or self.real)

    def splat(self, value: Expr | float, dtype: str | None = None, lanes: int = 0) -> Expr:
        """A vector of one value; ``lanes`` 0: of the emitter's."""
        scalar, lanes = self.number(value, dtype) if isinstance(value, (int, float)) else value, lanes or self.lanes
        return self.tirx.Broadcast(scalar, lanes) if lanes > 1 else scalar

    def type_of(self, scalar: Expr) -> str:
        """The type that a scalar of the cell has here: what it calls float32 is the layer's."""
        return self.real if str(scalar.ty) == "float32" else str(scalar.ty)

    def intrinsic(self, name: str, *operands: Expr) -> Expr:
        """A TIR intrinsic that returns the type of its first operand."""
        return self.ir.Call(self.ir.Op.get(f"tirx.{name}"), list(operands), ret_ty=operands[0].ty)

    def quotient(self, a: Expr, b: Expr) -> Expr:
        if not self.rough or self.lanes != 16:
            return a / b
        no_mask = self.tirx.const(-1, "int16")
        inverse = "llvm.x86.avx512.rcp14.ps.512"
        return a * self.tirx.call_llvm_pure_intrin(self.vector_type, inverse, b, self.splat(0.0), no_mask)

    def fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        return self.intrinsic("fma", a, b, c)  # a * b + c, rounded once

    # -- memory ---------------------------------------------------------------------------------
    def load(self, buffer: TirBuffer, index: Expr | int) -> Expr:
        return self.widened(buffer, self.tirx.BufferLoad(buffer, [self.index(index)]), 1)

    def store(self, buffer: TirBuffer, index: Expr | int, value: Expr) -> None:
        self.add(self.tirx.BufferStore(buffer, self.narrowed(buffer, value, 1), [self.index(index)]))

    def vload(self, buffer: TirBuffer, index: Expr | int) -> Expr:
        return self.widened(buffer, self.tirx.BufferLoad(buffer, [self.ramp(index)]), self.lanes)

    def vstore(self, buffer: TirBuffer, index: Expr | int, value: Expr) -> None:
        self.add(self.tirx.BufferStore(buffer, self.narrowed(buffer, value, self.lanes), [self.ramp(index)]))

    def widened(self, buffer: TirBuffer, value: Expr, lanes: int) -> Expr:
        """An element, or vector, of a buffer as code has it."""
        kind = self.narrow.get(buffer)
        if kind is None:
            return value
        if kind == "float16":
            return self.tirx.Cast(vector_of("float32", lanes), value)
        bits = self.tirx.Cast(vector_of("uint32", lanes), value) << self.splat(16, "uint32", lanes)
        return self.tirx.reinterpret(vector_of("float32", lanes), bits)

    def narrowed(self, buffer: TirBuffer, value: Expr, lanes: int) -> Expr:
        """A value as a buffer has it: rounded to nearest, ties to even."""
        kind = self.narrow.get(buffer)
        if kind is None:
            return value
        if kind == "float16":
            return self.tirx.Cast(vector_of("float16", lanes), value)
        return self.tirx.Cast(vector_of("uint16", lanes), self.rounded(value, lanes) >> self.splat(16, "uint32", lanes))

    def rounded(self, value: Expr, lanes: int) -> Expr:
        """Bits whose upper half is a float32 value in bfloat16."""
        bits = self.let("bits", self.tirx.reinterpret(vector_of("uint32", lanes), self.let("number", value)))
        one = self.splat(1, "uint32", lanes)
        rounded = bits + self.splat(0x7FFF, "uint32", lanes) + (bits >> self.splat(16, "uint32", lanes) & one)
        # NaN has the largest bits, which must not become zero. TVM takes floats to be equal to themselves
        size = bits & self.splat(0x7FFFFFFF, "uint32", lanes)
        return self.let("rounded", self.tirx.Select(size <= self.splat(0x7F800000, "uint32", lanes), rounded,
                                                     bits | self.splat(0x400000, "uint32", lanes)))

    def prefetch(self, buffer: TirBuffer, index: Expr | int) -> None:
        """Asks for the cache line of an element, which need not exist."""
        place = self.tirx.address_of(self.load(buffer, index))
        flags = (self.tirx.const(value, "int32") for value in (0, 3, 1))  # to read, for all caches, data
        self.add(self.tirx.Evaluate(self.tirx.call_llvm_intrin("void", "llvm.prefetch", place, *flags)))

    def ramp(self, index: Expr | int) -> Expr:
        first = self.index(index)
        return self.tirx.Ramp(first, self.index(1), self.lanes) if self.lanes > 1 else first

    def cast(self, dtype: str, value: Expr) -> Expr:
        return self.tirx.Cast(self.lanes_of(dtype), value)

    def lanes_of(self, dtype: str) -> str:
        return vector_of(dtype, self.lanes)

    def local(self, name: str, dtype: str | None = None, size: int = 0) -> TirBuffer:
        """A vector of its own, or ``size`` elements; LLVM makes it a register where every access is a whole vector."""
        buffer = self.tirx.decl_buffer([size or self.lanes], dtype or self.real, name, scope="local")
        self.add(self.tirx.AllocBuffer(buffer))
        return buffer

    def vload_part(self, name: str, buffer: TirBuffer, index: Expr, valid: Expr) -> Expr:
        """A vector whose first ``valid`` lanes (any number; <= 0 for none) are read, the others zero."""
        parts = self.local(name)
        self.vstore(parts, 0, self.splat(0.0))
        with self.when(valid >= self.index(self.lanes)):
            self.vstore(parts, 0, self.vload(buffer, index))
        with self.when(valid < self.index(self.lanes)), self.loop("lane", self.tirx.Max(valid, self.index(0))) as lane:
            self.store(parts, lane, self.load(buffer, index + lane))
        return self.let(f"{name}_value", self.vload(parts, 0))

    def vstore_part(self, name: str, buffer: TirBuffer, index: Expr, value: Expr, valid: Expr) -> None:
        """Stores the first ``valid`` lanes (any number; <= 0 for none)."""
        with self.when(valid >= self.index(self.lanes)):
            self.vstore(buffer, index, value)
        with self.when(valid < self.index(self.lanes)):
            parts = self.local(name)
            self.vstore(parts, 0, value)
            with self.loop("lane", self.tirx.Max(valid, self.index(0))) as lane:
                self.store(buffer, index + lane, self.load(parts, lane))


# Rational approximation of tanh: odd polynomial over even polynomial (Eigen, generic_fast_tanh_float),
# highest power first. At the bound it is exactly 1, computed with fma.
TANH_BOUND = 7.99881172180175781
TANH_ODD = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
            1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)
TANH_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

LOG2_E = 1.44269504088896341
TANH_BOUND_64 = 20.0  # tanh is 1 there


@dataclass(frozen=True)
class Exponential:
    """exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2, and how a type has powers of two."""

    tail: tuple[float, ...]  # p, highest power first
    ln2: tuple[float, float]  # in two parts, of which multiples of the first are exact
    bounds: tuple[float, float]  # beyond them exp is 0 and infinity
    integer: str  # the integers of as many bits
    bias: int  # the exponent of 1
    mantissa: int  # where the exponent lies: behind so many bits


EXPONENTIAL = {
    # Cephes, expf
    "float32": Exponential((1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
                            5.0000001201e-1), (0.693359375, -2.12194440e-4), (-105.0, 89.0), "int32", 127, 23),
    # Taylor's series, whose next term is less than 1e-17; ln(2) as FreeBSD's msun has it
    "float64": Exponential(tuple(1 / math.factorial(n) for n in range(13, 1, -1)), (6.93147180369123816490e-01,
                           1.90821492927058770002e-10), (-746.0, 710.0), "int64", 1023, 52),
}


def horner(e: Emitter, x: Expr, coefficients: Sequence[float]) -> Expr:
    highest, *others = map(e.splat, coefficients)
    return reduce(lambda total, c: e.fma(total, x, c), others, highest)


def bounded(e: Emitter, x: Expr, low: float, high: float) -> Expr:
    """x between two numbers; NaN stays NaN."""
    # a constant first: Max and Min return their second operand where the comparison is unordered
    return e.let("x", e.tirx.Min(e.splat(high), e.tirx.Max(e.splat(low), x)))


def tanh(e: Emitter, x: Expr) -> Expr:
    if e.real == "float64":  # by exp(2 x) - 1, which for small x has the bits of x
        n, r = reduced(e, e.splat(2.0) * bounded(e, x, -TANH_BOUND_64, TANH_BOUND_64))
        power = e.let("power", power_of_two(e, whole(e, n)))
        rest = e.let("rest", e.fma(r * r, horner(e, r, EXPONENTIAL["float64"].tail), r))  # exp(r) - 1
        less_one = e.let("less_one", e.fma(power, rest, power - e.splat(1.0)))
        return e.let("tanh", less_one / (less_one + e.splat(2.0)))
    x = bounded(e, x, -TANH_BOUND, TANH_BOUND)
    square = e.let("square", x * x)
    # the quotient first: x times a polynomial near 0.005 would lose the bits of a tiny x
    return e.let("tanh", x * e.quotient(horner(e, square, TANH_ODD), horner(e, square, TANH_EVEN)))


def sigmoid(e: Emitter, x: Expr) -> Expr:
    half = e.splat(0.5)
    return e.let("sigmoid", e.fma(half, tanh(e, half * x), half))


def exp(e: Emitter, x: Expr) -> Expr:
    kind = EXPONENTIAL[e.real]
    n, r = reduced(e, bounded(e, x, *kind.bounds))
    value = e.fma(r * r, horner(e, r, kind.tail), r + e.splat(1.0))
    # 2**n may lie outside the normal range, its two factors do not
    power = whole(e, n)
    first = e.let("first", power >> e.splat(1, kind.integer))
    return e.let("exp", value * power_of_two(e, first) * power_of_two(e, power - first))


def reduced(e: Emitter, x: Expr) -> tuple[Expr, Expr]:
    """n and r of x = n ln(2) + r with |r| <= ln(2) / 2."""
    high, low = EXPONENTIAL[e.real].ln2
    n = e.let("n", e.intrinsic("floor", e.fma(x, e.splat(LOG2_E), e.splat(0.5))))
    return n, e.let("r", e.fma(n, e.splat(-low), e.fma(n, e.splat(-high), x)))


def whole(e: Emitter, n: Expr) -> Expr:
    return e.let("whole", e.cast(EXPONENTIAL[e.real].integer, n))


def power_of_two(e: Emitter, n: Expr) -> Expr:
    """2**n for integer lanes, where that is a normal number."""
    kind = EXPONENTIAL[e.real]
    bias, mantissa = (e.splat(value, kind.integer) for value in (kind.bias, kind.mantissa))
    return e.tirx.reinterpret(e.vector_type, (n + bias) << mantissa)


def rsqrt(e: Emitter, x: Expr) -> Expr:
    return e.let("rsqrt", e.splat(1.0) / e.intrinsic("sqrt", x))


# key of the operator -> its vector code
FUNCTIONS: dict[str, Callable[..., Expr]] = {"tanh": tanh, "sigmoid": sigmoid, "exp": exp, "rsqrt": rsqrt}


def vector(e: Emitter, value: Expr, lookup: Callable[[Expr], Expr]) -> Expr:
    """``value``, an expression over scalars of the cell, on vectors; ``lookup`` maps its variables."""
    kind = type(value).__name__
    if kind == "Var":
        return lookup(value)
    if is_constant(value):
        return e.splat(value.value, e.type_of(value))
    if (key := key_of(value)) == CUSTOM:
        return vector(e, children(value)[0], lookup)
    parts = [vector(e, c, lookup) for c in children(value)]
    if key in FUNCTIONS:
        return FUNCTIONS[key](e, *parts)
    if key in ("Select", "if_then_else"):
        return e.tirx.Select(*parts)
    if key == "exp10" and e.real == "float64":  # TVM's has ten digits of ln(10)
        return by_lane(e, e.ir.Op.get("tirx.pow"), (e.splat(10.0), *parts))
    if kind == "Call":
        whole = OPERATORS[key].instruction
        return e.ir.Call(value.op, parts, ret_ty=parts[0].ty) if whole else by_lane(e, value.op, parts)
    if kind in ("Max", "Min"):
        a, b = parts[::-1] if is_constant(value.b) else parts
        return extremum(e, type(value), a, b, both=not any(map(is_constant, children(value))))
    if kind == "Cast" and str(value.value.ty) == "bool":  # TVM has no bounds of conditions that are vectors
        return e.tirx.Select(parts[0], *(e.splat(n, e.type_of(value)) for n in (1.0, 0.0)))
    if kind == "Cast":
        return e.cast(e.type_of(value), parts[0])
    return type(value)(*parts)


def extremum(e: Emitter, kind: Callable[..., Expr], a: Expr, b: Expr, both: bool) -> Expr:
    """Vector extremum, NaN where ``b`` is, with ``both`` also where ``a`` is: ``kind``, tirx.Max or tirx.Min, returns
    its second operand where the comparison is unordered, so its two orders differ only in NaN, and or'd stay NaN."""
    if not both:
        return kind(a, b)
    a, b = e.let("a", a), e.let("b", b)
    bits = [e.tirx.reinterpret(e.lanes_of(EXPONENTIAL[e.real].integer), kind(*order)) for order in ((a, b), (b, a))]
    return e.let("extremum", e.tirx.reinterpret(e.vector_type, e.tirx.bitwise_or(*bits)))


def by_lane(e: Emitter, function: Op, operands: Sequence[Expr]) -> Expr:
    """Any other function of scalars, one lane after the other."""
    places = [e.local("operand") for _ in operands]
    for place, operand in zip(places, operands, strict=True):
        e.vstore(place, 0, operand)
    result = e.local("result")
    with e.loop("lane", e.lanes) as lane:
        lanes = [e.load(place, lane) for place in places]
        e.store(result, lane, e.ir.Call(function, lanes, ret_ty=e.ir.PrimType(e.real)))
    return e.let("lanes", e.vload(result, 0))
