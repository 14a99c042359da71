"""PyTorch's core operators on each value of a traced step, as scalar te expressions, by their names in ATen."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add, ge, gt, le, lt, mul, sub
from typing import Any

from ecornn.cells import custom_gradient


def number_of(value: Any) -> Any:
    """The te scalar of a value: a constant for a number, 1 or 0 for a condition."""
    from tvm import tirx

    if isinstance(value, (bool, int, float)):
        return tirx.const(float(value), "float32")
    return select(value, 1.0, 0.0) if is_condition(value) else value


def is_condition(value: Any) -> bool:
    return str(getattr(value, "ty", "")) == "bool" or str(getattr(value, "dtype", "")) == "bool"


def _condition(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return number_of(bool(value)) > number_of(0.5)
    return value if is_condition(value) else _tirx("NE")(value, 0.0)


def select(condition: Any, yes: Any, no: Any) -> Any:
    from tvm import tirx

    return tirx.Select(_condition(condition), number_of(yes), number_of(no))


def _on(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on te scalars of its operands."""
    return lambda *operands: function(*map(number_of, operands))


def _tirx(name: str, convert: Callable[[Any], Any] = number_of) -> Callable[..., Any]:
    """A function of TVM by name."""
    def call(*operands: Any) -> Any:
        from tvm import tirx

        return getattr(tirx, name)(*map(convert, operands))

    return call


_max, _min, _and, _or = _tirx("max"), _tirx("min"), _tirx("all", _condition), _tirx("any", _condition)
_not, _xor = _tirx("Not", _condition), _tirx("NE", _condition)
_exp, _sqrt, _tanh, _power = _tirx("exp"), _tirx("sqrt"), _tirx("tanh"), _tirx("power")


def softplus(v: Any, beta: float = 1, threshold: float = 20) -> Any:
    """log(1 + e^v) without the overflow of e^v; the value itself above the threshold."""
    scaled = number_of(v) * number_of(beta)
    soft = _max(scaled, 0.0) + _tirx("log")(number_of(1) + _exp(number_of(0) - _tirx("abs")(scaled)))
    return select(scaled > number_of(threshold), v, soft / number_of(beta))


