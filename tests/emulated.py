"""Emulated programs against float64: what tests of several schedules share."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import step_cells
from cuda_on_cpu import Emulated, inputs
from msgspec.structs import replace

from ecornn.analysis import analyse
from ecornn.cells import BUILTIN, Cell, get
from ecornn.device import KNOWN, Device
from ecornn.numpy_reference import STEPS, reference
from ecornn.program import EARLIER, LATER, PIECES_APART
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.tune.interpreter import interpret
from ecornn.workload import ALONE, Place, Workload

ALL_CELLS = BUILTIN | step_cells.CELLS
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "tf32": 2e-3}  # relative norm of the error of y
TINY = replace(KNOWN["sm_90a"], cores=3)  # few blocks to emulate

# (T, B, I, H): the smallest of everything; odd rows; one more than a tile; more rows than a tile; whole tiles
SHAPES = [(1, 1, 1, 1), (3, 2, 5, 7), (5, 20, 33, 65), (4, 33, 31, 129), (7, 3, 64, 128)]


def task_of(cell: str, sizes: tuple[int, int, int, int], dtype: str, device: Device = TINY,
            place: Place = ALONE) -> Task:
    T, B, I, H = sizes
    found: Cell = ALL_CELLS.get(cell) or get(cell)
    if cell in step_cells.SQUARE:
        I = H
    kind, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
    return Task(Workload(cell, H, I, B, T, kind, precision=precision), analyse(found, I, H), device, place)


def relative(value: np.ndarray, expected: Any) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30))


def check_numbers(folder: Path, schedule: Schedule, task: Task, config: Config, batch: int | None = None,
                  lazy: bool = True, masks: dict[str, np.ndarray] | None = None) -> None:
    """Runs the program in the emulation and compares it with float64; ``batch`` is the call's B.

    Lengths, resets and sequences, where the task's place has them, are drawn unless ``masks`` has them; x that is of no
    sequence is NaN.
    """
    w, graph, place = task.workload, task.graph, task.place
    assert schedule.check(task, config) is None
    sizes = (w.seq, batch or w.batch, w.input, w.hidden)
    x, states, parameters = inputs(w.cell, sizes, w.dtype, graph.parameters, tuple(graph.states))
    program = schedule.program(task, config)
    masks = masks_of(place, *sizes[:2], program.together) if masks is None else masks
    for b, n in enumerate(masks.get("lengths", ())):
        x[n:, b] = np.nan
    if place.sequences:
        x[masks["sequences"] < 0] = np.nan
        count = unmarked(masks["sequences"]).max() + 1
        more = np.random.default_rng(1).uniform(-1, 1, (len(states), count, w.hidden))
        states = {name: value.astype(x.dtype) for name, value in zip(states, more, strict=True)}
    emulated = Emulated(program, folder, lazy=lazy)
    rows, after = emulated.run(x, states, parameters, masks, place.directions)

    def exact(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: value.astype(np.float64) for name, value in tensors.items()}

    want, wanted = expected(w.cell, place, x.astype(np.float64), exact(states), exact(parameters), masks)
    own = slice(place.y_offset(w.hidden), place.y_offset(w.hidden) + w.hidden)
    others = np.ascontiguousarray(np.delete(rows, own, axis=2))
    assert (others.view(np.uint8) == 0xFF).all(), "y of the other direction was written"
    y = rows[..., own]
    assert relative(y, want) <= LIMITS[w.arithmetic]
    for b, n in enumerate(masks.get("lengths", ())):
        assert not y[n:, b].astype(np.float32).any()
    if place.sequences:
        assert not y[masks["sequences"] < 0].astype(np.float32).any()
    for name, value in wanted.items():
        assert relative(after[name], value) <= 2 * LIMITS[w.arithmetic], name


def masks_of(place: Place, steps: int, batch: int, together: int = 1) -> dict[str, np.ndarray]:
    """Lengths of 0 up to ``steps``, resets of about a third of all steps, and sequences with gaps between some of them,
    where the place has them. In most groups of ``together`` columns (0: one group) many neighbours share a sequence,
    whose pieces are often as near to each other as they may be."""
    rng = np.random.default_rng(steps * 100 + batch)
    if place.sequences:
        found = []
        for b in range(batch):
            ends = [0, *np.flatnonzero(rng.random(steps) < 0.4), steps]
            found += [(b, *piece) for piece in pairwise(ends) if rng.random() < 0.8]
        table = np.full((steps, batch), -1)
        for number, (b, first, last) in zip(rng.permutation(len(found)), found, strict=True):
            table[first:last, b] = number
        marks, early = np.zeros_like(table), 0
        for c in range(batch - 1 if steps >= PIECES_APART + 2 else 0):
            room, early = steps - early, 0  # of the column: the end of the one before goes on at its beginning
            if (together == 0 or (c + 1) % together) and rng.random() < 0.7:
                late = min(int(rng.integers(1, room + 1)), steps - PIECES_APART - 1)
                early = max(1, steps - PIECES_APART - late - int(rng.integers(2)))
                for piece, mark in ((np.s_[:early, c + 1], EARLIER), (np.s_[steps - late:, c], LATER)):
                    table[piece], marks[piece] = batch * steps + c, mark
        return {"sequences": _numbered(table) | marks}
    masks = {"lengths": rng.permutation(np.arange(batch) * 5 % (steps + 1))} if place.lengths else {}
    return masks | ({"resets": rng.random((steps, batch)) < 0.35} if place.resets else {})


def unmarked(table: np.ndarray) -> np.ndarray:
    """Numbers of sequences alone."""
    return np.where(table < 0, table, table & (LATER - 1))


def _numbered(table: np.ndarray) -> np.ndarray:
    """With numbers from 0 on, and at least one sequence."""
    if table.max() < 0:
        table[0, 0] = 0
    return np.searchsorted(np.unique(table[table >= 0]), table) - (table < 0)


def expected(cell: str, place: Place, x: np.ndarray, states: dict[str, Any], parameters: dict[str, Any],
             masks: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
    """y (T, B, H) and the last states in float64: each row apart, turned round and cut by hand."""
    if place == ALONE:
        return forward(cell, x, states, parameters)
    steps, batch = x.shape[:2]
    y = np.zeros((steps, batch, next(iter(states.values())).shape[1]))
    last = {name: value.copy() for name, value in states.items()}
    table = unmarked(masks["sequences"]) if place.sequences else np.full((1, 1), -1)
    for number in range(table.max() + 1):
        at = np.nonzero(table == number)
        order = slice(None, None, -1 if place.reverse else 1)
        now = {name: value[number:number + 1] for name, value in states.items()}
        rows, now = forward(cell, x[at][order][:, None], now, parameters)
        y[at] = rows[order, 0]
        for name, value in now.items():
            last[name][number] = value[0]
    for b in range(0 if place.sequences else batch):
        n = int(masks["lengths"][b]) if place.lengths else steps
        starts = masks["resets"][:n, b] if place.resets else np.zeros(n, bool)
        if place.reverse:  # a start before step t is one after it, backwards
            starts = np.concatenate([np.zeros(min(n, 1), bool), starts[1:][::-1]])
        order = np.arange(n)[::-1] if place.reverse else np.arange(n)
        now = {name: value[b:b + 1] for name, value in states.items()}
        for piece in np.split(np.arange(n), np.flatnonzero(starts)):
            if len(piece):
                if starts[piece[0]]:
                    now = {name: np.zeros_like(value) for name, value in now.items()}
                y[order[piece], b:b + 1], now = forward(cell, x[order[piece], b:b + 1], now, parameters)
        for name, value in now.items():
            last[name][b] = value[0]
    return y, last


def forward(cell: str, x: np.ndarray, states: dict[str, Any], parameters: dict[str, Any]) -> tuple[np.ndarray, Any]:
    """A sequence from its first step to its last."""
    if cell in step_cells.CELLS:
        return step_cells.run(step_cells.CELLS[cell], x, states, parameters)
    if cell not in STEPS:  # one with options, whose analysed steps tests/test_variants.py compares with formulas
        hidden = next(iter(states.values())).shape[1]
        y, last = interpret(analyse(get(cell), x.shape[2], hidden), x, parameters, list(states.values()))
        return y, dict(zip(states, last, strict=True))
    weights = {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}
    y, last = reference(cell, x, weights, list(states.values()))
    return y, dict(zip(states, last, strict=True))
