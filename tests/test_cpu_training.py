"""The CPU's backward pass: gradients of every cell against a float64 tape over its formula, tails of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_sample import Array, pack
from msgspec import structs
from test_adjoint import ALL, H, adjoint_of, cell_of, formula, width

from ecornn.build.module import build_module
from ecornn.cells import BUILTIN
from ecornn.host_cpu import detect
from ecornn.numpy_gradients import reference_gradients
from ecornn.numpy_tape import Traced, backward
from ecornn.schedules.cpu import CPUSequence, training
from ecornn.task import make_manifest, make_task
from ecornn.workload import ALONE, Traversal, Workload

LIMIT = 2e-5  # relative, of gradients in float32


@dataclass
class Call:
    """The arguments of a training step and, after it, what it made."""

    x: np.ndarray
    states: list[np.ndarray]
    dy: np.ndarray
    dstates: list[np.ndarray]
    parameters: dict[str, np.ndarray]
    lengths: np.ndarray | None = None
    resets: np.ndarray | None = None
    sequences: np.ndarray | None = None
    made: dict[str, np.ndarray] = field(default_factory=dict)


class Layer:
    """A built layer with its entries ``forward`` and ``backward``."""

    def __init__(self, folder: Path, name: str, input: int, hidden: int, batch: int, seq: int,
                 traversal: Traversal = ALONE, keep: str = "gates") -> None:
        import tvm_ffi

        self.name, self.cell, self.traversal = name, cell_of(name), traversal
        work = Workload(self.cell.identity(), hidden, input, batch, seq)
        self.task = make_task(self.cell, work, detect(), structs.replace(traversal, keep=keep))
        schedule = CPUSequence()
        assert schedule.serves(self.task) is None
        config = schedule.default(self.task)
        self.program = schedule.program(self.task, config)
        manifest = make_manifest(self.cell, self.task, schedule, config, self.program, "test")
        file = folder / f"layer{len(list(folder.iterdir()))}.so"  # the loader takes one name for one library
        build_module(self.program, manifest, file)
        self.module: Any = tvm_ffi.load_module(str(file))

    def arguments(self, steps: int, batch: int, seed: int = 0) -> Call:
        rng, work, traversal = np.random.default_rng(seed), self.task.workload, self.traversal

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        # first states that no cell divides by, or takes the logarithm of, too near to zero
        states = [rng.uniform(0.1, 1, (batch, work.hidden)).astype(np.float32) for _ in self.cell.states]
        parameters = {n: (rng.uniform(-1, 1, shape) / work.hidden ** 0.5).astype(np.float32)
                      for n, shape in self.cell.parameters(work.input, work.hidden).items()}
        return Call(normal(steps, batch, work.input), states, normal(steps, batch, work.hidden),
                    [normal(batch, work.hidden) for _ in states], parameters,
                    rng.integers(0, steps + 1, batch).astype(np.int32) if traversal.lengths else None,
                    (rng.random((steps, batch)) < 0.4).astype(np.uint8) if traversal.resets else None)

    def __call__(self, call: Call, threads: int = 2, offset: int = 1) -> dict[str, np.ndarray]:
        """Everything that it makes; fails where anything outside of the arrays was written. Workspaces are NaN before
        each of the two calls."""
        steps, batch, _ = call.x.shape
        work, states = self.task.workload, list(self.cell.states)
        shapes = {"x": (steps, batch, work.input), "dx": (steps, batch, work.input), "y": (steps, batch, work.hidden),
                  "dy": (steps, batch, work.hidden), "state_kept": (steps, batch, work.hidden),
                  "value_kept": (steps, batch, work.hidden), "lengths": (batch,),
                  "resets": (steps, batch)}
        arrays: dict[str, Any] = {}
        for b in self.program.buffers:
            if b.tensor in ("lengths", "resets"):
                arrays[b.name] = Whole(getattr(call, b.tensor))
                continue
            if b.packing is not None:
                values = pack(b.packing, call.parameters)
                array = Array(values.shape)
                array.view[...] = values
            elif b.role == "workspace":
                array = Array((b.extent.at(steps),))
            elif b.tensor == "gradient":
                array = Array(call.parameters[b.state].shape, offset)
                array.view[...] = 0
            else:
                array = Array(shapes.get(b.tensor, (batch, work.hidden)), offset)
            arrays[b.name] = array
        for name in ("x", "dy"):
            arrays[name].view[...] = getattr(call, name)
        for i, name in enumerate(states):
            arrays[f"{name}_in"].view[...] = call.states[i]
            arrays[f"d{name}_out"].view[...] = call.dstates[i]
        for entry in ("forward", "backward"):
            for b in self.program.buffers:
                if b.role == "workspace":
                    arrays[b.name].view[...] = np.nan
            pointers = [arrays[n].view.ctypes.data for n in self.program.entries[entry].takes]
            getattr(self.module, entry)(steps, batch, 0, threads, *pointers)
        touched = [name for name, a in arrays.items() if not a.untouched]
        assert not touched, f"written outside {touched}"
        names = ["y", "dx", *(f"{n}_out" for n in states), *(f"d{n}_in" for n in states),
                 *(f"gradient_{n}" for n in call.parameters)]
        return {n: arrays[n].view.copy() for n in names}


class Whole:
    """An array without guards; the code reads it."""

    untouched = True

    def __init__(self, view: np.ndarray) -> None:
        self.view = view


def reference(name: str, call: Call, reverse: bool) -> dict[str, np.ndarray]:
    """The same in float64, by a tape; masks as the runtime describes them."""
    cell, step = cell_of(name), formula(name)
    steps, batch, _ = call.x.shape
    x, parameters = Traced(call.x.astype(np.float64)), {n: Traced(p.astype(np.float64))
                                                        for n, p in call.parameters.items()}
    first = [Traced(s.astype(np.float64)) for s in call.states]
    limit = np.full(batch, steps) if call.lengths is None else call.lengths
    states, y, output = list(first), [None] * steps, list(cell.states).index(cell.output_state())
    for t in reversed(range(steps)) if reverse else range(steps):
        starts = t + 1 if reverse else t
        fresh = np.zeros(batch, bool)
        if call.resets is not None and starts < steps:
            fresh = (call.resets[starts] != 0) & (starts < limit)
        live = (t < limit).astype(np.float64)[:, None]
        before = [s * (1.0 - fresh[:, None]) for s in states]
        after = step(x[t], before, parameters)
        states = [a * live + s * (1.0 - live) for a, s in zip(after, states, strict=True)]
        y[t] = after[output] * live
    backward([*zip(y, call.dy.astype(np.float64), strict=True),
              *zip(states, [d.astype(np.float64) for d in call.dstates], strict=True)])
    found = {"y": np.stack([v.value for v in y]), "dx": x.gradient}
    found |= {f"{n}_out": s.value for n, s in zip(cell.states, states, strict=True)}
    found |= {f"d{n}_in": s.gradient for n, s in zip(cell.states, first, strict=True)}
    return found | {f"gradient_{n}": p.gradient for n, p in parameters.items()}


def compare(layer: Layer, call: Call, **how: Any) -> dict[str, np.ndarray]:
    found, wanted = layer(call, **how), reference(layer.name, call, layer.traversal.reverse)
    for name, value in wanted.items():
        error = np.linalg.norm(found[name] - value) / max(np.linalg.norm(value), 1e-6)
        assert error < LIMIT, f"{name}: {error}"
    return found


@pytest.mark.parametrize(("name", "keep"), [*((name, "gates") for name in ALL),
                                            *((name, "states") for name in (*BUILTIN, "lstm(layer_norm)", "chain"))])
def test_gradients_of_every_cell(name, keep, tmp_path, monkeypatch):
    """In chunks of two steps, with rows that end, and sequences that begin anew; every other cell in reverse."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 6)
    traversal = Traversal(ALL.index(name) % 2 == 1, lengths=True, resets=True)
    layer = Layer(tmp_path, name, width(name), H, 3, 5, traversal, keep)
    compare(layer, layer.arguments(5, 3))


