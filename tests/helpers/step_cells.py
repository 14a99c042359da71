"""Cells that use what the built-in ones do not, each with its formula in NumPy float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from statistic_cells import Blend, Contrast, Focus

from ecornn.cells import Cell, pointwise, product
from ecornn.cells.vanilla import IndRNN


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


class Gated(Cell):
    """Minimal gated unit: a second product of what the first one gates; its gate is carried over."""

    name = "gated"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "b": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,) = states
        W, R, b = parameters["W"], parameters["R"], parameters["b"]
        fx, nx, fh = product(x, W, 0), product(x, W, 1), product(h, R, 0)
        f = pointwise(lambda i, j: te.sigmoid(fx[i, j] + fh[i, j] + b[0, j]), h, "f")
        kept = pointwise(lambda i, j: f[i, j] * h[i, j], h, "kept")
        nh = product(kept, R, 1)
        n = pointwise(lambda i, j: te.tanh(nx[i, j] + nh[i, j] + b[1, j]), h, "n")
        return [pointwise(lambda i, j: h[i, j] + f[i, j] * (n[i, j] - h[i, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        h = s["h"]
        f = sigmoid(x @ p["W"][0].T + h @ p["R"][0].T + p["b"][0])
        n = np.tanh(x @ p["W"][1].T + (f * h) @ p["R"][1].T + p["b"][1])
        return {"h": h + f * (n - h)}, "h"


class Pair(Cell):
    """Products of two operands, one of them computed from a state; states change places; y is the second."""

    name = "pair"
    states = ("p", "q")
    output = "q"

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (2, hidden, hidden), "S": (1, hidden, hidden), "b": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        p, q = states
        W, R, S, b = (parameters[n] for n in ("W", "R", "S", "b"))
        squeezed = pointwise(lambda i, j: te.tanh(p[i, j] * b[0, j]), p, "squeezed")
        wx, rq, rs, sq = product(x, W, 0), product(q, R, 0), product(squeezed, R, 1), product(q, S, 0)
        new = pointwise(lambda i, j: te.tanh(wx[i, j] + rq[i, j] * rs[i, j] + b[1, j]) + sq[i, j] * 0.25, p, "new")
        return [pointwise(lambda i, j: q[i, j], p, "swapped"), new]

    @staticmethod
    def formula(x, s, p):
        q = s["q"]
        product = (q @ p["R"][0].T) * (np.tanh(s["p"] * p["b"][0]) @ p["R"][1].T)
        return {"p": q, "q": np.tanh(x @ p["W"][0].T + product + p["b"][1]) + q @ p["S"][0].T * 0.25}, "q"


class Leaky(Cell):
    """No recurrent product, and x outside of products too (so I == H)."""

    name = "leaky"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "b": (1, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,) = states
        wx, b = product(x, parameters["W"], 0), parameters["b"]
        return [pointwise(lambda i, j: te.sigmoid(b[0, j]) * h[i, j] + te.tanh(wx[i, j]) * x[i, j], h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": sigmoid(p["b"][0]) * s["h"] + np.tanh(x @ p["W"][0].T) * x}, "h"


class Average(Cell):
    """No product at all, no parameter."""

    name = "average"
    states = ("h",)

    def parameters(self, input, hidden):
        return {}

    def step(self, x, states, parameters):
        (h,) = states
        return [pointwise(lambda i, j: h[i, j] * 0.75 + x[i, j] * 0.25, h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": s["h"] * 0.75 + x * 0.25}, "h"


class Independent(IndRNN):
    """The built-in one, with its formula."""

    @staticmethod
    def formula(x, s, p):
        return {"h": np.maximum(x @ p["weight_ih"][0].T + p["bias_ih"][0] + p["weight_hh"][0] * s["h"], 0.0)}, "h"


class Highway(Cell):
    """As SRU: gates of x and of a unit's own state, two states of which the first is y and is not read."""

    name = "highway"
    states = ("h", "c")

    def parameters(self, input, hidden):
        return {"W": (3, hidden, input), "v": (2, hidden), "b": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h, c), v, b = states, parameters["v"], parameters["b"]
        wx = product(x, parameters["W"])
        f = pointwise(lambda i, j: te.sigmoid(wx[i, 0, j] + v[0, j] * c[i, j] + b[0, j]), h, "f")
        r = pointwise(lambda i, j: te.sigmoid(wx[i, 1, j] + v[1, j] * c[i, j] + b[1, j]), h, "r")
        new = pointwise(lambda i, j: f[i, j] * c[i, j] + (1.0 - f[i, j]) * wx[i, 2, j], h, "new")
        return [pointwise(lambda i, j: r[i, j] * te.tanh(new[i, j]) + (1.0 - r[i, j]) * wx[i, 2, j], h, "out"), new]

    @staticmethod
    def formula(x, s, p):
        c, z = s["c"], x @ p["W"][2].T
        f, r = (sigmoid(x @ p["W"][n].T + p["v"][n] * c + p["b"][n]) for n in (0, 1))
        new = f * c + (1 - f) * z
        return {"h": r * np.tanh(new) + (1 - r) * z, "c": new}, "h"


