"""The elementwise schedule: cells without recurrent products, emulated on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from cuda_on_cpu import Emulated, inputs
from emulated import SHAPES, TINY, check_numbers, masks_of, task_of
from exact import ALL_CELLS, of_stack
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import Wanted

import ecornn
from ecornn.analysis import analyse
from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.compose import compose, parameter_prefix
from ecornn.dtypes import SERVED
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.schedules.elementwise import Elementwise
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, SERIAL, Overlap, Stack, Traversal, Workload

SCHEDULE = Elementwise()

# (cell, sizes, dtype, knobs unlike the default's, traversal)
CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], Traversal]] = [
    ("indrnn", SHAPES[0], "float16", {}, ALONE),
    ("indrnn", SHAPES[2], "float32", {}, ALONE),
    ("indrnn", (37, 3, 5, 12), "bfloat16", {"units": 4, "prefetch": 16, "group": 4}, ALONE),  # around the ring, a rest
    ("indrnn", (32, 3, 5, 34), "float16", {"units": 2, "prefetch": 8, "group": 8}, ALONE),  # whole groups only
    ("indrnn", (33, 5, 7, 12), "float32", {"units": 4, "prefetch": 16, "group": 16}, Traversal(True, 2, True, True)),
    ("highway", SHAPES[3], "bfloat16", {}, ALONE),
    ("highway", (21, 3, 5, 12), "float16", {"units": 4, "group": 4, "threads": 32}, Traversal(False, 2, True, True)),
    ("highway", (9, 2, 5, 7), "float32", {"prefetch": 128}, Traversal(True, 1, True, False)),  # no step so far ahead
    ("highway", (40, 4, 5, 6), "bfloat16", {"prefetch": 8, "units": 2}, Traversal(True, 1, False, True)),
    ("leaky", (5, 3, 7, 7), "float16", {"math": "exact"}, ALONE),  # x itself beside its product
    ("average", (11, 3, 7, 10), "float32", {"units": 2}, ALONE),  # no product at all
    ("decay", (13, 3, 7, 10), "float32", {}, Traversal(True, 1, True, True)),  # no inputs
    ("highway", (5, 2, 9, 8), "tf32", {}, ALONE)]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "knobs", "traversal", "lazy"), [  # copies come late, and at once
    *((*case, True) for case in CASES), (*CASES[2], False), (*CASES[6], False)], ids=str)
def test_results(tmp_path: Path, cell: str, sizes: tuple[int, int, int, int], dtype: str, knobs: dict[str, Any],
                 traversal: Traversal, lazy: bool):
    task = task_of(cell, sizes, dtype, traversal=traversal)
    check_numbers(tmp_path, SCHEDULE, task, {**SCHEDULE.default(task), **knobs}, lazy=lazy)


def test_fewer_rows_than_compiled(tmp_path: Path):
    task = task_of("indrnn", (9, 7, 5, 12), "float32")
    check_numbers(tmp_path, SCHEDULE, task, SCHEDULE.default(task), batch=3)


@pytest.mark.parametrize("overlap", [SERIAL, Overlap("directions", 2), Overlap("wavefront", 2, 3, 5)], ids=str)
def test_a_stack(tmp_path: Path, overlap: Overlap):
    """Two layers with lengths and resets, in both directions where they can be: each sequence by hand, float64."""
    T, B, H, cell = 19, 4, 6, ALL_CELLS["highway"]
    stack = Stack(2, overlap.kind != "wavefront", True, True)
    whole = Workload("highway", H, H, B, T, "float32")
    masks = masks_of(Traversal(lengths=True, resets=True), T, B)
    parameters: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    states: dict[str, Any] = {}
    programs: dict[Any, Any] = {}
    given = np.empty(0)
    for part in stack.parts(whole):
        traversal, wide = part.traversal, part.workload.input
        x, first, found = inputs("highway", (T, B, wide, H), "float32", cell.parameters(wide, H), cell.states,
                                 seed=part.number)
        given = given if part.number else x
        task = Task(part.workload, analyse(cell, wide, H), TINY, traversal)
        plan = SCHEDULE.plan(task, SCHEDULE.default(task))
        programs.setdefault((part.workload, traversal), SCHEDULE.program(task, plan))
        parameters |= {parameter_prefix(stack, part) + n: v for n, v in found.items()}
        weights |= {f"{n}_{part.label}": v for n, v in found.items()}
        states |= {f"{part.label}_{n}": v for n, v in first.items()}
    program = compose(stack, whole, [programs[p.workload, p.traversal] for p in stack.parts(whole)], overlap)
    y, after = Emulated(program, tmp_path).run(given, states, parameters, masks, stack.directions)
    start, last = ([np.stack([found[f"{p.label}_{n}"] for p in stack.parts(whole)]) for n in cell.states]
                   for found in (states, after))
    Wanted("float32", lambda forward: of_stack("highway", stack, given, start, weights, masks, forward)).check(y, last)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(step_cells.NO_PRODUCT), st.sampled_from(SERVED["cuda"]), st.sampled_from(list(KNOWN)),
       st.integers(1, 300), st.integers(1, 2500))
def test_defaults_fit(cell: str, dtype: str, arch: str, batch: int, hidden: int):
    task = task_of(cell, (9, batch, hidden, hidden), dtype, KNOWN[arch])
    assert SCHEDULE.serves(task) is None
    config, knobs = SCHEDULE.default(task), {k.name: k.values for k in SCHEDULE.knobs(task)}
    assert SCHEDULE.check(task, config) is None
    assert set(config) == set(knobs) and all(value in knobs[name] for name, value in config.items())
    features = SCHEDULE.features(task, SCHEDULE.plan(task, config))
    assert features["waste"] >= 1 and all(np.isfinite(v) and v >= 0 for v in features.values())
    assert 0 < SCHEDULE.expected(task) < 1e9


def test_it_is_chosen_for_such_cells_and_for_no_other():
    device = KNOWN["sm_90a"]
    alone = task_of("indrnn", (300, 20, 800, 800), "bfloat16", device)
    assert serving_or_raise(alone)[0].name == "elementwise"
    other = task_of("rnn_relu", (300, 20, 800, 800), "bfloat16", device)
    assert "has a recurrent product" in str(SCHEDULE.serves(other))
    assert SCHEDULE.expected(alone) < min(s.expected(other) for s in all_schedules().values()
                                          if s.kind == "cuda" and s.serves(other) is None)


@pytest.mark.parametrize(("knobs", "reason"), [
    ({"prefetch": 8, "group": 16}, "groups of 16 steps"),
    ({"prefetch": 128, "threads": 256, "units": 4}, "shared memory"),
    ({"group": 16, "units": 4, "threads": 256, "prefetch": 16}, "registers")])
def test_configurations_that_cannot_run(knobs: dict[str, Any], reason: str):
    task = task_of("highway", (300, 20, 800, 800), "float16", KNOWN["sm_90a"])
    assert reason in str(SCHEDULE.check(task, {**SCHEDULE.default(task), **knobs}))


@pytest.mark.parametrize(("cell", "dtype", "traversal"), [
    ("indrnn", "bfloat16", Traversal(True, 2, True, True)), ("highway", "float32", ALONE),
    pytest.param("indrnn", "bfloat16", ALONE, marks=pytest.mark.exhaustive),
    pytest.param("highway", "float32", Traversal(True, 2, True, True), marks=pytest.mark.exhaustive)], ids=str)
def test_registers_suffice(cell: str, dtype: str, traversal: Traversal):
    """None spills, in the largest unrolled codes too, and a block can start."""
    task = task_of(cell, (300, 20, 800, 800), dtype, KNOWN["sm_90a"], traversal)
    for change in ({}, {"units": 4, "group": 4}, {"units": 2, "group": 16, "prefetch": 16}):
        config = {**SCHEDULE.default(task), **change}
        assert SCHEDULE.check(task, config) is None
        kernels, source = lower(SCHEDULE.program(task, SCHEDULE.plan(task, config)), "sm_90a")
        used = compile_cubin(source, "sm_90a")[1][kernels["sequence"].symbol]
        assert used["spill_stores"] == used["stack"] == 0
        assert used["registers"] * config["threads"] <= task.device.registers


def test_a_cell_of_a_user_compiles():
    module = ecornn.compile(step_cells.Highway(), hidden=24, batch=3, dtype="bfloat16", target="sm_90a", layers=2,
                            bidirectional=True, lengths=True)
    assert module.manifest.schedule == "elementwise"
