"""Cells that use what the built-in ones do not, each with its formula in NumPy float64: other products and states,
statistics of hidden units in every place that they can have, and products of what depends on x and on a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import te, tirx

from ecornn.analysis import StepGraph
from ecornn.analysis.evaluate import Array, at, hoist, start, step
from ecornn.cells import Cell, mean, normalized, pointwise, product
from ecornn.cells.vanilla import IndRNN
from ecornn.numpy_gradients import erf


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


def normal(*gates: Any) -> list[Any]:
    """Layer normalization of all gates together."""
    values = np.concatenate(gates, axis=1)
    values = (values - values.mean(axis=1)[:, None]) / np.sqrt(values.var(axis=1)[:, None] + 1e-5)
    return np.split(values, len(gates), axis=1)


class Gated(Cell):
    """Minimal gated unit: a second product of what the first one gates; its gate is carried over."""

    name, states = "gated", ("h",)

    def parameters(self, input, hidden):
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "b": (2, hidden)}

    def step(self, x, states, parameters):
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

    name, states, output = "pair", ("p", "q"), "q"

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (2, hidden, hidden), "S": (1, hidden, hidden), "b": (2, hidden)}

    def step(self, x, states, parameters):
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

    name, states = "leaky", ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "b": (1, hidden)}

    def step(self, x, states, parameters):
        (h,) = states
        wx, b = product(x, parameters["W"], 0), parameters["b"]
        return [pointwise(lambda i, j: te.sigmoid(b[0, j]) * h[i, j] + te.tanh(wx[i, j]) * x[i, j], h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": sigmoid(p["b"][0]) * s["h"] + np.tanh(x @ p["W"][0].T) * x}, "h"


class Average(Cell):
    """No product at all, no parameter."""

    name, states = "average", ("h",)

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

    name, states = "highway", ("h", "c")

    def parameters(self, input, hidden):
        return {"W": (3, hidden, input), "v": (2, hidden), "b": (2, hidden)}

    def step(self, x, states, parameters):
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

    name, states, unread = "seven", ("h",), ("W", "b")

    def parameters(self, input, hidden):
        return {"W": (7, hidden, input), "b": (7, hidden)}

    def step(self, x, states, parameters):
        (h,), b = states, parameters["b"]
        wx = product(x, parameters["W"])
        return [pointwise(lambda i, j: sum((te.tanh(wx[i, n, j] + b[n, j] + h[i, j]) * (n - 3.0) for n in range(7)),
                                           te.const(0.0, "float32")) * 0.125, h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": sum(np.tanh(x @ p["W"][n].T + p["b"][n] + s["h"]) * (n - 3) for n in range(7)) / 8}, "h"


class Decay(Cell):
    """Nothing of x at all."""

    name, states = "decay", ("h",)

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

    name, states = "echo", ("h",)

    def parameters(self, input, hidden):
        return {"R": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        (h,) = states
        rh = product(h, parameters["R"], 0)
        return [pointwise(lambda i, j: te.tanh(rh[i, j] + x[i, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": np.tanh(s["h"] @ p["R"][0].T + x)}, "h"


class Blend(Cell):
    """Of x's products and, in the step, of what came of these; of a state beside a product; of values of a phase with
    another product; of a new state. Three hoisted values of two products."""

    name, states = "blend", ("h", "c")

    def parameters(self, input, hidden):
        return {"W": (2, hidden, input), "R": (2, hidden, hidden), "v": (2, hidden)}

    def step(self, x, states, parameters):
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

    name, states = "focus", ("h",)

    def parameters(self, input, hidden):
        return {"W": (2, hidden, input), "b": (2, hidden)}

    def step(self, x, states, parameters):
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

    name, states = "contrast", ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input)}

    def step(self, x, states, parameters):
        (h,), wx = states, product(x, parameters["W"], 0)
        seen = normalized(pointwise(lambda b, j: h[b, j] + wx[b, j], h, "seen"))
        return [pointwise(lambda b, j: te.tanh(seen[b, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": np.tanh(normal(s["h"] + x @ p["W"][0].T)[0])}, "h"


class Thrice(Cell):
    """Three products of a state, each normalized by itself: an odd number of statistics in one exchange."""

    name, states = "thrice", ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (3, hidden, hidden)}

    def step(self, x, states, parameters):
        (h,), wx = states, product(x, parameters["W"], 0)
        a, b, c = (normalized(product(h, parameters["R"], g)) for g in range(3))
        return [pointwise(lambda i, j: te.tanh(a[i, j] + wx[i, j]) * te.sigmoid(b[i, j]) + 0.1 * c[i, j], h, "new")]

    @staticmethod
    def formula(x, s, p):
        a, b, c = (normal(s["h"] @ r.T)[0] for r in p["R"])
        return {"h": np.tanh(a + x @ p["W"][0].T) * sigmoid(b) + 0.1 * c}, "h"


class Shared(Cell):
    """Products of x and of a state normalized together: x, whatever its size, is in a statistic of the step."""

    name, states = "shared", ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        (h,), wx = states, product(x, parameters["W"], 0)
        rh = product(h, parameters["R"], 0)
        seen = normalized(pointwise(lambda b, j: wx[b, j] + rh[b, j], h, "seen"))
        return [pointwise(lambda b, j: te.tanh(seen[b, j]), h, "new")]

    @staticmethod
    def formula(x, s, p):
        return {"h": np.tanh(normal(x @ p["W"][0].T + s["h"] @ p["R"][0].T)[0])}, "h"


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

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        c, h = s["c"], s["h"]
        g = [x @ w.T + h @ r.T for w, r in zip(p["W"], p["R"], strict=True)]
        new = sigmoid(g[0] + p["p"][0] * c) * c + np.tanh(g[1])
        return {"c": new, "h": sigmoid(g[2] + p["p"][2] * new) * np.tanh(new)}, "h"


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

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        h, w, r, v = s["h"], p["W"], p["R"], p["v"]
        a = np.tanh(x @ w[0].T + np.tanh(h - s["s"]) @ r[0].T + v[0])
        d = sigmoid(a @ r[1].T + h @ r[3].T) * a
        return {"h": np.tanh(d @ r[2].T + (x @ w[1].T) * v[1]) + a * d, "s": h}, "h"


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

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        h = s["h"]
        grown = np.log(np.sqrt(np.exp(h)) + np.abs(x @ p["W"][0].T))
        kept = np.where(x > 0, np.exp(p["decay"][0]) * h, np.maximum(h, grown))
        return {"h": erf(kept) + x}, "h"


class Given(Cell):
    """A cell of one state, or with such ``attributes``, whose step (x, h, parameters) to new states is given, and the
    shapes of its parameters, as a function of I and H."""

    name, states = "given", ("h",)

    def __init__(self, step: Any, parameters: Any = lambda input, hidden: {}, **attributes: Any) -> None:
        self.made, self.shapes = step, parameters
        vars(self).update(attributes)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return self.shapes(input, hidden)

    def step(self, x: Any, states: Any, p: Any) -> Any:
        return self.made(x, states[0], p)


CELLS = {cell.name: cell for cell in (
    Gated(), Pair(), Leaky(), Average(), Echo(), Independent(), Highway(), Seven(), Decay(), Blend(), Focus(),
    Contrast())}
SQUARE = ("leaky", "average", "echo")  # these read x outside of products, so that I == H
NO_PRODUCT = ("leaky", "average", "indrnn", "highway", "seven", "decay", "focus")  # nor a statistic, of a state
ROW_BY_ROW = ("contrast",)  # statistics, but no product, of a state
LATE = {cell.name: cell for cell in (LRU(), SCRN())}  # first products of what depends on x and on a state


def run(cell: Cell, x: Any, states: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """y (T, B, H), or (T, B, O H) of several outputs, and the last states, float64; parameters (G, H[, K]). A formula
    gives the new states, other outputs among them, and the name of y, or a tuple of names."""
    states, parameters = ({n: np.asarray(v, np.float64) for n, v in given.items()} for given in (states, parameters))
    y = []
    for row in np.asarray(x, np.float64):
        made, output = cell.formula(row, states, parameters)  # type: ignore[attr-defined]
        states = {name: made[name] for name in cell.states}
        y.append(np.concatenate([made[n] for n in ((output,) if isinstance(output, str) else output)], axis=1))
    return np.stack(y), states


def run_analysed(graph: StepGraph, x: Any, parameters: Mapping[str, Any],
                 states: Sequence[Any]) -> tuple[Array, tuple[Array, ...]]:
    """One layer: x (T, B, I), ``parameters`` by the cell's names in te shape, states (B, H) each,
    to y (T, B, H) and the final states; float64."""
    weights = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    x, current = np.asarray(x, np.float64), [np.asarray(s, np.float64) for s in states]
    shape, values, steps = current[0].shape, start(graph, weights), []
    hoist(graph, weights, values, x, (len(x), *shape))
    for t in range(len(x)):
        now = at(values, t, values) | dict(zip(graph.states.values(), current, strict=True))
        step(graph, weights, now, shape)
        current = [np.broadcast_to(now[v], shape) for v in graph.results.values()]
        outputs = graph.outputs or (graph.results[graph.output],)
        steps.append(np.concatenate([np.broadcast_to(now[v], shape) for v in outputs], axis=1))
    return np.stack(steps), tuple(current)
