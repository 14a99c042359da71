"""CPU layers that train, some in one module, called with guarded NumPy arrays; and their gradients by a tape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cpu_sample import Array
from limits import relative
from msgspec import structs
from numpy_packing import pack
from tape import Call, train
from test_adjoint import cell_of, formula

from ecornn.build.module import build_module
from ecornn.cells import Cell
from ecornn.host_cpu import detect
from ecornn.program import BACKWARD, FORWARD, Buffer, Entry, Parallel, Program
from ecornn.schedules.cpu import CPUSequence
from ecornn.task import make_manifest, make_task
from ecornn.workload import ALONE, Traversal, Workload

# relative, of gradients: of float32, and of float64, which is as near to the tape as sums in another order may be
LIMITS = {"float32": 2e-5, "float64": 1e-13}


@dataclass
class Layer:
    """A layer with the entries ``forward`` and ``backward``, once :func:`build` has built it."""

    name: str | Cell  # one that ``test_adjoint`` knows by name, or that has a formula of its own
    input: int
    hidden: int
    batch: int
    seq: int
    traversal: Traversal = ALONE
    keep: str = "gates"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.cell = cell_of(self.name)
        work = Workload(self.cell.identity(), self.hidden, self.input, self.batch, self.seq, self.dtype)
        self.task = make_task(self.cell, work, detect(), structs.replace(self.traversal, keep=self.keep))
        self.schedule = CPUSequence()
        assert self.schedule.serves(self.task) is None
        self.config = self.schedule.default(self.task)
        self.program = self.schedule.program(self.task, self.schedule.plan(self.task, self.config))
        self.module: Any = None
        self.prefix = ""

    def arguments(self, steps: int, batch: int, seed: int = 0) -> Call:
        rng, traversal = np.random.default_rng(seed), self.traversal

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(self.dtype)

        # first states that no cell divides by, or takes the logarithm of, too near to zero
        states = [rng.uniform(0.1, 1, (batch, self.hidden)).astype(self.dtype) for _ in self.cell.states]
        parameters = {n: (rng.uniform(-1, 1, shape) / self.hidden ** 0.5).astype(self.dtype)
                      for n, shape in self.cell.parameters(self.input, self.hidden).items()}
        return Call(normal(steps, batch, self.input), states, normal(steps, batch, self.hidden),
                    [normal(batch, self.hidden) for _ in states], parameters,
                    rng.integers(0, steps + 1, batch).astype(np.int32) if traversal.lengths else None,
                    (rng.random((steps, batch)) < 0.4).astype(np.uint8) if traversal.resets else None)

    def __call__(self, call: Call, threads: int = 2, offset: int = 1) -> dict[str, np.ndarray]:
        """Everything that it makes; fails where anything outside of the arrays was written. Workspaces are NaN before
        each of the two calls."""
        steps, batch, _ = call.x.shape
        states, rows = list(self.cell.states), (steps, batch, self.hidden)
        shapes = {"x": (steps, batch, self.input), "dx": (steps, batch, self.input), "y": call.dy.shape,
                  "dy": call.dy.shape, "state_kept": rows, "value_kept": rows}
        taken = {n for entry in (FORWARD, BACKWARD) for n in self.program.entries[entry].takes}
        arrays: dict[str, Any] = {}
        for b in self.program.buffers:
            if b.name not in taken:
                continue
            if b.tensor in ("lengths", "resets"):
                arrays[b.name] = Whole(getattr(call, b.tensor))
                continue
            if b.packing is not None:
                values = pack(b.packing, call.parameters)
                array = Array(values.shape, dtype=b.dtype)
                array.view[...] = values
            elif b.role == "workspace":
                array = Array((b.extent.at(steps),), dtype=b.dtype)
            elif b.tensor == "gradient":
                array = Array(call.parameters[b.state].shape, offset, b.dtype)
                array.view[...] = 0
            else:
                array = Array(shapes.get(b.tensor, (batch, self.hidden)), offset, b.dtype)
            arrays[b.name] = array
        for name in ("x", "dy"):
            arrays[name].view[...] = getattr(call, name)
        for i, name in enumerate(states):
            arrays[f"{name}_in"].view[...] = call.states[i]
            arrays[f"d{name}_out"].view[...] = call.dstates[i]
        for entry in (FORWARD, BACKWARD):
            for b in self.program.buffers:
                if b.role == "workspace" and b.name in taken:
                    arrays[b.name].view[...] = np.nan
            pointers = [arrays[n].view.ctypes.data for n in self.program.entries[entry].takes]
            getattr(self.module, self.prefix + entry)(steps, batch, 0, threads, *pointers)
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


def build(folder: Path, *layers: Layer) -> None:
    """Has layers built, in one module: the host's code, which takes a second, is the same for all."""
    import tvm_ffi

    functions: dict[str, Any] = {}
    buffers: list[Buffer] = []
    entries: dict[str, Entry] = {}
    for number, layer in enumerate(layers):
        layer.prefix, program = f"of{number}_", layer.program

        def own(name: str, prefix: str = layer.prefix) -> str:
            return prefix + name

        buffers += [structs.replace(b, name=own(b.name)) for b in program.buffers]
        for entry in (FORWARD, BACKWARD):
            calls = []
            for call in program.entries[entry].calls:
                assert isinstance(call, Parallel)
                function = functions[own(call.function)] = program.functions[call.function]
                names = {str(p.name): own(call.names.get(str(p.name), str(p.name))) for p in function.params}
                calls.append(replace(call, function=own(call.function), names=names))
            entries[own(entry)] = Entry(tuple(calls), tuple(map(own, program.entries[entry].takes)))
    whole, first = Program(functions, tuple(buffers), entries), layers[0]
    manifest = make_manifest(first.cell, first.task, first.schedule, first.config, first.program, "test")
    file = folder / f"layers{len(list(folder.iterdir()))}.so"  # the loader takes one name for one library
    build_module(whole, manifest, file)
    module = tvm_ffi.load_module(str(file))
    for layer in layers:
        layer.module = module


def reference(name: str | Cell, call: Call, reverse: bool) -> dict[str, np.ndarray]:
    """The same in float64, by a tape."""
    return train(cell_of(name), formula(name), call, reverse)


def compare(layer: Layer, call: Call, **how: Any) -> dict[str, np.ndarray]:
    """What the layer makes, once it has been held against the tape."""
    found, wanted = layer(call, **how), reference(layer.name, call, layer.traversal.reverse)
    for name, value in wanted.items():
        assert relative(found[name], value, 1e-6) < LIMITS[layer.dtype], f"{name} of {layer}"
    return found
