"""Schedules of one launch a step, and of cells without recurrent products, emulated; no kernel for Hopper spills."""

import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from emulated import SHAPES, check_numbers, task_of
from exact import ALL_CELLS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_backward_assembled import memory_of
from test_backward_recurrence_emulated import check_asked, recurrence_of

import ecornn
from ecornn.analysis.liveness import carried
from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin, find_nvcc, parse_resources
from ecornn.dtypes import SERVED
from ecornn.numpy_reference import STEPS
from ecornn.program import WORKSPACE, Buffer, Extent, Program
from ecornn.schedules import all_schedules
from ecornn.schedules.assemble import shared_buffers
from ecornn.schedules.backward.weights import weight_gradients
from ecornn.schedules.base import Schedule, Task, joined
from ecornn.schedules.elementwise import Elementwise
from ecornn.schedules.gemm.projection import project
from ecornn.schedules.gemm.wgmma_mainloop import THREADS
from ecornn.schedules.hoisted import gained, hoisted_of
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, Traversal

SCHEDULES: dict[str, Schedule] = {s.name: s for s in (FusedStep(), LayoutTransform())}


@pytest.mark.parametrize(("schedule", "cell", "sizes", "dtype", "change"), [
    ("fused_step", "lstm", SHAPES[1], "float32", {}),
    ("fused_step", "gru_reset_before", SHAPES[2], "float16", {}),
    ("fused_step", "pair", SHAPES[2], "bfloat16", {}),  # two operands, one of them not a state
    ("fused_step", "gated", SHAPES[1], "float32", {}),  # a gate carried over to the second phase
    ("fused_step", "leaky", SHAPES[1], "float32", {}),  # no recurrent product
    ("fused_step", "average", SHAPES[1], "float32", {}),  # no product, no parameter
    ("fused_step", "blend", SHAPES[2], "float32", {}),  # statistics wherever there can be some
    ("fused_step", "focus", SHAPES[1], "float16", {}),
    ("fused_step", "contrast", SHAPES[3], "float32", {}),
    ("layout_transform", "blend", SHAPES[3], "bfloat16", {}),
    ("layout_transform", "lstm", SHAPES[2], "bfloat16", {"hoisted": "same"}),
    ("layout_transform", "gru_reset_before", SHAPES[1], "float16", {"hoisted": "same"}),
    ("layout_transform", "gru_reset_before", SHAPES[1], "float32", {}),
    ("layout_transform", "pair", SHAPES[1], "float16", {}),
    ("layout_transform", "gru", SHAPES[2], "tf32", {}),
    ("fused_step", "lstm", SHAPES[1], "tf32", {}),  # in exact arithmetic, as all it does
], ids=str)
def test_results(tmp_path, schedule, cell, sizes, dtype, change):
    task, found = task_of(cell, sizes, dtype), SCHEDULES[schedule]
    check_numbers(tmp_path, found, task, found.default(task) | change)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("cell", [*STEPS, *step_cells.CELLS])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda s: s.name)
def test_results_of_every_cell(tmp_path, schedule, cell, sizes):
    for dtype in SERVED["cuda"]:
        task = task_of(cell, sizes, dtype)
        if schedule.serves(task) is None:
            (folder := tmp_path / dtype).mkdir()
            check_numbers(folder, schedule, task, schedule.default(task))


CONFIGS = [  # (schedule, cell, dtype, compiled B, knobs unlike the default's)
    ("layout_transform", "lstm", "float16", 33, {  # rows beyond the batch, K split, a layout each
        "units": 16, "rows": 24, "row_warps": 2, "batch_warps": 1, "split": 4, "depth": 2, "stages": 3,
        "layout": "hidden"}),
    ("layout_transform", "gru", "float32", 45, {  # more rows compiled than called, blocks without rows
        "units": 32, "rows": 16, "row_warps": 2, "batch_warps": 2, "split": 2, "depth": 1, "stages": 2,
        "layout": "batch"}),
    ("layout_transform", "rnn_tanh", "bfloat16", 33, {  # a pipeline longer than the product
        "units": 16, "rows": 40, "row_warps": 1, "batch_warps": 1, "split": 4, "depth": 1, "stages": 6,
        "layout": "hidden"}),
    ("layout_transform", "lstm", "float16", 33, {  # more hoisted items than are read before the product
        "units": 16, "rows": 40, "row_warps": 1, "batch_warps": 1, "split": 2, "depth": 1, "stages": 2,
        "hoisted": "same"}),
    ("fused_step", "lstm", "float16", 45, {"units": 8, "thread_rows": 4, "groups": 2, "split": 16, "depth": 16}),
    ("fused_step", "gru_reset_before", "float32", 33, {
        "units": 32, "thread_rows": 1, "groups": 8, "split": 1, "depth": 32}),
]


