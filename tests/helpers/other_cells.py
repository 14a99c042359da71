"""Cells with sequences beside x, other outputs, and maxima and softmaxes, with their formulas in NumPy float64."""

from typing import Any

import numpy as np
from step_cells import Formula, normal, sigmoid
from tvm import te

from ecornn.cells import largest, mean, normalized, pointwise, product, softmax


class TimedGRU(Formula):
    """A minimal gated unit that decays over time (Che et al. 2018, arXiv 1606.01865); a mask keeps units."""

    name, states, inputs, shapes = "timed_gru", ("h",), ("dt", "m"), {"W": (2, "I"), "R": (2, "H"), "w": (2,)}

    def step(self, x, states, p):
        (h,), dt, m, w = states, p["dt"], p["m"], p["w"]
        wx, zero = product(x, p["W"]), te.const(0.0, "float32")
        old = pointwise(lambda b, j: h[b, j] * te.exp(0.0 - te.max(w[0, j] * dt[b, j] + w[1, j], zero)), h, "old")
        rh = product(old, p["R"])
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j]), h, "z")
        n = pointwise(lambda b, j: te.tanh(wx[b, 1, j] + rh[b, 1, j]), h, "n")
        return [pointwise(lambda b, j: old[b, j] + m[b, j] * z[b, j] * (n[b, j] - old[b, j]), h, "new")]

    def numpy(self, x, h, W, R, w, dt, m):
        old = h * np.exp(-np.maximum(w[0] * dt + w[1], 0.0))
        z, n = sigmoid(x @ W[0].T + old @ R[0].T), np.tanh(x @ W[1].T + old @ R[1].T)
        return (old + m * z * (n - old),)


class Masked(Formula):
    """A tanh layer that one sequence scales after its product, and of which another, a mask, keeps units."""

    name, states, inputs, shapes = "masked", ("h",), ("scale", "m"), {"W": (1, "I"), "R": (1, "H"), "b": (1,)}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"], 0)
        scaled = pointwise(lambda b, j: wx[b, j] * p["scale"][b, j] + p["b"][0, j], h, "scaled")
        rh = product(h, p["R"], 0)
        new = pointwise(lambda b, j: te.tanh(scaled[b, j] + rh[b, j]), h, "new")
        return [pointwise(lambda b, j: p["m"][b, j] * new[b, j] + (1.0 - p["m"][b, j]) * h[b, j], h, "kept")]

    def numpy(self, x, h, W, R, b, scale, m):
        return (m * np.tanh((x @ W[0].T) * scale + b[0] + h @ R[0].T) + (1 - m) * h,)


class Gap(Formula):
    """No recurrent product: a leaky unit that forgets by the time since the step before."""

    name, states, inputs, nonnegative, shapes = "gap", ("h",), ("dt",), ("dt",), {"W": (1, "I"), "v": (1,)}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"], 0)
        decay = pointwise(lambda b, j: te.exp(0.0 - p["dt"][b, j] * te.exp(p["v"][0, j])), h, "decay")
        return [pointwise(lambda b, j: decay[b, j] * h[b, j] + (1.0 - decay[b, j]) * te.tanh(wx[b, j]), h, "new")]

    def numpy(self, x, h, W, v, dt):
        decay = np.exp(-dt * np.exp(v[0]))
        return (decay * h + (1 - decay) * np.tanh(x @ W[0].T),)


