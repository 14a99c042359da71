"""The recurrence of adjoints in the persistent kernel, and with a launch a step, emulated on a CPU, against float64."""

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backward_passes import Sample, draw, laid, lowered, recur
from cuda_on_cpu import Emulated
from emulated import masks_of, task_of
from exact import ALL_CELLS, limit, relative, stored
from msgspec.structs import replace
from numpy_packing import tf32
from test_adjoint import ALL, cell_of
from test_persistent_emulated import SMALL, cut

from ecornn.analysis.adjoint import adjoint
from ecornn.schedules import all_schedules
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.schedules.elementwise import Elementwise
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.tune.choose import choose
from ecornn.tune.log import Log
from ecornn.workload import ALONE, Traversal

HOPPER = KNOWN["sm_90a"]
GRADIENT = 2e-5  # of float32, at least: differences of sums
Sizes = tuple[int, int, int, int]


def recurrence_of(layer: Task) -> Task:
    return recurrence_task(layer, adjoint(layer.graph, layer.workload.hidden))


def carried_out(folder: Path, schedule: Schedule, task: Task, config: Config, sample: Sample, masks: dict[str, Any],
                **how: Any) -> dict[str, Any]:
    layout, first = hoisted_of(task, str(config.get("hoisted", "float32"))), next(iter(sample.first.values()))
    emulated = Emulated(schedule.program(task, schedule.plan(task, config)), folder, **how)
    given = masks | ({"hoisted": laid(layout, sample.hoisted)} if layout.outputs else {})
    memory = emulated.memory(task.workload.seq, sample.weights, lambda b: {
        "state_in": sample.first.get(b.state), "state_out": first.size}.get(b.tensor, given.get(b.tensor or b.name)))
    emulated.carry_out(memory, task.workload.seq, len(first))
    emulated.check_guards(memory)
    return memory


def check_recurrence(folder: Path, schedule: Schedule, layer: Task, config: Config | None = None,
                     batch: int | None = None, **how: Any) -> Config:
    """The adjoint's recurrence against float64; ``batch``: the call's B; ``how``: of ``cuda_on_cpu.Emulated``."""
    made = adjoint(layer.graph, layer.workload.hidden)
    task = recurrence_task(layer, made)
    assert schedule.serves(task) is None
    config = config or schedule.default(task)
    assert schedule.check(task, config) is None
    w, graph, rows = task.workload, task.graph, batch or layer.workload.batch
    sample = draw(task, made, hoisted_of(task, str(config.get("hoisted", "float32"))))
    hoisted = sample.hoisted.reshape(w.seq, w.batch, *sample.hoisted.shape[1:])[:, :rows].copy()
    sample = changed(sample, hoisted=hoisted.reshape(w.seq * rows, *hoisted.shape[2:]),
                     first={n: v[:rows] for n, v in sample.first.items()})
    masks = masks_of(task.traversal, w.seq, rows)
    for b, n in enumerate(masks.get("lengths", ())):
        hoisted[n:, b] = np.nan
    memory = carried_out(folder, schedule, task, config, changed(sample, hoisted=hoisted.reshape(sample.hoisted.shape)),
                         masks, **how)
    outputs = memory["outputs"][:w.seq * rows * len(graph.outputs) * w.hidden].reshape(w.seq, rows, -1, w.hidden)
    if w.arithmetic == "tf32":  # dx's products cut off the last 13 bits
        cut, outputs = outputs.view(np.uint32) & 0xFFFFE000, lowered(outputs)
        assert (cut == tf32(outputs).view(np.uint32)).all() and (tf32(outputs) != outputs).any()
    exact, exact_last = recur(task, sample, masks)
    library, library_last = recur(task, sample, masks, w.arithmetic)
    for o, var in enumerate(graph.outputs):
        close(outputs[:, :, o], exact[:, :, o], library[:, :, o], w.arithmetic, var.name)
    for name in graph.states:
        last = memory[f"{name}_out"][:rows * w.hidden].reshape(rows, w.hidden)
        close(last, exact_last[name], library_last[name], w.arithmetic, name)
    for b, n in enumerate(masks.get("lengths", ())):
        assert not outputs[n:, b].astype(np.float32).any()
    return config


