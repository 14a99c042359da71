"""Launches that begin early, in short calls by `persistent` and in all by `persistent_block`; narrow projections."""

from __future__ import annotations

import re
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from emulated import check_numbers, known_by_name, task_of
from msgspec.structs import replace
from step_cells import LATE
from test_persistent_emulated import SMALL, cut

from ecornn.build.cuda import lower
from ecornn.program import Program, launches
from ecornn.schedules.base import Task
from ecornn.schedules.gemm.projection import job_of
from ecornn.schedules.gemm.rows_wgmma import shape_of
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent_block import PersistentBlock
from ecornn.schedules.rates import SHORT
from ecornn.targets import KNOWN
from ecornn.workload import Traversal

SCHEDULE = Persistent()
known = known_by_name(LATE)


class InAnotherOrder(Persistent):
    """``start`` as early as it may come: all of it before the projection."""

    def program(self, task: Task, plan: Any) -> Program:
        program = super().program(task, plan)
        (name, entry), = program.entries.items()
        project, start, persistent = entry.calls
        assert (project.function, start.function, persistent.function) == ("project", "start", "persistent")
        return changed(program, entries={name: changed(entry, calls=(start, project, persistent))})


class ForFewSteps(Persistent):
    """Programs of any task as if it were of a short call."""

    def program(self, task: Task, plan: Any) -> Program:
        return super().program(changed(task, workload=replace(task.workload, seq=SHORT)), plan)


def texts(task: Task, **change: Any) -> tuple[list[str], dict[str, str]]:
    """The functions whose launches are early, and the texts of kernels by name, of `persistent`."""
    return texts_of(SCHEDULE.program(task, SCHEDULE.plan(task, cut(task, **change))), task)


def texts_of(program: Program, task: Task) -> tuple[list[str], dict[str, str]]:
    _, source = lower(program, task.device.arch)
    parts = re.split(r'extern "C" __global__ void __launch_bounds__\(\d+\) (\w+)_kernel', source)
    early = [one.function for one in launches(program.calls) if one.early]
    return early, dict(zip(parts[1::2], parts[2::2], strict=True))


def buffers(text: str) -> set[str]:
    """Those whose memory a piece of a kernel touches."""
    return set(re.findall(r"\b(\w+)_ptr\[", text)) & {
        "hoisted", "vectors", "h_in", "c_in", "h_out", "c_out", "recurrent_0", "exchange_0", "y"}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_launches_begin_early_and_wait(dtype: str):
    early, kernels = texts(task_of("lstm", (SHORT, 3, 24, 40), dtype, SMALL))
    assert early == ["start", "persistent"]
    leave, wait = (f"tvm_builtin_ptx_griddepcontrol_{what}();" for what in ("launch_dependents", "wait"))
    for name, leaves, waits in (("project", 1, 0), ("start", 1, 1), ("persistent", 0, 2)):
        # the definitions of these two, which stand before the first kernel that uses them, are no statements
        assert (kernels[name].count(f"{leave}\n"), kernels[name].count(f"{wait}\n")) == (leaves, waits), name
    for name in ("project", "start"):
        assert not buffers(kernels[name].partition(leave)[0])
    written, waited = kernels["start"].split(wait)
    assert buffers(written) - {"c_in"} == {"h_in", "exchange_0"} and not buffers(waited)
    weights, products, gates = kernels["persistent"].split(wait)
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
def test_others_do_not(cell: str, steps: int, device: str, change: dict[str, Any], traversal: Traversal):
    task = task_of(cell, (steps, 3, 24, 40), "float16", replace(KNOWN[device], cores=6), traversal)
    early, kernels = texts(task, **change)
    assert "persistent" in kernels and not early
    assert not any("griddepcontrol" in text for text in kernels.values())


@pytest.mark.parametrize(("cell", "dtype"), [("lstm", "float32"), ("gru", "float16")])
def test_a_block_loads_weights_until_the_projection_has_ended(cell: str, dtype: str):
    task, schedule = task_of(cell, (40, 3, 24, 40), dtype, KNOWN["sm_90a"]), PersistentBlock()
    early, kernels = texts_of(schedule.program(task, schedule.plan(task, schedule.default(task))), task)
    assert early == ["persistent_block"]
    leave, wait = (f"tvm_builtin_ptx_griddepcontrol_{what}();" for what in ("launch_dependents", "wait"))
    assert not buffers(kernels["project"].partition(leave)[0]) and leave in kernels["project"]
    before, after = kernels["persistent_block"].split(f"{wait}\n")
    assert buffers(before) == {"recurrent_0"} and {"hoisted", "h_in", "y"} <= buffers(after)
    for other in (replace(KNOWN["sm_80"], cores=6), KNOWN["sm_90a"]):
        keep = None if other.arch == "sm_80" else "states"
        task = task_of(cell, (40, 3, 24, 40), dtype, other, Traversal(keep=keep))
        plan = schedule.plan(task, schedule.default(task))
        assert not texts_of(schedule.program(task, plan), task)[0]


def test_clusters_of_blocks_wait_for_whole_multiprocessors():
    """Two of their blocks that came to one while the projection had the others would be there for all steps."""
    task, schedule = task_of("lstm", (40, 8, 64, 64), "float16", KNOWN["sm_90a"]), PersistentBlock()
    for cluster, wanted in ((1, ["persistent_block"]), (2, [])):
        config = {"products": "mma", "rows": 8, "units": 1, "lanes": 1, "cluster": cluster, "resident": 1,
                  "registers": 100, "hoisted": "same", "math": "fast"}
        assert schedule.check(task, config) is None
        early, kernels = texts_of(schedule.program(task, schedule.plan(task, config)), task)
        assert early == wanted
        assert any("griddepcontrol" in text for text in kernels.values()) is bool(early)


@pytest.mark.parametrize(("schedule", "steps", "dtype", "traversal"), [
    (InAnotherOrder(), 5, "float16", Traversal()),
    (InAnotherOrder(), 6, "float32", Traversal(True, 2, True, True)),
    (ForFewSteps(), SHORT + 9, "bfloat16", Traversal(sequences=True)),
], ids=["before the projection", "masked", "more steps"])
def test_numbers(tmp_path: Path, schedule: Persistent, steps: int, dtype: str, traversal: Traversal):
    """Whatever comes first of what may, and for any number of steps."""
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
