"""The results of layers in float64: cells with masks, directions and layers around them; and how far off one may be.

A ``Forward`` runs a cell from the first step of a sequence to its last: (cell, x (T, B, I), states by name (B, H),
parameters by name in te shape) to y (T, B, H) and the last states. ``in_float64`` is one; ``library`` another.

The limit is twice the error of ``library``, which has the roundings that nobody who computes in that type gets around:
of what products multiply, and of the state that is y. These are random, and a small layer may get around them all: the
limit is at least what the last rounding alone may do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import step_cells
from msgspec.structs import replace
from numpy_packing import tf32

from ecornn.cells import BUILTIN, get
from ecornn.interpreter import Step, interpret, output_numbers
from ecornn.numpy_reference import NORMALIZED, STEPS, reference
from ecornn.program import LATER
from ecornn.tune.oracle import rounded
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


FLOAT32 = 1e-5  # some roundings of a long sum
TF32 = 2.0**-11  # relative error of a rounding, at most
DIGITS = {"float16": (11, -24), "bfloat16": (8, -133)}  # binary ones, and the exponent of the last one's least


def relative(value: Any, expected: Any, least: float = 1e-30) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64) - expected) / max(np.linalg.norm(expected), least))


def limit(arithmetic: str, expected: Any, of_library: float = 0.0) -> float:
    """The most that :func:`relative` may be for ``expected``, for which a library has the error ``of_library``."""
    return FLOAT32 if arithmetic == "float32" else max(2 * of_library, FLOAT32 + of_rounding(arithmetic, expected))


def of_rounding(arithmetic: str, expected: Any) -> float:
    """The relative error of ``expected`` rounded to nearest, if every value lies where that errs most."""
    if arithmetic == "tf32":
        return TF32
    digits, least = DIGITS[arithmetic]
    spacing = np.where(expected == 0, 0.0, np.ldexp(1.0, np.maximum(np.frexp(expected)[1] - digits, least)))
    return relative(expected + spacing / 2, expected)


class Wanted:
    def __init__(self, arithmetic: str, run: Callable[[Forward], tuple[Any, Any]]) -> None:
        self.y, self.last = run(in_float64)
        y, last = (self.y, self.last) if arithmetic == "float32" else run(library(arithmetic))
        self.limit = limit(arithmetic, self.y, relative(y, self.y))
        self.limits = [limit(arithmetic, exact, relative(theirs, exact))
                       for theirs, exact in zip(values(last), values(self.last), strict=True)]

    def check(self, y: Any, last: Any = None) -> None:
        """Fails where y (T, B, H), or one of the last states, ordered or named as ``run`` has them, is too far off."""
        assert relative(y, self.y) <= self.limit
        if last is not None:
            found = [last[name] for name in self.last] if isinstance(self.last, Mapping) else last
            errors = [relative(*pair) for pair in zip(found, values(self.last), strict=True)]
            assert all(error <= most for error, most in zip(errors, self.limits, strict=True)), (errors, self.limits)


def values(states: Any) -> Sequence[Any]:
    return list(states.values()) if isinstance(states, Mapping) else states


def library(arithmetic: str) -> Forward:
    steps: dict[Any, Rounded] = {}
    def forward(cell: str, x: Any, states: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        found, now, y = ALL_CELLS.get(cell) or get(cell), list(states.values()), []
        places, count = output_numbers(found), len(now)
        state = places[0] if places[1:] == () and places[0] < count else None  # then y is a state, and rounded as such
        key = cell, x.shape[1:], now[0].shape
        step = steps.setdefault(key, steps.get(key) or Rounded(found, *key[1:], arithmetic))
        for row in x:
            made = list(step(row, now, parameters))
            if state is not None:
                made[state] = stored(made[state], arithmetic)
            y.append(np.concatenate([stored(made[n], arithmetic) for n in places], axis=1))
            now = made[:count]
        return np.stack(y), {n: stored(s, arithmetic) for n, s in zip(states, now, strict=True)}
    return forward


class Rounded(Step):
    def __init__(self, cell: Any, x: tuple[int, ...], state: tuple[int, ...], arithmetic: str) -> None:
        super().__init__(cell, x, state)
        self.arithmetic = arithmetic
        self.matrices = [p.op for p in self.parameters.values() if len(p.shape) == 3]

    def multiplied(self, parts: Sequence[Any], places: Mapping[Any, Any]) -> list[Any]:
        found = super().multiplied(parts, places)
        loads = [e.args[0].op for e in parts if type(e).__name__ == "Call" and e.op.name == "te.tensor_load"]
        if not any(load.same_as(matrix) for load in loads for matrix in self.matrices):
            return found
        kind = self.arithmetic
        return [np.float64(tf32(v) if kind == "tf32" else rounded(v, kind)) for v in found]


def stored(value: Any, arithmetic: str) -> Any:
    return np.float64(rounded(value, "float32" if arithmetic == "tf32" else arithmetic))
