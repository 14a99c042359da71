"""Cells that use what the built-in ones do not, each with its formula in NumPy float64."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from tvm import te, tirx

from ecornn.analysis import StepGraph
from ecornn.analysis.backpropagation import Array, at, hoist, start, step
from ecornn.cells import Cell, custom_gradient, mean, normalized, pointwise, product, spike
from ecornn.cells.builtin import IndRNN
from ecornn.numpy_gradients import custom_gradient as numpy_custom_gradient
from ecornn.numpy_gradients import erf, plain
from ecornn.numpy_gradients import spike as numpy_spike


def sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-z))


def normal(*gates: Any) -> list[Any]:
    values = np.concatenate(gates, axis=1)
    values = (values - values.mean(axis=1)[:, None]) / np.sqrt(values.var(axis=1)[:, None] + 1e-5)
    return np.split(values, len(gates), axis=1)


class Formula(Cell):
    """``shapes``: (G, "I"), (G, "H"), (G,) or (G, K) of each parameter; ``numpy``: the step on arrays, by name."""

    shapes: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def parameters(self, input, hidden):
        sizes = {"I": input, "H": hidden}
        return {n: (g, hidden, *(sizes.get(k, k) for k in more)) for n, (g, *more) in self.shapes.items()}

    def formula(self, x, states, parameters):
        """All that the step returns, by name, and the names of the outputs; x with the inputs beside it."""
        hidden = next(iter(states.values())).shape[1]
        own = self.own_input(x.shape[1], hidden)
        beside = {n: x[:, own + k * hidden:own + (k + 1) * hidden] for k, n in enumerate(self.inputs)}
        made = self.numpy(x[:, :own], *(states[n] for n in self.states), **parameters, **beside)
        return dict(zip(self.returned_names(), made, strict=True)), self.output_names()


class Gated(Formula):
    name, states, shapes = "gated", ("h",), {"W": (2, "I"), "R": (2, "H"), "b": (2,)}

    def step(self, x, states, parameters):
        (h,), W, R, b = states, parameters["W"], parameters["R"], parameters["b"]
        fx, nx, fh = product(x, W, 0), product(x, W, 1), product(h, R, 0)
        f = pointwise(lambda i, j: te.sigmoid(fx[i, j] + fh[i, j] + b[0, j]), h, "f")
        nh = product(pointwise(lambda i, j: f[i, j] * h[i, j], h, "kept"), R, 1)
        n = pointwise(lambda i, j: te.tanh(nx[i, j] + nh[i, j] + b[1, j]), h, "n")
        return [pointwise(lambda i, j: h[i, j] + f[i, j] * (n[i, j] - h[i, j]), h, "new")]

    def numpy(self, x, h, W, R, b):
        f = sigmoid(x @ W[0].T + h @ R[0].T + b[0])
        return (h + f * (np.tanh(x @ W[1].T + (f * h) @ R[1].T + b[1]) - h),)


class Pair(Formula):
    """Products of two operands, one of them computed from a state; states change places; y is the second."""

    name, states, output, shapes = "pair", ("p", "q"), "q", {"W": (1, "I"), "R": (2, "H"), "S": (1, "H"), "b": (2,)}

    def step(self, x, states, parameters):
        p, q = states
        W, R, S, b = (parameters[n] for n in ("W", "R", "S", "b"))
        squeezed = pointwise(lambda i, j: te.tanh(p[i, j] * b[0, j]), p, "squeezed")
        wx, rq, rs, sq = product(x, W, 0), product(q, R, 0), product(squeezed, R, 1), product(q, S, 0)
        new = pointwise(lambda i, j: te.tanh(wx[i, j] + rq[i, j] * rs[i, j] + b[1, j]) + sq[i, j] * 0.25, p, "new")
        return [pointwise(lambda i, j: q[i, j], p, "swapped"), new]

    def numpy(self, x, p, q, W, R, S, b):
        product = (q @ R[0].T) * (np.tanh(p * b[0]) @ R[1].T)
        return q, np.tanh(x @ W[0].T + product + b[1]) + q @ S[0].T * 0.25


class Leaky(Formula):
    name, states, shapes = "leaky", ("h",), {"W": (1, "I"), "b": (1,)}

    def step(self, x, states, parameters):
        (h,), wx, b = states, product(x, parameters["W"], 0), parameters["b"]
        return [pointwise(lambda i, j: te.sigmoid(b[0, j]) * h[i, j] + te.tanh(wx[i, j]) * x[i, j], h, "new")]

    def numpy(self, x, h, W, b):
        return (sigmoid(b[0]) * h + np.tanh(x @ W[0].T) * x,)


class Average(Formula):
    name, states = "average", ("h",)

    def step(self, x, states, parameters):
        (h,) = states
        return [pointwise(lambda i, j: h[i, j] * 0.75 + x[i, j] * 0.25, h, "new")]

    def numpy(self, x, h):
        return (h * 0.75 + x * 0.25,)


class Independent(IndRNN, Formula):
    def numpy(self, x, h, weight_ih, weight_hh, bias_ih):
        return (np.maximum(x @ weight_ih[0].T + bias_ih[0] + weight_hh[0] * h, 0.0),)


class Highway(Formula):
    """As SRU: gates of x and of a unit's own state, two states of which the first is y and is not read."""

    name, states, shapes = "highway", ("h", "c"), {"W": (3, "I"), "v": (2,), "b": (2,)}

    def step(self, x, states, parameters):
        (h, c), v, b = states, parameters["v"], parameters["b"]
        wx = product(x, parameters["W"])
        f = pointwise(lambda i, j: te.sigmoid(wx[i, 0, j] + v[0, j] * c[i, j] + b[0, j]), h, "f")
        r = pointwise(lambda i, j: te.sigmoid(wx[i, 1, j] + v[1, j] * c[i, j] + b[1, j]), h, "r")
        new = pointwise(lambda i, j: f[i, j] * c[i, j] + (1.0 - f[i, j]) * wx[i, 2, j], h, "new")
        return [pointwise(lambda i, j: r[i, j] * te.tanh(new[i, j]) + (1.0 - r[i, j]) * wx[i, 2, j], h, "out"), new]

    def numpy(self, x, h, c, W, v, b):
        z = x @ W[2].T
        f, r = (sigmoid(x @ W[n].T + v[n] * c + b[n]) for n in (0, 1))
        new = f * c + (1 - f) * z
        return r * np.tanh(new) + (1 - r) * z, new


