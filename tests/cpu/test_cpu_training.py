"""The CPU's backward pass: gradients of cells of one's own against a float64 tape over their formulas, tails of every
kind; of the built-in cells test_gradient_matrix.py has those."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_training_sample import LIMITS, Call, Layer, build, compare
from limits import relative
from test_adjoint import ALL, OF_STEP, H, adjoint_of, cell_of, width

from ecornn.numpy_gradients import reference_gradients
from ecornn.schedules.cpu import training
from ecornn.workload import Traversal

GROUPS = 4  # a module for each


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("group", range(GROUPS))
def test_gradients_of_other_cells(group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In chunks of two steps, with rows that end, and sequences that begin anew; every other cell in reverse, every
    other two with states kept, every other four in float64."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 6)
    layers = [Layer(name, width(name), H, 3, 5, Traversal(n % 2 == 1, lengths=True, resets=True),
                    ("gates", "states")[n // 2 % 2], ("float32", "float64")[n // 4 % 2])
              for n, name in enumerate(OF_STEP) if n % GROUPS == group]
    build(tmp_path, *layers)
    for layer in layers:
        compare(layer, layer.arguments(5, 3))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.exhaustive)
                                   for n in ("lstm(peepholes)", "gru(layer_norm)")), "bias"])
def test_both_ways(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also a cell whose adjoint is not rotated where sequences begin anew, since a parameter is added to the state."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 6)
    if name == "bias":
        name = next(n for n in ALL if adjoint_of(n).rotated and adjoint_of(n).finish.sums)
    layers = [Layer(name, width(name), H, 3, 5, Traversal(reverse, resets=resets))
              for reverse in (False, True) for resets in (False, True)]
    build(tmp_path, *layers)
    for layer in layers:
        compare(layer, layer.arguments(5, 3))


@pytest.mark.parametrize("size", [
    (1, 1, 1, 1), (33, 101, 3, 6),
    *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (
        (5, 7, 2, 3), (16, 48, 5, 9), (70, 20, 17, 40)))], ids=str)
def test_tails(size: tuple[int, int, int, int], tmp_path: Path):
    input, hidden, batch, steps = size
    kinds = (("lstm", "float32"), ("gru", "float32"), ("rnn_tanh", "float32"), ("gru", "float64"))
    layers = [Layer(cell, input, hidden, batch, steps, dtype=dtype) for cell, dtype in kinds]
    build(tmp_path, *layers)
    for layer in layers:
        call = layer.arguments(steps, batch)
        found, wanted = layer(call), by_formula(layer.name, call)
        for name, value in wanted.items():
            assert relative(found[name], value, 1e-6) < LIMITS[layer.dtype], f"{name} of {layer}"


def by_formula(cell: str, call: Call) -> dict[str, np.ndarray]:
    """Gradients by :func:`reference_gradients`, which takes any size."""
    names = {n: cell_of(cell).parameter_name(n) for n in call.parameters}
    weights = {names[n]: p.reshape(-1, *p.shape[2:]) for n, p in call.parameters.items()}
    dx, dweights, dstates = reference_gradients(cell, call.x, weights, call.states, dy=call.dy, dstate=call.dstates)
    return {"dx": dx, **{f"gradient_{n}": dweights[names[n]].reshape(call.parameters[n].shape) for n in names},
            **{f"d{n}_in": d for n, d in zip(cell_of(cell).states, dstates, strict=True)}}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", LIMITS)
def test_other_lengths_smaller_batches_and_bits(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bits do not depend on the number of threads, of which there may be more than tasks; chunks end anywhere."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 20)
    layer = Layer("lstm", 24, 40, 5, 20, dtype=dtype)
    build(tmp_path, layer)
    for steps, batch in ((1, 1), (4, 5), (5, 3), (13, 4)):
        call = layer.arguments(steps, batch, seed=steps)
        found = {threads: layer(call, threads=threads) for threads in (1, 2, 3, 29)}
        for name, value in by_formula("lstm", call).items():
            assert relative(found[1][name], value) < LIMITS[dtype], name
        for name, value in found[1].items():
            assert all(np.array_equal(value, found[t][name]) for t in (2, 3, 29)), name
