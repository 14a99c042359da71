"""What layers compute, in float64: cells with masks, directions and layers around them.

A ``Forward`` runs a cell from the first step of a sequence to its last: (cell, x (T, B, I), states by name (B, H),
parameters by name in te shape) to y (T, B, H) and the last states. ``in_float64`` is one; limits.py has another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import step_cells
from msgspec.structs import replace

from ecornn.cells import BUILTIN, get
from ecornn.interpreter import interpret
from ecornn.numpy_reference import NORMALIZED, STEPS, reference
from ecornn.program import LATER
from ecornn.workload import ALONE, Stack, Traversal, Workload

ALL_CELLS = BUILTIN | step_cells.CELLS
Forward = Callable[[str, Any, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]]


def in_float64(cell: str, x: np.ndarray, states: dict[str, Any], parameters: dict[str, Any]) -> tuple[np.ndarray, Any]:
    if cell in step_cells.CELLS:
        return step_cells.run(step_cells.CELLS[cell], x, states, parameters)
    if cell not in STEPS | NORMALIZED:  # another one with options; tests/cells/test_variants.py has their formulas
        y, last = interpret(ALL_CELLS.get(cell) or get(cell), x, parameters, list(states.values()))
        return y, dict(zip(states, last, strict=True))
    weights = {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}
    y, last = reference(cell, x, weights, list(states.values()))
    return y, dict(zip(states, last, strict=True))


def expected(cell: str, traversal: Traversal, x: np.ndarray, states: dict[str, Any], parameters: dict[str, Any],
             masks: dict[str, Any], forward: Forward) -> tuple[np.ndarray, dict[str, Any]]:
    """y (T, B, H) and the last states: each row apart, turned round and cut by hand."""
    if traversal == ALONE:
        return forward(cell, x, states, parameters)
    steps, batch = x.shape[:2]
    outputs = len(ALL_CELLS[cell].output_names()) if cell in ALL_CELLS else 1
    y = np.zeros((steps, batch, outputs * next(iter(states.values())).shape[1]))
    last = {name: value.copy() for name, value in states.items()}
    table = unmarked(masks["sequences"]) if traversal.sequences else np.full((1, 1), -1)
    for number in range(table.max() + 1):
        at, order = np.nonzero(table == number), slice(None, None, -1 if traversal.reverse else 1)
        now = {name: value[number:number + 1] for name, value in states.items()}
        rows, now = forward(cell, x[at][order][:, None], now, parameters)
        y[at] = rows[order, 0]
        for name, value in now.items():
            last[name][number] = value[0]
    for b in range(0 if traversal.sequences else batch):
        n = int(masks["lengths"][b]) if traversal.lengths else steps
        starts = masks["resets"][:n, b] if traversal.resets else np.zeros(n, bool)
        if traversal.reverse:  # a start before step t is one after it, backwards
            starts = np.concatenate([np.zeros(min(n, 1), bool), starts[1:][::-1]])
        order = np.arange(n)[::-1] if traversal.reverse else np.arange(n)
        now = {name: value[b:b + 1] for name, value in states.items()}
        for piece in np.split(np.arange(n), np.flatnonzero(starts)):
            if len(piece):
                if starts[piece[0]]:
                    now = {name: np.zeros_like(value) for name, value in now.items()}
                y[order[piece], b:b + 1], now = forward(cell, x[order[piece], b:b + 1], now, parameters)
        for name, value in now.items():
            last[name][b] = value[0]
    return y, last


def of_stack(cell: str, stack: Stack, x: Any, states: Sequence[Any], weights: Mapping[str, Any], masks: dict[str, Any],
             forward: Forward) -> tuple[np.ndarray, list[np.ndarray]]:
    """As :func:`~ecornn.numpy_reference.reference`, for any cell, and for a stack that only goes backwards."""
    steps, batch, width = x.shape
    found, hidden = ALL_CELLS.get(cell) or get(cell), states[0].shape[-1]
    first = [np.asarray(s, np.float64).reshape(-1, batch, hidden) for s in states]
    last, y, outputs = [np.empty_like(s) for s in first], np.asarray(x, np.float64), []
    for part in stack.parts(Workload(cell, hidden, width, batch, steps)):
        shapes = found.parameters(y.shape[2], hidden)
        own = {n: np.asarray(weights[f"{n}_{part.label}"], np.float64).reshape(s) for n, s in shapes.items()}
        traversal = replace(part.traversal, lengths="lengths" in masks, resets="resets" in masks, sequences=False)
        start = {name: s[part.number] for name, s in zip(found.states, first, strict=True)}
        rows, after = expected(cell, traversal, y, start, own, masks, forward)
        for kept, name in zip(last, found.states, strict=True):
            kept[part.number] = after[name]
        outputs.append(rows)
        if len(outputs) == stack.directions:
            y, outputs = np.concatenate(outputs, axis=2), []
    return y, [s.reshape(given.shape) for s, given in zip(last, states, strict=True)]


def unmarked(table: np.ndarray) -> np.ndarray:
    return np.where(table < 0, table, table & (LATER - 1))
