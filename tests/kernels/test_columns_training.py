"""Gradients of sequences in columns, emulated, against a tape over each sequence apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_training_stacks_emulated as stacks
from cpu_training_sample import Call, reference
from emulated import task_of
from emulated_training import check as compare
from exact import unmarked
from test_adjoint import H
from test_backward_emulated import LIMITS, Step, large_batches
from test_training_stacks_emulated import SIDES, program_of

from ecornn import Columns, reference_gradients
from ecornn.cells import get
from ecornn.errors import ScheduleError
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.training import with_backward
from ecornn.task import adjoint_task
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import SERIAL, Stack, Traversal

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


def check(step: Step, name: str, sizes: tuple[int, int, int, int], dtype: str, reverse: bool) -> None:
    call = step.arguments(*sizes[:2])
    wanted = apart(name, call, reverse)
    call.x[call.sequences < 0] = np.nan  # which nobody may use
    found = step.run(call)
    compare(found, wanted, LIMITS[dtype])
    dx = found["dx"].reshape(call.x.shape)
    assert not dx[call.sequences < 0].any()


@pytest.mark.parametrize(("schedule", "name", "sizes", "dtype", "reverse"), [
    ("persistent", "lstm", (9, 3, 6, H), "float32", False),
    pytest.param("persistent", "lstm", (9, 5, 16, H), "bfloat16", True, marks=pytest.mark.exhaustive),
    ("persistent", "gru", (8, 4, 7, H), "float32", True),
    pytest.param("persistent", "gru_reset_before", (7, 4, 8, H), "float32", False, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "rnn_tanh", (12, 2, 5, H), "float16", False, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(peepholes)", (9, 3, 5, H), "float32", True, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(layer_norm)", (9, 3, 5, H), "float32", False, marks=pytest.mark.exhaustive),
    ("persistent_wide", "lstm", (9, 9, 16, H), "bfloat16", False),
], ids=str)
def test_a_training_step(schedule, name, sizes, dtype, reverse, tmp_path):
    step = Step(tmp_path, schedule, name, sizes, dtype, Traversal(reverse=reverse, sequences=True))
    check(step, name, sizes, dtype, reverse)


@pytest.mark.parametrize(("name", "sizes", "reverse", "cut"), [
    ("lstm", (9, 9, 16, H), True, {}),
    ("gru", (9, 9, 6, 72), False, {"units": 80, "parts": 2, "row_teams": 2, "groups": 1})], ids=str)
def test_a_recurrence_of_large_batches(name, sizes, reverse, cut, tmp_path, monkeypatch):
    large_batches(monkeypatch, cut)
    step = Step(tmp_path, "persistent_wide", name, sizes, "float16", Traversal(reverse=reverse, sequences=True))
    assert "backward_persistent_wide" in step.program.functions and step.program.together != 1
    check(step, name, sizes, "float16", reverse)


def test_which_columns_may_share_a_sequence_in_both_passes(monkeypatch, tmp_path):
    """Those that forward and backward have in one group."""
    step = Step(tmp_path, "persistent", "lstm", (9, 3, 6, H), "float32", COLUMNS)
    whole, schedule = step.program.together, Persistent()
    assert whole == 0 == schedule.together(step.task, schedule.plan(step.task, schedule.default(step.task)))
    program, config = replace(step.program, together=12), schedule.default(adjoint_task(step.task))
    monkeypatch.setattr(Persistent, "together", lambda self, task, config: 8)
    assert with_backward(step.task, program, schedule, config).together == 4


def test_layers_whose_adjoint_does_not_fit_are_refused(monkeypatch):
    """A launch a step has no columns."""
    task = task_of("lstm", (9, 3, 6, H), "float32", traversal=Traversal(sequences=True, keep="states"))
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
    columns = Columns.of(lengths, stacks.B, program.together or stacks.B)
    assert len(columns.table) == 7 and columns.wrapped.size
    step = stacks.Step(cell, stack, "float32", 7)
    rng, count = np.random.default_rng(1), len(lengths)
    step.states, step.dstates = (
        [rng.uniform(-1, 1, (stack.count, count, stacks.H)).astype(np.float32) for _ in step.states] for _ in range(2))
    names = get(cell).states
    step.by_state = {"state_in": dict(zip(names, step.states, strict=True)),
                     "dstate_out": dict(zip(names, step.dstates, strict=True))}
    step.sizes |= {"state_out": count * stacks.H, "dstate_in": count * stacks.H}
    rows = {n: np.zeros((5, count, step.given[n].shape[2])) for n in ("x", "dy")}
    for name, padded in rows.items():
        for s, n in enumerate(lengths):
            padded[:n, s] = step.given[name].reshape(-1, padded.shape[2])[columns.of_sequence(s)]
        step.given[name][columns.table < 0] = np.nan  # which nobody may use
    step.given["sequences"] = columns.marked
    found = step.run(program, tmp_path)
    dx, weights, states = reference_gradients(cell, rows["x"], step.weights, step.states, dy=rows["dy"],
                                              dstate=step.dstates, lengths=lengths)
    laid = np.zeros((7 * stacks.B, dx.shape[2]))
    for s, n in enumerate(lengths):
        laid[columns.of_sequence(s)] = dx[:n, s]
    compare(found, {"dx": laid, **step.wanted(program, weights, states)}, LIMITS["float32"])
