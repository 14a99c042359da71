"""Cells with maxima and softmaxes of hidden units, with their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecornn.cells import Cell, largest, mean, pointwise, product, softmax


def soft(z: Any) -> Any:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class Peaks(Cell):
    """Maxima of products of x, over both gates; of a state, beside two means, in one exchange; a softmax of what has
    products; and a maximum of the new state. Some are below zero."""

    name, states = "peaks", ("h", "c")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "v": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        from tvm import te

        (h, c), wx = states, product(x, p["W"])
        top, middle = largest(wx, "top"), mean(c)
        most = largest(pointwise(lambda b, j: c[b, j] - 2.0, c, "below"), "most")
        square, rh = mean(pointwise(lambda b, j: c[b, j] * c[b, j], c, "square")), product(h, p["R"])
        seen = softmax(pointwise(lambda b, j: 2.0 * rh[b, 0, j] + wx[b, 0, j] + p["v"][0, j], h, "scores"), "seen")
        new = pointwise(lambda b, j: 0.5 * c[b, j] + te.tanh(rh[b, 1, j] + wx[b, 1, j]) + seen[b, j]
                        - most[b] * square[b] + middle[b], c, "new")
        end = largest(pointwise(lambda b, j: 0.5 * new[b, j] - 4.0, c, "ends"), "end")
        return [pointwise(lambda b, j: te.tanh(new[b, j] - end[b] - 4.0 + 0.25 * top[b]) + 2.0 * seen[b, j], h, "out"),
                new]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        h, c = s["h"], s["c"]
        w, r = ([a @ m.T for m in p[n]] for a, n in ((x, "W"), (h, "R")))
        seen = soft(2 * r[0] + w[0] + p["v"][0])
        of = {"axis": 1, "keepdims": True}
        new = 0.5 * c + np.tanh(r[1] + w[1]) + seen - (c.max(**of) - 2) * np.square(c).mean(**of) + c.mean(**of)
        return {"h": np.tanh(new - 0.5 * new.max(**of) + 0.25 * np.maximum(*w).max(**of)) + 2 * seen, "c": new}, "h"


class Attending(Cell):
    """No product of a state: what x brings is shared among the units by a softmax of x's and their own scores."""

    name, states = "attending", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "v": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        from tvm import te

        (h,), wx = states, product(x, p["W"])
        share = softmax(pointwise(lambda b, j: wx[b, 0, j] + p["v"][0, j] * h[b, j], h, "scores"), "share")
        return [pointwise(lambda b, j: 0.5 * h[b, j] + 4.0 * share[b, j] * te.tanh(wx[b, 1, j]), h, "new")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        scores, value = (x @ w.T for w in p["W"])
        return {"h": 0.5 * s["h"] + 4 * soft(scores + p["v"][0] * s["h"]) * np.tanh(value)}, "h"


CELLS: dict[str, Any] = {cell.name: cell for cell in (Peaks(), Attending())}
