"""Calls of a few steps, each step one launch: results in the emulation, states in place, what is chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, task_of
from msgspec.structs import replace

from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.compiler import plan
from ecornn.program import Relay
from ecornn.schedules.base import Task
from ecornn.schedules.step.whole_step import WholeStep
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import FEW, Traversal

SCHEDULE = WholeStep()


@pytest.mark.parametrize(("cell", "sizes", "dtype", "knobs"), [
    ("lstm", (1, 5, 33, 40), "float16", {"units": 4, "rows": 8, "warps": 4, "ahead": 2}),  # rows of x of odd length
    ("lstm", (3, 20, 64, 128), "bfloat16", {"units": 8, "rows": 16, "warps": 2, "ahead": 1}),  # loads behind products
    ("gru", (2, 17, 30, 50), "float32", {"units": 8, "rows": 24, "warps": 4, "ahead": 4}),  # half of an m16 tile
    ("gru", (1, 3, 300, 70), "float16", {"units": 16, "rows": 8, "warps": 4, "ahead": 2}),  # rounds that are not whole
    ("gru", (1, 1, 1, 1), "float32", {}),
    ("rnn_tanh", (8, 33, 10, 129), "tf32", {"units": 16, "rows": 16, "warps": 2, "ahead": 2}),
    ("slstm", (4, 3, 64, 64), "float16", {"chained": False}),  # four states
    ("lstm(peepholes)", (2, 3, 16, 24), "float32", {}),
    ("gru", (3, 20, 40, 72), "bfloat16", {"units": 8, "rows": 16, "warps": 4, "cluster": 4}),  # rows with an end
    ("lstm", (1, 3, 28, 52), "float32", {"units": 8, "warps": 4, "cluster": 2}),
    ("rnn_tanh", (2, 9, 64, 128), "float16", {"units": 8, "ahead": 1, "warps": 2, "cluster": 8}),
], ids=str)
def test_results(tmp_path: Path, cell: str, sizes: tuple[int, int, int, int], dtype: str, knobs: dict[str, Any]):
    task = task_of(cell, sizes, dtype)
    check_numbers(tmp_path, SCHEDULE, task, {**SCHEDULE.default(task), **knobs})


@pytest.mark.parametrize(("traversal", "steps"), [
    (Traversal(lengths=True, resets=True, reverse=True, directions=2), 3), (Traversal(lengths=True), 3),
    (Traversal(resets=True), 1), (Traversal(resets=True, reverse=True), 2)], ids=str)
def test_directions_lengths_and_resets(tmp_path: Path, traversal: Traversal, steps: int):
    task = task_of("gru", (steps, 9, 24, 40), "float16", traversal=traversal)
    check_numbers(tmp_path, SCHEDULE, task, SCHEDULE.default(task), batch=7)


@pytest.mark.parametrize("steps", [1, 2])
def test_states_may_be_in_place(tmp_path: Path, steps: int):
    """Some blocks write the new state while others still read the old one: these must not be in one place."""
    sizes = (steps, 11, 24, 64)
    task = task_of("lstm", sizes, "float16")
    config = {**SCHEDULE.default(task), "units": 8, "rows": 8}
    program = SCHEDULE.program(task, SCHEDULE.plan(task, config))
    emulated = Emulated(program, tmp_path)
    x, states, parameters = inputs("lstm", sizes, "float16", task.graph.parameters, ("h", "c"))
    apart = emulated.run(x, states, parameters)
    memory = {b.name: emulated._allocate(b, x, states, parameters, (steps, 11, 11 * 64, 64)) for b in program.buffers}
    memory |= {f"{name}_in": memory[f"{name}_out"] for name in states}
    for name, value in states.items():
        memory[f"{name}_in"][:value.size] = value.reshape(-1)
    emulated.carry_out(memory, steps, 11)
    for name in states:
        assert np.array_equal(memory[f"{name}_out"][:11 * 64], apart[1][name].reshape(-1))
    assert np.array_equal(memory["y"][:apart[0].size], apart[0].reshape(-1))


def test_a_call_of_one_step_uses_no_workspace(tmp_path: Path):
    sizes = (1, 3, 24, 40)
    task = task_of("gru", sizes, "float16")
    program = SCHEDULE.program(task, SCHEDULE.plan(task, SCHEDULE.default(task)))
    emulated = Emulated(program, tmp_path)
    x, states, parameters = inputs("gru", sizes, "float16", task.graph.parameters, ("h",))
    memory = {b.name: emulated._allocate(b, x, states, parameters, (1, 3, 3 * 40, 40)) for b in program.buffers}
    emulated.carry_out(memory, 1, 3)
    spaces = [b.name for b in program.buffers if b.role == "workspace"]
    assert spaces == ["states", "state_before", "state_after"]
    assert all((memory[name].view(np.uint8)[:-256] == 0xFF).all() for name in spaces)


@pytest.mark.parametrize(("cell", "sizes", "dtype"), [
    ("lstm", (1, 16, 1024, 1024), "float16"), ("gru", (1, 64, 512, 512), "float32")], ids=str)
def test_defaults_compile_without_spills(cell: str, sizes: tuple[int, int, int, int], dtype: str):
    task = task_of(cell, sizes, dtype, KNOWN["sm_90a"])
    config = SCHEDULE.default(task)
    _, source = lower(SCHEDULE.program(task, SCHEDULE.plan(task, config)), "sm_90a")
    (used,) = compile_cubin(source, "sm_90a")[1].values()
    assert used["spill_stores"] == used["stack"] == 0
    registers = 32 * WholeStep().plan(task, config).warps * used["registers"]
    assert registers <= KNOWN["sm_90a"].registers


def test_launches_may_begin_early():
    task = task_of("lstm", (1, 4, 32, 32), "float16", KNOWN["sm_90a"])
    for chained in (True, False):
        program = SCHEDULE.program(task, SCHEDULE.plan(task, {**SCHEDULE.default(task), "chained": chained}))
        _, source = lower(program, "sm_90a")
        (call,) = program.calls
        assert call.calls[0].early == ("griddepcontrol.wait" in source) == chained
        assert isinstance(call, Relay)
    older = task_of("lstm", (1, 4, 32, 32), "float16", KNOWN["sm_80"])
    program = SCHEDULE.program(older, SCHEDULE.plan(older, SCHEDULE.default(older)))
    compile_cubin(lower(program, "sm_80")[1], "sm_80")  # which knows of none


@pytest.mark.parametrize(("cell", "traversal", "reason"), [
    ("gru_reset_before", Traversal(), "2 recurrent products after each other"),
    ("indrnn", Traversal(), "0 recurrent products"), ("pair", Traversal(), "something else than a state"),
    ("lstm(layer_norm)", Traversal(), "sums over a batch row"), ("lstm", Traversal(keep="gates"), "keeps nothing")])
def test_what_it_does_not_serve(cell: str, traversal: Traversal, reason: str):
    assert reason in str(SCHEDULE.serves(task_of(cell, (1, 4, 16, 16), "float32", KNOWN["sm_90a"], traversal)))


def test_what_is_chosen_for_how_many_steps():
    """By the estimate, beside records of long sequences and without any; never for long ones."""
    for hidden in (1024, 333):
        sizes = {"hidden": hidden, "batch": 16, "dtype": "float16", "target": "sm_90a"}
        few, many = (plan("lstm", seq=seq, **sizes).found for seq in (1, 300))
        assert few.schedule.name == "whole_step" != many.schedule.name
        assert few.provenance.startswith("untuned default of whole_step: ")
    assert "of which record h100" in plan("lstm", seq=1, hidden=1024, batch=16, dtype="float16",
                                          target="sm_90a").found.provenance
    task = task_of("lstm", (FEW + 1, 4, 16, 16), "float32", KNOWN["sm_90a"])
    assert "8 steps at most" in str(SCHEDULE.serves(task))
    assert SCHEDULE.serves(replaced(task, FEW)) is None


@pytest.mark.parametrize(("cell", "hidden", "dtype"), [("lstm", 16, "float32"), ("gru", 64, "float16")])
def test_a_layer_that_fits_in_a_block_needs_fewer_launches(cell, hidden, dtype):
    """A call of eight steps of 16 units takes 18 us with a launch each, 6 in a block; one of a step 3 and 4."""
    task = task_of(cell, (1, 1, hidden, hidden), dtype, KNOWN["sm_90a"])
    chosen = [serving_or_raise(replaced(task, steps))[0].name for steps in (1, 4, FEW)]
    assert chosen == ["whole_step", "persistent_block", "persistent_block"]


def replaced(task: Task, steps: int) -> Task:
    return dataclasses.replace(task, workload=replace(task.workload, seq=steps))
