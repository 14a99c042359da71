"""Three published cells, each in a few lines, as stacks of layers for sequences of different lengths.

    python examples/03_more_cells.py

The classes are all that you have to write. The program exits with 1 if a result differs from the formula in NumPy. On a
CPU it takes two minutes at most.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from stages import stage

import ecornn
from ecornn import Cell, pointwise, product


class UGRNN(Cell):
    """Update gate RNN (Collins et al. 2017, arXiv 1611.09913)."""

    name = "ugrnn"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (2, hidden, input), "weight_hh": (2, hidden, hidden), "bias": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), v = states, parameters["bias"]
        wx, rh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        new = pointwise(lambda b, j: te.tanh(wx[b, 0, j] + rh[b, 0, j] + v[0, j]), h)
        gate = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + rh[b, 1, j] + v[1, j]), h)
        return [pointwise(lambda b, j: gate[b, j] * h[b, j] + (1.0 - gate[b, j]) * new[b, j], h)]


class LightGRU(Cell):
    """Light GRU, without a reset gate (Ravanelli et al. 2018, arXiv 1803.10225)."""

    name = "ligru"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (2, hidden, input), "weight_hh": (2, hidden, hidden), "bias": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te, tirx

        (h,), v = states, parameters["bias"]
        wx, rh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j] + v[0, j]), h)
        new = pointwise(lambda b, j: tirx.max(wx[b, 1, j] + rh[b, 1, j] + v[1, j], tirx.const(0.0, "float32")), h)
        return [pointwise(lambda b, j: z[b, j] * h[b, j] + (1.0 - z[b, j]) * new[b, j], h)]


class SRU(Cell):
    """Simple recurrent unit (Lei et al. 2018, arXiv 1709.02755): no recurrent product, and x itself, so I = H."""

    name = "sru"
    states = ("h", "c")

    def parameters(self, input, hidden):
        return {"weight_ih": (3, hidden, input), "weight_c": (2, hidden), "bias": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (_, c), wx = states, product(x, parameters["weight_ih"])
        u, v = parameters["weight_c"], parameters["bias"]
        f = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + u[0, j] * c[b, j] + v[0, j]), c)
        r = pointwise(lambda b, j: te.sigmoid(wx[b, 2, j] + u[1, j] * c[b, j] + v[1, j]), c)
        new = pointwise(lambda b, j: f[b, j] * c[b, j] + (1.0 - f[b, j]) * wx[b, 0, j], c)
        return [pointwise(lambda b, j: r[b, j] * new[b, j] + (1.0 - r[b, j]) * x[b, j], c), new]


def sigmoid(z: Any) -> Any:
    return 1 / (1 + np.exp(-z))


def ugrnn(x: Any, h: Any, c: Any, W: Any, R: Any, v: Any) -> tuple[Any, Any]:
    new, gate = np.tanh(x @ W[0].T + h @ R[0].T + v[0]), sigmoid(x @ W[1].T + h @ R[1].T + v[1])
    return gate * h + (1 - gate) * new, c


def light_gru(x: Any, h: Any, c: Any, W: Any, R: Any, v: Any) -> tuple[Any, Any]:
    z, new = sigmoid(x @ W[0].T + h @ R[0].T + v[0]), np.maximum(x @ W[1].T + h @ R[1].T + v[1], 0)
    return z * h + (1 - z) * new, c


def sru(x: Any, h: Any, c: Any, W: Any, u: Any, v: Any) -> tuple[Any, Any]:
    f, r = sigmoid(x @ W[1].T + u[0] * c + v[0]), sigmoid(x @ W[2].T + u[1] * c + v[1])
    c = f * c + (1 - f) * (x @ W[0].T)
    return r * c + (1 - r) * x, c


def formula(step: Callable[..., tuple[Any, Any]], x: Any, layers: list[list[Any]], lengths: Any) -> Any:
    """y (T, B, H) of a stack in float64; each row is computed separately, up to its length."""
    y = np.zeros(x.shape)
    for row, length in enumerate(lengths):
        values = x[:length, row].astype(np.float64)
        for parameters in layers:
            h = c = np.zeros(x.shape[2])
            for t in range(length):
                h, c = step(values[t], h, c, *parameters)
                values[t] = h
        y[:length, row] = values
    return y


def main() -> int:
    T, B, H, layers = 30, 6, 64, 2
    wrong = 0
    for cell, step in ((UGRNN(), ugrnn), (LightGRU(), light_gru), (SRU(), sru)):
        with stage(f"compiling {cell.name}"):
            module = ecornn.compile(cell, hidden=H, batch=B, seq=T, layers=layers, lengths=True)
        random = np.random.default_rng(0)
        weights = {p.name: random.uniform(-H ** -0.5, H ** -0.5, p.shape).astype(np.float32)
                   for p in module.manifest.parameters}
        x, lengths = random.standard_normal((T, B, H)).astype(np.float32), random.integers(1, T + 1, B)
        y, _ = module.bind(weights)(x, lengths=lengths)
        shapes = cell.parameters(H, H)
        values = [[weights[f"{n}_l{k}"].reshape(s).astype(np.float64) for n, s in shapes.items()]
                  for k in range(layers)]
        expected = formula(step, x, values, lengths)
        error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
        print(f"{cell.name}: {layers} layers by {module.manifest.schedule}, relative error {error:.1e}, limit 1.0e-05")
        wrong += not error <= 1e-5
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
