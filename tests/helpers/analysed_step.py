"""A layer by its step as it was analysed, in NumPy float64: for tests of ``ecornn.analysis`` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ecornn.analysis import StepGraph
from ecornn.analysis.evaluate import Array, at, hoist, start, step


def run_analysed(graph: StepGraph, x: Any, parameters: Mapping[str, Any],
                 states: Sequence[Any]) -> tuple[Array, tuple[Array, ...]]:
    """One layer: x (T, B, I), ``parameters`` by the cell's names in te shape, states (B, H) each,
    to y (T, B, H) and the final states; float64."""
    weights = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    x, current = np.asarray(x, np.float64), [np.asarray(s, np.float64) for s in states]
    shape, values, steps = current[0].shape, start(graph, weights), []
    hoist(graph, weights, values, x, (len(x), *shape))
    for t in range(len(x)):
        now = at(values, t, values) | dict(zip(graph.states.values(), current, strict=True))
        step(graph, weights, now, shape)
        current = [np.broadcast_to(now[v], shape) for v in graph.results.values()]
        outputs = graph.outputs or (graph.results[graph.output],)
        steps.append(np.concatenate([np.broadcast_to(now[v], shape) for v in outputs], axis=1))
    return np.stack(steps), tuple(current)
