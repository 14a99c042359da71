"""The tuner of adjoints: what their recurrences are checked against, how a module of one is measured, and searches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import step_cells
from cuda_on_cpu import DTYPES, Emulated
from msgspec import structs
from test_persistent_emulated import SMALL

from ecornn.analysis import backpropagation
from ecornn.cells import get
from ecornn.errors import CellError, ScheduleError
from ecornn.program import RUN
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.task import make_manifest, make_task
from ecornn.tune import adjoint_oracle, measuring
from ecornn.tune.measuring import Measure, measure
from ecornn.tune.tolerance import tolerance
from ecornn.workload import Workload


@dataclass
class Device:
    """The library of a module: device memory that is the host's, and kernels in the emulation."""

    emulated: Emulated
    runs: int = 0

    def __post_init__(self) -> None:
        self.memory: dict[int, Any] = {}

    def alloc(self, device: int, nbytes: int) -> int:
        raw = np.full(nbytes + 256, 0xFF, np.uint8)
        pointer = raw.ctypes.data + -raw.ctypes.data % 256
        self.memory[pointer] = raw, nbytes
        return pointer

    def free(self, device: int, pointer: int) -> None:
        del self.memory[pointer]

    def copy(self, device: int, to: int, source: int, nbytes: int, queue: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def synchronize(self, device: int, queue: int) -> None:
        pass

    def run(self, steps: int, batch: int, device: int, queue: int, *pointers: int) -> None:
        self.runs += 1
        program, given = self.emulated.program, {}
        takes = program.entries[RUN].takes
        assert len(takes) == len(pointers) and all(pointers)
        for buffer, pointer in zip((b for n in takes for b in program.buffers if b.name == n), pointers, strict=True):
            first = max(p for p in self.memory if p <= pointer)
            room = first + self.memory[first][1] - pointer
            assert room >= buffer.nbytes(steps), buffer.name
            raw = (ctypes.c_char * room).from_address(pointer)
            given[buffer.name] = np.frombuffer(raw, np.uint8)[:room // buffer.itemsize * buffer.itemsize].view(
                DTYPES[buffer.dtype])
        self.emulated.carry_out(given, steps, batch)


def module_of(cell: Any, task: Task, schedule: str, change: dict[str, Any], folder: Path) -> SimpleNamespace:
    """What ``load`` gives of a module, in the emulation."""
    found = all_schedules()[schedule]
    config = {**found.default(task), **change}
    assert found.check(task, config) is None
    program = found.program(task, config)
    manifest = make_manifest(cell, task, found, config, program, "test")
    return SimpleNamespace(manifest=manifest, library=Device(Emulated(program, folder)))


@pytest.mark.parametrize(("name", "sizes", "dtype", "schedule", "change"), [
    ("lstm", (3, 40), "bfloat16", "persistent", {"hoisted": "same"}),
    ("gru", (5, 24), "float32", "layout_transform", {}),
    ("indrnn", (3, 7), "float32", "elementwise", {}),
    ("pair", (2, 24), "float16", "persistent", {"units": 8, "hoisted": "float32"}),
], ids=str)
def test_a_module_of_a_recurrence_is_checked_and_timed(name, sizes, dtype, schedule, change, tmp_path, monkeypatch):
    """As the process with the GPU does it: within the tolerance, and beyond it where a weight or an output is off."""
    batch, hidden = sizes
    cell = step_cells.CELLS.get(name) or get(name)
    work = Workload(cell.identity(), hidden, hidden, batch, 5, dtype).adjoint
    module = module_of(cell, make_task(cell, work, SMALL), schedule, change, tmp_path)
    monkeypatch.setattr("ecornn.runtime.loader.load", lambda path: module)
    monkeypatch.setattr("ecornn.tune.arrays.torch_sees_gpu", lambda: False)
    monkeypatch.setattr("ecornn.runtime.loader.check_host", lambda device, number: None)
    monkeypatch.setattr(measuring, "race", lambda runs, bound, fewest: [[one.clock(one.run)] for one in runs])
    path = tmp_path / "answers.npz"
    adjoint_oracle.write(path, cell, work, seed=1)
    request = Measure(("module.so",), str(path), tolerance(work), work.seq, 0)
    (one,) = measure(request)
    assert 0 < one.check <= tolerance(work) and one.times[0] > 0
    assert module.library.runs == 3  # two are checked, one is timed

    kept = dict(np.load(path))
    packed = {source for b in module.manifest.buffers if b.packing for source, _ in b.packing.sources}
    weight = next(f"w:{p.name}" for p in module.manifest.parameters if p.key in packed)
    for wrong in ("y", "last_0", weight):
        other = tmp_path / f"{wrong[2:]}.npz"
        np.savez(other, **{n: 1.1 * v + 0.1 if n == wrong else v for n, v in kept.items()})
        with pytest.raises(ScheduleError, match="wrong output"):
            measure(structs.replace(request, answers=str(other)))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_relu", "lstm(layer_norm)", "lstm(peepholes,clip=0.75)", "slstm",
                                  "indrnn", "blend"])
def test_answers_are_proven_by_somebody_who_knows_nothing_of_the_analysis(name, monkeypatch):
    """An error of a derivative, of a sum over steps or of the direction is seen, whatever the cell."""
    cell = step_cells.CELLS.get(name) or get(name)
    work = Workload(cell.identity(), 12, 12, 3, 9, "float16").adjoint
    x, y, first, last, flat = adjoint_oracle.answers(cell, work, np.random.default_rng(0))
    graph = make_task(cell, work, SMALL).graph
    assert x.shape == (8, 3, len(graph.hoisted_outputs), 12) and y.shape == (8, 3, len(graph.outputs), 12)
    assert len(first) == len(last) == len(graph.states) and {*flat} == {
        cell.parameter_name(n) for n in cell.parameters(12, 12)}

    def one_off(*arguments: Any) -> Any:
        found = backpropagation.carry_out(*arguments)
        weight = next(iter(found.parameters))
        return replace(found, parameters=found.parameters | {weight: found.parameters[weight] * 1.01})

    monkeypatch.setattr(adjoint_oracle, "carry_out", one_off)
    with pytest.raises(CellError, match=f"gradients that were derived for {name.partition('(')[0]}.* are wrong: of"):
        adjoint_oracle.answers(cell, work, np.random.default_rng(0))
