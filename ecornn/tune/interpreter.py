"""A cell's step graph carried out in NumPy float64: the reference of cells written by users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.analysis import Statistic, StepGraph
from ecornn.analysis.scalar import children
from ecornn.errors import CellError

Array = NDArray[np.float64]

OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum,
    "Min": np.minimum, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal, "And": np.logical_and, "Or": np.logical_or,
    "Not": np.logical_not, "Select": np.where, "Cast": np.asarray}


def _erf(z: Any) -> Any:
    import math

    return np.vectorize(math.erf, otypes=[np.float64])(z)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "tanh": np.tanh, "sigmoid": lambda z: 0.5 * (1.0 + np.tanh(0.5 * z)),
    "log": np.log, "log2": np.log2, "log1p": np.log1p, "exp2": np.exp2, "sqrt": np.sqrt,
    "rsqrt": lambda z: 1.0 / np.sqrt(z), "fabs": np.abs, "pow": np.power, "erf": _erf,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "atan": np.arctan, "sinh": np.sinh,
    "cosh": np.cosh, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.round,
    "if_then_else": np.where}


def evaluate(e: Any, values: Mapping[Any, Array]) -> Any:
    """A scalar expression over arrays (B, H) or (H,) of its variables."""
    kind = type(e).__name__
    if kind == "Var":
        return values[e]
    if kind in ("FloatImm", "IntImm"):
        return float(e.value)
    operands = [evaluate(c, values) for c in children(e)]
    if kind == "Call":
        name = e.op.name.rsplit(".", 1)[-1]
        if name in FUNCTIONS:
            return FUNCTIONS[name](*operands)
        raise CellError(f"the cell uses {e.op.name}, which the tuner has no reference for; name the "
                        "schedule and configuration instead of tuning")
    return OPERATORS[kind](*operands)


def interpret(graph: StepGraph, x: Any, parameters: Mapping[str, Any],
              states: Sequence[Any]) -> tuple[Array, tuple[Array, ...]]:
    """One layer: x (T, B, I), ``parameters`` by the cell's names in te shape, states (B, H) each,
    to y (T, B, H) and the final states; float64."""
    weights = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    values: dict[Any, Array] = {v.var: weights[v.parameter][v.gate] for v in graph.vectors}
    for assign in graph.invariants:
        values[assign.var] = evaluate(assign.value, values)
    current = [np.asarray(s, np.float64) for s in states]
    steps = []
    for row in np.asarray(x, np.float64):
        now = dict(values)
        now.update(zip(graph.states.values(), current, strict=True))
        if graph.x is not None:
            now[graph.x] = row
        for r in graph.hoisted_rows:
            now[r.var] = row @ weights[r.weight][r.gate].T
        shape = current[0].shape
        for assign in graph.hoisted:
            now[assign.var] = evaluate(assign.value, now)
        summarize(graph.hoisted_statistics, now, shape)
        for assign in (*graph.normalized, *graph.prologue):
            now[assign.var] = evaluate(assign.value, now)
        for phase in graph.phases:
            summarize(phase.statistics, now, shape)
            for r in phase.rows:
                now[r.var] = now[r.operand] @ weights[r.weight][r.gate].T
            for assign in phase.assigns:
                now[assign.var] = evaluate(assign.value, now)
        current = [np.broadcast_to(now[v], shape) for v in graph.results.values()]
        steps.append(current[list(graph.states).index(graph.output)])
    return np.stack(steps), tuple(current)


def summarize(statistics: Sequence[Statistic], values: dict[Any, Array], shape: tuple[int, ...]) -> None:
    """Adds the variables of ``statistics``, (B, 1) each, to ``values``, from operands that broadcast to ``shape``."""
    for one in statistics:
        operands = np.stack([np.broadcast_to(values[o], shape) for o in one.operands])
        values[one.total] = operands.sum(axis=(0, 2))[:, None]
        if one.squares is not None:
            mean = operands.mean(axis=(0, 2))[:, None]
            values[one.squares] = np.square(operands - mean).sum(axis=(0, 2))[:, None]
