"""Cells that no built-in one resembles, each with its step in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from ecornn.cells import Cell, pointwise, product
from ecornn.numpy_gradients import erf


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * z)


class Peephole(Cell):
    """LSTM whose gates also read the cell state: pointwise values before any product."""

    name, states, output, unread = "peephole", ("c", "h"), "h", ("p",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (3, hidden, input), "R": (3, hidden, hidden), "p": (3, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        c, h = states
        wx, rh, v = product(x, p["W"]), product(h, p["R"]), p["p"]
        new = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j] + v[0, j] * c[b, j]) * c[b, j]
                        + te.tanh(wx[b, 1, j] + rh[b, 1, j]), c)
        h_new = pointwise(lambda b, j: te.sigmoid(wx[b, 2, j] + rh[b, 2, j] + v[2, j] * new[b, j])
                          * te.tanh(new[b, j]), c)
        return [new, h_new]

    def numpy(self, x: np.ndarray, states: list[np.ndarray], p: dict[str, np.ndarray]) -> list[np.ndarray]:
        c, h = states
        g = [x @ w.T + h @ r.T for w, r in zip(p["W"], p["R"], strict=True)]
        new = sigmoid(g[0] + p["p"][0] * c) * c + np.tanh(g[1])
        return [new, sigmoid(g[2] + p["p"][2] * new) * np.tanh(new)]


class Chain(Cell):
    """Three products a step, one of a function of the state, and values that skip a phase."""

    name, states = "chain", ("h", "s")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "R": (4, hidden, hidden), "v": (2, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        h, s = states
        wx, R, v = product(x, p["W"]), p["R"], p["v"]
        bent = pointwise(lambda b, j: te.tanh(h[b, j] - s[b, j]), h, "bent")
        first = product(bent, R, 0)
        a = pointwise(lambda b, j: te.tanh(wx[b, 0, j] + first[b, j] + v[0, j]), h, "a")
        second, other = product(a, R, 1), product(h, R, 3)
        d = pointwise(lambda b, j: te.sigmoid(second[b, j] + other[b, j]) * a[b, j], h, "d")
        third = product(d, R, 2)
        h_new = pointwise(lambda b, j: te.tanh(third[b, j] + wx[b, 1, j] * v[1, j]) + a[b, j] * d[b, j], h)
        return [h_new, h]  # s is the state of the step before

    def numpy(self, x: np.ndarray, states: list[np.ndarray], p: dict[str, np.ndarray]) -> list[np.ndarray]:
        h, s = states
        w, r, v = p["W"], p["R"], p["v"]
        a = np.tanh(x @ w[0].T + np.tanh(h - s) @ r[0].T + v[0])
        d = sigmoid(a @ r[1].T + h @ r[3].T) * a
        return [np.tanh(d @ r[2].T + (x @ w[1].T) * v[1]) + a * d, h]


class Residual(Cell):
    """No recurrent product, x read at its own unit (I = H), and functions without a vector form."""

    name, states = "residual", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "decay": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,) = states
        wx, decay = product(x, p["W"], 0), p["decay"]

        def new(b: Any, j: Any) -> Any:
            grown = te.log(te.sqrt(te.exp(h[b, j])) + te.abs(wx[b, j]))
            kept = tirx.Select(x[b, j] > 0.0, te.exp(decay[0, j]) * h[b, j], tirx.max(h[b, j], grown))
            return te.erf(kept) + x[b, j]

        return [pointwise(new, h)]

    def numpy(self, x: np.ndarray, states: list[np.ndarray], p: dict[str, np.ndarray]) -> list[np.ndarray]:
        (h,) = states
        grown = np.log(np.sqrt(np.exp(h)) + np.abs(x @ p["W"][0].T))
        kept = np.where(x > 0, np.exp(p["decay"][0]) * h, np.maximum(h, grown))
        return [erf(kept) + x]


def run(cell: Any, x: np.ndarray, states: list[np.ndarray],
        parameters: dict[str, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """y and final states in float64."""
    now = [s.astype(np.float64) for s in states]
    wide = {n: p.astype(np.float64) for n, p in parameters.items()}
    output = cell.states.index(cell.output_state())
    y = []
    for row in x.astype(np.float64):
        now = cell.numpy(row, now, wide)
        y.append(now[output])
    return np.stack(y), now