@pytest.mark.parametrize("reverse", (False, True), ids=("forward", "reverse"))
@pytest.mark.parametrize("name", ("lstm(peepholes)", "gru(layer_norm)", "bias"))
def test_both_ways(name, reverse, tmp_path, monkeypatch):
    """Also a cell whose adjoint is not rotated where sequences begin anew, since a parameter is added to the state."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 6)
    if name == "bias":
        name = next(n for n in ALL if adjoint_of(n).rotated and adjoint_of(n).finish.sums)
    layer = Layer(tmp_path, name, width(name), H, 3, 5, Traversal(reverse, resets=True))
    compare(layer, layer.arguments(5, 3))
    layer = Layer(tmp_path, name, width(name), H, 3, 5, Traversal(reverse))
    compare(layer, layer.arguments(5, 3))


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (5, 7, 2, 3), (16, 48, 5, 9), (33, 101, 3, 6), (70, 20, 17, 40)],
                         ids=str)
@pytest.mark.parametrize("cell", ("lstm", "gru", "rnn_tanh"))
def test_tails(cell, size, tmp_path):
    input, hidden, batch, steps = size
    layer = Layer(tmp_path, cell, input, hidden, batch, steps)
    call = layer.arguments(steps, batch)
    found, wanted = layer(call), by_formula(cell, call)
    for name, value in wanted.items():
        error = np.linalg.norm(found[name] - value) / max(np.linalg.norm(value), 1e-6)
        assert error < LIMIT, f"{name}: {error}"


def by_formula(cell: str, call: Call) -> dict[str, np.ndarray]:
    """Gradients by :func:`reference_gradients`, which takes any size."""
    names = {n: cell_of(cell).parameter_name(n) for n in call.parameters}
    weights = {names[n]: p.reshape(-1, *p.shape[2:]) for n, p in call.parameters.items()}
    dx, dweights, dstates = reference_gradients(cell, call.x, weights, call.states, dy=call.dy, dstate=call.dstates)
    return {"dx": dx, **{f"gradient_{n}": dweights[names[n]].reshape(call.parameters[n].shape) for n in names},
            **{f"d{n}_in": d for n, d in zip(cell_of(cell).states, dstates, strict=True)}}


def test_other_lengths_smaller_batches_and_bits(tmp_path, monkeypatch):
    """Bits do not depend on the number of threads; chunks end anywhere."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 20)
    layer = Layer(tmp_path, "lstm", 24, 40, 5, 20)
    for steps, batch in ((1, 1), (4, 5), (5, 3), (13, 4)):
        call = layer.arguments(steps, batch, seed=steps)
        found = {threads: layer(call, threads=threads) for threads in (1, 2, 3)}
        for name, value in by_formula("lstm", call).items():
            assert np.linalg.norm(found[1][name] - value) < LIMIT * np.linalg.norm(value), name
        for name, value in found[1].items():
            assert all(np.array_equal(value, found[t][name]) for t in (2, 3)), name