class Gate(Formula):
    """A minimal gated unit that shows its new state through a gate, which no step reads again: y is no state."""

    name, states, output, shapes = "shown", ("h",), "y", {"W": (3, "I"), "R": (3, "H"), "b": (3,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"]), product(states[0], p["R"]), p["b"]
        z, o = (pointwise(lambda b, j, g=g: te.sigmoid(wx[b, g, j] + rh[b, g, j] + v[g, j]), h, n)
                for g, n in ((0, "z"), (2, "o")))
        new = pointwise(lambda b, j: h[b, j] + z[b, j] * (te.tanh(wx[b, 1, j] + rh[b, 1, j] + v[1, j]) - h[b, j]), h,
                        "new")
        return [new, pointwise(lambda b, j: o[b, j] * te.tanh(new[b, j]), h, "shown")]

    def numpy(self, x, h, W, R, b):
        z, n, o = (x @ W[g].T + h @ R[g].T + b[g] for g in range(3))
        h = h + sigmoid(z) * (np.tanh(n) - h)
        return h, sigmoid(o) * np.tanh(h)


class Many(Formula):
    """Outputs of each kind: of the second exchange, a new state, a gate of the first exchange, one of x alone."""

    name, states, output = "many", ("h", "c"), ("read", "h", "z", "seen")
    shapes = {"W": (2, "I"), "R": (1, "H"), "C": (1, "H"), "b": (1,)}

    def step(self, x, states, p):
        (h, c), wx = states, product(x, p["W"])
        rh = product(h, p["R"], 0)
        z = pointwise(lambda b, j: te.sigmoid(rh[b, j] + p["b"][0, j]), h, "z")
        cell = pointwise(lambda b, j: z[b, j] * c[b, j] + (1.0 - z[b, j]) * te.tanh(wx[b, 0, j]), h, "cell")
        ch = product(cell, p["C"], 0)
        new = pointwise(lambda b, j: te.tanh(cell[b, j] + wx[b, 1, j]), h, "new")
        read = pointwise(lambda b, j: ch[b, j] * te.tanh(wx[b, 1, j]), h, "read")
        return [new, cell, read, z, pointwise(lambda b, j: te.tanh(wx[b, 0, j]) * p["b"][0, j], h, "seen")]

    def numpy(self, x, h, c, W, R, C, b):
        first, second = (x @ w.T for w in W)
        z = sigmoid(h @ R[0].T + b[0])
        c = z * c + (1 - z) * np.tanh(first)
        return np.tanh(c + second), c, (c @ C[0].T) * np.tanh(second), z, np.tanh(first) * b[0]


class Split(Formula):
    name, states, output, shapes = "split", ("h",), ("low", "high"), {"W": (1, "I"), "v": (1,)}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"], 0)
        new = pointwise(lambda b, j: h[b, j] + te.sigmoid(p["v"][0, j]) * (wx[b, j] - h[b, j]), h, "new")
        low = pointwise(lambda b, j: new[b, j] * 2.0, h, "low")
        return [new, low, pointwise(lambda b, j: wx[b, j] - new[b, j], h, "high")]

    def numpy(self, x, h, W, v):
        wx = x @ W[0].T
        h = h + sigmoid(v[0]) * (wx - h)
        return h, 2 * h, wx - h


class Read(Formula):
    """y is a product of the new state, and nothing else: y = C h'."""

    name, states, output, shapes = "read", ("h",), "y", {"W": (1, "I"), "R": (1, "H"), "C": (1, "H")}

    def step(self, x, states, p):
        (h,), wx, rh = states, product(x, p["W"], 0), product(states[0], p["R"], 0)
        new = pointwise(lambda b, j: te.tanh(wx[b, j] + rh[b, j]), h, "new")
        return [new, product(new, p["C"], 0)]

    def numpy(self, x, h, W, R, C):
        h = np.tanh(x @ W[0].T + h @ R[0].T)
        return h, h @ C[0].T


class Mixed(Formula):
    """A linear recurrence; y is a product of the new state, normalized, and of x, gated; the state, too."""

    name, states, output = "mixed", ("h", "c"), ("y", "h")
    shapes = {"W": (1, "I"), "C": (2, "H"), "D": (2, "I"), "v": (2,)}

    def step(self, x, states, p):
        (h, c), wx, dx, v = states, product(x, p["W"], 0), product(x, p["D"]), p["v"]
        new = pointwise(lambda b, j: te.sigmoid(v[0, j]) * h[b, j] + wx[b, j] + 0.25 * c[b, j], h, "new")
        other = pointwise(lambda b, j: 0.5 * c[b, j] + te.tanh(dx[b, 0, j]), h, "other")
        seen, shown = normalized(product(new, p["C"], 0)), product(other, p["C"], 1)
        gate = pointwise(lambda b, j: te.sigmoid(h[b, j] + v[1, j]), h, "gate")
        return [new, other, pointwise(lambda b, j: gate[b, j] * (seen[b, j] + shown[b, j]) + te.tanh(dx[b, 0, j])
                                      * dx[b, 1, j], h, "y")]

    def numpy(self, x, h, c, W, C, D, v):
        d, e = (x @ w.T for w in D)
        new, other = sigmoid(v[0]) * h + x @ W[0].T + 0.25 * c, 0.5 * c + np.tanh(d)
        (seen,) = normal(new @ C[0].T)
        return new, other, sigmoid(h + v[1]) * (seen + other @ C[1].T) + np.tanh(d) * e


def soft(z: Any) -> Any:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class Peaks(Formula):
    """Maxima of products of x, of a state, beside two means, and of the new state; a softmax. Some are below zero."""

    name, states, shapes = "peaks", ("h", "c"), {"W": (2, "I"), "R": (2, "H"), "v": (1,)}

    def step(self, x, states, p):
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

    def numpy(self, x, h, c, W, R, v):
        w, r = ([a @ m.T for m in matrices] for a, matrices in ((x, W), (h, R)))
        seen, of = soft(2 * r[0] + w[0] + v[0]), {"axis": 1, "keepdims": True}
        new = 0.5 * c + np.tanh(r[1] + w[1]) + seen - (c.max(**of) - 2) * np.square(c).mean(**of) + c.mean(**of)
        return np.tanh(new - 0.5 * new.max(**of) + 0.25 * np.maximum(*w).max(**of)) + 2 * seen, new


class Attending(Formula):
    """No product of a state: what x brings is shared among the units by a softmax of x's and their own scores."""

    name, states, shapes = "attending", ("h",), {"W": (2, "I"), "v": (1,)}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"])
        share = softmax(pointwise(lambda b, j: wx[b, 0, j] + p["v"][0, j] * h[b, j], h, "scores"), "share")
        return [pointwise(lambda b, j: 0.5 * h[b, j] + 4.0 * share[b, j] * te.tanh(wx[b, 1, j]), h, "new")]

    def numpy(self, x, h, W, v):
        scores, value = (x @ w.T for w in W)
        return (0.5 * h + 4 * soft(scores + v[0] * h) * np.tanh(value),)


def grouped(z: Any, groups: int, function: Any) -> Any:
    parts = z.reshape(-1, z.shape[-1] // groups)
    return np.broadcast_to(function(parts), parts.shape).reshape(z.shape)


class Grouped(Formula):
    """Two groups: maxima of products of x; a softmax; the state normalized; maxima mixed as one value a group."""

    name, states, groups, shapes = "grouped", ("h", "c"), 2, {"W": (2, "I"), "R": (2, "H"), "v": (1,)}

    def step(self, x, states, p):
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

    def numpy(self, x, h, c, W, R, v):
        w, r = ([a @ m.T for m in matrices] for a, matrices in ((x, W), (h, R)))
        n = self.groups
        def highest(z: Any) -> Any:
            return grouped(z, n, lambda part: part.max(axis=1, keepdims=True))
        share = grouped(2 * r[0] + w[0] + v[0], n, soft)
        alike = grouped(c, n, lambda part: (part - part.mean(axis=1, keepdims=True)) / np.sqrt(
            part.var(axis=1, keepdims=True) + 1e-2))
        new = 0.5 * c + np.tanh(r[1] + w[1]) + share + 0.25 * alike
        most = highest(new - 4)
        power = np.exp(most)
        whole = power.sum(axis=1, keepdims=True) / (c.shape[1] // n)
        return np.tanh(new * power / whole + 0.25 * highest(np.maximum(*w))) + share - 0.1 * most[:, :1], new


class Chunks(Formula):
    """A softmax of five values, which are normalized, and less their maximum; its products with H units."""

    name, states, chunks = "chunks", ("h",), 5

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "V": (1, self.chunks, hidden), "U": (2, hidden, self.chunks), "v": (1, hidden)}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"], 0)
        scores = normalized(product(h, p["V"], 0), 1e-2, "alike")
        biased = pointwise(lambda b, j: 3.0 * scores[b, j] + p["v"][0, j], scores, "biased")
        top, share = largest(biased, "top"), softmax(biased, "share")
        weight, middle = product(share, p["U"]), mean(h)
        return [pointwise(lambda b, j: te.tanh(wx[b, j] + weight[b, 0, j] + 0.25 * top[b]) + weight[b, 1, j] * (
            h[b, j] - middle[b]), h, "new")]

    def numpy(self, x, h, W, V, U, v):
        z = h @ V[0].T
        z = (z - z.mean(axis=1, keepdims=True)) / np.sqrt(z.var(axis=1, keepdims=True) + 1e-2)
        z = 3 * z + v[0, :z.shape[1]]
        weight = [soft(z) @ u.T for u in U]
        return (np.tanh(x @ W[0].T + weight[0] + 0.25 * z.max(axis=1, keepdims=True))
                + weight[1] * (h - h.mean(axis=1, keepdims=True)),)


class Slots(Formula):
    """Attention over two slots of units: scores, their softmax, the slots' mixture, and a product of the weights."""

    name, states, slots, shapes = "slots", ("h",), 2, {"W": (2, "I"), "M": (1, "H"), "U": (1, 2)}

    def step(self, x, states, p):
        (h,), wx, n, own = states, product(x, p["W"]), self.slots, int(states[0].shape[1]) // self.slots
        k = te.reduce_axis((0, own), "k")
        scores = te.compute((h.shape[0], n), lambda b, s: te.sum(
            h[b, s * own + k] * wx[b, 0, s * own + k], axis=k), name="scores")
        share = softmax(scores, "share")
        mixed = product(pointwise(lambda b, j: share[b, j // own] * h[b, j], h, "parts"), p["M"], 0)
        seen = product(share, p["U"], 0)
        return [pointwise(lambda b, j: te.tanh(mixed[b, j] + wx[b, 1, j] + seen[b, j]) - 0.5 * scores[b, 1], h)]

    def numpy(self, x, h, W, M, U):
        w, n = [x @ m.T for m in W], self.slots
        scores = (h * w[0]).reshape(len(h), n, -1).sum(axis=2)
        share = soft(scores)
        mixed = (share.repeat(h.shape[1] // n, axis=1) * h) @ M[0].T
        return (np.tanh(mixed + w[1] + share @ U[0].T) - 0.5 * scores[:, 1:],)


INPUTS: dict[str, Any] = {cell.name: cell for cell in (TimedGRU(), Masked(), Gap())}
OUTPUTS: dict[str, Any] = {cell.name: cell for cell in (Gate(), Many(), Split(), Read(), Mixed())}
MAXIMA: dict[str, Any] = {cell.name: cell for cell in (Peaks(), Attending(), Grouped(), Chunks(), Slots())}
