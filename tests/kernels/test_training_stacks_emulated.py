"""Training steps of GPU stacks, and of sequences in columns, emulated: layers and directions one after the other, and
directions side by side; each sequence in columns apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Call, reference
from cuda_on_cpu import DTYPES, Emulated
from emulated import TINY, task_of, training_program
from emulated_training import check, train
from exact import unmarked
from test_adjoint import H as UNITS
from test_backward_emulated import LIMITS, in_chunks, large_batches
from test_backward_emulated import Step as LayerStep

from ecornn import Columns, reference_gradients
from ecornn.analysis import analyse
from ecornn.cells import get
from ecornn.compose import compose, parameter_prefix
from ecornn.errors import ScheduleError
from ecornn.program import BACKWARD, FORWARD, Chunks, Concurrent, Program, launches
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.training import with_backward
from ecornn.task import adjoint_task
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import SERIAL, Overlap, Stack, Traversal, Workload

T, B, I, H = 5, 3, 6, 20
SIDES = Overlap("directions", 2)


def program_of(cell: str, stack: Stack, dtype: str, overlap: Overlap, steps: int) -> Program:
    whole, made, schedule = Workload(cell, H, I, B, steps, dtype), {}, Persistent()
    for part in stack.parts(whole):
        task = Task(part.workload, analyse(get(cell), part.workload.input, H), TINY, part.traversal)
        made.setdefault((part.workload, part.traversal), training_program(schedule, task, overlap))
    return compose(stack, whole, [made[p.workload, p.traversal] for p in stack.parts(whole)], overlap)


class Step:
    """A training step on random arguments: what it must give, by :func:`reference_gradients`, and what it gives."""

    def __init__(self, cell: str, stack: Stack, dtype: str, steps: int) -> None:
        rng, self.stack = np.random.default_rng(5), stack

        def drawn(*shape: int, scale: float = 1.0) -> np.ndarray:
            return (rng.uniform(-scale, scale, shape)).astype(DTYPES[dtype]).astype(np.float32)

        self.steps, names, width = steps, get(cell).states, H * stack.directions
        self.parameters, self.weights = dict[str, Any](), dict[str, Any]()
        for part in stack.parts(Workload(cell, H, I, B, steps, dtype)):
            for name, shape in get(cell).parameters(part.workload.input, H).items():
                made = drawn(*shape, scale=H ** -0.5)
                self.parameters[parameter_prefix(stack, part) + name] = made
                self.weights[f"{name}_{part.label}"] = made.reshape(-1, *shape[2:])
        self.given = {"x": drawn(steps, B, I), "dy": drawn(steps, B, width)}
        self.states, self.dstates = ([drawn(stack.count, B, H) for _ in names] for _ in range(2))
        self.by_state = {"state_in": dict(zip(names, self.states, strict=True)),
                         "dstate_out": dict(zip(names, self.dstates, strict=True))}
        self.sizes = {"y": steps * B * width, "dx": steps * B * I, "state_out": B * H, "dstate_in": B * H}

    def run(self, program: Program, folder: Path, add: bool = True) -> dict[str, np.ndarray]:
        """What each buffer that is made holds, see :func:`~emulated_training.train`."""
        given = {b.name: self.given[b.tensor] for b in program.buffers if b.tensor in self.given}
        given |= {b.name: self.by_state[b.tensor][b.state][b.part] for b in program.buffers
                  if b.tensor in self.by_state}
        made = {b.name: self.sizes[b.tensor] for b in program.buffers if b.tensor in self.sizes}
        return train(Emulated(program, folder), given, made, self.parameters, self.steps, B, add)

    def wanted(self, program: Program, weights: dict[str, Any], states: Any) -> dict[str, Any]:
        """By the names of buffers: gradients of weights, and of first states."""
        found = {}
        for b in program.buffers:
            if b.tensor == "gradient":
                prefix, _, name = b.state.rpartition(".")
                found[b.name] = weights[f"{name}_{prefix}"]
            elif b.tensor == "dstate_in":
                found[b.name] = states[list(self.by_state["state_in"]).index(b.state)][b.part]
        return found

    def check(self, cell: str, found: dict[str, np.ndarray], program: Program, limit: float) -> None:
        dx, weights, states = reference_gradients(cell, self.given["x"], self.weights, self.states,
                                                  dy=self.given["dy"], dstate=self.dstates)
        check(found, {"dx": dx, **self.wanted(program, weights, states)}, limit)


@pytest.mark.parametrize(("cell", "layers", "dtype", "overlap"), [
    pytest.param("gru", 2, "float32", SIDES, marks=pytest.mark.exhaustive), ("lstm", 2, "bfloat16", SIDES),
    pytest.param("rnn_tanh", 2, "float32", SERIAL, marks=pytest.mark.exhaustive)], ids=str)
def test_directions(tmp_path: Path, cell: str, layers: int, dtype: str, overlap: Overlap):
    """The launches of both are mixed where they are side by side: what one writes the other must not use."""
    stack = Stack(layers, True, keep="states")
    program = program_of(cell, stack, dtype, overlap, T)
    for entry in (FORWARD, BACKWARD):
        pairs = [c for c in program.entries[entry].calls if isinstance(c, Concurrent) and all(
            any("persistent" in one.function for one in launches(branch)) for branch in c.branches)]
        assert [len(pair.branches) for pair in pairs] == [2] * layers * (overlap == SIDES)
    step = Step(cell, stack, dtype, T)
    step.check(cell, step.run(program, tmp_path), program, LIMITS[dtype])


def test_directions_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Side by side, each in chunks of its own."""
    in_chunks(monkeypatch)
    stack = Stack(1, True, keep="states")
    program = program_of("gru", stack, "float32", SIDES, 20)
    pair = next(c for c in program.entries[BACKWARD].calls if isinstance(c, Concurrent))
    assert [[c.reverse for c in branch if isinstance(c, Chunks)] for branch in pair.branches] == [[True], [False]]
    step = Step("gru", stack, "float32", 20)
    step.check("gru", step.run(program, tmp_path, add=False), program, LIMITS["float32"])


