"""What the published cells have in common: shapes as a table, sums of products and vectors, and NumPy's functions."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from tvm import te, tirx

from ecornn import Cell, pointwise, product

ONE, TWO, THREE, FOUR = ({"W": (n, "I"), "R": (n, "H"), "b": (n,)} for n in range(1, 5))


class Published(Cell):
    """A cell whose ``shapes`` say (G, "I"), (G, "H") or (G,) of each parameter.

    ``numpy(x, *states, **parameters)`` is its step on arrays: x (B, I), states (B, H) in their order, and parameters
    (G, H, K) and (G, H), to the new states in their order, and behind them outputs that are none. ``hidden``: an H that
    it can have. ``square``: it reads x at each unit, so that I = H. ``ranges``: where the values of some parameters are
    drawn from, instead of around 0. ``fixed``: of those that are no weights, the values (G, H[, K]) for H."""

    shapes: ClassVar[dict[str, tuple[Any, ...]]] = {}
    hidden: ClassVar[int] = 7
    square: ClassVar[bool] = False
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}
    fixed: ClassVar[dict[str, Callable[[int], Any]]] = {}

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes = {"I": input, "H": hidden}
        return {n: (g, hidden, *(sizes[k] for k in more)) for n, (g, *more) in self.shapes.items()}

    def sample(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
        if name in self.fixed:
            return self.fixed[name](shape[1])
        return rng.uniform(*self.ranges[name], shape) if name in self.ranges else super().sample(name, shape, rng)

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}()"  # one class, one cell

    @abstractmethod
    def numpy(self, x: Any, *states: Any, **parameters: Any) -> Sequence[Any]:
        """The formula as published: what the step returns."""


def sums(x: Any, h: Any, p: Mapping[str, Any]) -> Callable[[Any, int, Any], Any]:
    """``at(b, g, j)`` = W_g x + R_g h + b_g, on te tensors."""
    wx, rh, v = product(x, p["W"]), product(h, p["R"]), p["b"]
    return lambda b, g, j: wx[b, g, j] + rh[b, g, j] + v[g, j]


def lstm(at: Callable[[Any, int, Any], Any], c: Any) -> list[Any]:
    new = pointwise(lambda b, j: te.sigmoid(at(b, 1, j)) * c[b, j] + te.sigmoid(at(b, 0, j)) * te.tanh(at(b, 2, j)), c)
    return [pointwise(lambda b, j: te.sigmoid(at(b, 3, j)) * te.tanh(new[b, j]), c), new]


def relu(value: Any) -> Any:
    return tirx.max(value, tirx.const(0.0, "float32"))


def softplus(value: Any) -> Any:
    return relu(value) + te.log(1.0 + te.exp(0.0 - te.abs(value)))


# -- NumPy --------------------------------------------------------------------------------------
def affine(x: Any, h: Any, W: Any, R: Any, b: Any) -> list[Any]:
    return [x @ w.T + h @ r.T + v for w, r, v in zip(W, R, b, strict=True)]


def lstm_formula(i: Any, f: Any, g: Any, o: Any, c: Any) -> tuple[Any, Any]:
    c = sig(f) * c + sig(i) * np.tanh(g)
    return sig(o) * np.tanh(c), c


def sig(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


def soft(z: Any) -> Any:
    return np.log1p(np.exp(z))
