"""Scalar expressions of a cell as vector code, with polynomial exp, tanh and sigmoid.

Largest errors over all of float32 (NaN stays NaN):

    tanh     3e-7 relative; exactly +-1 beyond 8
    sigmoid  1.5e-7 absolute, as 0.5 + 0.5 tanh(x / 2)
    exp      2e-7 relative, also where the result is subnormal or infinite
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecornn.analysis.operators import OPERATORS, key_of
from ecornn.analysis.scalar import children, is_constant
from ecornn.schedules.builder import Expr
from ecornn.schedules.cpu.emit import Emitter

# Rational approximation of tanh: odd polynomial over even polynomial (Eigen, generic_fast_tanh_float),
# highest power first. At the bound it is exactly 1, computed with fma.
TANH_BOUND = 7.99881172180175781
TANH_ODD = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
            1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)
TANH_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

# exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2 (Cephes, expf); ln(2) in two parts.
EXP_TAIL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
            5.0000001201e-1)
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
EXP_LOW, EXP_HIGH = -105.0, 89.0  # beyond: 0 and infinity


def horner(e: Emitter, x: Expr, coefficients: Sequence[float]) -> Expr:
    """A polynomial, highest power first."""
    total = e.splat(coefficients[0])
    for c in coefficients[1:]:
        total = e.fma(total, x, e.splat(c))
    return total


def tanh(e: Emitter, x: Expr) -> Expr:
    """Vector tanh."""
    # a constant first: Max and Min return their second operand where the comparison is unordered
    x = e.let("x", e.tirx.Min(e.splat(TANH_BOUND), e.tirx.Max(e.splat(-TANH_BOUND), x)))
    square = e.let("square", x * x)
    # the quotient first: x times a polynomial near 0.005 would lose the bits of a tiny x
    return e.let("tanh", x * (horner(e, square, TANH_ODD) / horner(e, square, TANH_EVEN)))


def sigmoid(e: Emitter, x: Expr) -> Expr:
    """Vector logistic function."""
    half = e.splat(0.5)
    return e.let("sigmoid", e.fma(half, tanh(e, half * x), half))


def exp(e: Emitter, x: Expr) -> Expr:
    """Vector exponential."""
    x = e.let("x", e.tirx.Min(e.splat(EXP_HIGH), e.tirx.Max(e.splat(EXP_LOW), x)))
    n = e.let("n", e.intrinsic("floor", e.fma(x, e.splat(LOG2_E), e.splat(0.5))))
    r = e.let("r", e.fma(n, e.splat(-LN2_LOW), e.fma(n, e.splat(-LN2_HIGH), x)))
    value = e.fma(r * r, horner(e, r, EXP_TAIL), r + e.splat(1.0))
    # 2**n may lie outside the normal range, its two factors do not
    whole = e.let("whole", e.tirx.Cast(f"int32x{e.lanes}", n))
    first = e.let("first", whole >> splat_int(e, 1))
    return e.let("exp", value * power_of_two(e, first) * power_of_two(e, whole - first))


def splat_int(e: Emitter, value: int) -> Expr:
    return e.tirx.Broadcast(e.tirx.const(value, "int32"), e.lanes)


def power_of_two(e: Emitter, n: Expr) -> Expr:
    """2**n for int32 lanes from -126 to 127."""
    return e.tirx.reinterpret(e.vector_type, (n + splat_int(e, 127)) << splat_int(e, 23))


def rsqrt(e: Emitter, x: Expr) -> Expr:
    """Vector reciprocal square root."""
    return e.let("rsqrt", e.splat(1.0) / e.intrinsic("sqrt", x))


def select(e: Emitter, condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Vector choice between two values."""
    return e.tirx.Select(condition, yes, no)


FUNCTIONS: dict[str, Callable[..., Expr]] = {  # key of the operator -> its vector code
    "tanh": tanh, "sigmoid": sigmoid, "exp": exp, "rsqrt": rsqrt, "Select": select, "if_then_else": select}


def vector(e: Emitter, value: Expr, lookup: Callable[[Expr], Expr]) -> Expr:
    """``value``, an expression over float32 scalars, on vectors; ``lookup`` maps its variables."""
    kind = type(value).__name__
    if kind == "Var":
        return lookup(value)
    if is_constant(value):
        return e.tirx.Broadcast(value, e.lanes)
    key, parts = key_of(value), [vector(e, c, lookup) for c in children(value)]
    if key in FUNCTIONS:
        return FUNCTIONS[key](e, *parts)
    if kind == "Call":
        whole = OPERATORS[key].instruction
        return e.ir.Call(value.op, parts, ret_ty=parts[0].ty) if whole else by_lane(e, value, parts)
    if kind in ("Max", "Min"):
        a, b = parts[::-1] if is_constant(value.b) else parts
        return extremum(e, type(value), a, b, both=not any(map(is_constant, children(value))))
    if kind == "Cast":
        return e.tirx.Cast(f"{value.ty}x{e.lanes}", parts[0])
    return type(value)(*parts)


def extremum(e: Emitter, kind: Callable[..., Expr], a: Expr, b: Expr, both: bool) -> Expr:
    """Vector maximum or minimum, NaN where ``b`` is, and with ``both`` also where ``a`` is.

    ``kind``, tirx.Max or tirx.Min, returns its second operand where the comparison is unordered. Its two orders are
    the same bits but for NaN, where one of them is NaN; these or any others are NaN, too.
    """
    if not both:
        return kind(a, b)
    a, b = e.let("a", a), e.let("b", b)
    bits = [e.tirx.reinterpret(f"int32x{e.lanes}", kind(*order)) for order in ((a, b), (b, a))]
    return e.let("extremum", e.tirx.reinterpret(e.vector_type, e.tirx.bitwise_or(*bits)))


def by_lane(e: Emitter, call: Expr, operands: Sequence[Expr]) -> Expr:
    """Any other function of float32 scalars, one lane after the other."""
    places = [e.local("operand") for _ in operands]
    for place, operand in zip(places, operands, strict=True):
        e.vstore(place, 0, operand)
    result = e.local("result")
    with e.loop("lane", e.lanes) as lane:
        e.store(result, lane, e.ir.Call(call.op, [e.load(p, lane) for p in places], ret_ty=call.ty))
    return e.let("lanes", e.vload(result, 0))
