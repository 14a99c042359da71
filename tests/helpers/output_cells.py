"""Cells whose outputs are no states, or are several, with their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te

from ecornn.cells import Cell, normalized, pointwise, product


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


class Gate(Cell):
    """A minimal gated unit that shows its new state through a gate, which no step reads again: y is no state."""

    name, states, output = "shown", ("h",), "y"

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (3, hidden, input), "R": (3, hidden, hidden), "b": (3, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx, rh, v = states, product(x, p["W"]), product(states[0], p["R"]), p["b"]
        z, o = (pointwise(lambda b, j, g=g: te.sigmoid(wx[b, g, j] + rh[b, g, j] + v[g, j]), h, n)
                for g, n in ((0, "z"), (2, "o")))
        new = pointwise(lambda b, j: h[b, j] + z[b, j] * (te.tanh(wx[b, 1, j] + rh[b, 1, j] + v[1, j]) - h[b, j]), h,
                        "new")
        return [new, pointwise(lambda b, j: o[b, j] * te.tanh(new[b, j]), h, "shown")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        z, n, o = (x @ p["W"][g].T + s["h"] @ p["R"][g].T + p["b"][g] for g in range(3))
        h = s["h"] + sigmoid(z) * (np.tanh(n) - s["h"])
        return {"h": h, "y": sigmoid(o) * np.tanh(h)}, ("y",)


class Many(Cell):
    """Outputs of each kind, in an order of their own: a value of the second exchange, a new state, a gate of the first
    exchange, one of x alone; the other state is none."""

    name, states, output = "many", ("h", "c"), ("read", "h", "z", "seen")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "R": (1, hidden, hidden), "C": (1, hidden, hidden), "b": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h, c), wx = states, product(x, p["W"])
        rh = product(h, p["R"], 0)
        z = pointwise(lambda b, j: te.sigmoid(rh[b, j] + p["b"][0, j]), h, "z")
        cell = pointwise(lambda b, j: z[b, j] * c[b, j] + (1.0 - z[b, j]) * te.tanh(wx[b, 0, j]), h, "cell")
        ch = product(cell, p["C"], 0)
        new = pointwise(lambda b, j: te.tanh(cell[b, j] + wx[b, 1, j]), h, "new")
        read = pointwise(lambda b, j: ch[b, j] * te.tanh(wx[b, 1, j]), h, "read")
        return [new, cell, read, z, pointwise(lambda b, j: te.tanh(wx[b, 0, j]) * p["b"][0, j], h, "seen")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        first, second = (x @ w.T for w in p["W"])
        z = sigmoid(s["h"] @ p["R"][0].T + p["b"][0])
        c = z * s["c"] + (1 - z) * np.tanh(first)
        return {"h": np.tanh(c + second), "c": c, "read": (c @ p["C"][0].T) * np.tanh(second), "z": z,
                "seen": np.tanh(first) * p["b"][0]}, ("read", "h", "z", "seen")


class Split(Cell):
    """No recurrent product: a leaky sum, and what it leaves out."""

    name, states, output = "split", ("h",), ("low", "high")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "v": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        new = pointwise(lambda b, j: h[b, j] + te.sigmoid(p["v"][0, j]) * (wx[b, j] - h[b, j]), h, "new")
        low = pointwise(lambda b, j: new[b, j] * 2.0, h, "low")
        return [new, low, pointwise(lambda b, j: wx[b, j] - new[b, j], h, "high")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        wx = x @ p["W"][0].T
        h = s["h"] + sigmoid(p["v"][0]) * (wx - s["h"])
        return {"h": h, "low": 2 * h, "high": wx - h}, ("low", "high")


class Read(Cell):
    """y is a product of the new state, and nothing else: y = C h'."""

    name, states, output = "read", ("h",), "y"

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (1, hidden, hidden), "C": (1, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx, rh = states, product(x, p["W"], 0), product(states[0], p["R"], 0)
        new = pointwise(lambda b, j: te.tanh(wx[b, j] + rh[b, j]), h, "new")
        return [new, product(new, p["C"], 0)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        h = np.tanh(x @ p["W"][0].T + s["h"] @ p["R"][0].T)
        return {"h": h, "y": h @ p["C"][0].T}, ("y",)


class Mixed(Cell):
    """A linear recurrence without a product; y is a product of the new state, normalized, and of x, through a gate of
    the state before; and the state is an output, too."""

    name, states, output = "mixed", ("h", "c"), ("y", "h")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "C": (2, hidden, hidden), "D": (2, hidden, input), "v": (2, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h, c), wx, dx, v = states, product(x, p["W"], 0), product(x, p["D"]), p["v"]
        new = pointwise(lambda b, j: te.sigmoid(v[0, j]) * h[b, j] + wx[b, j] + 0.25 * c[b, j], h, "new")
        other = pointwise(lambda b, j: 0.5 * c[b, j] + te.tanh(dx[b, 0, j]), h, "other")
        seen, shown = normalized(product(new, p["C"], 0)), product(other, p["C"], 1)
        gate = pointwise(lambda b, j: te.sigmoid(h[b, j] + v[1, j]), h, "gate")
        return [new, other, pointwise(lambda b, j: gate[b, j] * (seen[b, j] + shown[b, j]) + te.tanh(dx[b, 0, j])
                                      * dx[b, 1, j], h, "y")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        d, e = (x @ w.T for w in p["D"])
        h = sigmoid(p["v"][0]) * s["h"] + x @ p["W"][0].T + 0.25 * s["c"]
        c = 0.5 * s["c"] + np.tanh(d)
        seen = h @ p["C"][0].T
        seen = (seen - seen.mean(axis=1)[:, None]) / np.sqrt(seen.var(axis=1)[:, None] + 1e-5)
        y = sigmoid(s["h"] + p["v"][1]) * (seen + c @ p["C"][1].T) + np.tanh(d) * e
        return {"h": h, "c": c, "y": y}, ("y", "h")


CELLS: dict[str, Any] = {cell.name: cell for cell in (Gate(), Many(), Split(), Read(), Mixed())}