class Seven(Formula):
    """More gates of x than any built-in cell, and no power of two; of one the factor is 0."""

    name, states, unread, shapes = "seven", ("h",), ("W", "b"), {"W": (7, "I"), "b": (7,)}

    def step(self, x, states, parameters):
        (h,), wx, b = states, product(x, parameters["W"]), parameters["b"]
        return [pointwise(lambda i, j: sum((te.tanh(wx[i, n, j] + b[n, j] + h[i, j]) * (n - 3.0) for n in range(7)),
                                           te.const(0.0, "float32")) * 0.125, h, "new")]

    def numpy(self, x, h, W, b):
        return (sum(np.tanh(x @ W[n].T + b[n] + h) * (n - 3) for n in range(7)) / 8,)


class Decay(Formula):
    name, states, shapes = "decay", ("h",), {"u": (1,)}

    def step(self, x, states, parameters):
        (h,), u = states, parameters["u"]
        return [pointwise(lambda i, j: h[i, j] - 0.25 * u[0, j] * h[i, j], h, "new")]

    def numpy(self, x, h, u):
        return (h * (1 - 0.25 * u[0]),)


class Echo(Formula):
    name, states, shapes = "echo", ("h",), {"R": (1, "H")}

    def step(self, x, states, parameters):
        (h,), rh = states, product(states[0], parameters["R"], 0)
        return [pointwise(lambda i, j: te.tanh(rh[i, j] + x[i, j]), h, "new")]

    def numpy(self, x, h, R):
        return (np.tanh(h @ R[0].T + x),)


