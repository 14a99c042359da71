"""CPU layers that train, some in one module, called with guarded NumPy arrays; and their gradients by a tape."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cpu_sample import carry_out
from exact import relative
from msgspec import structs
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
        """Everything that it makes; fails where anything outside of the arrays was written."""
        states, rows, shape = self.cell.states, call.dy.shape, call.states[0].shape
        given = {"x": call.x, "dy": call.dy, "lengths": call.lengths, "resets": call.resets,
                 **{f"{n}_in": s for n, s in zip(states, call.states, strict=True)},
                 **{f"d{n}_out": s for n, s in zip(states, call.dstates, strict=True)},
                 **{f"gradient_{n}": np.zeros(p.shape) for n, p in call.parameters.items()}}
        made = {"y": rows, "dx": call.x.shape, **{f"{n}_out": shape for n in states},
                **{f"d{n}_in": shape for n in states}}
        kept = {b.name: (*rows[:2], self.hidden) for b in self.program.buffers
                if b.tensor in ("state_kept", "value_kept")}
        found = carry_out(self.module, self.program, (FORWARD, BACKWARD), given, made | kept, call.parameters, threads,
                          offset, prefix=self.prefix)
        return {n: found[n].copy() for n in (*made, *(n for n in given if n.startswith("gradient_")))}


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
    return train(cell_of(name), formula(name), call, reverse)


def compare(layer: Layer, call: Call, **how: Any) -> dict[str, np.ndarray]:
    found, wanted = layer(call, **how), reference(layer.name, call, layer.traversal.reverse)
    for name, value in wanted.items():
        assert relative(found[name], value, 1e-6) < LIMITS[layer.dtype], f"{name} of {layer}"
    return found
