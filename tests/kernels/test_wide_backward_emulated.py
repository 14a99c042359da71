"""The recurrence of adjoints in the wide persistent kernel, and with a launch a step and phase, emulated on the CPU,
against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Fault, pack
from emulated import task_of
from msgspec.structs import replace
from test_backward_recurrence_emulated import check_recurrence
from test_emulation import without
from test_persistent_wide import HOPPER, SMALL, config_of
from without_spills import needs_ptxas, resources_without_spills

from ecornn.analysis.adjoint import adjoint
from ecornn.build.cuda import lower
from ecornn.program import PACKED
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.schedules.persistent_wide.plan import packing_of
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.tune.choose import choose
from ecornn.tune.log import Log
from ecornn.workload import ALONE, Traversal

Sizes = tuple[int, int, int, int]


def recurrence_of(layer: Task) -> Task:
    return recurrence_task(layer, adjoint(layer.graph, layer.workload.hidden))


def cut(**change: Any) -> dict[str, Any]:
    return config_of(math="exact", **{"units": 64, **change})


CASES: list[tuple[str, Sizes, str, dict[str, Any], Traversal]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}, ALONE),
    ("lstm", (7, 5, 24, 41), "float16", {"units": 24, "hoisted": "same"}, Traversal(False, 2, True, True)),
    ("gru", (6, 9, 24, 130), "bfloat16", {"units": 48, "groups": 2}, Traversal(True, 1, True, True)),
    ("rnn_tanh", (6, 9, 5, 70), "float16", {"units": 16}, Traversal(resets=True)),
    ("rnn_tanh", (1, 1, 1, 1), "bfloat16", {"units": 8}, ALONE),
]

# 2 or 3 warpgroups with rows of their own, and blocks that share K
SHARED: list[tuple[str, Sizes, str, dict[str, Any], Traversal]] = [
    ("lstm", (6, 11, 7, 90), "bfloat16", {"units": 96, "row_teams": 2, "parts": 4}, ALONE),  # an operand each
    ("lstm", (5, 5, 7, 70), "float16", {"units": 72, "row_teams": 2, "parts": 3, "registers": 50},
     Traversal(True, 2, True, True)),  # three chunks each of eight, the last of which only pads K
    ("gru", (7, 9, 5, 128), "float16", {"units": 128, "row_teams": 2, "parts": 6, "hoisted": "same"},
     Traversal(False, 1, True, True)),  # blocks of 22 units, and the last one of 18
    ("gru", (6, 21, 8, 136), "bfloat16", {"units": 136, "row_teams": 3, "groups": 2, "parts": 3, "registers": 0},
     ALONE),
    ("rnn_tanh", (6, 5, 3, 250), "bfloat16", {"units": 128, "row_teams": 2, "parts": 2}, Traversal(resets=True)),
    ("pair", (6, 5, 24, 70), "bfloat16", {"units": 36, "row_teams": 2, "parts": 3}, Traversal(True, 2, True, True)),
]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), CASES + SHARED, ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal):
    check_recurrence(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, SMALL, traversal), cut(**change))


@pytest.mark.parametrize("change", [{"units": 24}, {"units": 96, "row_teams": 2, "parts": 4}], ids=str)
def test_copies_that_come_early(tmp_path, change):
    layer = task_of("lstm", (7, 5, 7, 70), "float16", SMALL)
    check_recurrence(tmp_path, PersistentWide(), layer, cut(**change), lazy=False)


def test_more_chunks_than_stages(tmp_path):
    """Stages are given back and used again within a step."""
    layer = task_of("lstm", (7, 9, 8, 130), "float16", SMALL)
    config = cut(units=136, row_teams=2, parts=2, registers=50)
    plan = PersistentWide().plan(recurrence_of(layer), config)
    layer = task_of("lstm", (7, 9, 8, 130), "float16", replace(SMALL, shared=plan.shared - 3 * (plan.stage_bytes + 16)))
    plan = PersistentWide().plan(recurrence_of(layer), config)
    assert (plan.chunks, plan.stages) == (6, 3)
    check_recurrence(tmp_path, PersistentWide(), layer, config)


def test_fewer_rows_than_compiled(tmp_path):
    layer = task_of("lstm", (5, 9, 16, 34), "float16", replace(SMALL, cores=12), Traversal(True, 2, True, True))
    check_recurrence(tmp_path, PersistentWide(), layer, cut(groups=2, units=40, row_teams=1), batch=2)


def test_the_default_of_a_small_layer(tmp_path):
    layer = task_of("gru", (3, 33, 31, 129), "bfloat16", SMALL)
    check_recurrence(tmp_path, PersistentWide(), layer)


# Fences that mbarriers have begun, of which either would do; of the state's chunks acquire, fence of who copies, fence
# of who wrote, release. What is dropped is missed.
@pytest.mark.parametrize("change", [{"units": 16}, {"units": 96, "row_teams": 2, "parts": 4}], ids=str)
@pytest.mark.parametrize("numbers", [(), (2,), (3,), (4,), (5,)], ids=str)
def test_with_no_more_order_of_memory_than_is_promised(tmp_path, numbers, change):
    layer = task_of("lstm", (6, 3, 24, 40), "float16", SMALL)
    run = partial(check_recurrence, tmp_path, PersistentWide(), layer, cut(**change), ordered=True,
                  change=lambda text: without(text, numbers, 6))
    if numbers:
        with pytest.raises((Fault, AssertionError), match="allowed"):
            run()
    else:
        run()


@pytest.mark.parametrize(("cell", "H", "change"), [
    ("lstm", 70, {"units": 24}), ("lstm", 70, {"units": 72, "row_teams": 2, "parts": 3}),
    ("rnn_tanh", 70, {"units": 8})])
def test_weights_lie_as_wgmma_reads_them(cell, H, change):
    """8 rows of 16 bytes in a piece, the pieces of 8 values of K one behind the other, K operand by operand."""
    task = recurrence_of(task_of(cell, (3, 4, 8, H), "float16", replace(HOPPER, cores=16)))
    plan = PersistentWide().plan(task, cut(**change))
    parameters = {n: np.arange(np.prod(s)).reshape(s) % 2039 for n, s in task.graph.parameters.items()}
    packing, (phase,) = packing_of(task, plan), task.graph.phases
    made = pack(packing, parameters).reshape(plan.sets, -1, 8, plan.octets, 8, 8)
    assert made.shape[1] >= plan.counters >= 2 * len(phase.operands)
    rng = np.random.default_rng(0)
    for operand, unit, k in zip(rng.integers(len(phase.operands), size=500), rng.integers(H, size=500),
                                rng.integers(H, size=500), strict=True):
        member, row = divmod(int(unit), plan.units)
        value = made[member, 2 * operand + k // 64, k % 64 // 8, row // 8, row % 8, k % 8]
        name, gate = phase.products[0].source(phase.operands[operand])
        assert float(value) == parameters[name][gate, k, unit]


def test_what_it_does_not_serve():
    def reason(cell="lstm", sizes=(4, 64, 64, 1024), dtype="float16", traversal=ALONE) -> str:
        return PersistentWide().serves(recurrence_of(task_of(cell, sizes, dtype, HOPPER, traversal))) or ""

    assert not reason() and not reason("gru", dtype="bfloat16") and not reason("pair", (4, 64, 64, 64))
    assert not reason(sizes=(4, 64, 64, 2048)) and not reason(sizes=(4, 256, 64, 1024))
    assert "16-bit" in reason(dtype="float32") and not reason(traversal=Traversal(sequences=True))
    assert "one recurrent product" in reason("gru_reset_before") and "do not fit" in reason(sizes=(4, 64, 64, 2816))
    forward = task_of("lstm", (4, 64, 64, 1024), "float16", HOPPER)
    knobs = {k.name: k.values for k in PersistentWide().knobs(recurrence_of(forward))}
    assert max(knobs["parts"]) == 16 and max(knobs["units"]) == 256 and knobs["math"] == ("exact",)
    assert {k.name: k.values for k in PersistentWide().knobs(forward)}["parts"] == (1, 2, 3, 4)


@needs_ptxas
@pytest.mark.parametrize(("cell", "batch", "hidden"), [
    ("lstm", 64, 1024), ("lstm", 512, 256), ("gru", 64, 2048),
    *(pytest.param("lstm", *sizes, marks=pytest.mark.exhaustive) for sizes in ((64, 2048), (256, 1024)))])
def test_compiles_without_spills(cell, batch, hidden):
    task, schedule = recurrence_of(task_of(cell, (100, batch, hidden, hidden), "float16", HOPPER)), PersistentWide()
    config = schedule.default(task)
    knobs = {k.name: k.values for k in schedule.knobs(task)}
    assert all(value in knobs[name] for name, value in config.items())
    assert schedule.features(task, schedule.plan(task, config))["estimate"] == schedule.expected(task) > 0
    source = lower(schedule.program(task, schedule.plan(task, config)), "sm_90a")[1]
    assert resources_without_spills(source, "persistent_wide_kernel")


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
], ids=str)
def test_a_launch_a_step_matches_float64(tmp_path, cell, sizes, dtype, change, traversal, batch):
    layer, schedule = task_of(cell, sizes, dtype, SMALL, traversal), LayoutTransform()
    task = recurrence_task(layer, adjoint(layer.graph, layer.workload.hidden))
    config = {**schedule.default(task), **change}
    check_recurrence(tmp_path, schedule, layer, config, batch)


def test_what_is_asked_of_a_launch_a_step():
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