class Seven(Cell):
    """More gates of x than any built-in cell, and no power of two; of one the factor is 0."""

    name = "seven"
    states = ("h",)
    unread = ("W", "b")

    def parameters(self, input, hidden):
        return {"W": (7, hidden, input), "b": (7, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), b = states, parameters["b"]
        wx = product(x, parameters["W"])
        return [pointwise(lambda i, j: sum((te.tanh(wx[i, n, j] + b[n, j] + h[i, j]) * (n - 3.0) for n in range(7)),
                                           te.const(0.0, "float32")) * 0.125, h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": sum(np.tanh(x @ p["W"][n].T + p["b"][n] + s["h"]) * (n - 3) for n in range(7)) / 8}, "h"


class Decay(Cell):
    """Nothing of x at all."""

    name = "decay"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"u": (1, hidden)}

    def step(self, x, states, parameters):
        (h,), u = states, parameters["u"]
        return [pointwise(lambda i, j: h[i, j] - 0.25 * u[0, j] * h[i, j], h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": s["h"] * (1 - 0.25 * p["u"][0])}, "h"


class Echo(Cell):
    """A recurrent product, but none of x."""

    name = "echo"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"R": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,) = states
        rh = product(h, parameters["R"], 0)
        return [pointwise(lambda i, j: te.tanh(rh[i, j] + x[i, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": np.tanh(s["h"] @ p["R"][0].T + x)}, "h"


CELLS = {cell.name: cell for cell in (
    Gated(), Pair(), Leaky(), Average(), Echo(), Independent(), Highway(), Seven(), Decay(), Blend(), Focus(),
    Contrast())}
SQUARE = ("leaky", "average", "echo")  # these read x outside of products, so that I == H
NO_PRODUCT = ("leaky", "average", "indrnn", "highway", "seven", "decay", "focus")  # nor a statistic, of a state
ROW_BY_ROW = ("contrast",)  # statistics, but no product, of a state


def run(cell: Cell, x: Any, states: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """y (T, B, H), or (T, B, O H) of several outputs, and the last states, float64; parameters (G, H[, K]). A formula
    gives the new states, other outputs among them, and the name of y, or a tuple of names."""
    y = []
    for row in x:
        made, output = cell.formula(row, states, parameters)  # type: ignore[attr-defined]
        states = {name: made[name] for name in cell.states}
        y.append(np.concatenate([made[n] for n in ((output,) if isinstance(output, str) else output)], axis=1))
    return np.stack(y), states


def layer(name: str, hidden: int, x: Any, weights: Mapping[str, Any], lengths: Any = None,
          resets: Any = None) -> tuple[Any, Mapping[str, Any]]:
    """As :func:`~ecornn.numpy_reference.reference`: one layer of such a cell, from states of zeros."""
    cell, (steps, batch, width) = CELLS[name], x.shape
    parameters = {n: weights[f"{n}_l0"].reshape(s) for n, s in cell.parameters(width, hidden).items()}
    states, y = {n: np.zeros((batch, hidden)) for n in cell.states}, np.zeros((steps, batch, hidden))
    for t in range(steps):
        live = np.full((batch, 1), True) if lengths is None else (t < lengths)[:, None]
        fresh = live & (False if resets is None else resets[t][:, None])
        before = {n: np.where(fresh, 0.0, s) for n, s in states.items()}
        after, output = cell.formula(x[t], before, parameters)  # type: ignore[attr-defined]
        states = {n: np.where(live, after[n], before[n]) for n in states}
        y[t] = np.where(live, after[output], 0.0)
    return y, states
