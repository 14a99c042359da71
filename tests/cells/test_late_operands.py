"""Products of what depends on x and on a state, before any exchange: served by every schedule, emulated, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from drawn_layers import Drawn
from emulated import TINY, check_numbers, known_by_name, task_of
from exact import ALL_CELLS
from msgspec.structs import replace
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_emulated import cut

import ecornn
from ecornn.analysis.liveness import late_operands
from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.cells import Cell, normalized, pointwise, product
from ecornn.schedules import all_schedules
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, Traversal

pytestmark = pytest.mark.usefixtures("small_tiles")

SIZES = (6, 5, 9, 22)
BOTH = Traversal(True, 2, True, True)
known = known_by_name(step_cells.LATE)


@pytest.mark.parametrize(("cell", "schedule", "dtype", "change", "traversal"), [
    ("lru", "fused_step", "float32", {}, BOTH), ("scrn", "fused_step", "float16", {}, ALONE),
    ("lru", "layout_transform", "bfloat16", {"hoisted": "same"}, ALONE),
    ("scrn", "layout_transform", "float32", {"hoisted": "float32"}, BOTH),
    ("lru", "persistent", "bfloat16", {"hoisted": "same"}, BOTH),
    ("lru", "persistent_wide", "bfloat16", {}, BOTH),
    ("lru", "persistent_wide", "float16", {}, Traversal(sequences=True)),
    ("scrn", "persistent", "float32", {}, ALONE),  # two products that wait for each other
    ("scrn", "persistent", "float16", {}, Traversal(sequences=True)),
    ("lru", "persistent", "float32", {"carrier": "cluster", "fences": "rare", "units": 8},
     BOTH)], ids=str)
def test_results(tmp_path: Path, cell: str, schedule: str, dtype: str, change: dict[str, Any], traversal: Traversal):
    device = replace(TINY, cores=12) if "carrier" in change else TINY
    task = task_of(cell, SIZES, dtype, device, traversal)
    found = all_schedules()[schedule]
    assert found.serves(task) is None
    config = cut(task, **change) if "carrier" in change else {**found.default(task), **change}
    check_numbers(tmp_path, found, task, config)


@pytest.mark.parametrize(("cell", "schedule", "dtype", "traversal"), [
    ("lru", "persistent", "float32", Traversal(False, 1, True, True)), ("scrn", "persistent", "bfloat16", ALONE),
    ("lru", "persistent_wide", "bfloat16", Traversal(False, 1, True, True)),
    ("scrn", "layout_transform", "float32", Traversal(False, 1, True, True))], ids=str)
def test_their_adjoints(tmp_path: Path, cell: str, schedule: str, dtype: str, traversal: Traversal):
    """Whose first product is of the gradient of y, which each step reads, and of gradients of states."""
    check_recurrence(tmp_path, all_schedules()[schedule], task_of(cell, SIZES, dtype, TINY, traversal))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "scrn" else pytest.mark.exhaustive) for name in step_cells.LATE])
def test_training_compiles_for_a_gpu_and_runs_on_a_cpu(name: str):
    """The module of a GPU has a backward pass; that of a CPU makes what the formula and the adjoint do."""
    cell = step_cells.LATE[name]
    entries = ecornn.compile(cell, hidden=24, input=9, batch=3, target="sm_90a", training=True).manifest.entries
    assert {"run", "forward", "backward"} <= {*entries}
    module = ecornn.compile(cell, hidden=7, input=4, batch=3, dtype="float64", target="cpu", training=True)
    drawn = Drawn(cell, (5, 3, 4, 7), scale=0.4)
    layer = module.bind(drawn.weights)
    y, last, kept = layer.forward(drawn.x, drawn.first)
    drawn.check_call(y, last, 1e-12)
    drawn.check_backward(layer.backward(kept, drawn.dy, drawn.dlast), 1e-10)


@pytest.mark.parametrize("schedule", ["persistent", "persistent_wide"])
def test_registers_suffice(schedule: str):
    """Inputs of two steps are kept: nothing spills."""
    task = task_of("lru", (300, 64, 512, 1024), "bfloat16", KNOWN["sm_90a"], Traversal(lengths=True))
    found = all_schedules()[schedule]
    assert found.serves(task) is None
    kernels, source = lower(found.program(task, found.plan(task, found.default(task))), "sm_90a")
    used = compile_cubin(source, "sm_90a")[1][kernels[schedule].symbol]
    assert used["spill_stores"] == used["stack"] == 0


class Normalized(Cell):
    """The late operand takes statistics of x."""

    name, states = "normalized", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, normalized(product(x, p["W"], 0))
        mixed = product(pointwise(lambda b, j: h[b, j] * wx[b, j], h, "mixed"), p["R"], 0)
        return [pointwise(lambda b, j: mixed[b, j] + wx[b, j], h)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        wx = x @ p["W"][0].T
        wx = (wx - wx.mean(axis=1)[:, None]) / np.sqrt(wx.var(axis=1)[:, None] + 1e-5)
        return {"h": (s["h"] * wx) @ p["R"][0].T + wx}, "h"


def test_who_cannot_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(step_cells.CELLS, "normalized", Normalized())
    monkeypatch.setitem(ALL_CELLS, "normalized", Normalized())
    task, schedules = task_of("normalized", SIZES, "float32"), all_schedules()
    assert [o.name for o in late_operands(task.graph)] == ["mixed__0"]
    assert "takes statistics of x and a state" in str(schedules["persistent"].serves(task))
    for name in ("fused_step", "layout_transform"):
        (tmp_path / name).mkdir()
        check_numbers(tmp_path / name, schedules[name], task, schedules[name].default(task))
    beside = schedules["persistent"]
    late = task_of("lru", (9, 4, 64, 256), "bfloat16", KNOWN["sm_90a"])
    config = {**beside.default(late), "carrier": "l2", "fences": "every", "groups": 1, "units": 8, "ahead": 50}
    assert beside.check(late, {**config, "ahead": 100}) is None
    assert "read the projection" in str(beside.check(late, config))
