"""How far from float64 a layer may be: no farther than twice what a library of its data type is.

The library here is one in NumPy, on the very same inputs: what products multiply is rounded to the type, sums have more
digits than that, and the state that is y is rounded between steps. So it has the roundings that nobody who computes in
that type gets around, and a kernel may have as many again: those of float32 sums, of W x kept in 16 bits, of
``fast`` functions. Roundings are random, and a small layer may get around them all: the limit is at least what the last
rounding alone may do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from exact import ALL_CELLS, Forward, in_float64
from numpy_packing import tf32

from ecornn.cells import get
from ecornn.interpreter import Step, output_numbers
from ecornn.tune.oracle import rounded

FLOAT32 = 1e-5  # some roundings of a long sum
TF32 = 2.0**-11  # relative error of a rounding, at most
DIGITS = {"float16": (11, -24), "bfloat16": (8, -133)}  # binary ones, and the exponent of the last one's least


def relative(value: Any, expected: Any, least: float = 1e-30) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64) - expected) / max(np.linalg.norm(expected), least))


def limit(arithmetic: str, expected: Any, of_library: float = 0.0) -> float:
    """What :func:`relative` may be of a result ``expected`` for which a library has the error ``of_library``."""
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
    """A sequence from its first step to its last, as a library of that type computes it."""
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
    """A tensor of a layer; with tf32 products these are float32."""
    return np.float64(rounded(value, "float32" if arithmetic == "tf32" else arithmetic))
