"""Calls of a few steps: launches that begin early, narrow projections, `whole_step`, and what is chosen."""

import re
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, known_by_name, task_of
from msgspec.structs import replace
from step_cells import LATE
from test_persistent_emulated import SMALL, cut

from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.compiler import plan
from ecornn.program import Program, Relay, launches
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.schedules.gemm.projection import job_of
from ecornn.schedules.gemm.rows_wgmma import shape_of
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent_block import PersistentBlock
from ecornn.schedules.rates import SHORT
from ecornn.schedules.step.whole_step import WholeStep
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import FEW, Traversal

LEAVE, WAIT = (f"tvm_builtin_ptx_griddepcontrol_{what}();" for what in ("launch_dependents", "wait"))
known = known_by_name(LATE)


def replaced(task: Task, steps: int) -> Task:
    return changed(task, workload=replace(task.workload, seq=steps))


class InAnotherOrder(Persistent):
    def program(self, task: Task, plan: Any) -> Program:
        program = super().program(task, plan)
        (name, entry), = program.entries.items()
        project, start, persistent = entry.calls
        assert (project.function, start.function, persistent.function) == ("project", "start", "persistent")
        return changed(program, entries={name: changed(entry, calls=(start, project, persistent))})


class ForFewSteps(Persistent):
    def program(self, task: Task, plan: Any) -> Program:
        return super().program(replaced(task, SHORT), plan)


def program_of(schedule: Schedule, task: Task, config: Config | None = None) -> Program:
    config = schedule.default(task) if config is None else config
    assert schedule.check(task, config) is None
    return schedule.program(task, schedule.plan(task, config))


def texts(schedule: Schedule, task: Task, config: Config | None = None) -> tuple[list[str], dict[str, str]]:
    program = program_of(schedule, task, config)
    source = lower(program, task.device.arch)[1]
    parts = re.split(r'extern "C" __global__ void __launch_bounds__\(\d+\) (\w+)_kernel', source)
    early = [one.function for one in launches(program.calls) if one.early]
    return early, dict(zip(parts[1::2], parts[2::2], strict=True))


def buffers(text: str) -> set[str]:
    return set(re.findall(r"\b(\w+)_ptr\[", text)) & {
        "hoisted", "vectors", "h_in", "c_in", "h_out", "c_out", "recurrent_0", "exchange_0", "y"}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_launches_begin_early_and_wait(dtype: str):
    task = task_of("lstm", (SHORT, 3, 24, 40), dtype, SMALL)
    early, kernels = texts(Persistent(), task, cut(task))
    assert early == ["start", "persistent"]
    for name, leaves, waits in (("project", 1, 0), ("start", 1, 1), ("persistent", 0, 2)):
        # the definitions of these two, which stand before the first kernel that uses them, are no statements
        assert (kernels[name].count(f"{LEAVE}\n"), kernels[name].count(f"{WAIT}\n")) == (leaves, waits), name
    for name in ("project", "start"):
        assert not buffers(kernels[name].partition(LEAVE)[0])
    written, waited = kernels["start"].split(WAIT)
    assert buffers(written) - {"c_in"} == {"h_in", "exchange_0"} and not buffers(waited)
    weights, products, gates = kernels["persistent"].split(WAIT)
    assert buffers(weights) == {"recurrent_0"} and buffers(products) == {"exchange_0"}
    assert buffers(gates) >= {"hoisted", "h_in", "c_in", "exchange_0", "y"}


@pytest.mark.parametrize(("cell", "steps", "device", "change", "traversal"), [
    ("lstm", SHORT + 1, "sm_90a", {}, Traversal()),
    ("lstm", 4, "sm_80", {}, Traversal()),
    ("lstm", 4, "sm_90a", {"ahead": 50}, Traversal()),  # the projection counts its tiles in what start makes zero
    ("lstm", 4, "sm_90a", {"carrier": "cluster", "fences": "rare"}, Traversal()),  # states come before weights
    ("lstm(layer_norm)", 4, "sm_90a", {}, Traversal()),  # words of statistics are wiped between
    ("lstm", 4, "sm_90a", {}, Traversal(keep="gates")),  # another workspace may be where the exchange is
    ("scrn", 4, "sm_90a", {}, Traversal()),  # start reads the projection
], ids=str)
def test_others_do_not(cell, steps, device, change, traversal):
    task = task_of(cell, (steps, 3, 24, 40), "float16", replace(KNOWN[device], cores=6), traversal)
    early, kernels = texts(Persistent(), task, cut(task, **change))
    assert "persistent" in kernels and not early and not any("griddepcontrol" in text for text in kernels.values())


