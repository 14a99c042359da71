"""Activations by name, those of ONNX's recurrent operators, as scalar tensor expressions.

An activation is written ``name``, ``name:alpha`` or ``name:alpha:beta``; the numbers default to ONNX's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ecornn.errors import ArgumentError

if TYPE_CHECKING:
    from tvm.ir import Expr

# name -> defaults of alpha and beta, those that it has; https://onnx.ai/onnx/operators/onnx__LSTM.html
DEFAULTS: dict[str, tuple[float, ...]] = {
    "sigmoid": (), "tanh": (), "relu": (), "softsign": (), "softplus": (), "affine": (1.0, 0.0),
    "leaky_relu": (0.01,), "thresholded_relu": (1.0,), "scaled_tanh": (1.0, 1.0), "hard_sigmoid": (0.2, 0.5),
    "elu": (1.0,)}


def check_activation(where: str, text: Any) -> tuple[str, tuple[float, ...]]:
    """Name and numbers of an activation; :class:`ArgumentError` where it is none."""
    name, *numbers = text.split(":") if isinstance(text, str) else ("",)
    try:
        values = tuple(float(n) for n in numbers)
    except ValueError:
        values = (float("nan"),)
    if name not in DEFAULTS or len(values) > len(DEFAULTS[name]) or not all(abs(v) < float("inf") for v in values):
        forms = ", ".join(":".join((n, "ALPHA", "BETA")[:1 + len(d)]) for n, d in DEFAULTS.items())
        raise ArgumentError(where, text, f"one of {forms}")
    return name, values + DEFAULTS[name][len(values):]


def activation(text: str) -> Callable[[Expr], Expr]:
    """The function of an activation, on float32 scalar expressions."""
    from tvm import te, tirx

    name, numbers = check_activation("activation", text)
    alpha, beta = (*(tirx.const(n, "float32") for n in numbers), None, None)[:2]
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
    table: dict[str, Callable[[Expr], Expr]] = {
        "sigmoid": te.sigmoid,
        "tanh": te.tanh,
        "relu": lambda v: tirx.max(v, zero),
        "softsign": lambda v: v / (one + te.abs(v)),
        # log(1 + e^v) without the overflow of e^v
        "softplus": lambda v: tirx.max(v, zero) + te.log(one + te.exp(zero - te.abs(v))),
        "affine": lambda v: alpha * v + beta,
        "leaky_relu": lambda v: tirx.Select(v >= zero, v, alpha * v),
        "thresholded_relu": lambda v: tirx.Select(v >= alpha, v, zero),
        "scaled_tanh": lambda v: alpha * te.tanh(beta * v),
        "hard_sigmoid": lambda v: tirx.max(tirx.min(alpha * v + beta, one), zero),
        "elu": lambda v: tirx.Select(v >= zero, v, alpha * (te.exp(v) - one)),
    }
    return table[name]
