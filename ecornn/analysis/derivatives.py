"""Partial derivatives of scalar operators, as expressions: those that take more than a line.

Each function takes an expression, variables or constants for its operands, and one for its result. Where there is no
derivative they agree with PyTorch: that of ``|x|`` is 0 at 0; that of a bound is 1 where it is met (``torch.clamp``),
but that of ``max(x, 0)`` is 0 at 0 (``torch.relu``), unless x is itself bounded from above, or :func:`smooth`; two
values that are equal share that of their maximum (``torch.maximum``); steps such as ``floor`` and comparisons have 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.ir import Expr


def number(value: float) -> Expr:
    """A float32 constant."""
    from tvm import tirx

    return tirx.const(value, "float32")


def call(name: str, operand: Expr) -> Expr:
    """A function of one scalar, by TVM's name."""
    from tvm import te

    return getattr(te, name)(operand)


def where(condition: Expr, yes: Expr | float, no: Expr | float) -> Expr:
    """One of two values, expressions or numbers."""
    from tvm import tirx

    return tirx.Select(condition, *(number(v) if isinstance(v, float) else v for v in (yes, no)))


def constant(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[float, ...]:
    return (0.0,) * len(v)


def quotient(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr | float, ...]:
    if type(v[1]).__name__ == "FloatImm":
        return number(1.0 / float(v[1].value)), 0.0
    inverse = number(1.0) / v[1]
    return inverse, number(0.0) - r * inverse


def extremum(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr | float, ...]:
    kind, (a, b) = type(e).__name__, v
    fixed = [type(x).__name__ == "FloatImm" for x in v]
    if not any(fixed):
        share = where(a == b, 0.5, where(a > b if kind == "Max" else a < b, 1.0, 0.0))
        return share, number(1.0) - share
    if all(fixed):
        return 0.0, 0.0
    value, bound, inner = (b, a, e.b) if fixed[0] else (a, b, e.a)
    if kind == "Max":
        relu = float(bound.value) == 0.0 and not _bounded(inner)
        share = where(r > bound if relu else value >= bound, 1.0, 0.0)
    else:
        share = where(value <= bound, 1.0, 0.0)
    return (0.0, share) if fixed[0] else (share, 0.0)


def _bounded(e: Expr) -> bool:
    return type(e).__name__ == "Min" and "FloatImm" in (type(e.a).__name__, type(e.b).__name__)


def smooth(e: Expr, v: Sequence[Expr]) -> tuple[Expr | float, ...]:
    """The derivatives of a maximum or minimum of x and 0 beside ``|x|``, as softplus and logsigmoid have them where
    they must not overflow: 1/2 at 0, so that the whole has its derivative there."""
    fixed = [type(x).__name__ == "FloatImm" and float(x.value) == 0.0 for x in v]
    if not any(fixed):
        return extremum(e, v, e)
    value, zero = (v[1], v[0]) if fixed[0] else v
    above, below = (1.0, 0.0) if type(e).__name__ == "Max" else (0.0, 1.0)
    share = where(value > zero, above, where(value < zero, below, 0.5))
    return (0.0, share) if fixed[0] else (share, 0.0)


def chosen(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr | float, ...]:
    return 0.0, where(v[0], 1.0, 0.0), where(v[0], 0.0, 1.0)


def converted(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[float, ...]:
    return (1.0 if str(e.ty).startswith("float") and str(v[0].ty).startswith("float") else 0.0,)


def error_function(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr, ...]:
    return (number(2 / math.sqrt(math.pi)) * call("exp", number(0.0) - v[0] * v[0]),)


def absolute(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr, ...]:
    zero = number(0.0)
    return (where(v[0] > zero, 1.0, where(v[0] < zero, -1.0, 0.0)),)


def angle(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr, ...]:
    y, x = v
    inverse = number(1.0) / (x * x + y * y)
    return x * inverse, number(0.0) - y * inverse


def less_one(exponent: Expr) -> Expr:
    """``exponent - 1``; of a constant in all its digits, where TVM would subtract in float32."""
    return number(exponent.value - 1.0) if type(exponent).__name__ == "FloatImm" else exponent - number(1.0)


def power(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr, ...]:
    from tvm import te

    (base, exponent), zero = v, number(0.0)
    by_base = where(exponent == zero, 0.0, exponent * te.power(base, less_one(exponent)))
    return by_base, where(base == zero, 0.0, r * call("log", base))
