"""The recurrence of adjoints with a launch a step and phase, emulated on the CPU, against float64."""

from __future__ import annotations

import pytest
from emulated import task_of
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_emulated import SMALL

from ecornn.analysis.adjoint import adjoint
from ecornn.program import PACKED
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.tune.choose import choose
from ecornn.tune.log import Log
from ecornn.workload import ALONE, Traversal

HOPPER = KNOWN["sm_90a"]
NORM = "lstm(layer_norm)"


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal", "batch"), [
    ("lstm", (5, 9, 7, 33), "float32", {"layout": "hidden"}, Traversal(True, 2, True, True), None),
    ("lstm", (5, 9, 24, 40), "bfloat16", {"hoisted": "same"}, ALONE, 3),
    ("lstm(peepholes,clip=0.75,zoneout_h=0.25)", (5, 3, 9, 40), "float32", {}, Traversal(resets=True), None),
    (NORM, (4, 3, 24, 40), "float32", {}, Traversal(lengths=True), None),
    ("gru", (6, 9, 24, 39), "float16", {"split": 2}, Traversal(False, 1, True, True), None),
    ("gru_reset_before", (6, 5, 9, 20), "float32", {}, Traversal(True, 1, True, True), None),  # two exchanges
    ("rnn_tanh", (1, 1, 1, 1), "tf32", {}, ALONE, None),
    ("pair", (5, 5, 24, 40), "float32", {}, Traversal(True, 2, True, True), None),  # two of three operands
], ids=lambda v: str(v).replace(" ", ""))
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal, batch):
    layer, schedule = task_of(cell, sizes, dtype, SMALL, traversal), LayoutTransform()
    task = recurrence_task(layer, adjoint(layer.graph, layer.workload.hidden))
    config = {**schedule.default(task), **change}
    check_recurrence(tmp_path, schedule, layer, config, batch)


def test_what_is_asked_of_it():
    layer, schedule = task_of("lstm", (300, 64, 640, 640), "bfloat16", HOPPER), LayoutTransform()
    task = recurrence_task(layer, adjoint(layer.graph, 640))
    knobs, config = {k.name: k.values for k in schedule.knobs(task)}, schedule.default(task)
    assert all(value in knobs[name] for name, value in config.items()) and knobs["math"] == ("exact",)
    assert schedule.features(task, schedule.plan(task, config))["estimate"] == schedule.expected(task) > 0
    assert schedule.expected(layer) == float("inf")  # of layers others say what they expect
    buffers = schedule.program(task, schedule.plan(task, config)).buffers
    (weights,) = [b for b in buffers if b.role == PACKED and b.name == "recurrent_0"]
    assert weights.packing is not None
    assert weights.packing.sources == tuple(("weight_hh", gate) for gate in range(4))


@pytest.mark.parametrize(("cell", "batch", "hidden", "name"), [
    ("lstm", 16, 768, "persistent"), ("lstm", 64, 2048, "persistent_wide"), ("lstm", 256, 1024, "persistent_wide"),
    ("gru", 2, 5000, "layout_transform")])
def test_which_schedule_carries_out_an_adjoint(cell, batch, hidden, name):
    """The faster one of those that keep weights on chip; for all else there is the other."""
    layer = task_of(cell, (256, batch, hidden, hidden), "bfloat16", HOPPER)
    task = recurrence_task(layer, adjoint(layer.graph, hidden))
    assert choose(task, None, None, Log()).schedule.name == name
    if hidden == 5000:
        assert "do not fit" in str(Persistent().serves(task))
