"""Published cells whose first product is of what depends on x and on a state, with their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te

from ecornn.cells import Cell, pointwise, product


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


class LRU(Cell):
    """A diagonal linear recurrence with a read-out of its new state, as the linear recurrent unit (Orvieto et al. 2023,
    arXiv 2303.06349) with real eigenvalues: s' = a s + sqrt(1 - a^2) B x, y = C s' + d tanh(s')."""

    name, states = "lru", ("y", "s")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"B": (1, hidden, input), "C": (1, hidden, hidden), "nu": (1, hidden), "d": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (_, s), nu = states, p["nu"]
        bx = product(x, p["B"], 0)
        decay = pointwise(lambda b, j: te.exp(0.0 - te.exp(nu[0, j])), s, "decay")
        new = pointwise(lambda b, j: decay[b, j] * s[b, j] + te.sqrt(1.0 - decay[b, j] * decay[b, j]) * bx[b, j], s,
                        "new")
        read = product(new, p["C"], 0)
        return [pointwise(lambda b, j: read[b, j] + p["d"][0, j] * te.tanh(new[b, j]), s, "y_new"), new]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        a = np.exp(-np.exp(p["nu"][0]))
        new = a * s["s"] + np.sqrt(1 - a * a) * (x @ p["B"][0].T)
        return {"y": new @ p["C"][0].T + p["d"][0] * np.tanh(new), "s": new}, "y"


class SCRN(Cell):
    """Structurally constrained recurrent network (Mikolov et al. 2015, arXiv 1412.7753), as published:
    s' = (1 - a) B x + a s, h' = sigmoid(P s' + A x + R h), y = softplus'(U h' + V s'), all of H units."""

    name, states = "scrn", ("y", "h", "s")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"A": (2, hidden, input), "R": (4, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        _, h, s = states
        ax = product(x, p["A"])
        slow = pointwise(lambda b, j: 0.05 * ax[b, 0, j] + 0.95 * s[b, j], h, "slow")
        ps, rh, vs = product(slow, p["R"], 0), product(h, p["R"], 1), product(slow, p["R"], 2)
        fast = pointwise(lambda b, j: te.sigmoid(ps[b, j] + ax[b, 1, j] + rh[b, j]), h, "fast")
        uh = product(fast, p["R"], 3)
        return [pointwise(lambda b, j: te.sigmoid(uh[b, j] + vs[b, j]), h, "out"), fast, slow]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        slow = 0.05 * (x @ p["A"][0].T) + 0.95 * s["s"]
        fast = sigmoid(slow @ p["R"][0].T + x @ p["A"][1].T + s["h"] @ p["R"][1].T)
        return {"y": sigmoid(fast @ p["R"][3].T + slow @ p["R"][2].T), "h": fast, "s": slow}, "y"


CELLS = {cell.name: cell for cell in (LRU(), SCRN())}