# fused_step has no asynchronous copies, which could come at once or late
@pytest.mark.parametrize(("schedule", "cell", "dtype", "batch", "knobs", "lazy"), [
    (*case, lazy) for case in CONFIGS for lazy in (True, False) if lazy or case[0] != "fused_step"])
def test_other_configurations(tmp_path, schedule, cell, dtype, batch, knobs, lazy):
    task = task_of(cell, (3, batch, 31, 70), dtype)
    config = {**SCHEDULES[schedule].default(task), **knobs}
    check_numbers(tmp_path, SCHEDULES[schedule], task, config, batch=min(batch, 33), lazy=lazy)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(ALL_CELLS)), st.sampled_from(SERVED["cuda"]), st.sampled_from(list(KNOWN)),
       st.integers(1, 300), st.integers(1, 2500))
@example("lstm", "float16", "sm_90a", 64, 1024)
@example("gru", "float16", "sm_90a", 32, 2048)
@example("rnn_tanh", "float16", "sm_90a", 1, 64)
@example("lstm", "float16", "sm_90a", 27, 166)
def test_defaults_fit(cell: str, dtype: str, arch: str, batch: int, hidden: int):
    task = task_of(cell, (8, batch, hidden, hidden), dtype, KNOWN[arch])
    reasons = {name: found.serves(task) for name, found in all_schedules().items() if found.kind == "cuda"}
    assert reasons["fused_step"] is None and (reasons["elementwise"] is None) == (cell in step_cells.NO_PRODUCT)
    if (reason := reasons["layout_transform"]) is not None:
        products = any(phase.products for phase in task.graph.phases)
        assert ("shared memory" if products else "no recurrent product") in reason
    for found in (all_schedules()[name] for name, reason in reasons.items() if reason is None):
        config, knobs = found.default(task), {k.name: k.values for k in found.knobs(task)}
        assert found.check(task, config) is None and set(config) == set(knobs)
        assert all(value in knobs[name] for name, value in config.items())
        features = found.features(task, found.plan(task, config))
        assert features.get("waste", 1) >= 1 and all(np.isfinite(v) and v >= 0 for v in features.values())
        if "recurrence" in features:
            # what memory takes is hidden in part; what rounded hoisted values save of it is taken off whole
            least = features["recurrence"] - gained(task, str(config.get("hoisted", "float32")))
            assert features["estimate"] == found.expected(task) >= least and features["recurrence"] > 0
            assert cell == "echo" or features["estimate"] > least  # which has no product of x
    assert reasons["elementwise"] is not None or 0 < SCHEDULE.expected(task) < 1e9


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_programs_agree_with_their_buffers(schedule: str):
    rng, found = random.Random(7), SCHEDULES[schedule]
    for cell in ("lstm", "gru_reset_before", "pair"):
        task = task_of(cell, (4, 50, 40, 200), "float16", KNOWN["sm_80"])
        knobs, built = found.knobs(task), 0
        while built < 4:
            config = {k.name: rng.choice(k.values) for k in knobs}
            if found.check(task, config) is not None:
                continue
            built += 1
            program = found.program(task, found.plan(task, config))
            for b in program.buffers:
                if b.packing is not None:
                    assert prod(b.packing.pad) == prod(b.packing.split) == b.extent.fixed
                    assert sorted(b.packing.order) == list(range(len(b.packing.split)))
            lower(program, "sm_80")


