"""The scalar operators that a cell may use, a row each, which has all that is known of an operator.

Schedules write an operator as TVM does, unless they have something better under its key: CUDA functions in
``schedules/cuda/isa/functions.py``, vector functions for CPUs in ``schedules/cpu/emit.py``.

A derivative takes an expression, variables or constants for its operands, and one for its result. Where there is none
they agree with PyTorch: that of ``|x|`` is 0 at 0; that of a bound is 1 where it is met (``torch.clamp``), but that of
``max(x, 0)`` is 0 at 0 (``torch.relu``), unless x is itself bounded from above, or :func:`smooth`; two values that are
equal share that of their maximum (``torch.maximum``); steps such as ``floor`` and comparisons have 0. The operator
``custom_gradient(value, operand, derivative, ...)`` is its value, with the derivatives that it says: ``ecornn.spike``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var


def number(value: float) -> Expr:
    from tvm import tirx

    return tirx.const(value, "float32")


def variable(name: str, kind: str = "float32") -> Var:
    from tvm import tirx

    return tirx.Var(name, kind)


def call(name: str, operand: Expr) -> Expr:
    from tvm import te

    return getattr(te, name)(operand)


def where(condition: Expr, yes: Expr | float, no: Expr | float) -> Expr:
    from tvm import tirx

    return tirx.Select(condition, *(number(v) if isinstance(v, float) else v for v in (yes, no)))


def constant(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[float, ...]:
    return (0.0,) * len(v)


def quotient(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr | float, ...]:
    if type(v[1]).__name__ == "FloatImm":
        return number(1.0 / float(v[1].value)), 0.0
    inverse = number(1.0) / v[1]
    return inverse, number(0.0) - r * inverse


def angle(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr, ...]:
    y, x = v
    inverse = number(1.0) / (x * x + y * y)
    return x * inverse, number(0.0) - y * inverse


def extremum(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr | float, ...]:
    (a, b), largest = v, type(e).__name__ == "Max"
    fixed = [type(x).__name__ == "FloatImm" for x in v]
    if not any(fixed):
        share = where(a == b, 0.5, where(a > b if largest else a < b, 1.0, 0.0))
        return share, number(1.0) - share
    if all(fixed):
        return 0.0, 0.0
    value, bound, inner = (b, a, e.b) if fixed[0] else (a, b, e.a)
    if largest:
        bounded = type(inner).__name__ == "Min" and "FloatImm" in (type(inner.a).__name__, type(inner.b).__name__)
        share = where(r > bound if float(bound.value) == 0.0 and not bounded else value >= bound, 1.0, 0.0)
    else:
        share = where(value <= bound, 1.0, 0.0)
    return (0.0, share) if fixed[0] else (share, 0.0)


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


def power(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr, ...]:
    from tvm import te

    (base, exponent), zero = v, number(0.0)
    # of a constant in all its digits, where TVM would subtract in float32
    less_one = number(exponent.value - 1.0) if type(exponent).__name__ == "FloatImm" else exponent - number(1.0)
    by_base = where(exponent == zero, 0.0, exponent * te.power(base, less_one))
    return by_base, where(base == zero, 0.0, r * call("log", base))


@dataclass(frozen=True)
class Operator:
    numpy: Callable[..., Any]  # the function on float64 arrays
    # (expression, operands, result) -> the partial derivatives by each operand, as expressions or numbers
    derivative: Callable[[Expr, Sequence[Expr], Expr], Sequence[Expr | float]]
    fields: tuple[str, ...] = ()  # of TVM's node that are its operands; none of a call, whose arguments they are
    instruction: bool = False  # True where LLVM has it for a whole vector; else CPUs compute it lane by lane


def said(e: Expr, v: Sequence[Expr], r: Expr) -> tuple[Expr | float, ...]:
    return (0.0, *(d for derivative in v[2::2] for d in (derivative, 0.0)))


PAIR = ("a", "b")
CUSTOM = "custom_gradient"  # the operator that says its own derivatives
OPERATORS: dict[str, Operator] = {
    "Add": Operator(np.add, lambda e, v, r: (1.0, 1.0), fields=PAIR),
    "Sub": Operator(np.subtract, lambda e, v, r: (1.0, -1.0), fields=PAIR),
    "Mul": Operator(np.multiply, lambda e, v, r: (v[1], v[0]), fields=PAIR),
    "Div": Operator(np.divide, quotient, fields=PAIR),
    "Max": Operator(np.maximum, extremum, fields=PAIR),
    "Min": Operator(np.minimum, extremum, fields=PAIR),
    "LT": Operator(np.less, constant, fields=PAIR),
    "LE": Operator(np.less_equal, constant, fields=PAIR),
    "GT": Operator(np.greater, constant, fields=PAIR),
    "GE": Operator(np.greater_equal, constant, fields=PAIR),
    "EQ": Operator(np.equal, constant, fields=PAIR),
    "NE": Operator(np.not_equal, constant, fields=PAIR),
    "And": Operator(np.logical_and, constant, fields=PAIR),
    "Or": Operator(np.logical_or, constant, fields=PAIR),
    "Not": Operator(np.logical_not, constant, fields=("a",)),
    "Select": Operator(np.where, chosen, fields=("condition", "true_value", "false_value")),
    "if_then_else": Operator(np.where, chosen),
    "Cast": Operator(np.asarray, lambda e, v, r: (
        1.0 if str(e.ty).startswith("float") and str(v[0].ty).startswith("float") else 0.0,), fields=("value",)),
    "exp": Operator(np.exp, lambda e, v, r: (r,)),
    "exp2": Operator(np.exp2, lambda e, v, r: (r * number(math.log(2)),)),
    "exp10": Operator(lambda x: np.power(10.0, x), lambda e, v, r: (r * number(math.log(10)),)),
    "log": Operator(np.log, lambda e, v, r: (number(1.0) / v[0],)),
    "log2": Operator(np.log2, lambda e, v, r: (number(1 / math.log(2)) / v[0],)),
    "log10": Operator(np.log10, lambda e, v, r: (number(1 / math.log(10)) / v[0],)),
    "log1p": Operator(np.log1p, lambda e, v, r: (number(1.0) / (number(1.0) + v[0]),)),
    "sqrt": Operator(np.sqrt, lambda e, v, r: (number(0.5) / r,), instruction=True),
    "rsqrt": Operator(lambda x: 1.0 / np.sqrt(x), lambda e, v, r: (number(-0.5) * r * r * r,)),
    "tanh": Operator(np.tanh, lambda e, v, r: (number(1.0) - r * r,)),
    "sigmoid": Operator(lambda x: 0.5 * (1.0 + np.tanh(0.5 * x)), lambda e, v, r: (r * (number(1.0) - r),)),
    "erf": Operator(np.vectorize(math.erf, otypes=[np.float64]),
                    lambda e, v, r: (number(2 / math.sqrt(math.pi)) * call("exp", number(0.0) - v[0] * v[0]),)),
    "fabs": Operator(np.abs, lambda e, v, r: (
        where(v[0] > number(0.0), 1.0, where(v[0] < number(0.0), -1.0, 0.0)),), instruction=True),
    "sin": Operator(np.sin, lambda e, v, r: (call("cos", v[0]),)),
    "cos": Operator(np.cos, lambda e, v, r: (number(0.0) - call("sin", v[0]),)),
    "tan": Operator(np.tan, lambda e, v, r: (number(1.0) + r * r,)),
    "asin": Operator(np.arcsin, lambda e, v, r: (call("rsqrt", number(1.0) - v[0] * v[0]),)),
    "acos": Operator(np.arccos, lambda e, v, r: (number(0.0) - call("rsqrt", number(1.0) - v[0] * v[0]),)),
    "atan": Operator(np.arctan, lambda e, v, r: (number(1.0) / (number(1.0) + v[0] * v[0]),)),
    "atan2": Operator(np.arctan2, angle),
    "sinh": Operator(np.sinh, lambda e, v, r: (call("cosh", v[0]),)),
    "cosh": Operator(np.cosh, lambda e, v, r: (call("sinh", v[0]),)),
    "asinh": Operator(np.arcsinh, lambda e, v, r: (call("rsqrt", v[0] * v[0] + number(1.0)),)),
    "acosh": Operator(np.arccosh, lambda e, v, r: (call("rsqrt", v[0] * v[0] - number(1.0)),)),
    "atanh": Operator(np.arctanh, lambda e, v, r: (number(1.0) / (number(1.0) - v[0] * v[0]),)),
    "pow": Operator(np.power, power),
    "floor": Operator(np.floor, constant, instruction=True),
    "ceil": Operator(np.ceil, constant, instruction=True),
    "trunc": Operator(np.trunc, constant, instruction=True),
    "round": Operator(np.round, constant, instruction=True),
    "nearbyint": Operator(np.round, constant),
    CUSTOM: Operator(lambda value, *pairs: value, said),
}


def key_of(e: Expr) -> str:
    """The key of an expression's operator, such as ``tanh`` or ``Add``; for one that is not in the table its name."""
    kind = type(e).__name__
    return str(e.op.name).rsplit(".", 1)[-1] if kind == "Call" else kind


def operator_of(e: Expr) -> Operator:
    """The row of an expression's operator. Raises :class:`CellError`, which names it, where it is not in the table."""
    try:
        return OPERATORS[key_of(e)]
    except KeyError:
        raise CellError(f"the cell uses {key_of(e)}, which cannot be scheduled; use one of "
                        f"{', '.join(OPERATORS)}") from None
