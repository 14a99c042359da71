"""Builds a CPU module and calls it with guarded NumPy arrays, without the runtime."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec.structs
import numpy as np
from numpy_packing import pack

from ecornn.build.module import build_module
from ecornn.cells import get
from ecornn.host_cpu import detect
from ecornn.program import Program
from ecornn.schedules.cpu import CPUSequence
from ecornn.schedules.cpu.tiling import Tile, registers_of, registers_used
from ecornn.task import make_manifest, make_task
from ecornn.workload import Workload

GUARD = 96  # elements on either side of an array that nobody may touch


def rows_that_fit(most: int, columns: int, weights: str = "float32", pairs: int = 0) -> int:
    """Rows of a tile of ``columns`` vectors: as many as registers hold, at most ``most``, at least one."""
    return max((rows for rows in range(1, most + 1)
                if registers_used(Tile(rows, 1, 1, pairs), columns, weights) <= registers_of(detect())), default=1)


ALL_GATES = {"gates": 0, "project_gates": 0}  # as products of pairs have them


class Array:
    def __init__(self, shape: tuple[int, ...], offset: int = 0, dtype: str = "float32") -> None:
        size = int(np.prod(shape))
        self.memory = np.full(size + 3 * GUARD + 64, np.nan, dtype)
        start = GUARD + (-(self.memory.ctypes.data // self.memory.itemsize + GUARD)) % 64 + offset
        self.view = self.memory[start:start + size].reshape(shape)
        self.outside = np.ones(self.memory.shape, bool)
        self.outside[start:start + size] = False

    @property
    def untouched(self) -> bool:
        return bool(np.isnan(self.memory[self.outside]).all())


def carry_out(module: Any, program: Program, entries: tuple[str, ...], given: Mapping[str, Any],
              made: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Any], threads: int, offset: int,
              in_place: Mapping[str, str] = MappingProxyType({}), prefix: str = "") -> dict[str, np.ndarray]:
    """Calls entries on arrays by the names of buffers; fails where anything outside them was written."""
    steps, batch, _ = given["x"].shape
    taken = {n for entry in entries for n in program.entries[entry].takes}
    arrays: dict[str, Array] = {}
    views: dict[str, np.ndarray] = {}
    for b in (b for b in program.buffers if b.name in taken):
        content = pack(b.packing, parameters) if b.role == "packed" else given.get(b.name)
        if b.tensor in ("lengths", "resets"):  # the code reads them, and no guard can be NaN
            views[b.name] = content
            continue
        if b.name in in_place:
            views[b.name] = views[in_place[b.name]]
            continue
        assert b.role != "packed" or content.size == b.extent.at(steps)
        own = b.role in ("packed", "workspace")
        shape = content.shape if content is not None else made.get(b.name) or (b.extent.at(steps),)
        arrays[b.name] = Array(shape, 0 if own else offset, b.dtype)
        views[b.name] = arrays[b.name].view
        if content is not None:
            views[b.name][...] = content
    for entry in entries:
        for b in program.buffers:
            if b.role == "workspace" and b.name in taken:  # undefined contents: NaN
                views[b.name][...] = np.nan
        pointers = [views[n].ctypes.data for n in program.entries[entry].takes]
        getattr(module, prefix + entry)(steps, batch, 0, threads, *pointers)
    touched = [name for name, a in arrays.items() if not a.untouched]
    assert not touched, f"written outside {touched}"
    return views


class Sample:
    """A built layer. ``config`` changes knobs of the default; ``features`` replaces the CPU's."""

    def __init__(self, folder: Path, cell: Any, input: int, hidden: int, batch: int, seq: int,
                 features: tuple[str, ...] | None = None, **config: int) -> None:
        import tvm_ffi

        device = detect() if features is None else msgspec.structs.replace(detect(), features=features)
        self.cell = get(cell)
        self.task = make_task(self.cell, Workload(self.cell.identity(), hidden, input, batch, seq), device)
        schedule, paired = CPUSequence(), config.get("pairs") or config.get("project_pairs")
        self.config = {**schedule.default(self.task), **(ALL_GATES if paired else {}), **config}
        assert schedule.check(self.task, self.config) is None
        self.program = schedule.program(self.task, schedule.plan(self.task, self.config))
        manifest = make_manifest(self.cell, self.task, schedule, self.config, self.program, "test")
        self.file = folder / f"{self.cell.name}.so"
        self.generated = build_module(self.program, manifest, self.file)
        self.module: Any = tvm_ffi.load_module(str(self.file))
        generator = np.random.default_rng(7)
        self.parameters = {
            name: generator.uniform(-1, 1, shape).astype(np.float32) / np.float32(hidden ** 0.5)
            for name, shape in self.cell.parameters(input, hidden).items()}

    def inputs(self, steps: int, batch: int, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
        generator, work = np.random.default_rng(seed), self.task.workload
        states = [generator.standard_normal((batch, work.hidden), np.float32) for _ in self.cell.states]
        return generator.standard_normal((steps, batch, work.input), np.float32), states

    def __call__(self, x: np.ndarray, states: list[np.ndarray], threads: int = 2, offset: int = 1,
                 in_place: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
        names = self.cell.states
        given = {"x": x, **{f"{n}_in": s for n, s in zip(names, states, strict=True)}}
        made = {"y": (*x.shape[:2], self.task.workload.hidden), **{f"{n}_out": states[0].shape for n in names}}
        found = carry_out(self.module, self.program, ("run",), given, made, self.parameters, threads, offset,
                          in_place={f"{n}_out": f"{n}_in" for n in names} if in_place else {})
        return found["y"], [found[f"{n}_out"] for n in names]
