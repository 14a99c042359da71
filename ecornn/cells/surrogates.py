"""Values with derivatives of their own: the threshold of a neuron, whose derivative is a surrogate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ecornn.errors import ArgumentError

if TYPE_CHECKING:
    from tvm.ir import Expr


class Surrogate(NamedTuple):
    derivative: Callable[[Any, float], Any]  # (u, slope) -> the derivative of the step at u
    slope: float | None  # the default; None: it has no slope


def _fast_sigmoid(u: Any, slope: float) -> Any:
    from tvm import te

    below = 1.0 + slope * te.abs(u)
    return 1.0 / (below * below)


def _arctan(u: Any, slope: float) -> Any:
    angle = math.pi / 2 * slope * u
    return slope / 2 / (1.0 + angle * angle)


def _sigmoid(u: Any, slope: float) -> Any:
    from tvm import te

    share = te.sigmoid(slope * u)
    return slope * (share * (1.0 - share))


def _triangle(u: Any, slope: float) -> Any:
    from tvm import te, tirx

    return slope * tirx.max(1.0 - slope * te.abs(u), tirx.const(0.0, "float32"))


def _straight_through(u: Any, slope: float) -> Any:
    from tvm import tirx

    return tirx.const(1.0, "float32")


SURROGATES = {"fast_sigmoid": Surrogate(_fast_sigmoid, 25.0), "arctan": Surrogate(_arctan, 2.0),
              "sigmoid": Surrogate(_sigmoid, 25.0), "triangle": Surrogate(_triangle, 1.0),
              "straight_through": Surrogate(_straight_through, None)}


def custom_gradient(value: Any, *pairs: tuple[Any, Any]) -> Expr:
    """``value``, with the derivatives that ``pairs`` say instead of its own: scalars of a step, float32.

    Parameters
    ----------
    value : an expression, such as ``tirx.round(v[b, j])``; a condition is 1 where it holds and 0 elsewhere
    pairs : (operand, derivative) each: the gradient of the operand is that of the result, times the derivative. Nothing
        else that ``value`` reads gets a gradient from it, so without pairs none goes through

    Raises :class:`ArgumentError` where something else than scalars is passed."""
    from tvm import tirx

    scalars = [_scalar("value", value)]
    for n, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentError(f"pairs[{n}]", pair, "a tuple of an operand and the derivative by it")
        scalars += [_scalar(f"pairs[{n}][{k}]", one) for k, one in enumerate(pair)]
    return tirx.call_intrin("float32", operator(), *scalars)


def spike(v: Any, threshold: Any = 0.0, *, surrogate: str = "fast_sigmoid", slope: float | None = None) -> Expr:
    """1 where ``v > threshold``, else 0, so also 0 where they are equal, as in snnTorch and Norse; SpikingJelly has 1
    there. The derivative by u = ``v - threshold`` is that of a ``surrogate``:

    ===================  ==================================  =======  =================================================
    ``surrogate``        derivative, with s = ``slope``      default  source
    ===================  ==================================  =======  =================================================
    `fast_sigmoid`       1 / (1 + s |u|)^2                   25       SuperSpike (Zenke and Ganguli 2018, arXiv
                                                                      1705.11146); snnTorch's fast_sigmoid
    `arctan`             s / 2 / (1 + (pi / 2 s u)^2)        2        Fang et al. 2021, arXiv 2007.05785; ATan of
                                                                      snnTorch and SpikingJelly
    `sigmoid`            s sigmoid(s u) (1 - sigmoid(s u))   25       snnTorch's sigmoid; Sigmoid of SpikingJelly
    `triangle`           s max(0, 1 - s |u|)                 1        Esser et al. 2016, arXiv 1603.08270; Bellec et al.
                                                                      2018, arXiv 1803.09574; PiecewiseQuadratic of
                                                                      SpikingJelly
    `straight_through`   1                                            Bengio et al. 2013, arXiv 1308.3432; snnTorch's
                                                                      straight_through_estimator
    ===================  ==================================  =======  =================================================

    Parameters
    ----------
    v, threshold : scalars of a step, such as ``v[b, j]``; numbers. Both get gradients
    surrogate : a name of the table. :func:`custom_gradient` takes any other derivative
    slope : s; None: the default of the table

    Returns
    -------
    a scalar, float32, to be used within :func:`~ecornn.pointwise`

    Raises
    ------
    ArgumentError : the surrogate is unknown, the slope is not a number above 0 or one that the surrogate does not have,
        or something else than scalars is passed"""
    if surrogate not in SURROGATES:
        raise ArgumentError("surrogate", surrogate, f"one of {', '.join(SURROGATES)}; ecornn.custom_gradient takes any "
                            "other derivative")
    derivative, usual = SURROGATES[surrogate]
    if usual is None and slope is not None:
        raise ArgumentError("slope", slope, f"None: {surrogate} has no slope")
    steep = usual if slope is None else slope
    if usual is not None and (not isinstance(steep, (int, float)) or not 0 < steep < math.inf):
        raise ArgumentError("slope", slope, "a number above 0")
    above, limit = _scalar("v", v), _scalar("threshold", threshold)
    u = above if isinstance(threshold, (int, float)) and threshold == 0 else above - limit
    return custom_gradient(u > 0.0, (u, derivative(u, float(steep or 0.0))))


def operator() -> Any:
    """TVM's operator of a value and its derivatives, which only the analysis reads: kernels have the value alone."""
    from tvm.ir import Op, register_op_attr

    from ecornn.analysis.operators import CUSTOM

    name = f"tirx.{CUSTOM}"
    if name not in Op.list_op_names():
        register_op_attr(name, "TScriptPrinterName", CUSTOM)  # which also registers the operator
    return Op.get(name)


def _scalar(name: str, value: Any) -> Expr:
    """A scalar as an expression, float32."""
    from tvm import tirx
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.te.tensor import TensorSlice

    if isinstance(value, (bool, int, float)):
        return tirx.const(float(value), "float32")
    if isinstance(value, Tensor) or not isinstance(value, (Expr, TensorSlice)):
        raise ArgumentError(name, value, "a scalar of a step, such as h[b, j] within pointwise(), or a number")
    if isinstance(value, TensorSlice):
        return value.asobject()
    one, zero = tirx.const(1.0, "float32"), tirx.const(0.0, "float32")
    return tirx.Select(value, one, zero) if str(value.ty) == "bool" else value
