"""Cells with statistics of hidden units in every place that they can have, with their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecornn.cells import Cell, mean, normalized, pointwise, product


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


def normal(*gates: Any) -> list[Any]:
    """Layer normalization of all gates together."""
    values = np.concatenate(gates, axis=1)
    values = (values - values.mean(axis=1)[:, None]) / np.sqrt(values.var(axis=1)[:, None] + 1e-5)
    return np.split(values, len(gates), axis=1)


class Blend(Cell):
    """Of x's products and, in the step, of what came of these; of a state beside a product; of values of a phase with
    another product; of a new state. Three hoisted values of two products."""

    name = "blend"
    states = ("h", "c")

    def parameters(self, input, hidden):
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "v": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h, c), R, v = states, parameters["R"], parameters["v"]
        wx = normalized(product(x, parameters["W"]))
        spread = mean(pointwise(lambda b, j: te.abs(wx[b, 0, j]), h, "magnitude"))
        middle, rh = mean(c), product(h, R, 0)
        a = pointwise(lambda b, j: te.tanh(
            wx[b, 0, j] + rh[b, j] + v[0, j] * (c[b, j] - middle[b]) + spread[b]), h, "a")
        ra, na = product(a, R, 1), normalized(a)
        new = pointwise(lambda b, j: 0.5 * c[b, j] + na[b, j] * te.sigmoid(ra[b, j]), h, "new")
        shown = normalized(new)
        return [pointwise(lambda b, j: te.tanh(shown[b, j] * v[1, j] + wx[b, 1, j]), h, "out"), new]

    @staticmethod
    def formula(x, s, p):
        h, c = s["h"], s["c"]
        w0, w1 = normal(*(x @ w.T for w in p["W"]))
        spread = np.abs(w0).mean(axis=1)[:, None]
        a = np.tanh(w0 + h @ p["R"][0].T + p["v"][0] * (c - c.mean(axis=1)[:, None]) + spread)
        new = 0.5 * c + normal(a)[0] * sigmoid(a @ p["R"][1].T)
        return {"h": np.tanh(normal(new)[0] * p["v"][1] + w1), "c": new}, "h"


class Focus(Cell):
    """Of products of x alone, in which fewer values go in than come out; no exchange in a step."""

    name = "focus"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"W": (2, hidden, input), "b": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), b = states, parameters["b"]
        gates = product(x, parameters["W"])
        n = normalized(te.compute(gates.shape, lambda i, g, j: gates[i, g, j] + b[g, j], name="biased"))
        return [pointwise(lambda i, j: te.sigmoid(n[i, 0, j]) * h[i, j] + te.tanh(n[i, 1, j]) * (1.0 - h[i, j]) * 0.5
                          + (n[i, 0, j] + n[i, 1, j]) * 0.25, h, "new")]

    @staticmethod
    def formula(x, s, p):
        a, b = normal(*(x @ w.T + bias for w, bias in zip(p["W"], p["b"], strict=True)))
        return {"h": sigmoid(a) * s["h"] + np.tanh(b) * (1 - s["h"]) * 0.5 + (a + b) * 0.25}, "h"


class Contrast(Cell):
    """No product of a state: what units see of each other is their mean and variance."""

    name = "contrast"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), wx = states, product(x, parameters["W"], 0)
        seen = normalized(pointwise(lambda b, j: h[b, j] + wx[b, j], h, "seen"))
        return [pointwise(lambda b, j: te.tanh(seen[b, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": np.tanh(normal(s["h"] + x @ p["W"][0].T)[0])}, "h"


class Thrice(Cell):
    """Three products of a state, each normalized by itself: an odd number of statistics in one exchange."""

    name = "thrice"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (3, hidden, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), wx = states, product(x, parameters["W"], 0)
        a, b, c = (normalized(product(h, parameters["R"], g)) for g in range(3))
        return [pointwise(lambda i, j: te.tanh(a[i, j] + wx[i, j]) * te.sigmoid(b[i, j]) + 0.1 * c[i, j], h, "new")]

    @staticmethod
    def formula(x, s, p):
        a, b, c = (normal(s["h"] @ r.T)[0] for r in p["R"])
        return {"h": np.tanh(a + x @ p["W"][0].T) * sigmoid(b) + 0.1 * c}, "h"


class Shared(Cell):
    """Products of x and of a state normalized together: x, whatever its size, is in a statistic of the step."""

    name = "shared"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), wx = states, product(x, parameters["W"], 0)
        rh = product(h, parameters["R"], 0)
        seen = normalized(pointwise(lambda b, j: wx[b, j] + rh[b, j], h, "seen"))
        return [pointwise(lambda b, j: te.tanh(seen[b, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": np.tanh(normal(x @ p["W"][0].T + s["h"] @ p["R"][0].T)[0])}, "h"