@pytest.mark.parametrize(("schedule", "knobs", "reason"), [
    ("fused_step", {"units": 32, "groups": 8, "split": 16}, "threads"),
    ("fused_step", {"units": 8, "groups": 1, "split": 1}, "threads"),
    ("fused_step", {"thread_rows": 8, "groups": 8, "depth": 64, "units": 16, "split": 8}, "registers"),
    ("layout_transform", {"units": 6}, "multiple"),
    ("layout_transform", {"row_warps": 8, "batch_warps": 4, "split": 8}, "threads"),
    ("layout_transform", {"rows": 24, "batch_warps": 2}, "batch rows"),
    ("layout_transform", {"units": 4, "row_warps": 2, "batch_warps": 1, "split": 1}, "weight rows"),
    ("layout_transform", {"units": 64, "rows": 256, "row_warps": 4, "batch_warps": 2, "split": 1, "depth": 4,
                          "stages": 6}, "shared memory"),
    ("layout_transform", {"units": 32, "rows": 128, "row_warps": 1, "batch_warps": 1, "split": 1, "depth": 1,
                          "stages": 2}, "registers"),
    ("elementwise", {"prefetch": 8, "group": 16}, "groups of 16 steps"),
    ("elementwise", {"prefetch": 128, "threads": 256, "units": 4}, "shared memory"),
    ("elementwise", {"group": 16, "units": 4, "threads": 256, "prefetch": 16}, "registers"),
])
def test_configurations_that_cannot_run(schedule: str, knobs: dict[str, Any], reason: str):
    cell, sizes = ("highway", (300, 20, 800, 800)) if schedule == "elementwise" else ("lstm", (4, 300, 64, 512))
    task, found = task_of(cell, sizes, "float16", KNOWN["sm_90a"]), all_schedules()[schedule]
    assert reason in str(found.check(task, {**found.default(task), **knobs}))


def test_what_phases_hand_on():
    graph = task_of("gru_reset_before", (1, 1, 4, 4), "float32").graph
    names = {var.name.rsplit("__", 1)[0]: made for var, made in carried(graph).items()}
    assert list(names.values()) == [0] and "update" in next(iter(names))
    assert not carried(task_of("lstm", (1, 1, 4, 4), "float32").graph)


@pytest.mark.parametrize("name", [name for name, schedule in all_schedules().items() if schedule.kind == "cuda"])
def test_every_schedule_of_a_gpu_estimates_times(name):
    """The cost model starts from these, so none may be missing; of a larger layer it is not shorter."""
    schedule, times = all_schedules()[name], []
    steps, sizes = 8 if name == "whole_step" else 10, ((64, 1), (256, 16), (800, 20))
    for hidden, batch in ((16, 1), (64, 32), (128, 5000)) if name == "persistent_block" else sizes:
        cell = {"elementwise": "indrnn", "scan": "leaky"}.get(name, "lstm")
        task = task_of(cell, (steps, batch, hidden, hidden), "float16", KNOWN["sm_90a"])
        assert schedule.serves(task) is None
        times.append(schedule.features(task, schedule.plan(task, schedule.default(task)))["estimate"])
    assert all(10 < ns < 1e6 for ns in times) and times == sorted(times)


def test_the_estimate_of_the_fallback_knows_what_is_slow():
    task, schedule = task_of("lstm", (100, 16, 1024, 1024), "float32", KNOWN["sm_90a"]), FusedStep()
    default = schedule.default(task)
    def estimate(**change: object) -> float:
        config = {**default, **change}
        assert schedule.check(task, config) is None
        return schedule.features(task, schedule.plan(task, config))["estimate"]
    assert estimate() < min(estimate(depth=16), estimate(split=1), estimate(groups=1, thread_rows=1))


SCHEDULE = Elementwise()

