"""Arguments of a training step, and what comes of them in float64, by a tape over a cell's formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ecornn.cells import Cell
from ecornn.numpy_gradients import Traced, backward


@dataclass
class Call:
    x: np.ndarray
    states: list[np.ndarray]
    dy: np.ndarray
    dstates: list[np.ndarray]
    parameters: dict[str, np.ndarray]
    lengths: np.ndarray | None = None
    resets: np.ndarray | None = None
    sequences: np.ndarray | None = None

    def moved(self, way: Call, by: float) -> Call:
        """``by`` times another call's arguments farther."""
        return replace(self, x=self.x + by * way.x,
                       states=[s + by * w for s, w in zip(self.states, way.states, strict=True)],
                       parameters={n: p + by * way.parameters[n] for n, p in self.parameters.items()})


def train(cell: Cell, step: Callable[[Traced, list[Traced], dict[str, Traced]], list[Traced]], call: Call,
          reverse: bool = False) -> dict[str, np.ndarray]:
    """The results of a training step for a call, by the names of buffers; ``step``: all that the cell returns."""
    steps, batch, _ = call.x.shape
    x, parameters = Traced(call.x), {n: Traced(p) for n, p in call.parameters.items()}
    first = [Traced(s) for s in call.states]
    limit = np.full(batch, steps) if call.lengths is None else call.lengths
    outputs = [cell.returned_names().index(n) for n in cell.output_names()]
    states, y = list(first), list[Any]([None] * steps)
    for t in reversed(range(steps)) if reverse else range(steps):
        starts, fresh = t + 1 if reverse else t, np.zeros(batch, bool)
        if call.resets is not None and starts < steps:
            fresh = (call.resets[starts] != 0) & (starts < limit)
        live = (t < limit).astype(np.float64)[:, None]
        before = [s * (1.0 - fresh[:, None]) for s in states]
        after = step(x[t], before, parameters)
        states = [a * live + s * (1.0 - live) for a, s in zip(after, before, strict=False)]
        y[t] = [after[o] * live for o in outputs]
    dy = np.split(call.dy.astype(np.float64), len(outputs), axis=-1)
    backward([*((v, d[t]) for t, row in enumerate(y) for v, d in zip(row, dy, strict=True)),
              *zip(states, [d.astype(np.float64) for d in call.dstates], strict=True)])
    found = {"y": np.stack([np.concatenate([v.value for v in row], axis=1) for row in y]), "dx": x.gradient}
    found |= {f"{n}_out": s.value for n, s in zip(cell.states, states, strict=True)}
    found |= {f"d{n}_in": s.gradient for n, s in zip(cell.states, first, strict=True)}
    return found | {f"gradient_{n}": p.gradient for n, p in parameters.items()}
