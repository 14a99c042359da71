"""Emulated programs against float64: what tests of several schedules share; training steps, both entries."""

from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from cuda_on_cpu import GUARD, Emulated, inputs
from exact import ALL_CELLS, Forward, Wanted, expected, relative, unmarked
from msgspec.structs import replace

from ecornn import program as programs
from ecornn.analysis import analyse
from ecornn.cells import Cell, get
from ecornn.device import Device
from ecornn.program import EARLIER, FORWARD, LATER, PIECES_APART, RUN, Program, launches
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task, make_program
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, SERIAL, Overlap, Traversal, Workload

TINY = replace(KNOWN["sm_90a"], cores=3)  # few blocks to emulate

# (T, B, I, H): the smallest of everything; odd rows; one more than a tile; more rows than a tile; whole tiles
SHAPES = [(1, 1, 1, 1), (3, 2, 5, 7), (5, 20, 33, 65), (4, 33, 31, 129), (7, 3, 64, 128)]


def known_by_name(cells: Mapping[str, Cell]) -> Any:
    """A fixture of a file of tests: helpers find these cells by their names, as those of step_cells.py."""
    @pytest.fixture(autouse=True)
    def known(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, cell in cells.items():
            monkeypatch.setitem(ALL_CELLS, name, cell)
            if hasattr(cell, "formula"):  # others are interpreted
                monkeypatch.setitem(step_cells.CELLS, name, cell)
    return known


def task_of(cell: str, sizes: tuple[int, int, int, int], dtype: str, device: Device = TINY,
            traversal: Traversal = ALONE) -> Task:
    T, B, I, H = sizes
    found: Cell = ALL_CELLS.get(cell) or get(cell)
    if cell in step_cells.SQUARE:
        I = H
    kind, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
    kind, _, weights = kind.partition(", ")
    return Task(Workload(cell, H, I, B, T, kind, weights or None, precision), analyse(found, I, H), device, traversal)


def rounded_weights(task: Task, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In float64; of weights in 8 bits each row of a recurrent matrix as multiples of its largest magnitude / 127."""
    exact = {name: value.astype(np.float64) for name, value in parameters.items()}
    recurrent = {term.source[0] for phase in task.graph.product_phases for p in phase.products for term in p.terms}
    for name in recurrent if task.workload.weights == "int8" else ():
        exact[name] = in_integers(exact[name])
    return exact


def in_integers(values: np.ndarray) -> np.ndarray:
    step = np.abs(values).max(-1, keepdims=True) / 127
    return np.round(values / np.where(step, step, 1)) * step


def check_numbers(folder: Path, schedule: Schedule, task: Task, config: Config, batch: int | None = None,
                  lazy: bool = True, masks: dict[str, np.ndarray] | None = None) -> None:
    """Runs the program in the emulation and compares it with float64; ``batch`` is the call's B. Of a task that trains
    it is ``forward`` that runs, and what it keeps is compared, too.

    Lengths, resets and sequences, where the task has them, are drawn unless ``masks`` has them; x that is of no
    sequence is NaN."""
    w, graph, traversal = task.workload, task.graph, task.traversal
    assert schedule.check(task, config) is None
    sizes = (w.seq, batch or w.batch, w.input, w.hidden)
    x, states, parameters = inputs(w.cell, sizes, w.dtype, graph.parameters, tuple(graph.states))
    program = only(schedule.program(task, schedule.plan(task, config)), RUN if traversal.keep is None else FORWARD)
    masks = masks_of(traversal, *sizes[:2], program.together) if masks is None else masks
    for b, n in enumerate(masks.get("lengths", ())):
        x[n:, b] = np.nan
    if traversal.sequences:
        x[masks["sequences"] < 0] = np.nan
        count = unmarked(masks["sequences"]).max() + 1
        more = np.random.default_rng(1).uniform(-1, 1, (len(states), count, w.hidden))
        states = {name: value.astype(x.dtype) for name, value in zip(states, more, strict=True)}
    emulated = Emulated(program, folder, lazy=lazy)
    rows, after = emulated.run(x, states, parameters, masks, traversal.directions * graph.written, *program.entries)
    def exact(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: value.astype(np.float64) for name, value in tensors.items()}
    weights = rounded_weights(task, parameters)
    def reference(forward: Forward) -> Any:
        return expected(w.cell, traversal, x.astype(np.float64), exact(states), weights, masks, forward)
    wanted, values = Wanted(w.arithmetic, reference), graph.written * w.hidden
    own = slice(traversal.y_offset(values), traversal.y_offset(values) + values)
    others = np.ascontiguousarray(np.delete(rows, own, axis=2))
    assert (others.view(np.uint8) == 0xFF).all(), "y of the other direction was written"
    y = rows[..., own]
    wanted.check(y, after)
    for b, n in enumerate(masks.get("lengths", ())):
        assert not y[n:, b].astype(np.float32).any()
    if traversal.sequences:
        assert not y[masks["sequences"] < 0].astype(np.float32).any()
    for state in [b.state for b in program.buffers if b.tensor == "state_kept"]:
        whole, size = emulated.kept[f"{state}_kept"], w.seq * len(x[0]) * w.hidden
        found, rest = whole[:size].reshape(w.seq, -1, w.hidden), whole[size:-GUARD // w.itemsize]
        assert whole.dtype == y.dtype and (rest.view(np.uint8) == 0xFF).all(), "rows that the call has not were written"
        wanted = Wanted(w.arithmetic, partial(lambda name, forward: reference(after_each_step(forward, name)), state))
        wanted.check(found)
        assert not found[(wanted.y == 0).all(axis=2)].astype(np.float32).any()


def training_program(schedule: Schedule, task: Task, overlap: Overlap = SERIAL,
                     behind: Schedule | None = None) -> Program:
    inner = adjoint_task(task)
    behind = behind or serving_or_raise(inner)[0]
    return make_program(schedule, task, schedule.default(task), (behind, behind.default(inner)), overlap)


def only(program: Program, entry: str) -> Program:
    found = program.entries[entry]
    return changed(program, functions={c.function: program.functions[c.function] for c in launches(found.calls)},
                   buffers=tuple(b for b in program.buffers if b.name in found.takes), entries={entry: found})


def after_each_step(forward: Forward, state: str) -> Forward:
    def run(cell: str, x: Any, states: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ends = [forward(cell, x[:t], states, parameters)[1] for t in range(1, len(x) + 1)]
        return np.stack([end[state] for end in ends]), ends[-1]
    return run


def masks_of(traversal: Traversal, steps: int, batch: int, together: int = 1) -> dict[str, np.ndarray]:
    """Lengths up to ``steps``, resets of a third of all steps, sequences with gaps, near each other if ``together``."""
    rng = np.random.default_rng(steps * 100 + batch)
    if traversal.sequences:
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
    masks = {"lengths": rng.permutation(np.arange(batch) * 5 % (steps + 1))} if traversal.lengths else {}
    return masks | ({"resets": rng.random((steps, batch)) < 0.35} if traversal.resets else {})


def _numbered(table: np.ndarray) -> np.ndarray:
    if table.max() < 0:
        table[0, 0] = 0
    return np.searchsorted(np.unique(table[table >= 0]), table) - (table < 0)


def train(emulated: Emulated, given: Mapping[str, Any], made: Mapping[str, int], parameters: Mapping[str, Any],
          steps: int, batch: int, add: bool = False, apart: bool = False) -> dict[str, Any]:
    """The results of both entries for ``given`` and parameters in te shape: float64, by the names of buffers.

    What is written holds NaN before, and has a guard behind it; workspaces hold nothing between the entries.
    ``made``: elements of those that have no extent; ``add``: gradients are added to ones, which results lack again;
    ``apart``: what is kept stays as it is; else it is written over where the program allows that."""
    program, kept = emulated.program, dict[str, Any]()
    memory = emulated.memory(steps, parameters, lambda b: np.full(parameters[b.state].size, 1.0 if add else np.nan)
                             if b.tensor == "gradient" else given.get(b.name, made.get(b.name)))
    if not apart:
        if program.dx_in and memory["dx"].nbytes == memory[program.dx_in].nbytes:
            memory["dx"] = memory[program.dx_in]
        memory |= {own: memory[place] for own, place in program.in_place.items()}
    for entry in (FORWARD, programs.BACKWARD):
        kept = {b.name: memory[b.name].copy() for b in program.buffers if b.role == programs.KEPT}
        for b in program.buffers:
            if b.role == programs.WORKSPACE and (apart or b.name not in program.in_place):
                memory[b.name].view(np.uint8)[:-GUARD] = 0xFF
        emulated.carry_out({n: memory[n] for n in program.entries[entry].takes}, steps, batch, entry, add)
    emulated.check_guards(memory)
    assert not apart or all((memory[n].view(np.uint8) == a.view(np.uint8)).all() for n, a in kept.items())
    return {b.name: memory[b.name][:-GUARD // b.itemsize].astype(np.float64) - (add if b.tensor == "gradient" else 0)
            for b in program.buffers if b.role == programs.MADE}


def train_call(emulated: Emulated, states: Sequence[str], call: Any, **how: bool) -> dict[str, Any]:
    given = {n: v for n in ("x", "dy", "lengths", "resets", "sequences") if (v := getattr(call, n, None)) is not None}
    made = {"y": call.dy.size, "dx": call.x.size}
    for name, first, last in zip(states, call.states, call.dstates, strict=True):
        given |= {f"{name}_in": first, f"d{name}_out": last}
        made |= {f"{name}_out": first.size, f"d{name}_in": first.size}
    return train(emulated, given, made, call.parameters, *call.x.shape[:2], **how)


def check(found: Mapping[str, Any], wanted: Mapping[str, Any], limit: float) -> None:
    for name, value in wanted.items():
        assert relative(found[name].reshape(-1), value.reshape(-1), 1e-6) < limit, name