class Blend(Formula):
    """Reductions of x's products and their functions; of a state beside a product; of a new state."""

    name, states, shapes = "blend", ("h", "c"), {"W": (2, "I"), "R": (2, "H"), "v": (2,)}

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

    def numpy(self, x, h, c, W, R, v):
        w0, w1 = normal(*(x @ w.T for w in W))
        a = np.tanh(w0 + h @ R[0].T + v[0] * (c - c.mean(axis=1)[:, None]) + np.abs(w0).mean(axis=1)[:, None])
        new = 0.5 * c + normal(a)[0] * sigmoid(a @ R[1].T)
        return np.tanh(normal(new)[0] * v[1] + w1), new


class Focus(Formula):
    """Of products of x alone, in which fewer values go in than come out; no exchange in a step."""

    name, states, shapes = "focus", ("h",), {"W": (2, "I"), "b": (2,)}

    def step(self, x, states, parameters):
        (h,), b = states, parameters["b"]
        gates = product(x, parameters["W"])
        n = normalized(te.compute(gates.shape, lambda i, g, j: gates[i, g, j] + b[g, j], name="biased"))
        return [pointwise(lambda i, j: te.sigmoid(n[i, 0, j]) * h[i, j] + te.tanh(n[i, 1, j]) * (1.0 - h[i, j]) * 0.5
                          + (n[i, 0, j] + n[i, 1, j]) * 0.25, h, "new")]

    def numpy(self, x, h, W, b):
        a, b = normal(*(x @ w.T + bias for w, bias in zip(W, b, strict=True)))
        return (sigmoid(a) * h + np.tanh(b) * (1 - h) * 0.5 + (a + b) * 0.25,)


class Contrast(Formula):
    """No product of a state: what units see of each other is their mean and variance."""

    name, states, shapes = "contrast", ("h",), {"W": (1, "I")}

    def step(self, x, states, parameters):
        (h,), wx = states, product(x, parameters["W"], 0)
        seen = normalized(pointwise(lambda b, j: h[b, j] + wx[b, j], h, "seen"))
        return [pointwise(lambda b, j: te.tanh(seen[b, j]), h, "new")]

    def numpy(self, x, h, W):
        return (np.tanh(normal(h + x @ W[0].T)[0]),)


class Thrice(Formula):
    """Three products of a state, each normalized by itself: an odd number of statistics in one exchange."""

    name, states, shapes = "thrice", ("h",), {"W": (1, "I"), "R": (3, "H")}

    def step(self, x, states, parameters):
        (h,), wx = states, product(x, parameters["W"], 0)
        a, b, c = (normalized(product(h, parameters["R"], g)) for g in range(3))
        return [pointwise(lambda i, j: te.tanh(a[i, j] + wx[i, j]) * te.sigmoid(b[i, j]) + 0.1 * c[i, j], h, "new")]

    def numpy(self, x, h, W, R):
        a, b, c = (normal(h @ r.T)[0] for r in R)
        return (np.tanh(a + x @ W[0].T) * sigmoid(b) + 0.1 * c,)


class Shared(Formula):
    """Products of x and of a state normalized together: x, whatever its size, is in a statistic of the step."""

    name, states, shapes = "shared", ("h",), {"W": (1, "I"), "R": (1, "H")}

    def step(self, x, states, parameters):
        (h,), wx, rh = states, product(x, parameters["W"], 0), product(states[0], parameters["R"], 0)
        seen = normalized(pointwise(lambda b, j: wx[b, j] + rh[b, j], h, "seen"))
        return [pointwise(lambda b, j: te.tanh(seen[b, j]), h, "new")]

    def numpy(self, x, h, W, R):
        return (np.tanh(normal(x @ W[0].T + h @ R[0].T)[0]),)


class LRU(Formula):
    """The linear recurrent unit (Orvieto et al. 2023, arXiv 2303.06349), real: s' = a s + sqrt(1 - a^2) B x."""

    name, states, shapes = "lru", ("y", "s"), {"B": (1, "I"), "C": (1, "H"), "nu": (1,), "d": (1,)}

    def step(self, x, states, p):
        (_, s), nu = states, p["nu"]
        bx = product(x, p["B"], 0)
        decay = pointwise(lambda b, j: te.exp(0.0 - te.exp(nu[0, j])), s, "decay")
        new = pointwise(lambda b, j: decay[b, j] * s[b, j] + te.sqrt(1.0 - decay[b, j] * decay[b, j]) * bx[b, j], s,
                        "new")
        read = product(new, p["C"], 0)
        return [pointwise(lambda b, j: read[b, j] + p["d"][0, j] * te.tanh(new[b, j]), s, "y_new"), new]

    def numpy(self, x, y, s, B, C, nu, d):
        a = np.exp(-np.exp(nu[0]))
        new = a * s + np.sqrt(1 - a * a) * (x @ B[0].T)
        return new @ C[0].T + d[0] * np.tanh(new), new