COLUMNS = Traversal(sequences=True)


def apart(name: str, call: Call, reverse: bool) -> dict[str, np.ndarray]:
    """As :func:`reference`, each sequence by itself; zeros where there is none."""
    table, found = unmarked(call.sequences), {}
    for number in range(len(call.states[0])):
        at = np.nonzero(table == number)
        own = replace(call, x=call.x[at][:, None], dy=call.dy[at][:, None], sequences=None,
                      states=[s[number:number + 1] for s in call.states],
                      dstates=[s[number:number + 1] for s in call.dstates])
        for what, value in reference(name, own, reverse).items():
            if what.startswith("gradient"):
                found[what] = found.get(what, 0) + value
            elif what in ("y", "dx"):
                found.setdefault(what, np.zeros((*table.shape, value.shape[-1])))[at] = value[:, 0]
            else:
                found.setdefault(what, np.zeros((len(call.states[0]), value.shape[-1])))[number] = value[0]
    return found


def check_columns(step: LayerStep, name: str, sizes: tuple[int, int, int, int], dtype: str, reverse: bool) -> None:
    call = step.arguments(*sizes[:2])
    wanted = apart(name, call, reverse)
    call.x[call.sequences < 0] = np.nan  # which nobody may use
    found = step.run(call)
    check(found, wanted, LIMITS[dtype])
    dx = found["dx"].reshape(call.x.shape)
    assert not dx[call.sequences < 0].any()


@pytest.mark.parametrize(("schedule", "name", "sizes", "dtype", "reverse"), [
    ("persistent", "lstm", (9, 3, 6, UNITS), "float32", False),
    pytest.param("persistent", "lstm", (9, 5, 16, UNITS), "bfloat16", True, marks=pytest.mark.exhaustive),
    ("persistent", "gru", (8, 4, 7, UNITS), "float32", True),
    pytest.param("persistent", "gru_reset_before", (7, 4, 8, UNITS), "float32", False, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "rnn_tanh", (12, 2, 5, UNITS), "float16", False, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(peepholes)", (9, 3, 5, UNITS), "float32", True, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(layer_norm)", (9, 3, 5, UNITS), "float32", False, marks=pytest.mark.exhaustive),
    ("persistent_wide", "lstm", (9, 9, 16, UNITS), "bfloat16", False),
], ids=str)
def test_a_training_step(schedule, name, sizes, dtype, reverse, tmp_path):
    step = LayerStep(tmp_path, schedule, name, sizes, dtype, Traversal(reverse=reverse, sequences=True))
    check_columns(step, name, sizes, dtype, reverse)


