"""Gradients of biases from what a recurrence leaves, both emulated, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from adjoint_recurrence import draw, laid, recur
from backward_passes import Passes
from cuda_on_cpu import Emulated
from emulated import task_of
from test_backward_recurrence_emulated import SMALL, memory_for

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.evaluate import start
from ecornn.analysis.kept import kept
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.backward.memory import Memory
from ecornn.schedules.backward.weights import step_sums, vector_gradients
from ecornn.schedules.base import joined
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.keeping import written
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.workload import Traversal


@pytest.mark.parametrize("schedule", [Persistent(), pytest.param(LayoutTransform(), marks=pytest.mark.exhaustive)],
                         ids=["persistent", "step"])
def test_sums_are_of_values_before_tf32_rounds_them(tmp_path, schedule):
    """One step from zeros: all products are zero, so that what is summed is exact but for float32."""
    sizes = T, B, _, H = 1, 9, 5, 24
    layer = task_of("gru", sizes, "tf32", SMALL, Traversal(lengths=True))
    back = adjoint(layer.graph, H)
    task = recurrence_task(layer, back)
    config = schedule.default(task)
    layout, masks = hoisted_of(task, str(config.get("hoisted", "float32"))), {"lengths": np.int32(np.arange(B) % 3 > 0)}
    sample = draw(task, back, layout)
    sample = type(sample)(sample.weights, sample.hoisted, {n: 0 * v for n, v in sample.first.items()})
    program = schedule.program(task, schedule.plan(task, config))
    memory = memory_for(program, sample.weights, sample.first, masks, T)
    values = laid(layout, sample.hoisted)
    memory["hoisted"][:values.size] = values
    (tmp_path / "recurrence").mkdir()
    Emulated(program, tmp_path / "recurrence").carry_out(memory, T, B)
    exact, _ = recur(task, sample, masks)
    totals = {s.var: exact[:, :, written(back).index(s.value)].sum((0, 1))
              for s in (*back.recurrence.sums, *back.inputs.sums)}
    once = totals | start(back.once, sample.weights, totals)
    wanted = {n: np.zeros(p.shape) for n, p in sample.weights.items() if p.ndim == 2}
    for vector in back.vectors:
        wanted[vector.parameter][vector.gate] += once[vector.var]
    passes = Memory(layer, back, kept(back, "gates"))
    given = {"outputs": (exact.shape, "float32"), "vectors": ((len(layer.graph.vectors), H), "float32"),
             **{f"d_{n}": (v.shape, "float32") for n, v in wanted.items()}}
    (tmp_path / "sums").mkdir()
    found = Passes(joined(step_sums(passes), vector_gradients(passes)), tmp_path / "sums", given).run(
        T, B, {"outputs": memory["outputs"][:exact.size].reshape(exact.shape)})
    for name, exactly in wanted.items():
        assert exactly.any() and np.abs(found[f"d_{name}"] - exactly).max() <= 1e-6 * np.abs(exactly).max(), name