@pytest.mark.parametrize(("cell", "dtype"), [("lstm", "float32"), ("gru", "float16")])
def test_a_block_loads_weights_until_the_projection_has_ended(cell: str, dtype: str):
    task, schedule = task_of(cell, (40, 3, 24, 40), dtype, KNOWN["sm_90a"]), PersistentBlock()
    early, kernels = texts(schedule, task)
    assert early == ["persistent_block"]
    assert not buffers(kernels["project"].partition(LEAVE)[0]) and LEAVE in kernels["project"]
    before, after = kernels["persistent_block"].split(f"{WAIT}\n")
    assert buffers(before) == {"recurrent_0"} and {"hoisted", "h_in", "y"} <= buffers(after)
    for other, keep in ((replace(KNOWN["sm_80"], cores=6), None), (KNOWN["sm_90a"], "states")):
        assert not texts(schedule, task_of(cell, (40, 3, 24, 40), dtype, other, Traversal(keep=keep)))[0]


def test_clusters_of_blocks_wait_for_whole_multiprocessors():
    """Two of their blocks that came to one while the projection had the others would be there for all steps."""
    task, schedule = task_of("lstm", (40, 8, 64, 64), "float16", KNOWN["sm_90a"]), PersistentBlock()
    for cluster, wanted in ((1, ["persistent_block"]), (2, [])):
        config = {"products": "mma", "rows": 8, "units": 1, "lanes": 1, "cluster": cluster, "resident": 1,
                  "registers": 100, "hoisted": "same", "math": "fast"}
        early, kernels = texts(schedule, task, config)
        assert early == wanted and any("griddepcontrol" in text for text in kernels.values()) is bool(early)


@pytest.mark.parametrize(("schedule", "steps", "dtype", "traversal"), [
    (InAnotherOrder(), 5, "float16", Traversal()),
    (InAnotherOrder(), 6, "float32", Traversal(True, 2, True, True)),
    (ForFewSteps(), SHORT + 9, "bfloat16", Traversal(sequences=True)),
], ids=["before the projection", "masked", "more steps"])
def test_numbers(tmp_path: Path, schedule: Persistent, steps: int, dtype: str, traversal: Traversal):
    task = task_of("lstm", (steps, 9, 24, 40), dtype, SMALL, traversal)
    check_numbers(tmp_path, schedule, task, cut(task, groups=2, units=24))


def test_a_projection_of_few_rows_is_in_narrow_tiles():
    """A group of 128 rows by tiles of 256 columns would be 16 blocks, of which each reads half a MB of weights."""
    def tiles(steps: int, batch: int) -> tuple[int, int]:
        shape = shape_of(job_of(task_of("lstm", (steps, batch, 1024, 1024), "float16", KNOWN["sm_90a"])))
        assert shape is not None
        return shape.columns, shape.width
    assert tiles(8, 16) == (64, 64)
    assert tiles(SHORT + 1, 16) == (16, 256)  # as records have timed it
    assert tiles(SHORT, 512) == (16, 256)  # 64 groups of rows: the chip is full anyway


WHOLE = WholeStep()


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
def test_results(tmp_path, cell, sizes, dtype, knobs):
    task = task_of(cell, sizes, dtype)
    check_numbers(tmp_path, WHOLE, task, {**WHOLE.default(task), **knobs})


@pytest.mark.parametrize(("traversal", "steps"), [
    (Traversal(lengths=True, resets=True, reverse=True, directions=2), 3), (Traversal(lengths=True), 3),
    (Traversal(resets=True), 1), (Traversal(resets=True, reverse=True), 2)], ids=str)
def test_directions_lengths_and_resets(tmp_path: Path, traversal: Traversal, steps: int):
    task = task_of("gru", (steps, 9, 24, 40), "float16", traversal=traversal)
    check_numbers(tmp_path, WHOLE, task, WHOLE.default(task), batch=7)


