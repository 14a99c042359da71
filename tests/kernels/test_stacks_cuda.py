"""Stacks, directions, lengths and resets on CUDA: programs of every schedule emulated, and compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from exact import of_stack
from limits import Wanted
from msgspec.structs import replace

from ecornn.analysis import analyse
from ecornn.build.cuda import generate
from ecornn.cells import get
from ecornn.compose import compose, parameter_prefix
from ecornn.device import Device
from ecornn.program import Program, Wave
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.schedules.step.whole_step import WholeStep
from ecornn.targets import KNOWN
from ecornn.workload import SERIAL, Overlap, Stack, Workload

TINY = replace(KNOWN["sm_90a"], cores=3)  # few blocks to emulate
SCHEDULES = {s.name: s for s in (FusedStep(), LayoutTransform(), Persistent(), PersistentWide(), WholeStep())}
T, B, I, H = 5, 6, 7, 37


def program_of(schedule: str, cell: str, stack: Stack, dtype: str, cores: int = 3,
               forward: dict[str, int] | None = None, overlap: Overlap = SERIAL, **change: int) -> Program:
    """With these knobs, those of ``forward`` only in sequences that do not go in reverse."""
    whole, device = Workload(cell, H, I, B, T, dtype), replace(TINY, cores=cores)
    made = {}
    for part in stack.parts(whole):
        if (part.workload, part.traversal) not in made:
            graph = analyse(get(cell), part.workload.input, H)
            task = Task(part.workload, graph, device, part.traversal)
            assert SCHEDULES[schedule].serves(task) is None
            own = {} if part.traversal.reverse else forward or {}
            config = {**SCHEDULES[schedule].default(task), **change, **own}
            assert SCHEDULES[schedule].check(task, config) is None
            plan = SCHEDULES[schedule].plan(task, config)
            made[part.workload, part.traversal] = SCHEDULES[schedule].program(task, plan)
    return compose(stack, whole, [made[p.workload, p.traversal] for p in stack.parts(whole)], overlap)


SIDES = Overlap("directions", 2)
CASES = [("fused_step", "lstm", Stack(2, True, True, True), "float32"),
         ("fused_step", "gru_reset_before", Stack(1, True, True, True), "bfloat16"),
         ("layout_transform", "gru", Stack(2, True, True, True), "float16"),
         ("layout_transform", "rnn_tanh", Stack(3, False, True, False), "float32"),
         ("layout_transform", "gru_reset_before", Stack(1, True, False, True), "float32"),
         ("persistent", "lstm", Stack(2, True, True, True), "bfloat16"),
         ("persistent", "gru", Stack(3, False, True, True), "float16"),
         ("persistent", "gru_reset_before", Stack(1, True, True, True), "float32"),
         ("persistent_wide", "lstm", Stack(2, True, True, True), "float16"),
         ("whole_step", "lstm", Stack(2, True, True, True), "float16"),
         ("fused_step", "lstm(layer_norm)", Stack(2, True, True, True), "float32"),
         ("persistent", "lstm(layer_norm)", Stack(2, True, True, True), "float16")]


@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype"), CASES, ids=str)
def test_results(tmp_path: Path, schedule: str, cell: str, stack: Stack, dtype: str):
    check_results(Emulated(program_of(schedule, cell, stack, dtype), tmp_path), cell, stack, dtype)


@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype"), [c for c in CASES if c[2].bidirectional], ids=str)
def test_directions_side_by_side(tmp_path: Path, schedule: str, cell: str, stack: Stack, dtype: str):
    """Their launches mixed: what one writes the other must not use."""
    program = program_of(schedule, cell, stack, dtype, overlap=SIDES)
    assert len(program.calls) == stack.layers
    check_results(Emulated(program, tmp_path), cell, stack, dtype)


WAVES = [("fused_step", "gru_reset_before", Stack(3, False, True, True), "float32", 3, {}),
         ("layout_transform", "rnn_tanh", Stack(5, False, True), "float16", 2, {}),
         pytest.param(*("persistent", "lstm", Stack(3), "bfloat16", 3, {}), marks=pytest.mark.exhaustive),
         pytest.param(*("persistent", "gru", Stack(4, False, False, True), "float32", 3, {"cores": 7, "ahead": 0}),
                      marks=pytest.mark.exhaustive),
         ("persistent", "lstm", Stack(2, False, True, True), "float16", 2, {}),
         ("persistent_wide", "lstm", Stack(2, False, True, True), "float16", 2, {}),
         ("whole_step", "gru", Stack(3, False, True, True), "float32", 3, {}),
         ("persistent", "gru(layer_norm)", Stack(2, False, True, True), "float32", 2, {})]


@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype", "width", "change"), WAVES, ids=str)
def test_a_wavefront(tmp_path: Path, schedule: str, cell: str, stack: Stack, dtype: str, width: int,
                     change: dict[str, int]):
    """With less than a chunk, a chunk and a step, and several; states and resets at the ends of chunks."""
    program = program_of(schedule, cell, stack, dtype, overlap=Overlap("wavefront", width, 3, 5), **change)
    assert sum(isinstance(call, Wave) for call in program.calls) == max(1, stack.layers // width)
    emulated = Emulated(program, tmp_path)
    for steps in (1, 9, 19):
        check_results(emulated, cell, stack, dtype, steps)


def check_results(emulated: Emulated, cell: str, stack: Stack, dtype: str, T: int = T) -> None:
    """A program for up to B rows of I elements, with units of H, against float64."""
    whole, generator = Workload(cell, H, I, B, T, dtype), np.random.default_rng(2)
    parameters, weights, states = {}, {}, {}
    for part in stack.parts(whole):
        shapes = get(cell).parameters(part.workload.input, H)
        x, first, found = inputs(cell, (T, B, part.workload.input, H), dtype, shapes, get(cell).states,
                                 seed=part.number)
        prefix, label = parameter_prefix(stack, part), f"{part.label}_" if stack.count > 1 else ""
        parameters |= {prefix + n: v for n, v in found.items()}
        weights |= {f"{n}_{part.label}": v.reshape(-1, *v.shape[2:]) for n, v in found.items()}
        states |= {label + n: v for n, v in first.items()}
        if not part.number:
            given = x
    masks = {"lengths": np.minimum([3, max(T, 5), 0, 8, 1, 12], T)} if stack.lengths else {}
    if stack.resets:
        masks["resets"] = generator.random((T, B)) < 0.4
        masks["resets"][8:9] = np.arange(B) % 2
    for b, n in enumerate(masks.get("lengths", ())):
        given[n:, b] = np.nan
    y, after = emulated.run(given, states, parameters, masks, stack.directions)
    start = [np.stack([v for n, v in states.items() if n.removesuffix(s) != n]).astype(np.float64)
             for s in get(cell).states]
    start = start if stack.count > 1 else [s[0] for s in start]
    exact = np.nan_to_num(given.astype(np.float64))
    wanted = Wanted(dtype, lambda forward: of_stack(cell, stack, exact, start, weights, masks, forward))
    last = [np.stack([v for n, v in after.items() if n.removesuffix(name) != n]) for name in get(cell).states]
    wanted.check(y, last if stack.count > 1 else [s[0] for s in last])
    for b, n in enumerate(masks.get("lengths", ())):
        assert not y[n:, b].astype(np.float32).any()


@pytest.mark.parametrize(("cell", "dtype"), [
    pytest.param("lstm", "bfloat16", marks=pytest.mark.exhaustive), ("gru_reset_before", "float32"),
    pytest.param("lstm", "float32", marks=pytest.mark.exhaustive),
    pytest.param("gru_reset_before", "bfloat16", marks=pytest.mark.exhaustive)])
def test_persistent_stacks_compile(cell: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    """With predicates as without, and no register spilled; equal layers share their kernels."""
    stack = Stack(3, True, True, True)
    clusters = program_of("persistent", cell, stack, dtype, cores=132)
    assert sorted(clusters.functions) == sorted(f"{n}{end}" for n in ("project", "persistent") for end in ("", "_v1"))
    monkeypatch.setattr(Device, "clusters", lambda self, blocks: 0)
    monkeypatch.setattr(SCHEDULES["persistent"], "_known", {})
    before = program_of("persistent", cell, stack, dtype, cores=132, ahead=100)
    # one projection for each width of x, the others for each direction
    assert sorted(before.functions) == sorted(f"{n}{end}" for n in ("project", "persistent", "start")
                                              for end in ("", "_v1"))
    # kernels that have the projection in them are of one width, too
    beside = program_of("persistent", cell, stack, dtype, cores=132, ahead=100, forward={"ahead": 50})
    assert sum(name.startswith("persistent") for name in beside.functions) == 3
    for program in (before, beside, clusters):
        made = generate(program, KNOWN["sm_90a"])
        assert all(found["spill_stores"] == 0 for found in made.resources.values())