# (cell, sizes, dtype, knobs unlike the default's, traversal)
CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], Traversal]] = [
    ("indrnn", SHAPES[0], "float16", {}, ALONE),
    ("indrnn", SHAPES[2], "float32", {}, ALONE),
    ("indrnn", (37, 3, 5, 12), "bfloat16", {  # around the ring, a rest
        "units": 4, "prefetch": 16, "group": 4, "hoisted": "same"}, ALONE),
    ("indrnn", (32, 3, 5, 34), "float16", {  # whole groups only
        "units": 2, "prefetch": 8, "group": 8, "hoisted": "same"}, ALONE),
    ("seven", (19, 3, 5, 34), "float16", {"units": 2, "prefetch": 8, "group": 4, "hoisted": "same"}, ALONE),
    ("seven", (11, 3, 24, 20), "bfloat16", {"units": 4, "group": 4, "hoisted": "same"}, Traversal(True, 1, True, True)),
    ("indrnn", (33, 5, 7, 12), "float32", {"units": 4, "prefetch": 16, "group": 16}, Traversal(True, 2, True, True)),
    ("highway", SHAPES[3], "bfloat16", {}, ALONE),
    ("highway", (21, 3, 5, 12), "float16", {"units": 4, "group": 4, "threads": 32, "hoisted": "same"},
     Traversal(False, 2, True, True)),
    ("highway", (9, 2, 5, 7), "float32", {"prefetch": 128}, Traversal(True, 1, True, False)),  # no step so far ahead
    ("highway", (40, 4, 5, 6), "bfloat16", {"prefetch": 8, "units": 2}, Traversal(True, 1, False, True)),
    ("leaky", (5, 3, 7, 7), "float16", {"math": "exact"}, ALONE),  # x itself beside its product
    ("leaky", (5, 3, 14, 14), "float16", {"units": 2, "hoisted": "same"}, Traversal(True)),
    ("average", (11, 3, 7, 10), "float32", {"units": 2}, ALONE),  # no product at all
    ("decay", (13, 3, 7, 10), "float32", {}, Traversal(True, 1, True, True)),  # no inputs
    ("highway", (5, 2, 9, 8), "tf32", {}, ALONE)]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "knobs", "traversal", "lazy"), [  # copies come late, and at once
    *((*case, True) for case in CASES), *((*CASES[n], False) for n in (2, 4, 8))], ids=str)
def test_elementwise(tmp_path, cell, sizes, dtype, knobs, traversal, lazy):
    task = task_of(cell, sizes, dtype, traversal=traversal)
    check_numbers(tmp_path, SCHEDULE, task, {**SCHEDULE.default(task), **knobs}, lazy=lazy)


def test_it_is_chosen_for_such_cells_and_for_no_other():
    device = KNOWN["sm_90a"]
    alone = task_of("indrnn", (300, 20, 800, 800), "bfloat16", device)
    assert serving_or_raise(alone)[0].name == "elementwise"
    other = task_of("rnn_relu", (300, 20, 800, 800), "bfloat16", device)
    assert "has a recurrent product" in str(SCHEDULE.serves(other))
    assert SCHEDULE.expected(alone) < min(s.expected(other) for s in all_schedules().values()
                                          if s.kind == "cuda" and s.serves(other) is None)


def resources(task: Task, schedule: Schedule, config: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, int]]]:
    assert schedule.check(task, config) is None
    kernels, source = lower(schedule.program(task, schedule.plan(task, config)), "sm_90a")
    found = compile_cubin(source, "sm_90a")[1]
    for name in (name for name in kernels if name.startswith(("step", "sequence"))):
        used, threads = found[kernels[name].symbol], kernels[name].extents["threadIdx.x"]
        assert used["spill_stores"] == 0 and used["registers"] * threads <= task.device.registers
        yield name, threads, used


@pytest.mark.parametrize(("schedule", "cell", "batch", "hidden", "dtype"), [
    ("layout_transform", "lstm", 64, 1024, "float16"), ("layout_transform", "gru", 256, 1024, "float32"),
    ("fused_step", "lstm", 20, 800, "bfloat16")])
def test_registers_suffice(schedule: str, cell: str, batch: int, hidden: int, dtype: str):
    task, found = task_of(cell, (100, batch, hidden, hidden), dtype, KNOWN["sm_90a"]), SCHEDULES[schedule]
    config = found.default(task)
    made = [*resources(task, found, config)]
    counted = found.features(task, found.plan(task, config)).get("registers")
    assert made and (schedule == "fused_step" or all(used["registers"] <= counted for *_, used in made))


@pytest.mark.parametrize(("cell", "dtype", "traversal"), [
    ("indrnn", "bfloat16", Traversal(True, 2, True, True)), ("highway", "float32", ALONE),
    pytest.param("indrnn", "bfloat16", ALONE, marks=pytest.mark.exhaustive),
    pytest.param("highway", "float32", Traversal(True, 2, True, True), marks=pytest.mark.exhaustive)], ids=str)
def test_registers_of_elementwise_suffice(cell: str, dtype: str, traversal: Traversal):
    task = task_of(cell, (300, 20, 800, 800), dtype, KNOWN["sm_90a"], traversal)
    for change in ({}, {"units": 4, "group": 4}, {"units": 2, "group": 16, "prefetch": 16}):
        config = {**SCHEDULE.default(task), **change}
        ((name, threads, used),) = resources(task, SCHEDULE, config)
        assert (name, threads, used["stack"]) == ("sequence", config["threads"], 0)