class SCRN(Formula):
    """Structurally constrained recurrent network (Mikolov et al. 2015, arXiv 1412.7753), all of H units."""

    name, states, shapes = "scrn", ("y", "h", "s"), {"A": (2, "I"), "R": (4, "H")}

    def step(self, x, states, p):
        _, h, s = states
        ax = product(x, p["A"])
        slow = pointwise(lambda b, j: 0.05 * ax[b, 0, j] + 0.95 * s[b, j], h, "slow")
        ps, rh, vs = product(slow, p["R"], 0), product(h, p["R"], 1), product(slow, p["R"], 2)
        fast = pointwise(lambda b, j: te.sigmoid(ps[b, j] + ax[b, 1, j] + rh[b, j]), h, "fast")
        uh = product(fast, p["R"], 3)
        return [pointwise(lambda b, j: te.sigmoid(uh[b, j] + vs[b, j]), h, "out"), fast, slow]

    def numpy(self, x, y, h, s, A, R):
        slow = 0.05 * (x @ A[0].T) + 0.95 * s
        fast = sigmoid(slow @ R[0].T + x @ A[1].T + h @ R[1].T)
        return sigmoid(fast @ R[3].T + slow @ R[2].T), fast, slow


class Peephole(Formula):
    name, states, output, unread = "peephole", ("c", "h"), "h", ("p",)
    shapes = {"W": (3, "I"), "R": (3, "H"), "p": (3,)}

    def step(self, x, states, p):
        c, h = states
        wx, rh, v = product(x, p["W"]), product(h, p["R"]), p["p"]
        new = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j] + v[0, j] * c[b, j]) * c[b, j]
                        + te.tanh(wx[b, 1, j] + rh[b, 1, j]), c)
        h_new = pointwise(lambda b, j: te.sigmoid(wx[b, 2, j] + rh[b, 2, j] + v[2, j] * new[b, j])
                          * te.tanh(new[b, j]), c)
        return [new, h_new]

    def numpy(self, x, c, h, W, R, p):
        g = [x @ w.T + h @ r.T for w, r in zip(W, R, strict=True)]
        new = sigmoid(g[0] + p[0] * c) * c + np.tanh(g[1])
        return new, sigmoid(g[2] + p[2] * new) * np.tanh(new)


class Chain(Formula):
    name, states, shapes = "chain", ("h", "s"), {"W": (2, "I"), "R": (4, "H"), "v": (2,)}

    def step(self, x, states, p):
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

    def numpy(self, x, h, s, W, R, v):
        a = np.tanh(x @ W[0].T + np.tanh(h - s) @ R[0].T + v[0])
        d = sigmoid(a @ R[1].T + h @ R[3].T) * a
        return np.tanh(d @ R[2].T + (x @ W[1].T) * v[1]) + a * d, h


class Residual(Formula):
    """No recurrent product, x read at its own unit (I = H), and functions without a vector form."""

    name, states, shapes = "residual", ("h",), {"W": (1, "I"), "decay": (1,)}

    def step(self, x, states, p):
        (h,), wx, decay = states, product(x, p["W"], 0), p["decay"]
        def new(b: Any, j: Any) -> Any:
            grown = te.log(te.sqrt(te.exp(h[b, j])) + te.abs(wx[b, j]))
            return te.erf(tirx.Select(x[b, j] > 0.0, te.exp(decay[0, j]) * h[b, j], tirx.max(h[b, j], grown))) + x[b, j]
        return [pointwise(new, h)]

    def numpy(self, x, h, W, decay):
        grown = np.log(np.sqrt(np.exp(h)) + np.abs(x @ W[0].T))
        return (erf(np.where(x > 0, np.exp(decay[0]) * h, np.maximum(h, grown))) + x,)