def close(found: Any, exact: Any, library: Any, arithmetic: str, what: str) -> None:
    error = relative(found, exact)
    most = max(limit(arithmetic, exact, relative(stored(library, arithmetic), exact)), GRADIENT)
    assert error <= most, f"{what}: {error:.2e}, allowed {most:.2e}"


def check_asked(schedule: Schedule, task: Task) -> Config:
    knobs, config = {knob.name: knob.values for knob in schedule.knobs(task)}, schedule.default(task)
    assert all(value in knobs[name] for name, value in config.items()) and knobs["math"] == ("exact",)
    assert schedule.features(task, schedule.plan(task, config))["estimate"] == schedule.expected(task) > 0
    return config


NORM, CLUSTER = "lstm(layer_norm)", {"carrier": "cluster", "fences": "rare"}
PEEPHOLES = "lstm(peepholes,clip=0.75,zoneout_h=0.25)"


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}, ALONE),
    ("lstm", (5, 3, 24, 40), "float32", {"registers": 50, "units": 8}, ALONE),
    ("lstm", (5, 9, 7, 33), "tf32", {"groups": 2, "hoisted": "float32"}, Traversal(True, 2, True, True)),
    ("lstm", (7, 5, 24, 41), "float16", {"hoisted": "same", "chains": 2, "registers": 0},
     Traversal(False, 2, True, True)),
    (PEEPHOLES, (5, 3, 9, 40), "float32", {"units": 8}, Traversal(resets=True)),
    (NORM, (5, 3, 24, 40), "bfloat16", {}, Traversal(lengths=True)),
    ("gru", (6, 9, 24, 40), "float32", {"units": 8}, Traversal(False, 1, True, True)),
    ("gru", (40, 3, 24, 39), "bfloat16", {"fences": "rare", "hoisted": "same"}, Traversal(True, resets=True)),
    ("gru_reset_before", (6, 5, 9, 20), "float32", {"units": 8}, Traversal(False, 1, True, True)),  # two exchanges
    ("gru_reset_before", (40, 4, 8, 23), "float16", {"units": 8, "warps": 1, "fences": "rare"}, Traversal(True)),
    ("rnn_tanh", (6, 9, 5, 7), "float32", {"units": 8, "warps": 1}, Traversal(False, 1, True, True)),
    ("rnn_tanh", (1, 1, 1, 1), "bfloat16", {"units": 8, "warps": 1}, ALONE),
    ("pair", (6, 5, 24, 40), "bfloat16", {"units": 8}, Traversal(True, 2, True, True)),  # two of three operands
    ("lstm", (6, 5, 24, 40), "bfloat16", CLUSTER | {"units": 8, "hoisted": "same"}, Traversal(False, 1, True, True)),
    ("lstm", (5, 9, 9, 33), "float32", CLUSTER | {"groups": 2, "units": 24}, Traversal(True, 1, True, True)),
    ("gru_reset_before", (5, 3, 9, 20), "float16", CLUSTER | {"units": 8, "warps": 1}, ALONE),
    (NORM, (5, 3, 24, 40), "float32", CLUSTER, Traversal(resets=True)),
    ("rnn_tanh", (1, 5, 9, 24), "tf32", CLUSTER | {"units": 8, "warps": 1}, ALONE),
], ids=str)
def test_persistent(tmp_path, cell, sizes, dtype, change, traversal):
    layer = task_of(cell, sizes, dtype, replace(SMALL, cores=15) if "carrier" in change else SMALL, traversal)
    check_recurrence(tmp_path, Persistent(), layer, cut(layer, **change))


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal", "batch"), [
    ("indrnn", (1, 1, 1, 1), "float32", {}, ALONE, None),
    ("indrnn", (9, 5, 5, 7), "float32", {}, Traversal(False, 2, True, True), 2),
    ("highway", (9, 3, 5, 12), "float16", {"units": 2, "hoisted": "same"}, Traversal(True, 2, True, True), None),
    ("highway", (5, 3, 5, 7), "bfloat16", {"hoisted": "float32"}, Traversal(lengths=True), None),
    ("focus", (6, 5, 7, 9), "float32", {}, Traversal(resets=True), None),  # statistics of x
    ("leaky", (7, 3, 8, 8), "tf32", {"units": 2}, Traversal(True, resets=True), None),
    ("average", (9, 3, 4, 4), "bfloat16", {"units": 4, "hoisted": "same"}, ALONE, None),
], ids=str)
def test_cells_without_recurrent_products(tmp_path, cell, sizes, dtype, change, traversal, batch):
    layer, schedule = task_of(cell, sizes, dtype, SMALL, traversal), Elementwise()
    config = check_asked(schedule, recurrence_of(layer)) | {"prefetch": 8, "group": 4, **change}
    check_recurrence(tmp_path, schedule, layer, config, batch)


