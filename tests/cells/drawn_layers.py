"""Layers of cells that have a ``formula``, with random arguments, and what comes of these in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import step_cells
from cpu_training_sample import Call
from cuda_on_cpu import DTYPES, Emulated
from emulated import train_call

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.program import Program


class Drawn:
    """Arguments of ``sizes`` T, B, I, H; x and sequences from ``least`` to 1; ``ends``: last states have gradients."""

    def __init__(self, cell: Any, sizes: tuple[int, int, int, int], dtype: str = "float64", scale: float = 0.25,
                 least: float = -1.0, ends: bool = True) -> None:
        (T, B, I, H), rng, self.cell = sizes, np.random.default_rng(4), cell
        def drawn(*shape: int, low: float = -1.0) -> Any:
            return rng.uniform(low, 1, shape).astype(DTYPES.get(dtype, dtype)).astype(np.float64)
        self.names, self.width, self.hidden = cell.output_names(), cell.row_width(I, H), H
        self.x, self.dy = drawn(T, B, self.width, low=least), drawn(T, B, len(self.names) * H)
        self.first, self.dlast = [drawn(B, H) for _ in cell.states], [drawn(B, H) * ends for _ in cell.states]
        self.parameters = {n: drawn(*s) * scale for n, s in cell.parameters(I, H).items()}
        self.weights = {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in self.parameters.items()}
        self.y, self.last = self.run()

    def run(self, **moved: Any) -> tuple[Any, list[Any]]:
        first = dict(zip(self.cell.states, self.first, strict=True))
        y, last = step_cells.run(self.cell, moved.pop("x", self.x), first, {**self.parameters, **moved})
        return y, [last[n] for n in self.cell.states]

    def loss(self, **moved: Any) -> float:
        y, last = self.run(**moved)
        return float(sum((v * d).sum() for v, d in zip((y, *last), (self.dy, *self.dlast), strict=True)))

    def gradients(self, **options: Any) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
        made = adjoint(analyse(self.cell, self.width, self.hidden), self.hidden)
        return backpropagate(made, self.x, self.parameters, self.first, self.dy, self.dlast, **options)

    def wanted(self) -> dict[str, Any]:
        dx, parameters, states = self.gradients()
        return {"y": self.y, "dx": dx, **{f"gradient_{n}": v for n, v in parameters.items()},
                **{f"d{n}_in": v for n, v in zip(self.cell.states, states, strict=True)}}

    def train(self, program: Program, folder: Path) -> dict[str, Any]:
        call = Call(self.x, self.first, self.dy, self.dlast, self.parameters)
        return train_call(Emulated(program, folder), self.cell.states, call)

    def check_call(self, y: Any, last: Any, limit: float) -> None:
        y = np.concatenate([*y.values()], axis=2) if isinstance(y, dict) else y
        assert all(abs(a - b).max() < limit for a, b in zip((y, *last), (self.y, *self.last), strict=True))

    def check_backward(self, found: Any, limit: float) -> None:
        dx, parameters, states = self.gradients()
        assert abs(found.x - dx[..., :found.x.shape[-1]]).max() < limit
        assert all(abs(a - b).max() < limit for a, b in zip(found.state, states, strict=True))
        for name, value in parameters.items():
            assert abs(found.weights[f"{name}_l0"] - value.reshape(-1, *value.shape[2:])).max() < limit, name