def test_a_cell_of_a_user_compiles():
    module = ecornn.compile(step_cells.Highway(), hidden=24, batch=3, dtype="bfloat16", target="sm_90a", layers=2,
                            bidirectional=True, lengths=True)
    assert module.manifest.schedule == "elementwise"


HOPPER = KNOWN["sm_90a"]
NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is optional, and this reads what its ptxas says")


def resources_without_spills(source: str, kernel: str = "") -> dict[str, dict[str, int]]:
    """Checks that kernel, or all: no spills, wgmma serialized or setmaxnreg ignored, which cost most of the speed."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        given.write_text(source)
        command = [str(NVCC), "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-cubin", "-Xptxas=-v",
                   "-diag-suppress=177", str(given), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert made.read_bytes()[:4] == b"\x7fELF"
    log = done.stdout + done.stderr
    assert not re.findall(r"C75\d\d|wgmma|setmaxnreg", log), log
    found = {name: used for name, used in parse_resources(log).items() if kernel in ("", name)}
    assert found and all(used["spill_stores"] == used["stack"] == 0 for used in found.values()), found
    return found


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 800), ("bfloat16", 803), ("float32", 800)])
def test_gradients_of_weights(dtype, width):
    memory = memory_of("lstm", (300, 20, width, width), dtype, device=HOPPER)
    part = joined(*weight_gradients(memory, memory.leaves() | memory.outputs(), add=True))
    names = ("x", "before_h", "outputs", "d_weight_ih", "d_weight_hh")
    others = tuple(Buffer(n, WORKSPACE, dtype if n[:2] != "d_" else "float32", Extent(1)) for n in names)
    source = lower(Program.running(dict(part.functions), (*part.buffers, *others), part.calls), "sm_90a")[1]
    assert ("wgmma" in source) == (width % 2 == 0 and dtype == "bfloat16") and resources_without_spills(source)


@pytest.mark.parametrize(("cell", "hidden", "input", "dtype", "wide"), [
    ("lstm", 768, 768, "bfloat16", True), ("gru", 800, 800, "bfloat16", True),
    ("rnn_tanh", 2048, 2048, "bfloat16", True), ("lstm", 767, 3000, "bfloat16", True),
    ("lstm", 33, 64, "bfloat16", True), ("rnn_tanh", 100, 16, "bfloat16", False), ("gru", 7, 8, "bfloat16", False),
    ("lstm", 768, 768, "tf32", True), ("gru", 800, 803, "tf32", True)])
def test_the_projection(cell, hidden, input, dtype, wide):
    made = task_of(cell, (64, 16, input, hidden), dtype, HOPPER)
    part = project(made)
    assert part.calls[-1].threads == THREADS  # x may be copied before
    buffers = (*shared_buffers(made, hoisted_of(made)), *part.buffers)
    source = lower(Program.running(dict(part.functions), buffers, part.calls), "sm_90a")[1]
    found = resources_without_spills(source, "project_kernel")["project_kernel"]
    if wide:  # what setmaxnreg starts from is what a block of 384 threads gets; from less it would wait forever
        assert found["registers"] == 168 and "setmaxnreg" in source


@pytest.mark.parametrize(("cell", "batch", "hidden", "backward"), [
    ("lstm", 64, 1024, False), ("lstm", 64, 1536, False), ("lstm", 64, 2048, False), ("gru", 32, 2048, False),
    ("gru", 32, 2816, False), ("lstm", 64, 1024, True), ("lstm", 512, 256, True), ("gru", 64, 2048, True),
    *(pytest.param("lstm", *sizes, True, marks=pytest.mark.exhaustive) for sizes in ((64, 2048), (256, 1024)))])
def test_the_wide_kernel(cell, batch, hidden, backward):
    task, schedule = task_of(cell, (100, batch, hidden, hidden), "float16", HOPPER), PersistentWide()
    task = recurrence_of(task) if backward else task
    plan = schedule.plan(task, check_asked(schedule, task) if backward else schedule.default(task))
    source = lower(schedule.program(task, plan), "sm_90a")[1]
    found = resources_without_spills(source, "persistent_wide_kernel")["persistent_wide_kernel"]
    assert backward or found["registers"] == 65536 // plan.threads // 8 * 8