STEP, FUSED = LayoutTransform(), FusedStep()


@pytest.mark.parametrize(("schedule", "cell", "sizes", "dtype", "change", "traversal", "batch"), [
    (FUSED, "lstm", (5, 5, 9, 33), "float32", {}, Traversal(True, 2, True, True), 3),  # a product of four operands
    (FUSED, "gru_reset_before", (4, 3, 9, 20), "bfloat16", {}, ALONE, None),
    (FUSED, "contrast", (5, 3, 7, 40), "float32", {}, Traversal(resets=True), None),  # statistics, and no product
    (FUSED, "blend", (5, 3, 7, 20), "tf32", {}, Traversal(lengths=True), None),
    (STEP, "lstm", (3, 5, 9, 32), "tf32", {}, ALONE, None),
    (STEP, "lstm", (5, 9, 7, 33), "float32", {"layout": "hidden"}, Traversal(True, 2, True, True), None),
    (STEP, "lstm", (5, 9, 24, 40), "bfloat16", {"hoisted": "same"}, ALONE, 3),
    (STEP, PEEPHOLES, (5, 3, 9, 40), "float32", {}, Traversal(resets=True), None),
    (STEP, NORM, (4, 3, 24, 40), "float32", {}, Traversal(lengths=True), None),
    (STEP, "gru", (6, 9, 24, 39), "float16", {"split": 2}, Traversal(False, 1, True, True), None),
    (STEP, "gru_reset_before", (6, 5, 9, 20), "float32", {}, Traversal(True, 1, True, True), None),  # two exchanges
    (STEP, "rnn_tanh", (1, 1, 1, 1), "tf32", {}, ALONE, None),
    (STEP, "pair", (5, 5, 24, 40), "float32", {}, Traversal(True, 2, True, True), None),  # two of three operands
], ids=lambda value: getattr(value, "name", str(value)))
def test_a_launch_a_step(tmp_path, schedule, cell, sizes, dtype, change, traversal, batch):
    layer = task_of(cell, sizes, dtype, SMALL, traversal)
    check_recurrence(tmp_path, schedule, layer, schedule.default(recurrence_of(layer)) | change, batch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_weights_that_do_not_fit_on_chip(tmp_path, arch):
    """Of four operands, read from L2 in every step: through a ring of shared memory, or straight into registers."""
    layer = task_of("lstm", (5, 3, 9, 136), "bfloat16", replace(SMALL, cores=9, arch=arch, shared=12 << 10))
    config = cut(layer, warps=1, registers=25)
    plan = Persistent().plan(recurrence_of(layer), config)
    assert plan.streamed and bool(plan.phases[0].slots) == (arch == "sm_90a")
    check_recurrence(tmp_path, Persistent(), layer, config)


@pytest.mark.parametrize("change", [{}, {"fences": "rare"}, CLUSTER], ids=str)
def test_with_no_more_order_of_memory_than_is_promised(tmp_path, change):
    layer = task_of("gru_reset_before", (40, 3, 9, 24), "float32", replace(SMALL, cores=12))
    check_recurrence(tmp_path, Persistent(), layer, cut(layer, units=8, warps=1, **change), ordered=True)


@pytest.mark.parametrize("carrier", ["l2", "cluster"])
def test_fewer_rows_than_compiled(tmp_path, carrier):
    layer = task_of("lstm", (5, 9, 16, 34), "float16", replace(SMALL, cores=12), Traversal(True, 2, True, True))
    config = cut(layer, groups=2, units=24, carrier=carrier, fences="rare")
    check_recurrence(tmp_path, Persistent(), layer, config, batch=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_every_cell_that_is_served(tmp_path, monkeypatch, name):
    monkeypatch.setitem(ALL_CELLS, name, cell_of(name))
    for dtype, reverse in (("float32", False), ("bfloat16", True)):
        layer = task_of(name, (6, 5, 40, 40), dtype, replace(SMALL, cores=15), Traversal(reverse, 1, True, True))
        if reason := Persistent().serves(recurrence_of(layer)):
            assert "no recurrent product" in reason or "statistics before its first product" in reason
            return
        (tmp_path / dtype).mkdir()
        check_recurrence(tmp_path / dtype, Persistent(), layer)


def test_packing_without_zeros():
    """An LSTM's adjoint has one product of four operands, and as many weights as the layer, none of them twice."""
    task, sources = recurrence_of(task_of("lstm", (5, 3, 24, 768), "bfloat16", HOPPER)), []
    for schedule in (Persistent(), LayoutTransform()):
        plan = schedule.plan(task, schedule.default(task))
        recurrent = next(b for b in schedule.program(task, plan).buffers if b.name == "recurrent_0")
        assert recurrent.packing is not None
        sources.append(recurrent.packing.sources)
        if schedule.name == "persistent":
            (phase,) = plan.phases
            assert (phase.gates, phase.operands) == (1, 4)
            assert recurrent.extent.at(5) == 4 * 768 * plan.warps * phase.warp_pairs * 32
    assert sources == [tuple(("weight_hh", gate) for gate in range(4))] * 2


@pytest.mark.parametrize(("schedule", "cell", "batch", "hidden"), [
    (Persistent(), "lstm", 16, 768), (Persistent(), "gru", 20, 800), (Persistent(), "rnn_tanh", 64, 512),
    (STEP, "lstm", 64, 640)], ids=lambda value: getattr(value, "name", str(value)))
def test_what_is_asked_of_a_schedule_that_carries_out_adjoints(schedule, cell, batch, hidden):
    layer = task_of(cell, (300, batch, hidden, hidden), "bfloat16", HOPPER)
    task = recurrence_of(layer)
    config = check_asked(schedule, task)
    if schedule is STEP:
        assert schedule.expected(layer) == float("inf")  # of layers others say what they expect
        return
    assert next(knob.values for knob in schedule.knobs(task) if knob.name == "ahead") == (100,)
    assert "no product with x" in str(schedule.check(task, {**config, "ahead": 50, "carrier": "l2", "fences": "every"}))
    assert schedule.default(layer) != config == schedule.default(task)


@pytest.mark.parametrize(("cell", "batch", "hidden", "name"), [
    ("lstm", 16, 768, "persistent"), ("lstm", 64, 2048, "persistent_wide"), ("lstm", 256, 1024, "persistent_wide"),
    ("gru", 2, 5000, "layout_transform")])
def test_which_schedule_carries_out_an_adjoint(cell, batch, hidden, name):
    task = recurrence_of(task_of(cell, (256, batch, hidden, hidden), "bfloat16", HOPPER))
    assert choose(task, None, None, Log()).schedule.name == name
    assert hidden < 5000 or "do not fit" in str(Persistent().serves(task))


def test_schedules_that_cannot_say_so():
    task = recurrence_of(task_of("lstm", (5, 3, 24, 64), "bfloat16", HOPPER))
    refusing = {name for name, s in all_schedules().items() if "not support backward passes" in str(s.serves(task))}
    assert refusing == {*all_schedules()} - {"persistent", "persistent_wide", "scan", "elementwise",
                                           "layout_transform", "fused_step"}
    columns = task_of("lstm", (5, 3, 24, 64), "bfloat16", HOPPER, Traversal(sequences=True))
    assert Persistent().serves(recurrence_of(columns)) is None
    (phase,) = task.graph.phases
    (product,) = phase.products
    first, *others = product.terms
    mixed = changed(first, transposed=False)
    for terms, why in (((first, first, *others), "twice"), ((mixed, *others), "and with transposed")):
        phases = (changed(phase, products=(changed(product, terms=terms),)),)
        assert why in str(Persistent().serves(changed(task, graph=changed(task.graph, phases=phases))))


def test_sums_are_made_from_outputs():
    """A bias that is multiplied within the step has a gradient that is summed over all steps."""
    layer = task_of("indrnn", (5, 3, 24, 64), "float32")
    made = adjoint(layer.graph, 64)
    task = recurrence_task(layer, made)
    assert made.recurrence.sums and {s.value for s in made.recurrence.sums} <= {*task.graph.outputs}
    assert task.traversal == Traversal(reverse=True, backward=True)