class Spiking(Formula):
    """Spikes with surrogates above a learned threshold, of values of x alone, and within a function; a gate that shows
    its state rounded, with the derivative of a tanh; all read again."""

    name, states, shapes = "spiking", ("s", "v"), {"W": (2, "I"), "R": (2, "H"), "b": (2,)}

    def step(self, x, states, parameters):
        (s, v), b = states, parameters["b"]
        wx, rs = product(x, parameters["W"]), product(s, parameters["R"])
        seen = pointwise(lambda i, j: spike(wx[i, 1, j], surrogate="arctan", slope=1.5), v, "seen")
        new = pointwise(lambda i, j: 0.75 * v[i, j] + wx[i, 0, j] + rs[i, 0, j] - 0.5 * s[i, j] + seen[i, j], v, "new")
        gate = pointwise(lambda i, j: te.sigmoid(spike(rs[i, 1, j] * v[i, j], b[1, j], slope=2.0)), v, "gate")
        shown = pointwise(lambda i, j: custom_gradient(
            te.floor(new[i, j] * 2.0), (new[i, j], 1.0 - te.tanh(new[i, j]) * te.tanh(gate[i, j])), (b[0, j], 0.5)), v)
        fires = pointwise(lambda i, j: spike(new[i, j], b[0, j], surrogate="triangle", slope=0.25), v, "fires")
        return [pointwise(lambda i, j: gate[i, j] * fires[i, j] + 0.25 * shown[i, j], v), new]

    def numpy(self, x, s, v, W, R, b):
        new = 0.75 * v + x @ W[0].T + s @ R[0].T - 0.5 * s + numpy_spike(x @ W[1].T, 0.0, "arctan", 1.5)
        gate = sigmoid(numpy_spike((s @ R[1].T) * v, b[1], "fast_sigmoid", 2.0))
        shown = numpy_custom_gradient(np.floor(plain(new) * 2.0), (new, 1.0 - np.tanh(new) * np.tanh(gate)),
                                      (b[0], np.full(new.shape, 0.5)))
        return gate * numpy_spike(new, b[0], "triangle", 0.25) + 0.25 * shown, new


class Given(Cell):
    """A cell whose step (x, h, parameters) to new states is given, and its shapes as a function of I and H."""

    name, states = "given", ("h",)

    def __init__(self, step: Any, parameters: Any = lambda input, hidden: {}, **attributes: Any) -> None:
        self.made, self.shapes = step, parameters
        vars(self).update(attributes)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return self.shapes(input, hidden)

    def step(self, x, states, p):
        return self.made(x, states[0], p)


CELLS = {cell.name: cell for cell in (
    Gated(), Pair(), Leaky(), Average(), Echo(), Independent(), Highway(), Seven(), Decay(), Blend(), Focus(),
    Contrast(), Spiking())}
SQUARE = ("leaky", "average", "echo")  # these read x outside of products, so that I == H
NO_PRODUCT = ("leaky", "average", "indrnn", "highway", "seven", "decay", "focus")  # nor a statistic, of a state
ROW_BY_ROW = ("contrast",)  # statistics, but no product, of a state
LATE = {cell.name: cell for cell in (LRU(), SCRN())}  # first products of what depends on x and on a state


def run(cell: Cell, x: Any, states: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """y (T, B, H), or (T, B, O H), and the last states, float64; parameters (G, H[, K])."""
    states, parameters = ({n: np.asarray(v, np.float64) for n, v in given.items()} for given in (states, parameters))
    y = []
    for row in np.asarray(x, np.float64):
        made, output = cell.formula(row, states, parameters)  # type: ignore[attr-defined]
        states = {name: made[name] for name in cell.states}
        y.append(np.concatenate([made[n] for n in ((output,) if isinstance(output, str) else output)], axis=1))
    return np.stack(y), states


def run_analysed(graph: StepGraph, x: Any, parameters: Mapping[str, Any],
                 states: Sequence[Any]) -> tuple[Array, tuple[Array, ...]]:
    """y (T, B, H) and the final states, float64, of one analysed layer; ``parameters`` in te shape, states (B, H)."""
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
