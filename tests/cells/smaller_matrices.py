"""Cells whose matrices are smaller than H x H, of heads or narrow ones, with their formulas; and random arguments."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from cpu_training_sample import Call, reference
from published.heads import each_head
from step_cells import Formula, sigmoid
from tvm import te

from ecornn import Cell, pointwise, product
from ecornn.tune.oracle import relative_error

T, B, I = 5, 3, 4
Parameters = dict[str, Any]


class BlockRNN(Formula):
    """A GRU-like cell of products with heads in two exchanges; if ``whole``, beside a product without heads."""

    def __init__(self, heads: int, whole: bool = False) -> None:
        self.heads, self.whole = heads, whole
        self.name, self.states = f"block_{heads}{'_whole' * whole}", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        own = hidden // self.heads
        found = {"W": (2, hidden, input), "R": (2, hidden, own), "S": (1, hidden, own), "b": (2, hidden)}
        return found | ({"Q": (1, hidden, hidden)} if self.whole else {})

    def step(self, x, states, p):
        (h,), a, r, v = states, product(x, p["W"]), product(states[0], p["R"], heads=self.heads), p["b"]
        q = product(h, p["Q"], 0) if self.whole else h
        z = pointwise(lambda b, j: te.sigmoid(a[b, 0, j] + r[b, 0, j] + v[0, j] + q[b, j]), h)
        s = product(pointwise(lambda b, j: z[b, j] * h[b, j], h), p["S"], 0, heads=self.heads)
        n = pointwise(lambda b, j: te.tanh(a[b, 1, j] + r[b, 1, j] + s[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: z[b, j] * h[b, j] + (1.0 - z[b, j]) * n[b, j], h)]

    def numpy(self, x, h, W, R, S, b, Q=None):
        (a, c), (r, s) = (x @ w.T for w in W), each_head(h, R)
        z = sigmoid(a + r + b[0] + (h if Q is None else h @ Q[0].T))
        return (z * h + (1 - z) * np.tanh(c + s + each_head(z * h, S)[0] + b[1]),)


class LowRank(Formula):
    """A gated unit whose recurrent matrices are U f(V h), of ``rank`` values; if ``whole`` beside a whole matrix."""

    def __init__(self, rank: int, whole: bool = False) -> None:
        self.rank, self.whole, self.name, self.states = rank, whole, f"low_rank_{rank}{'_whole' * whole}", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        found = {"W": (2, hidden, input), "V": (1, self.rank, hidden), "U": (2, hidden, self.rank), "b": (3, hidden)}
        return found | ({"R": (1, hidden, hidden)} if self.whole else {})

    def step(self, x, states, p):
        (h,), a, v = states, product(x, p["W"]), p["b"]
        narrow = product(h, p["V"], 0)
        deep = product(pointwise(lambda b, j: te.tanh(narrow[b, j] + v[2, j]), narrow), p["U"])
        z = pointwise(lambda b, j: te.sigmoid(a[b, 0, j] + deep[b, 0, j] + v[0, j]), h)
        kept = pointwise(lambda b, j: z[b, j] * h[b, j], h)
        new = product(kept, p["R"], 0) if self.whole else kept
        n = pointwise(lambda b, j: te.tanh(a[b, 1, j] + deep[b, 1, j] + new[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: kept[b, j] + (1.0 - z[b, j]) * n[b, j], h)]

    def numpy(self, x, h, W, V, U, b, R=None):
        narrow = np.tanh(h @ V[0].T + b[2, :self.rank])
        gate, fresh = (x @ w.T + narrow @ u.T + v for w, u, v in zip(W, U, b[:2], strict=True))
        z = sigmoid(gate)
        return (z * h + (1 - z) * np.tanh(fresh + (z * h if R is None else (z * h) @ R[0].T)),)


class NarrowInput(LowRank):
    """Its narrow values take a narrow product of x, too; if ``whole`` its units a whole one besides."""

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        found = {"W": (1, self.rank, input), "V": (1, self.rank, hidden), "U": (1, hidden, self.rank)}
        return found | ({"Q": (1, hidden, input)} if self.whole else {})

    def step(self, x, states, p):
        (h,), a, b = states, product(x, p["W"], 0), product(states[0], p["V"], 0)
        u = product(pointwise(lambda i, j: te.tanh(a[i, j] + b[i, j]), a), p["U"], 0)
        q = product(x, p["Q"], 0) if self.whole else h
        return [pointwise(lambda i, j: 0.5 * h[i, j] + u[i, j] + 0.25 * q[i, j], h)]

    def numpy(self, x, h, W, V, U, Q=None):
        u = np.tanh(x @ W[0].T + h @ V[0].T) @ U[0].T
        return (0.5 * h + u + 0.25 * (h if Q is None else x @ Q[0].T),)


class Projected(Formula):
    """An LSTM whose gates see a projection r (P) of its output (Sak et al. 2014, arXiv 1402.1128)."""

    name, states, width = "lstm_projected", ("m", "c"), 3

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (4, hidden, input), "R": (4, hidden, self.width), "P": (1, self.width, hidden), "b": (4, hidden)}

    def step(self, x, states, p):
        (m, c), a, v = states, product(x, p["W"]), p["b"]
        r = product(product(m, p["P"], 0), p["R"])
        i, f, o = (pointwise(lambda b, j, g=g: te.sigmoid(a[b, g, j] + r[b, g, j] + v[g, j]), m) for g in (0, 1, 3))
        z = pointwise(lambda b, j: te.tanh(a[b, 2, j] + r[b, 2, j] + v[2, j]), m)
        new = pointwise(lambda b, j: f[b, j] * c[b, j] + i[b, j] * z[b, j], c)
        return [pointwise(lambda b, j: o[b, j] * te.tanh(new[b, j]), m), new]

    def numpy(self, x, m, c, W, R, P, b):
        i, f, z, o = (x @ w.T + m @ P[0].T @ r.T + v for w, r, v in zip(W, R, b, strict=True))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(z)
        return sigmoid(o) * np.tanh(c), c


def drawn(cell: Cell, hidden: int, batch: int = B) -> tuple[Any, Parameters, list[Any]]:
    rng = np.random.default_rng(0)
    def values(shape: tuple[int, ...], scale: float = 1.0) -> Any:
        return (rng.uniform(-1, 1, shape) * scale).astype(np.float16).astype(np.float32)
    parameters = {n: values(s, 2 * s[-1] ** -0.5) for n, s in cell.parameters(I, hidden).items()}
    zeros = [np.zeros((batch, hidden), np.float32)] * (len(cell.states) - 1)
    return values((T, batch, I)), parameters, [values((batch, hidden)), *zeros]


def training_call(cell: Cell, hidden: int) -> tuple[Call, dict[str, Any]]:
    """A call with gradients, and what must come of it, by the names of buffers: by a tape over the formula."""
    (x, parameters, states), rng = drawn(cell, hidden), np.random.default_rng(1)
    dy, *dstates = (rng.normal(size=s).astype(np.float16).astype(np.float32)
                    for s in ((T, B, hidden), *[(B, hidden)] * len(states)))
    call = Call(x, states, dy, dstates, parameters)
    return call, reference(cell, call, False)


def flat(parameters: Parameters) -> Parameters:
    return {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}


def near(found: Mapping[str, Any], wanted: Mapping[str, Any], limit: float) -> None:
    for name, value in found.items():
        assert relative_error(value.reshape(wanted[name].shape), wanted[name]) <= limit, name
