"""The scalar operators that a cell may use, a row each, which has all that is known of an operator.

Schedules write an operator as TVM does, unless they have something better under its key: CUDA functions in
``schedules/cuda/isa/functions.py``, vector functions for CPUs in ``schedules/cpu/emit.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.analysis import derivatives as d
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes
    ----------
    numpy : the function on float64 arrays
    derivative : (expression, operands, result) -> the partial derivatives by each operand, as expressions or numbers
    fields : the fields of TVM's node that are its operands; none of a call, whose arguments they are
    instruction : True where LLVM has it for a whole vector; else CPUs compute it lane by lane
    """

    numpy: Callable[..., Any]
    derivative: Callable[[Expr, Sequence[Expr], Expr], Sequence[Expr | float]]
    fields: tuple[str, ...] = ()
    instruction: bool = False


PAIR = ("a", "b")
OPERATORS: dict[str, Operator] = {
    "Add": Operator(np.add, lambda e, v, r: (1.0, 1.0), fields=PAIR),
    "Sub": Operator(np.subtract, lambda e, v, r: (1.0, -1.0), fields=PAIR),
    "Mul": Operator(np.multiply, lambda e, v, r: (v[1], v[0]), fields=PAIR),
    "Div": Operator(np.divide, d.quotient, fields=PAIR),
    "Max": Operator(np.maximum, d.extremum, fields=PAIR),
    "Min": Operator(np.minimum, d.extremum, fields=PAIR),
    "LT": Operator(np.less, d.constant, fields=PAIR),
    "LE": Operator(np.less_equal, d.constant, fields=PAIR),
    "GT": Operator(np.greater, d.constant, fields=PAIR),
    "GE": Operator(np.greater_equal, d.constant, fields=PAIR),
    "EQ": Operator(np.equal, d.constant, fields=PAIR),
    "NE": Operator(np.not_equal, d.constant, fields=PAIR),
    "And": Operator(np.logical_and, d.constant, fields=PAIR),
    "Or": Operator(np.logical_or, d.constant, fields=PAIR),
    "Not": Operator(np.logical_not, d.constant, fields=("a",)),
    "Select": Operator(np.where, d.chosen, fields=("condition", "true_value", "false_value")),
    "if_then_else": Operator(np.where, d.chosen),
    "Cast": Operator(np.asarray, d.converted, fields=("value",)),
    "exp": Operator(np.exp, lambda e, v, r: (r,)),
    "exp2": Operator(np.exp2, lambda e, v, r: (r * d.number(math.log(2)),)),
    "exp10": Operator(lambda x: np.power(10.0, x), lambda e, v, r: (r * d.number(math.log(10)),)),
    "log": Operator(np.log, lambda e, v, r: (d.number(1.0) / v[0],)),
    "log2": Operator(np.log2, lambda e, v, r: (d.number(1 / math.log(2)) / v[0],)),
    "log10": Operator(np.log10, lambda e, v, r: (d.number(1 / math.log(10)) / v[0],)),
    "log1p": Operator(np.log1p, lambda e, v, r: (d.number(1.0) / (d.number(1.0) + v[0]),)),
    "sqrt": Operator(np.sqrt, lambda e, v, r: (d.number(0.5) / r,), instruction=True),
    "rsqrt": Operator(lambda x: 1.0 / np.sqrt(x), lambda e, v, r: (d.number(-0.5) * r * r * r,)),
    "tanh": Operator(np.tanh, lambda e, v, r: (d.number(1.0) - r * r,)),
    "sigmoid": Operator(lambda x: 0.5 * (1.0 + np.tanh(0.5 * x)), lambda e, v, r: (r * (d.number(1.0) - r),)),
    "erf": Operator(np.vectorize(math.erf, otypes=[np.float64]), d.error_function),
    "fabs": Operator(np.abs, d.absolute, instruction=True),
    "sin": Operator(np.sin, lambda e, v, r: (d.call("cos", v[0]),)),
    "cos": Operator(np.cos, lambda e, v, r: (d.number(0.0) - d.call("sin", v[0]),)),
    "tan": Operator(np.tan, lambda e, v, r: (d.number(1.0) + r * r,)),
    "asin": Operator(np.arcsin, lambda e, v, r: (d.call("rsqrt", d.number(1.0) - v[0] * v[0]),)),
    "acos": Operator(np.arccos, lambda e, v, r: (d.number(0.0) - d.call("rsqrt", d.number(1.0) - v[0] * v[0]),)),
    "atan": Operator(np.arctan, lambda e, v, r: (d.number(1.0) / (d.number(1.0) + v[0] * v[0]),)),
    "atan2": Operator(np.arctan2, d.angle),
    "sinh": Operator(np.sinh, lambda e, v, r: (d.call("cosh", v[0]),)),
    "cosh": Operator(np.cosh, lambda e, v, r: (d.call("sinh", v[0]),)),
    "asinh": Operator(np.arcsinh, lambda e, v, r: (d.call("rsqrt", v[0] * v[0] + d.number(1.0)),)),
    "acosh": Operator(np.arccosh, lambda e, v, r: (d.call("rsqrt", v[0] * v[0] - d.number(1.0)),)),
    "atanh": Operator(np.arctanh, lambda e, v, r: (d.number(1.0) / (d.number(1.0) - v[0] * v[0]),)),
    "pow": Operator(np.power, d.power),
    "floor": Operator(np.floor, d.constant, instruction=True),
    "ceil": Operator(np.ceil, d.constant, instruction=True),
    "trunc": Operator(np.trunc, d.constant, instruction=True),
    "round": Operator(np.round, d.constant, instruction=True),
    "nearbyint": Operator(np.round, d.constant),
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
        raise CellError(f"the cell uses {key_of(e)}, which cannot be scheduled; it may use "
                        f"{', '.join(OPERATORS)}") from None
