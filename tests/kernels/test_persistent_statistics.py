"""Statistics of hidden units in the persistent kernel, emulated on the CPU: through L2 and inside clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exact
import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, known_by_name, task_of
from limits import relative
from msgspec.structs import replace
from step_cells import Shared, Thrice
from test_persistent_emulated import SMALL, cut

from ecornn.build.cuda import lower
from ecornn.cells import get
from ecornn.interpreter import interpret
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent.plan import LINE, lanes_of
from ecornn.targets import KNOWN
from ecornn.workload import Traversal

LSTM, GRU, CLUSTER = "lstm(layer_norm)", "gru(layer_norm)", {"carrier": "cluster", "fences": "rare"}
known = known_by_name({"shared": Shared(), "thrice": Thrice()})
CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], Traversal]] = [
    (LSTM, (5, 3, 24, 40), "bfloat16", {}, Traversal()),
    (GRU, (40, 5, 24, 40), "float32", {"fences": "rare", "units": 8}, Traversal()),  # more than once around the ring
    # rows of two warps, in turns; lanes without a unit, and without a row
    (LSTM, (5, 9, 24, 80), "float16", {"units": 40, "warps": 2, "gate_warps": 6, "registers": 0}, Traversal()),
    (GRU, (5, 7, 9, 33), "bfloat16", {"units": 24, "gate_warps": 2}, Traversal()),
    (LSTM, (5, 23, 31, 33), "float16", {"groups": 2, "fences": "products"}, Traversal(True, 2, True, True)),
    (LSTM, (4, 4, 24, 24), "tf32", {"units": 8, "warps": 1, "hoisted": "float32"}, Traversal(lengths=True)),
    ("gru_reset_before(layer_norm)", (5, 4, 8, 20), "float32", {"units": 8}, Traversal(False, 2, True, True)),
    ("lstm(layer_norm,projection)", (5, 4, 8, 20), "bfloat16", {"units": 8, "warps": 1, "hoisted": "same"},
     Traversal()),
    ("blend", (5, 6, 9, 40), "float16", {}, Traversal(resets=True)),  # statistics beside a product
    (LSTM, (9, 5, 24, 40), "float16", {}, Traversal(sequences=True)),
    (LSTM, (7, 1, 24, 40), "float16", CLUSTER, Traversal()),
    (LSTM, (6, 5, 24, 33), "bfloat16", CLUSTER | {"units": 8, "hoisted": "same"}, Traversal()),
    (GRU, (2, 23, 7, 65), "float16", CLUSTER | {"groups": 2, "units": 24, "registers": 0}, Traversal()),
    (LSTM, (5, 9, 9, 40), "float32", CLUSTER | {"registers": 50}, Traversal(True, 2, True, True)),
    ("gru_reset_before(layer_norm)", (1, 3, 9, 20), "float32", CLUSTER | {"units": 8}, Traversal()),  # the first alone
    ("blend", (6, 10, 9, 20), "float16", CLUSTER | {"units": 8, "warps": 1}, Traversal(False, 2, True, True)),
    (GRU, (9, 5, 24, 40), "float16", CLUSTER, Traversal(sequences=True))]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal", "lazy"), [
    pytest.param(*case, lazy, marks=[pytest.mark.slow] * (n not in (0, 3, 4, 8, 10, 13, 15))
                 + [pytest.mark.exhaustive] * (not lazy))
    for n, case in enumerate(CASES) for lazy in (True, False) if lazy or "carrier" in case[3]], ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal, lazy):
    """Inside clusters words arrive as early as they can, and as late."""
    clusters = "carrier" in change
    task = task_of(cell, sizes, dtype, replace(SMALL, cores=15) if clusters else SMALL, traversal)
    config = cut(task, **change)
    program = Persistent().program(task, Persistent().plan(task, config))
    assert any(b.name.startswith("sums") for b in program.buffers) != clusters
    check_numbers(tmp_path, Persistent(), task, config, lazy=lazy)


@pytest.mark.parametrize("carrier", ["l2", "cluster"])
def test_fewer_rows_than_compiled(tmp_path, carrier):
    task = task_of(LSTM, (5, 9, 16, 34), "float16", replace(SMALL, cores=12), Traversal(True, 2, True, True))
    check_numbers(tmp_path, Persistent(), task, cut(task, groups=2, units=24, carrier=carrier, fences="rare"), batch=2)


def drawn(task: Task) -> tuple[Any, Any, Any]:
    w = task.workload
    return inputs(w.cell, (w.seq, w.batch, w.input, w.hidden), w.dtype, task.graph.parameters, tuple(task.graph.states))


def emulated(task: Task, folder: Path) -> Emulated:
    return Emulated(Persistent().program(task, Persistent().plan(task, cut(task))), folder)


def test_a_mean_that_is_large_beside_the_deviations(tmp_path):
    """The state of all units is near 20: a sum of squares that is not about the mean would lose all of its digits."""
    task = task_of(LSTM, (6, 3, 8, 40), "float32", SMALL)
    x, states, parameters = drawn(task)
    parameters["bias_hh"][1] += 9  # forget gates stay open
    states["c"] += np.float32(20)
    y, _ = emulated(task, tmp_path).run(x, states, parameters)
    wanted, _ = interpret(get(LSTM), x, parameters, list(states.values()))
    assert relative(y[1:], wanted[1:]) < 2e-5


def test_a_row_that_is_no_number_harms_no_sequence_after_it(tmp_path):
    """The mean of the step before is not used where it is none."""
    task = task_of(LSTM, (6, 3, 8, 40), "float32", SMALL, Traversal(resets=True))
    x, states, parameters = drawn(task)
    clean, resets = x.copy(), np.zeros((6, 3), bool)
    x[1, 1], resets[3, 1] = np.nan, True
    run = emulated(task, tmp_path).run
    y, wanted = (run(values, states, parameters, {"resets": resets})[0] for values in (x, clean))
    assert np.isnan(y[1:3, 1]).all() and np.isfinite(y[3:]).all()
    assert relative(y[3:], wanted[3:]) < 1e-5


def test_rows_of_any_size_before_a_row_begins(tmp_path):
    """Steps in which a row takes no part leave no mean to the steps in which it does."""
    task = task_of("shared", (5, 3, 8, 40), "float32", SMALL, Traversal(reverse=True, lengths=True))
    x, states, parameters = drawn(task)
    lengths = np.array([2, 5, 3], np.int32)
    for b, n in enumerate(lengths):
        x[n:, b] = 1e5
    y, _ = emulated(task, tmp_path).run(x, states, parameters, {"lengths": lengths})
    wanted, _ = exact.expected("shared", task.traversal, x.astype(np.float64), {"h": states["h"].astype(np.float64)},
                               {n: p.astype(np.float64) for n, p in parameters.items()}, {"lengths": lengths},
                               exact.in_float64)
    assert relative(y, wanted) < 1e-5


@pytest.mark.parametrize(("carrier", "change"), [
    ("l2", {"units": 8}), ("l2", {"units": 32}), ("cluster", {"units": 16})])
def test_an_odd_number_of_statistics_in_one_exchange(tmp_path, carrier, change):
    task = task_of("thrice", (6, 3, 9, 40), "float16", replace(SMALL, cores=12))
    config = cut(task, carrier=carrier, fences="rare", warps=2, gate_warps=2 if change["units"] > 8 else 1, **change)
    assert Persistent().plan(task, config).sums == (3,)
    check_numbers(tmp_path, Persistent(), task, config)


@pytest.mark.parametrize(("cell", "change"), [(LSTM, {"units": 8}), (GRU, {"units": 16}), (LSTM, {"units": 32}),
                                              (GRU, {"units": 40, "warps": 2, "gate_warps": 6, "registers": 0})])
def test_a_line_of_sums_has_one_writer_and_a_store_of_a_warp_fills_sectors(cell, change):
    task = task_of(cell, (5, 8, 24, 80), "float16", SMALL)
    plan = Persistent().plan(task, cut(task, **change))
    for e in range(len(plan.sums)):
        assert plan.sum_stride(e) % LINE == 0 and plan.sum_stride(e) >= plan.rows * plan.row_quads(e) * 4
        assert max(1, 32 // plan.lanes) * plan.row_quads(e) * 16 % 32 == 0


def test_the_recurrence_normalizes_what_is_rounded_once():
    """The pass over W x only makes sums; 16 bits are the default where their bytes are worth the error, and never where
    normalized values would be rounded a second time."""
    schedule, task = Persistent(), task_of(LSTM, (256, 16, 1024, 1024), "float16", KNOWN["sm_90a"])
    config = schedule.default(task)
    assert config["hoisted"] == "same"
    kernels = lower(schedule.program(task, schedule.plan(task, config)), "sm_90a")[0]
    assert set(kernels["normalize"].arguments) == {"hoisted", "row_sums", "T", "B"}
    assert "row_sums" in kernels["persistent"].arguments
    small = task_of(LSTM, (256, 16, 256, 256), "float16", KNOWN["sm_90a"])
    assert schedule.default(small)["hoisted"] == "float32"
    assert all_schedules()["layout_transform"].default(task)["hoisted"] == "float32"


def test_statistics_need_whole_rows_of_lanes():
    assert [lanes_of(n) for n in (1, 2, 6, 16, 24, 32, 34, 64, 70)] == [1, 2, 8, 16, 32, 32, 64, 64, 96]
    task = task_of(LSTM, (5, 9, 24, 80), "float16", SMALL)
    assert "64 lanes a row" in (Persistent().check(task, cut(task, units=40, gate_warps=3, warps=1)) or "")
    assert "after all of it" in (Persistent().check(task, cut(task, ahead=0, units=16)) or "")


@pytest.mark.parametrize("cell", [LSTM, GRU])
@pytest.mark.parametrize("sizes", [(256, 16, 256, 256), (256, 16, 1024, 1024), (50, 1, 64, 64)])
def test_defaults(cell, sizes):
    task, schedule = task_of(cell, sizes, "float16", KNOWN["sm_90a"]), Persistent()
    config = schedule.default(task)
    assert schedule.check(task, config) is None and set(config) == {k.name for k in schedule.knobs(task)}
    assert config["ahead"] == 100 and Persistent().plan(task, config).sums == ((1, 1) if cell == LSTM else (2,))
    plain = task_of(cell.split("(")[0], sizes, "float16", KNOWN["sm_90a"])
    assert schedule.expected(plain) < schedule.expected(task) < 4 * schedule.expected(plain)
