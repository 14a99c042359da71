"""Emulated programs against float64: what tests of several schedules share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import step_cells
from cuda_on_cpu import Emulated, inputs
from msgspec.structs import replace

from ecornn.analysis import analyse
from ecornn.cells import BUILTIN, Cell
from ecornn.device import KNOWN, Device
from ecornn.numpy_reference import reference
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.workload import Workload

ALL_CELLS = BUILTIN | step_cells.CELLS
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # relative norm of the error of y
TINY = replace(KNOWN["sm_90a"], cores=3)  # few blocks to emulate

# (T, B, I, H): the smallest of everything; odd rows; one more than a tile; more rows than a tile; whole tiles
SHAPES = [(1, 1, 1, 1), (3, 2, 5, 7), (5, 20, 33, 65), (4, 33, 31, 129), (7, 3, 64, 128)]


def task_of(cell: str, sizes: tuple[int, int, int, int], dtype: str, device: Device = TINY) -> Task:
    T, B, I, H = sizes
    found: Cell = ALL_CELLS[cell]
    if cell in step_cells.SQUARE:
        I = H
    return Task(Workload(cell, H, I, B, T, dtype), analyse(found, I, H), device)


def relative(value: np.ndarray, expected: Any) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30))


def check_numbers(folder: Path, schedule: Schedule, task: Task, config: Config, batch: int | None = None,
                  lazy: bool = True) -> None:
    """Runs the program in the emulation and compares it with float64; ``batch`` is the call's B."""
    w, graph = task.workload, task.graph
    assert schedule.check(task, config) is None
    sizes = (w.seq, batch or w.batch, w.input, w.hidden)
    x, states, parameters = inputs(w.cell, sizes, w.dtype, graph.parameters, tuple(graph.states))
    y, after = Emulated(schedule.program(task, config), folder, lazy=lazy).run(x, states, parameters)

    def exact(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: value.astype(np.float64) for name, value in tensors.items()}

    if w.cell in BUILTIN:
        weights = {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in exact(parameters).items()}
        want, last = reference(w.cell, x.astype(np.float64), weights, list(exact(states).values()))
        wanted = dict(zip(graph.states, last, strict=True))
    else:
        want, found = step_cells.run(step_cells.CELLS[w.cell], x.astype(np.float64), exact(states), exact(parameters))
        wanted = dict(found)
    assert relative(y, want) <= LIMITS[w.dtype]
    for name, value in wanted.items():
        assert relative(after[name], value) <= 2 * LIMITS[w.dtype], name
