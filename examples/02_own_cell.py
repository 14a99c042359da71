"""A cell of your own: the minimal gated unit (Zhou et al. 2016, arXiv 1603.09420).

    python examples/02_own_cell.py

The class below is all that ecornn needs to tune, compile and run the cell; ecornn treats it as it
treats the built-in cells. On the command line it is
``--cell examples/02_own_cell.py:MinimalGatedUnit``. The program exits with 1 if the result differs
from the formula in NumPy. On a CPU it takes two minutes at most.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
from stages import stage

import ecornn
from ecornn import Cell, pointwise, product


class MinimalGatedUnit(Cell):
    name = "mgu"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (2, hidden, input), "weight_hh": (2, hidden, hidden), "bias": (2, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,), v = states, parameters["bias"]
        W, R = parameters["weight_ih"], parameters["weight_hh"]
        wx, rh = product(x, W), product(h, R, 0)
        forget = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, j] + v[0, j]), h)
        kept = product(pointwise(lambda b, j: forget[b, j] * h[b, j], h), R, 1)
        new = pointwise(lambda b, j: te.tanh(wx[b, 1, j] + kept[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: h[b, j] + forget[b, j] * (new[b, j] - h[b, j]), h)]


def formula(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """y (T, B, H) of the same cell in NumPy float64."""
    W, R, v = (weights[f"{name}_l0"].astype(np.float64) for name in ("weight_ih", "weight_hh", "bias"))
    H = R.shape[1]
    h, y = np.zeros((x.shape[1], H)), []
    for row in x.astype(np.float64):
        forget = 1 / (1 + np.exp(-(row @ W[:H].T + h @ R[:H].T + v[:H])))
        new = np.tanh(row @ W[H:].T + (forget * h) @ R[H:].T + v[H:])
        h = (1 - forget) * h + forget * new
        y.append(h)
    return np.stack(y)


def main() -> int:
    T, B, I, H = 50, 8, 96, 128
    sizes = {"hidden": H, "input": I, "batch": B, "seq": T, "dtype": "float32"}
    tune = Path(sysconfig.get_path("scripts"), "ecornn-tune")
    options = [f"--{name}={value}" for name, value in sizes.items()]
    with stage("search", beats=False):
        subprocess.run([tune, f"--cell={__file__}:MinimalGatedUnit", *options, "--trials=8"], check=True)

    with stage("compiling"):
        module = ecornn.compile(MinimalGatedUnit(), **sizes)
    print(module)
    random = np.random.default_rng(0)
    shapes = {"weight_ih_l0": (2 * H, I), "weight_hh_l0": (2 * H, H), "bias_l0": (2 * H,)}
    weights = {name: random.uniform(-H ** -0.5, H ** -0.5, shape).astype(np.float32)
               for name, shape in shapes.items()}
    x = random.standard_normal((T, B, I)).astype(np.float32)
    y, _ = module.bind(weights)(x)

    expected = formula(x, weights)
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    print(f"relative error against NumPy float64: {error:.1e}, limit 1.0e-05")
    return int(not error <= 1e-5)


if __name__ == "__main__":
    sys.exit(main())
