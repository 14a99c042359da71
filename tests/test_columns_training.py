"""Gradients of sequences in columns, emulated, against a tape over each sequence apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exact import unmarked
from test_adjoint import H
from test_backward_emulated import LIMITS, Step
from test_cpu_training import Call, reference

from ecornn.workload import Traversal

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
    for what, value in wanted.items():
        error = np.linalg.norm(found[what] - value.reshape(-1)) / max(np.linalg.norm(value), 1e-6)
        assert error < LIMITS[dtype], f"{what}: {error}"
    dx = found["dx"].reshape(call.x.shape)
    assert not dx[call.sequences < 0].any()


@pytest.mark.parametrize(("schedule", "name", "sizes", "dtype", "reverse"), [
    ("persistent", "lstm", (9, 3, 6, H), "float32", False),
    ("persistent", "lstm", (9, 5, 16, H), "bfloat16", True),
    ("persistent", "gru", (8, 4, 7, H), "float32", True),
    ("persistent", "gru_reset_before", (7, 4, 8, H), "float32", False),
    ("persistent", "rnn_tanh", (12, 2, 5, H), "float16", False),
    ("persistent", "lstm(peepholes)", (9, 3, 5, H), "float32", True),
    ("persistent", "lstm(layer_norm)", (9, 3, 5, H), "float32", False),
    ("persistent_wide", "lstm", (9, 9, 16, H), "bfloat16", False),
], ids=str)
def test_a_training_step(schedule, name, sizes, dtype, reverse, tmp_path):
    step = Step(tmp_path, schedule, name, sizes, dtype, Traversal(reverse=reverse, sequences=True))
    check(step, name, sizes, dtype, reverse)
