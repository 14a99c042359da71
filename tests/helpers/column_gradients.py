"""A training step of a bound layer on sequences in columns, against float64: for a GPU's tests and the sanitizer."""

from typing import Any

import numpy as np
import torch
from exact import relative

import ecornn


def errors_of(layer: Any, cell: str, weights: dict[str, Any], rng: np.random.Generator,
              device: str = "cuda") -> dict[str, float]:
    """The relative error of each gradient, by name, of more than twice as many sequences as columns."""
    w, stack = layer.manifest.workload, layer.manifest.stack
    kind, count = getattr(torch, w.dtype), 2 * w.batch + 1
    lengths = rng.integers(w.seq // 2, w.seq + 1, count)
    columns = ecornn.Columns.of(lengths, w.batch, layer.together)
    assert columns.wrapped.size or layer.together == 1  # where no columns may share one
    def drawn(*shape: int) -> Any:
        return torch.tensor(rng.standard_normal(shape)).to(kind)
    rows, drows = drawn(w.seq, count, w.input), drawn(w.seq, count, w.hidden * stack.directions)
    shape = (count, w.hidden) if stack.count == 1 else (stack.count, count, w.hidden)
    states, dstates = ([drawn(*shape) for _ in layer.manifest.states] for _ in range(2))
    x, dy = (v[columns.inside, columns.table] for v in (rows, drows))
    for unused in (x, dy):
        unused[torch.from_numpy(columns.table < 0)] = float("nan")
    _, _, kept = layer.forward(x.to(device), [s.to(device) for s in states], sequences=columns)
    found = layer.backward(kept, dy.to(device), [s.to(device) for s in dstates])
    dx, dweights, before = ecornn.reference_gradients(
        cell, rows.double().numpy(), weights, [s.double().numpy() for s in states], dy=drows.double().numpy(),
        dstate=[s.double().numpy() for s in dstates], lengths=lengths)
    laid = found.x.double().cpu().numpy()
    assert not laid[columns.table < 0].any()
    ours = np.zeros_like(dx)
    for s, n in enumerate(lengths):
        ours[:n, s] = laid.reshape(-1, w.input)[columns.of_sequence(s)]
    pairs = {"x": (ours, dx)} | {n: (found.weights[n].cpu().numpy(), g) for n, g in dweights.items()}
    pairs |= {n: (a.double().cpu().numpy(), b.reshape(a.shape))
              for n, a, b in zip(layer.manifest.states, found.state, before, strict=True)}
    return {name: relative(a, b) for name, (a, b) in pairs.items()}