def _added(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(a: Any, b: Any, alpha: Any = 1) -> Any:
        return function(number_of(a), number_of(b) if alpha == 1 else number_of(b) * number_of(alpha))

    return call


def divided(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    """The quotient, rounded down (``floor``) or to zero (``trunc``) if asked."""
    quotient = number_of(a) / number_of(b)
    return quotient if rounding_mode is None else _tirx(rounding_mode)(quotient)


def bounded(v: Any, low: Any = None, high: Any = None) -> Any:
    """The value within PyTorch's bounds: the upper one wins, and a value at a bound still has its gradient."""
    v = v if low is None else select(number_of(v) < number_of(low), low, v)
    return v if high is None else select(number_of(v) > number_of(high), high, v)


def hardtanh(v: Any, low: Any = -1, high: Any = 1) -> Any:
    """The value of :func:`bounded`, without a gradient at a bound."""
    return select(number_of(v) > number_of(low), select(number_of(v) < number_of(high), v, high), low)


def square_root(v: Any) -> Any:
    """The square root without a gradient at 0, as norms and standard deviations have none there."""
    positive = number_of(v) > number_of(0)
    return select(positive, _sqrt(select(positive, v, 1.0)), 0.0)


def power(v: Any, exponent: Any) -> Any:
    """The power; for small whole exponents products, which negative numbers have, too."""
    if not isinstance(exponent, (int, float)):
        return _power(v, exponent)
    if exponent in (0.5, -0.5):
        return _tirx("sqrt" if exponent > 0 else "rsqrt")(v)
    if exponent != int(exponent) or abs(exponent) > 8:
        return _power(v, exponent)
    result = number_of(1.0)
    for n in range(abs(int(exponent))):
        result = number_of(v) if n == 0 else result * number_of(v)
    return result if exponent >= 0 else number_of(1.0) / result


def gelu(v: Any, approximate: str = "none") -> Any:
    """GELU, Hendrycks and Gimpel 2016, arXiv 1606.08415; with ``tanh`` its approximation."""
    v = number_of(v)
    if approximate == "none":
        return v * number_of(0.5) * (number_of(1) + _tirx("erf")(v * number_of(math.sqrt(0.5))))
    inner = number_of(math.sqrt(2 / math.pi)) * (v + number_of(0.044715) * v * v * v)
    return v * number_of(0.5) * (number_of(1) + _tanh(inner))


def elu(v: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    below = _exp(_min(number_of(v) * number_of(input_scale), 0.0)) - number_of(1)
    return select(number_of(v) > number_of(0), number_of(v) * number_of(scale), below * number_of(alpha * scale))


def added(*values: Any) -> Any:
    return reduce(lambda a, b: a + b, map(number_of, values))


def highest(*values: Any) -> Any:
    """The maximum, whose gradient all values that equal it share."""
    top = reduce(_max, values)
    if len(values) <= 2:
        return top
    here = [_tirx("EQ")(v, top) for v in values]
    return added(*(select(at, v, 0.0) for at, v in zip(here, values, strict=True))) / added(*here)


def angle(y: Any, x: Any) -> Any:
    """The angle of a point, without a gradient at the origin."""
    origin = _and(_tirx("EQ")(y, 0.0), _tirx("EQ")(x, 0.0))
    return select(origin, 0.0, _tirx("atan2")(y, select(origin, 1.0, x)))


def sign(v: Any) -> Any:
    return select(number_of(v) > number_of(0), 1.0, select(number_of(v) < number_of(0), -1.0, 0.0))


def own_gradient(v: Any, *both: Any) -> Any:
    """The value, whose derivatives by the first half of ``both`` are the second."""
    count = len(both) // 2
    numbers = [*map(number_of, both)]
    return custom_gradient(number_of(v), *zip(numbers[:count], numbers[count:], strict=True))


def detached(v: Any) -> Any:
    return v if is_condition(v) else own_gradient(v)


# Name of an operator -> its function on scalars, arguments in ATen's order.
POINTWISE: dict[str, Callable[..., Any]] = {
    "add": _added(add), "sub": _added(sub), "rsub": lambda a, b, alpha=1: _added(sub)(b, a, alpha),
    "mul": _on(mul), "div": divided, "neg": _on(lambda v: number_of(0) - v), "pow": power,
    "reciprocal": _on(lambda v: number_of(1) / v), "maximum": _max, "minimum": _min, "where": select,
    "lt": _on(lt), "le": _on(le), "gt": _on(gt), "ge": _on(ge), "eq": _tirx("EQ"), "ne": _tirx("NE"),
    "logical_and": _and, "bitwise_and": _and, "logical_or": _or, "bitwise_or": _or, "logical_not": _not,
    "bitwise_not": _not, "logical_xor": _xor, "bitwise_xor": _xor,
    **{name: _tirx(name) for name in ("sigmoid", "tanh", "exp", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "abs",
                                      "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
                                      "atanh", "erf", "floor", "ceil", "trunc")},
    "expm1": lambda v: _exp(v) - number_of(1), "erfc": lambda v: number_of(1) - _tirx("erf")(v),
    "round": _tirx("nearbyint"), "detach": detached, "sign": sign, "sgn": sign,
    "relu": lambda v: _max(v, 0.0), "gelu": gelu,
    "silu": _on(lambda v: v * _tirx("sigmoid")(v)), "mish": lambda v: number_of(v) * _tanh(softplus(v)),
    "elu": elu, "softplus": softplus, "clamp": bounded, "hardtanh": hardtanh, "atan2": angle,
    "remainder": lambda a, b: number_of(a) - divided(a, b, "floor") * number_of(b),
    "fmod": lambda a, b: number_of(a) - divided(a, b, "trunc") * number_of(b),
    "hypot": _on(lambda a, b: _sqrt(a * a + b * b))}
# Operators that leave each value as it is.
SAME = ("alias", "clone", "contiguous", "lift_fresh_copy", "lift_fresh")
REFUSED = ("a step cannot use this operator. It can use products with weights, sums, means, maxima and variances "
           "over units, softmax, layer_norm, group_norm, cat, stack, chunk, split, slices in multiples of H, views, "
           + ", ".join(sorted(POINTWISE)))