@pytest.mark.parametrize("steps", [1, 2])
def test_states_may_be_in_place(tmp_path: Path, steps: int):
    """Some blocks write the new state while others still read the old one: these must not be in one place."""
    sizes = (steps, 11, 24, 64)
    task = task_of("lstm", sizes, "float16")
    emulated = Emulated(program_of(WHOLE, task, {**WHOLE.default(task), "units": 8, "rows": 8}), tmp_path)
    x, states, parameters = inputs("lstm", sizes, "float16", task.graph.parameters, ("h", "c"))
    apart = emulated.run(x, states, parameters)
    given = {"x": x, "y": steps * 11 * 64, "state_out": 11 * 64}
    memory = emulated.memory(steps, parameters, lambda b: given.get(b.tensor or ""))
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
    emulated = Emulated(program_of(WHOLE, task), tmp_path)
    x, states, parameters = inputs("gru", sizes, "float16", task.graph.parameters, ("h",))
    given = {"x": x, "y": 3 * 40, "state_in": states["h"], "state_out": 3 * 40}
    memory = emulated.memory(1, parameters, lambda b: given.get(b.tensor or ""))
    emulated.carry_out(memory, 1, 3)
    spaces = [b.name for b in emulated.program.buffers if b.role == "workspace"]
    assert spaces == ["states", "state_before", "state_after"]
    assert all((memory[name].view(np.uint8)[:-256] == 0xFF).all() for name in spaces)


@pytest.mark.parametrize(("cell", "sizes", "dtype"), [
    ("lstm", (1, 16, 1024, 1024), "float16"), ("gru", (1, 64, 512, 512), "float32")], ids=str)
def test_defaults_compile_without_spills(cell: str, sizes: tuple[int, int, int, int], dtype: str):
    task = task_of(cell, sizes, dtype, KNOWN["sm_90a"])
    (used,) = compile_cubin(lower(program_of(WHOLE, task), "sm_90a")[1], "sm_90a")[1].values()
    assert used["spill_stores"] == used["stack"] == 0
    assert 32 * WHOLE.plan(task, WHOLE.default(task)).warps * used["registers"] <= KNOWN["sm_90a"].registers


def test_launches_may_begin_early():
    task = task_of("lstm", (1, 4, 32, 32), "float16", KNOWN["sm_90a"])
    for chained in (True, False):
        program = program_of(WHOLE, task, {**WHOLE.default(task), "chained": chained})
        (call,) = program.calls
        assert call.calls[0].early == ("griddepcontrol.wait" in lower(program, "sm_90a")[1]) == chained
        assert isinstance(call, Relay)
    older = program_of(WHOLE, task_of("lstm", (1, 4, 32, 32), "float16", KNOWN["sm_80"]))
    compile_cubin(lower(older, "sm_80")[1], "sm_80")  # which knows of none


@pytest.mark.parametrize(("cell", "traversal", "reason"), [
    ("gru_reset_before", Traversal(), "2 recurrent products in sequence"),
    ("indrnn", Traversal(), "0 recurrent products"), ("pair", Traversal(), "a value that is not a state"),
    ("lstm(layer_norm)", Traversal(), "sums over a batch row"), ("lstm", Traversal(keep="gates"), "does not keep")])
def test_what_it_does_not_serve(cell: str, traversal: Traversal, reason: str):
    assert reason in str(WHOLE.serves(task_of(cell, (1, 4, 16, 16), "float32", KNOWN["sm_90a"], traversal)))


def test_what_is_chosen_for_how_many_steps():
    for hidden in (1024, 333):
        sizes = {"hidden": hidden, "batch": 16, "dtype": "float16", "target": "sm_90a"}
        few, many = (plan("lstm", seq=seq, **sizes).found for seq in (1, 300))
        assert few.schedule.name == "whole_step" != many.schedule.name
        assert few.provenance.startswith("untuned default of whole_step: ")
    assert "whose record h100" in plan("lstm", seq=1, hidden=1024, batch=16, dtype="float16",
                                          target="sm_90a").found.provenance
    task = task_of("lstm", (FEW + 1, 4, 16, 16), "float32", KNOWN["sm_90a"])
    assert "at most 8 steps" in str(WHOLE.serves(task)) and WHOLE.serves(replaced(task, FEW)) is None


@pytest.mark.parametrize(("cell", "hidden", "dtype"), [("lstm", 16, "float32"), ("gru", 64, "float16")])
def test_a_layer_that_fits_in_a_block_needs_fewer_launches(cell, hidden, dtype):
    """A call of eight steps of 16 units takes 18 us with a launch each, 6 in a block; one of a step 3 and 4."""
    task = task_of(cell, (1, 1, hidden, hidden), dtype, KNOWN["sm_90a"])
    chosen = [serving_or_raise(replaced(task, steps))[0].name for steps in (1, 4, FEW)]
    assert chosen == ["whole_step", "persistent_block", "persistent_block"]
