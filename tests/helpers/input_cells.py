"""Cells with sequences beside x, with their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te

from ecornn.cells import Cell, pointwise, product


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


class TimedGRU(Cell):
    """A minimal gated unit whose state decays over the time since the step before, as GRU-D's (Che et al. 2018, arXiv
    1606.01865): h~ = exp(-relu(w dt + b)) h; and a mask m of units that keep it."""

    name, states, inputs = "timed_gru", ("h",), ("dt", "m")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "w": (2, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), dt, m, w = states, p["dt"], p["m"], p["w"]
        wx = product(x, p["W"])
        zero = te.const(0.0, "float32")
        old = pointwise(lambda b, j: h[b, j] * te.exp(0.0 - te.max(w[0, j] * dt[b, j] + w[1, j], zero)), h, "old")
        rh = product(old, p["R"])
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j]), h, "z")
        n = pointwise(lambda b, j: te.tanh(wx[b, 1, j] + rh[b, 1, j]), h, "n")
        return [pointwise(lambda b, j: old[b, j] + m[b, j] * z[b, j] * (n[b, j] - old[b, j]), h, "new")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        H = s["h"].shape[1]
        x, dt, m = x[:, :-2 * H], x[:, -2 * H:-H], x[:, -H:]
        old = s["h"] * np.exp(-np.maximum(p["w"][0] * dt + p["w"][1], 0.0))
        z = sigmoid(x @ p["W"][0].T + old @ p["R"][0].T)
        n = np.tanh(x @ p["W"][1].T + old @ p["R"][1].T)
        return {"h": old + m * z * (n - old)}, "h"


class Masked(Cell):
    """A tanh layer that a sequence scales after its product, and that keeps what a mask leaves out; one input is read
    by what is hoisted alone."""

    name, states, inputs = "masked", ("h",), ("scale", "m")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (1, hidden, hidden), "b": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        scaled = pointwise(lambda b, j: wx[b, j] * p["scale"][b, j] + p["b"][0, j], h, "scaled")
        rh = product(h, p["R"], 0)
        new = pointwise(lambda b, j: te.tanh(scaled[b, j] + rh[b, j]), h, "new")
        return [pointwise(lambda b, j: p["m"][b, j] * new[b, j] + (1.0 - p["m"][b, j]) * h[b, j], h, "kept")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        H, h = s["h"].shape[1], s["h"]
        x, scale, m = x[:, :-2 * H], x[:, -2 * H:-H], x[:, -H:]
        return {"h": m * np.tanh((x @ p["W"][0].T) * scale + p["b"][0] + h @ p["R"][0].T) + (1 - m) * h}, "h"


class Gap(Cell):
    """No recurrent product: a leaky unit that forgets by the time since the step before."""

    name, states, inputs, nonnegative = "gap", ("h",), ("dt",), ("dt",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "v": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        decay = pointwise(lambda b, j: te.exp(0.0 - p["dt"][b, j] * te.exp(p["v"][0, j])), h, "decay")
        return [pointwise(lambda b, j: decay[b, j] * h[b, j] + (1.0 - decay[b, j]) * te.tanh(wx[b, j]), h, "new")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        H = s["h"].shape[1]
        decay = np.exp(-x[:, -H:] * np.exp(p["v"][0]))
        return {"h": decay * s["h"] + (1 - decay) * np.tanh(x[:, :-H] @ p["W"][0].T)}, "h"


CELLS = {cell.name: cell for cell in (TimedGRU(), Masked(), Gap())}
