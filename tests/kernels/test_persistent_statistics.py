"""Statistics of hidden units in the persistent kernel, emulated on the CPU: through L2 and inside clusters."""

from __future__ import annotations

from typing import Any

import exact
import numpy as np
import pytest
import step_cells
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, task_of
from limits import relative
from msgspec.structs import replace
from step_cells import Shared, Thrice
from test_persistent_emulated import SMALL, cut

from ecornn.build.cuda import lower
from ecornn.cells import get
from ecornn.interpreter import interpret
from ecornn.schedules import all_schedules
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent.plan import LINE, lanes_of
from ecornn.targets import KNOWN
from ecornn.workload import Traversal

LSTM, GRU = "lstm(layer_norm)", "gru(layer_norm)"
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
    (LSTM, (9, 5, 24, 40), "float16", {}, Traversal(sequences=True))]
CLUSTERS: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], Traversal]] = [
    (LSTM, (7, 1, 24, 40), "float16", {}, Traversal()),
    (LSTM, (6, 5, 24, 33), "bfloat16", {"units": 8, "hoisted": "same"}, Traversal()),
    (GRU, (2, 23, 7, 65), "float16", {"groups": 2, "units": 24, "registers": 0}, Traversal()),
    (LSTM, (5, 9, 9, 40), "float32", {"registers": 50}, Traversal(True, 2, True, True)),
    ("gru_reset_before(layer_norm)", (1, 3, 9, 20), "float32", {"units": 8}, Traversal()),  # no step after the first
    ("blend", (6, 10, 9, 20), "float16", {"units": 8, "warps": 1}, Traversal(False, 2, True, True)),
    (GRU, (9, 5, 24, 40), "float16", {}, Traversal(sequences=True))]


def some(cases: list[Any], quick: tuple[int, ...]) -> list[Any]:
    """The cases, those that are not ``quick`` among the slow ones."""
    return [case if n in quick else pytest.param(*case, marks=pytest.mark.slow) for n, case in enumerate(cases)]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), some(CASES, (0, 3, 4, 8)), ids=str)
def test_through_l2(tmp_path, cell, sizes, dtype, change, traversal):
    task = task_of(cell, sizes, dtype, SMALL, traversal)
    check_numbers(tmp_path, Persistent(), task, cut(task, **change))


@pytest.mark.parametrize("lazy", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), some(CLUSTERS, (0, 3, 5)), ids=str)
def test_in_clusters(tmp_path, cell, sizes, dtype, change, traversal, lazy):
    """Words arrive as early as they can, and as late."""
    task = task_of(cell, sizes, dtype, replace(SMALL, cores=15), traversal)
    config = cut(task, carrier="cluster", fences="rare", **change)
    program = Persistent().program(task, Persistent().plan(task, config))
    assert not any(b.name.startswith("sums") for b in program.buffers)
    check_numbers(tmp_path, Persistent(), task, config, lazy=lazy)


@pytest.mark.parametrize("carrier", ["l2", "cluster"])
def test_fewer_rows_than_compiled(tmp_path, carrier):
    task = task_of(LSTM, (5, 9, 16, 34), "float16", replace(SMALL, cores=12), Traversal(True, 2, True, True))
    check_numbers(tmp_path, Persistent(), task, cut(task, groups=2, units=24, carrier=carrier, fences="rare"), batch=2)


def test_a_mean_that_is_large_beside_the_deviations(tmp_path):
    """The state of all units is near 20: a sum of squares that is not about the mean would lose all of its digits."""
    task = task_of(LSTM, (6, 3, 8, 40), "float32", SMALL)
    x, states, parameters = inputs(LSTM, (6, 3, 8, 40), "float32", task.graph.parameters, tuple(task.graph.states))
    parameters["bias_hh"][1] += 9  # forget gates stay open
    states["c"] += np.float32(20)
    y, _ = Emulated(Persistent().program(task, Persistent().plan(task, cut(task))), tmp_path).run(x, states, parameters)
    wanted, _ = interpret(get(LSTM), x, parameters, list(states.values()))
    assert relative(y[1:], wanted[1:]) < 2e-5


def test_a_row_that_is_no_number_harms_no_sequence_after_it(tmp_path):
    """The mean of the step before is not used where it is none."""
    task = task_of(LSTM, (6, 3, 8, 40), "float32", SMALL, Traversal(resets=True))
    x, states, parameters = inputs(LSTM, (6, 3, 8, 40), "float32", task.graph.parameters, tuple(task.graph.states))
    clean, resets = x.copy(), np.zeros((6, 3), bool)
    x[1, 1], resets[3, 1] = np.nan, True
    run = Emulated(Persistent().program(task, Persistent().plan(task, cut(task))), tmp_path).run
    y, wanted = (run(values, states, parameters, {"resets": resets})[0] for values in (x, clean))
    assert np.isnan(y[1:3, 1]).all() and np.isfinite(y[3:]).all()
    assert relative(y[3:], wanted[3:]) < 1e-5


def test_rows_of_any_size_before_a_row_begins(tmp_path, monkeypatch):
    """Steps in which a row takes no part leave no mean to the steps in which it does."""
    for known in (step_cells.CELLS, exact.ALL_CELLS):
        monkeypatch.setitem(known, "shared", Shared())
    task = task_of("shared", (5, 3, 8, 40), "float32", SMALL, Traversal(reverse=True, lengths=True))
    x, states, parameters = inputs("shared", (5, 3, 8, 40), "float32", task.graph.parameters, ("h",))
    lengths = np.array([2, 5, 3], np.int32)
    for b, n in enumerate(lengths):
        x[n:, b] = 1e5
    program = Persistent().program(task, Persistent().plan(task, cut(task)))
    y, _ = Emulated(program, tmp_path).run(x, states, parameters, {"lengths": lengths})
    wanted, _ = exact.expected("shared", task.traversal, x.astype(np.float64), {"h": states["h"].astype(np.float64)},
                               {n: p.astype(np.float64) for n, p in parameters.items()}, {"lengths": lengths},
                               exact.in_float64)
    assert relative(y, wanted) < 1e-5


@pytest.mark.parametrize(("carrier", "change"), [
    ("l2", {"units": 8}), ("l2", {"units": 32}), ("cluster", {"units": 16})])
def test_an_odd_number_of_statistics_in_one_exchange(tmp_path, monkeypatch, carrier, change):
    for known in (step_cells.CELLS, exact.ALL_CELLS):
        monkeypatch.setitem(known, "thrice", Thrice())
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
