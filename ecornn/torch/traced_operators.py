"""PyTorch's operators as scalar te expressions: what a traced step may use, by the names that torch.fx gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecornn.errors import CellError


def _te() -> Any:
    from tvm import te

    return te


def _const(value: float) -> Any:
    return _te().const(float(value), "float32")


def _max(a: Any, b: Any) -> Any:
    from tvm import tirx

    return tirx.max(a, b)


def _min(a: Any, b: Any) -> Any:
    from tvm import tirx

    return tirx.min(a, b)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Of two scalars."""
    from tvm import tirx

    return tirx.Select(condition, yes, no)


def _logical(name: str, a: Any, b: Any) -> Any:
    from tvm import tirx

    return getattr(tirx, name)(a, b)


def relu(v: Any) -> Any:
    return _max(v, _const(0))


def softplus(v: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Without the overflow of e^v; torch's threshold cuts off what float32 does not have."""
    te, scaled = _te(), v * _const(beta)
    return (relu(scaled) + te.log(_const(1) + te.exp(_const(0) - te.abs(scaled)))) / _const(beta)


def clamp(v: Any, min: Any = None, max: Any = None) -> Any:
    """Bounds as torch has them: the upper one wins."""
    for bound in (min, max):
        if bound is not None and not isinstance(bound, (int, float)):
            raise CellError("clamp with a bound that is no number; use torch.minimum and torch.maximum")
    v = v if min is None else _max(v, _const(min))
    return v if max is None else _min(v, _const(max))


def power(v: Any, exponent: Any) -> Any:
    """Whole exponents from 1 to 4 as products, which negative numbers have, too."""
    n = float(exponent.value) if hasattr(exponent, "value") else exponent
    if n in (1.0, 2.0, 3.0, 4.0):
        result = v
        for _ in range(int(n) - 1):
            result = result * v
        return result
    return _te().power(v, exponent)


def weighted(a: Any, b: Any, share: Any) -> Any:
    return a + share * (b - a)


def of(name: str) -> Callable[..., Any]:
    """A function of ``te`` by name."""
    return lambda v: getattr(_te(), name)(v)


def hard_sigmoid(v: Any) -> Any:
    return _max(_min(v / _const(6) + _const(0.5), _const(1)), _const(0))


def elu(v: Any, alpha: float = 1.0) -> Any:
    return select(v > _const(0), v, _const(alpha) * (_te().exp(v) - _const(1)))


def leaky(v: Any, negative_slope: float = 0.01) -> Any:
    return select(v >= _const(0), v, _const(negative_slope) * v)


# Name of a function, method or torch.nn class, without underscores and in lower case -> on scalars.
POINTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
    "div": lambda a, b: a / b, "neg": lambda v: _const(0) - v, "pow": power, "square": lambda v: v * v,
    "reciprocal": lambda v: _const(1) / v, "lerp": weighted, "maximum": _max, "minimum": _min, "where": select,
    "multiply": lambda a, b: a * b, "subtract": lambda a, b: a - b, "divide": lambda a, b: a / b,
    "and": lambda a, b: _logical("all", a, b), "logicaland": lambda a, b: _logical("all", a, b),
    "or": lambda a, b: _logical("any", a, b), "logicalor": lambda a, b: _logical("any", a, b),
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "sigmoid": of("sigmoid"), "tanh": of("tanh"), "exp": of("exp"), "log": of("log"), "sqrt": of("sqrt"),
    "rsqrt": of("rsqrt"), "abs": of("abs"), "sin": of("sin"), "cos": of("cos"), "erf": of("erf"), "floor": of("floor"),
    "relu": relu, "silu": lambda v: v * _te().sigmoid(v), "logsigmoid":
    lambda v: _const(0) - softplus(_const(0) - v), "softsign": lambda v: v / (_const(1) + _te().abs(v)),
    "hardsigmoid": hard_sigmoid, "identity": lambda v: v, "contiguous": lambda v: v}
# Those whose arguments behind the first are plain numbers.
NUMBERS: dict[str, Callable[..., Any]] = {
    "clamp": clamp, "clip": clamp, "softplus": softplus, "elu": elu, "leakyrelu": leaky,
    "hardtanh": lambda v, min_val=-1.0, max_val=1.0: clamp(v, min_val, max_val)}
# Of torch.nn classes, the attributes that are their functions' numbers.
ATTRIBUTES = {"softplus": ("beta", "threshold"), "elu": ("alpha",), "leakyrelu": ("negative_slope",),
              "hardtanh": ("min_val", "max_val")}


def key_of(target: Any) -> str:
    """The name of a function, a method or a class."""
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    return str(name).strip("_").lower().replace("_", "") if str(name) not in POINTWISE else str(name)


def allowed() -> str:
    """All of them, for messages."""
    shapes = ("Linear, linear, matmul, LayerNorm, layer_norm, chunk, split, cat, indexing by columns, LSTMCell, "
              "GRUCell, RNNCell")
    return f"{shapes}, {', '.join(sorted({*POINTWISE, *NUMBERS}))}"
