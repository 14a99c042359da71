"""Cells with reductions over groups of units, and of what is narrower than H, with their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from maximum_cells import soft
from tvm import te

from ecornn.cells import Cell, largest, mean, normalized, pointwise, product, softmax


def grouped(z: Any, groups: int, function: Any) -> Any:
    """A function of rows, applied to each group of units."""
    parts = z.reshape(-1, z.shape[-1] // groups)
    return np.broadcast_to(function(parts), parts.shape).reshape(z.shape)


class Grouped(Cell):
    """Of two groups: maxima of products of x, over both gates; a softmax of what has products; the state normalized;
    maxima below zero that are mixed as one value a group."""

    name, states, groups = "grouped", ("h", "c"), 2

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "v": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h, c), wx, rh, n = states, product(x, p["W"]), product(states[0], p["R"]), self.groups
        own, top, alike = int(h.shape[1]) // n, largest(wx, "top", n), normalized(c, 1e-2, "alike", n)
        share = softmax(pointwise(lambda b, j: 2.0 * rh[b, 0, j] + wx[b, 0, j] + p["v"][0, j], h, "scores"), "share", n)
        new = pointwise(lambda b, j: 0.5 * c[b, j] + te.tanh(rh[b, 1, j] + wx[b, 1, j]) + share[b, j]
                        + 0.25 * alike[b, j], c, "new")
        k, g = te.reduce_axis((0, own), "k"), te.reduce_axis((0, n), "g")
        most = te.compute((h.shape[0], n), lambda b, s: te.max(new[b, s * own + k] - 4.0, axis=k), name="most")
        power = te.compute(most.shape, lambda b, s: te.exp(most[b, s]), name="power")
        whole = te.compute((h.shape[0],), lambda b: te.sum(power[b, g], axis=g), name="whole")
        return [pointwise(lambda b, j: te.tanh(new[b, j] * power[b, j // own] / whole[b] + 0.25 * top[b, j])
                          + share[b, j] - 0.1 * most[b, 0], h, "out"), new]

    @classmethod
    def formula(cls, x: Any, s: Any, p: Any) -> Any:
        w, r = ([a @ m.T for m in p[n]] for a, n in ((x, "W"), (s["h"], "R")))
        n, c = cls.groups, s["c"]

        def highest(z: Any) -> Any:
            return grouped(z, n, lambda part: part.max(axis=1, keepdims=True))

        share = grouped(2 * r[0] + w[0] + p["v"][0], n, soft)
        alike = grouped(c, n, lambda part: (part - part.mean(axis=1, keepdims=True)) / np.sqrt(
            part.var(axis=1, keepdims=True) + 1e-2))
        new = 0.5 * c + np.tanh(r[1] + w[1]) + share + 0.25 * alike
        most = highest(new - 4)
        power = np.exp(most)
        whole = power.sum(axis=1, keepdims=True) / (c.shape[1] // n)
        return {"h": np.tanh(new * power / whole + 0.25 * highest(np.maximum(*w))) + share - 0.1 * most[:, :1],
                "c": new}, "h"


class Chunks(Cell):
    """A softmax of five values, which are normalized, and less their maximum; its products with H units."""

    name, states, chunks = "chunks", ("h",), 5

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "V": (1, self.chunks, hidden), "U": (2, hidden, self.chunks), "v": (1, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        scores = normalized(product(h, p["V"], 0), 1e-2, "alike")
        biased = pointwise(lambda b, j: 3.0 * scores[b, j] + p["v"][0, j], scores, "biased")
        top, share = largest(biased, "top"), softmax(biased, "share")
        weight = product(share, p["U"])
        middle = mean(h)
        return [pointwise(lambda b, j: te.tanh(wx[b, j] + weight[b, 0, j] + 0.25 * top[b]) + weight[b, 1, j] * (
            h[b, j] - middle[b]), h, "new")]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        h, z = s["h"], s["h"] @ p["V"][0].T
        z = (z - z.mean(axis=1, keepdims=True)) / np.sqrt(z.var(axis=1, keepdims=True) + 1e-2)
        z = 3 * z + p["v"][0, :z.shape[1]]
        weight = [soft(z) @ u.T for u in p["U"]]
        return {"h": np.tanh(x @ p["W"][0].T + weight[0] + 0.25 * z.max(axis=1, keepdims=True))
                + weight[1] * (h - h.mean(axis=1, keepdims=True))}, "h"


class Slots(Cell):
    """Attention over two slots of units: a score of each by what x brings, their softmax, the slots' mixture, and a
    product of the weights."""

    name, states, slots = "slots", ("h",), 2

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (2, hidden, input), "M": (1, hidden, hidden), "U": (1, hidden, self.slots)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx, n, own = states, product(x, p["W"]), self.slots, int(states[0].shape[1]) // self.slots
        k = te.reduce_axis((0, own), "k")
        scores = te.compute((h.shape[0], n), lambda b, s: te.sum(
            h[b, s * own + k] * wx[b, 0, s * own + k], axis=k), name="scores")
        share = softmax(scores, "share")
        mixed = product(pointwise(lambda b, j: share[b, j // own] * h[b, j], h, "parts"), p["M"], 0)
        seen = product(share, p["U"], 0)
        return [pointwise(lambda b, j: te.tanh(mixed[b, j] + wx[b, 1, j] + seen[b, j]) - 0.5 * scores[b, 1], h)]

    @classmethod
    def formula(cls, x: Any, s: Any, p: Any) -> Any:
        w, h, n = [x @ m.T for m in p["W"]], s["h"], cls.slots
        scores = (h * w[0]).reshape(len(h), n, -1).sum(axis=2)
        share = soft(scores)
        mixed = (share.repeat(h.shape[1] // n, axis=1) * h) @ p["M"][0].T
        return {"h": np.tanh(mixed + w[1] + share @ p["U"][0].T) - 0.5 * scores[:, 1:]}, "h"


CELLS: dict[str, Any] = {cell.name: cell for cell in (Grouped(), Chunks(), Slots())}
