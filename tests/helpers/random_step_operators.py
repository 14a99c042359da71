"""Operators of random steps: what each is in te, and its value and slope in float64."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecornn.numpy_gradients import erf


@dataclass(frozen=True)
class Smooth:
    """An operator of one value: its name in te, its value and its slope in float64."""

    te: str
    value: Callable[[Any], Any]
    slope: Callable[[Any], Any]


def _sigmoid(v: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * v))


SMOOTH = {s.te: s for s in (
    Smooth("tanh", np.tanh, lambda v: 1 - np.tanh(v) ** 2),
    Smooth("sigmoid", _sigmoid, lambda v: _sigmoid(v) * (1 - _sigmoid(v))),
    Smooth("sin", np.sin, np.cos),
    Smooth("cos", np.cos, lambda v: -np.sin(v)),
    Smooth("atan", np.arctan, lambda v: 1 / (1 + v * v)),
    Smooth("erf", erf, lambda v: 2 / np.sqrt(np.pi) * np.exp(-v * v)),
)}
# of a value that is at least zero, or at most one; each is written as the operator of a square, or of a tanh
GUARDED = {s.te: s for s in (
    Smooth("sqrt", np.sqrt, lambda v: 0.5 / np.sqrt(v)),
    Smooth("rsqrt", lambda v: v ** -0.5, lambda v: -0.5 * v ** -1.5),
    Smooth("log", np.log, lambda v: 1 / v),
    Smooth("log1p", np.log1p, lambda v: 1 / (1 + v)),
)}
STEPPED = {"floor": np.floor, "ceil": np.ceil, "round": np.round}
COMPARED = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}