@pytest.mark.parametrize(("name", "sizes", "reverse", "cut"), [
    ("lstm", (9, 9, 16, UNITS), True, {}),
    ("gru", (9, 9, 6, 72), False, {"units": 80, "parts": 2, "row_teams": 2, "groups": 1})], ids=str)
def test_a_recurrence_of_large_batches(name, sizes, reverse, cut, tmp_path, monkeypatch):
    large_batches(monkeypatch, cut)
    step = LayerStep(tmp_path, "persistent_wide", name, sizes, "float16", Traversal(reverse=reverse, sequences=True))
    assert "backward_persistent_wide" in step.program.functions and step.program.together != 1
    check_columns(step, name, sizes, "float16", reverse)


def test_which_columns_may_share_a_sequence_in_both_passes(monkeypatch, tmp_path):
    """Those that forward and backward have in one group."""
    step = LayerStep(tmp_path, "persistent", "lstm", (9, 3, 6, UNITS), "float32", COLUMNS)
    whole, schedule = step.program.together, Persistent()
    assert whole == 0 == schedule.together(step.task, schedule.plan(step.task, schedule.default(step.task)))
    program, config = replace(step.program, together=12), schedule.default(adjoint_task(step.task))
    monkeypatch.setattr(Persistent, "together", lambda self, task, config: 8)
    assert with_backward(step.task, program, schedule, config).together == 4


def test_layers_whose_adjoint_does_not_fit_are_refused(monkeypatch):
    """A launch a step has no columns."""
    task = task_of("lstm", (9, 3, 6, UNITS), "float32", traversal=Traversal(sequences=True, keep="states"))
    inner = adjoint_task(task)
    assert "persistent" in [s.name for s in serving_or_raise(inner)]
    monkeypatch.setattr(Persistent, "refuses", lambda self, task: "no room")
    with pytest.raises(ScheduleError, match="persistent no room"):
        serving_or_raise(inner)


@pytest.mark.parametrize(("cell", "overlap"), [
    ("gru", SIDES), pytest.param("lstm", SERIAL, marks=pytest.mark.exhaustive)], ids=str)
def test_stacks(tmp_path, cell, overlap):
    """Two layers, both ways; some sequences wrap around in all of them."""
    stack, lengths = Stack(2, True, sequences=True, keep="states"), [5, 5, 5, 5, 1]
    program = program_of(cell, stack, "float32", overlap, 7)
    columns = Columns.of(lengths, B, program.together or B)
    assert len(columns.table) == 7 and columns.wrapped.size
    step = Step(cell, stack, "float32", 7)
    rng, count = np.random.default_rng(1), len(lengths)
    step.states, step.dstates = (
        [rng.uniform(-1, 1, (stack.count, count, H)).astype(np.float32) for _ in step.states] for _ in range(2))
    names = get(cell).states
    step.by_state = {"state_in": dict(zip(names, step.states, strict=True)),
                     "dstate_out": dict(zip(names, step.dstates, strict=True))}
    step.sizes |= {"state_out": count * H, "dstate_in": count * H}
    rows = {n: np.zeros((5, count, step.given[n].shape[2])) for n in ("x", "dy")}
    for name, padded in rows.items():
        for s, n in enumerate(lengths):
            padded[:n, s] = step.given[name].reshape(-1, padded.shape[2])[columns.of_sequence(s)]
        step.given[name][columns.table < 0] = np.nan  # which nobody may use
    step.given["sequences"] = columns.marked
    found = step.run(program, tmp_path)
    dx, weights, states = reference_gradients(cell, rows["x"], step.weights, step.states, dy=rows["dy"],
                                              dstate=step.dstates, lengths=lengths)
    laid = np.zeros((7 * B, dx.shape[2]))
    for s, n in enumerate(lengths):
        laid[columns.of_sequence(s)] = dx[:n, s]
    check(found, {"dx": laid, **step.wanted(program, weights, states)}, LIMITS["float32"])
