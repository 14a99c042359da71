"""The persistent kernel, emulated on a CPU: every way in which a layer can be cut; statistics of hidden units."""

import re
from pathlib import Path
from typing import Any

import exact
import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, known_by_name, task_of
from exact import relative
from msgspec.structs import replace
from step_cells import Shared, Thrice

from ecornn.build import nvcc
from ecornn.build.cuda import lower
from ecornn.cells import get
from ecornn.interpreter import interpret
from ecornn.runtime import Columns
from ecornn.schedules import all_schedules
from ecornn.schedules.base import SearchedSchedule, Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent import plan as persistent_plan
from ecornn.schedules.persistent.plan import LINE, lanes_of
from ecornn.targets import KNOWN
from ecornn.tune.choose import candidates
from ecornn.workload import ALONE, Traversal

SMALL = replace(KNOWN["sm_90a"], cores=6)
CUT = {"groups": 1, "units": 16, "warps": 2, "chains": 1, "registers": 100, "interleave": 0,
       "ahead": 100, "fences": "every", "carrier": "l2", "hoisted": "float32", "math": "exact"}

NORM, GRU_NORM, CLUSTER = "lstm(layer_norm)", "gru(layer_norm)", {"carrier": "cluster", "fences": "rare"}
MASKED = Traversal(True, 2, True, True)
Case = tuple[str, tuple[int, int, int, int], str, dict[str, Any], Traversal]
CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any]]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}),
    ("lstm", (5, 3, 24, 40), "float16", {"registers": 0, "chains": 2, "hoisted": "same"}),  # all in shared memory
    ("lstm", (4, 9, 7, 24), "float32", {"units": 24, "warps": 1}),  # a second n8 tile with one row in it
    ("lstm", (6, 8, 64, 64), "bfloat16", {"warps": 2, "registers": 50}),  # whole tiles
    ("gru", (5, 1, 16, 48), "float16", {}),  # one row: seven columns of padding
    ("gru", (3, 7, 20, 41), "bfloat16", {"interleave": 4, "units": 8, "hoisted": "same"}),
    ("gru_reset_before", (4, 5, 9, 20), "float32", {"units": 8}),  # two exchanges a step
    ("rnn_relu", (1, 1, 1, 1), "float16", {"units": 8, "warps": 1, "hoisted": "same"}),
    ("gated", (4, 3, 24, 39), "float16", {"units": 8, "hoisted": "same"}),
    ("rnn_tanh", (30, 17, 8, 24), "float16", {"units": 8, "warps": 1, "ahead": 0}),
    ("lstm", (5, 9, 31, 40), "tf32", {"registers": 50}),
    ("gru_reset_before", (5, 4, 8, 24), "tf32", {"ahead": 0, "units": 8}),
    # the projection beside the recurrence: all of it, and the rest of what was done before
    ("lstm", (9, 3, 24, 40), "bfloat16", {"ahead": 0}),
    ("lstm", (40, 7, 24, 40), "float16", {"ahead": 50}),
    ("gru", (7, 20, 17, 41), "float16", {"ahead": 0, "units": 24, "hoisted": "same"}),  # odd rows of x
    ("rnn_tanh", (70, 5, 16, 24), "bfloat16", {"ahead": 25, "units": 8, "warps": 1}),
    ("rnn_tanh", (70, 5, 9, 24), "bfloat16", {"units": 8, "warps": 1, "fences": "rare"}),  # twice around the ring
    ("lstm", (40, 20, 9, 40), "float16", {"fences": "rare", "units": 8}),
    ("gru_reset_before", (70, 4, 8, 24), "float32", {"fences": "rare", "units": 8}),
    ("gru", (40, 3, 24, 40), "float16", {"ahead": 0, "fences": "products"}),
]
TRAVERSALS: list[Case] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}, Traversal(reverse=True)),
    ("gru", (5, 3, 7, 40), "float16", {}, Traversal(directions=2)),  # the first half of y's rows
    ("rnn_tanh", (6, 9, 16, 24), "float32", {"units": 24, "warps": 1}, Traversal(True, 2)),  # and the second
    ("lstm", (7, 5, 24, 40), "float16", {}, Traversal(lengths=True)),
    ("lstm", (7, 5, 24, 40), "bfloat16", {}, Traversal(resets=True)),
    ("gru", (7, 5, 17, 40), "float16", {"units": 24}, Traversal(True, lengths=True)),
    ("gru", (6, 7, 9, 40), "bfloat16", {"interleave": 4, "units": 8}, Traversal(True, resets=True)),
    ("gru_reset_before", (6, 10, 9, 20), "float32", {"units": 8}, MASKED),  # two exchanges
    ("lstm", (6, 23, 31, 33), "bfloat16", {"groups": 2, "hoisted": "same"},  # several items a thread
     MASKED),
    ("lstm", (6, 23, 31, 33), "float16", {"groups": 2, "units": 24}, Traversal(False, 1, True, True)),
    ("pair", (6, 5, 24, 39), "float16", {"units": 8, "hoisted": "same"}, MASKED),
    ("slstm", (7, 5, 24, 40), "bfloat16", {"math": "approx"}, Traversal(True, 1, True, True)),
    # the projection beside the recurrence
    ("lstm", (40, 7, 24, 40), "float16", {"ahead": 50, "hoisted": "same"}, Traversal(False, 2, True, True)),
    ("rnn_tanh", (70, 5, 16, 23), "bfloat16", {"ahead": 25, "units": 8, "warps": 1, "hoisted": "same"},
     Traversal(resets=True)),
    ("gru_reset_before", (9, 4, 8, 24), "float32", {"ahead": 0, "units": 8}, Traversal(False, 2, True, True)),
    # sequences end to end in columns
    ("lstm", (9, 5, 24, 40), "float16", {}, Traversal(sequences=True)),
    ("lstm", (1, 3, 24, 40), "bfloat16", {}, Traversal(sequences=True)),
    ("gru", (12, 9, 17, 40), "bfloat16", {"units": 24}, Traversal(True, sequences=True)),
    ("lstm", (9, 23, 31, 33), "float16", {"groups": 2}, Traversal(True, 2, sequences=True)),  # several items a thread
    ("gru_reset_before", (40, 7, 9, 20), "float32", {"units": 8, "fences": "rare"},
     Traversal(False, 2, sequences=True)),
    ("lstm", (40, 7, 24, 40), "float16", {"ahead": 50}, Traversal(sequences=True)),
]
# of hidden units; all but the first four are slow
STATISTICS: list[Case] = [
    (NORM, (5, 3, 24, 40), "bfloat16", {}, ALONE),
    (GRU_NORM, (5, 7, 9, 33), "bfloat16", {"units": 24, "gate_warps": 2}, ALONE),  # lanes without a unit
    (NORM, (5, 23, 31, 33), "float16", {"groups": 2, "fences": "products"}, MASKED),
    ("blend", (5, 6, 9, 40), "float16", {}, Traversal(resets=True)),  # statistics beside a product
    (GRU_NORM, (40, 5, 24, 40), "float32", {"fences": "rare", "units": 8}, ALONE),  # more than once around the ring
    # rows of two warps, in turns; lanes without a unit, and without a row
    (NORM, (5, 9, 24, 80), "float16", {"units": 40, "warps": 2, "gate_warps": 6, "registers": 0}, ALONE),
    (NORM, (4, 4, 24, 24), "tf32", {"units": 8, "warps": 1, "hoisted": "float32"}, Traversal(lengths=True)),
    ("gru_reset_before(layer_norm)", (5, 4, 8, 20), "float32", {"units": 8}, Traversal(False, 2, True, True)),
    ("lstm(layer_norm,projection)", (5, 4, 8, 20), "bfloat16", {"units": 8, "warps": 1, "hoisted": "same"}, ALONE),
    (NORM, (9, 5, 24, 40), "float16", {}, Traversal(sequences=True)),
]


def some_slow(cases: list[Case], quick: int, *more: Any) -> list[Any]:
    return [pytest.param(*case, *more, marks=[pytest.mark.slow] * (n >= quick)) for n, case in enumerate(cases)]


def cut(task: Task, **change: Any) -> dict[str, Any]:
    config = {**CUT, **change}
    rows = -(-task.workload.batch // config["groups"])
    busy = -(-config["units"] * rows // 32)
    return {"gate_warps": min(busy, -config["warps"] % 4 or 4), **config}


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal", "lazy"), [
    *((*case, True) for case in TRAVERSALS), *((*case, ALONE, True) for case in CASES),
    ("gru", (4, 3, 16, 40), "bfloat16", {"ahead": 0}, ALONE, False),  # copies come at once
    *some_slow(STATISTICS, 4, True)], ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal, lazy):
    task = task_of(cell, sizes, dtype, SMALL, traversal)
    check_numbers(tmp_path, Persistent(), task, cut(task, **change), lazy=lazy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_variables_for_arrays(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(nvcc, "COSTLY", 1)
    monkeypatch.setattr(nvcc, "EACH", 1)
    task = task_of("lstm", (5, 9, 24, 40), dtype, SMALL)
    config = cut(task, registers=50)
    source = lower(Persistent().program(task, Persistent().plan(task, config)), SMALL.arch)[1]
    assert "acc_ptr_e0" in source and not re.search(r"alignas\(64\) float \w+\[", source)
    check_numbers(tmp_path, Persistent(), task, config)


@pytest.mark.parametrize(("reverse", "seed"), [(False, 0), (True, 1), (False, 4), (True, 3)])
def test_columns_of_random_lengths(tmp_path, reverse, seed):
    lengths = np.random.default_rng(seed).integers(1, 12, 31)
    columns = Columns.of(lengths, 11, 6)
    assert columns.wrapped.size and len(columns.table) < len(Columns.of(lengths, 11).table)
    task = task_of("lstm", (len(columns.table), 11, 9, 34), "float16", SMALL, Traversal(reverse, 2, sequences=True))
    config = cut(task, groups=2, units=24)
    assert Persistent().program(task, Persistent().plan(task, config)).together == 6
    check_numbers(tmp_path, Persistent(), task, config, masks={"sequences": columns.marked})


def test_no_projection_beside_a_recurrence_that_goes_backwards():
    """Workers would begin with the rows that are needed last."""
    schedule, ahead = Persistent(), (0, 25, 50, 75)
    for reverse in (False, True):
        task = task_of("lstm", (40, 7, 24, 40), "float16", SMALL, Traversal(reverse))
        reasons = [schedule.check(task, cut(task, ahead=percent)) for percent in ahead]
        assert all("last" in (r or "") for r in reasons) if reverse else reasons == [None] * len(ahead)
        assert schedule.check(task, cut(task)) is None


def test_each_direction_has_a_default_of_its_own():
    schedule = Persistent()
    for reverse in (False, True, False):
        task = task_of("rnn_tanh", (300, 20, 2048, 640), "float32", KNOWN["sm_90a"], Traversal(reverse, 2))
        config = schedule.default(task)
        assert schedule.check(task, config) is None and (config["ahead"] == 100) == reverse


@pytest.mark.parametrize("cell, sizes, dtype, keep", [
    ("lstm", (128, 16, 256, 256), "float32", None), ("gru", (128, 1, 96, 96), "bfloat16", "gates"),
    ("rnn_tanh", (300, 20, 2048, 640), "float32", None)])
def test_a_reverse_sequence_finds_what_a_search_of_its_own_would(cell: str, sizes: tuple[int, int, int, int],
                                                                 dtype: str, keep: str | None):
    for schedule in candidates(KNOWN["sm_90a"]):
        task = task_of(cell, sizes, dtype, KNOWN["sm_90a"], Traversal(reverse=True, directions=2, keep=keep))
        if isinstance(schedule, SearchedSchedule) and schedule.serves(task) is None:
            assert (anew := type(schedule)()).best(task) == anew.search(task)


def test_polls_in_parts_where_registers_are_short(tmp_path):
    task = task_of("lstm", (2, 57, 8, 150), "bfloat16", replace(SMALL, cores=19))
    config = cut(task, units=8, warps=1, registers=0)
    phase = Persistent().plan(task, config).phases[0]
    assert phase.polled_pairs < phase.pairs
    check_numbers(tmp_path, Persistent(), task, config)


# (cell, sizes, dtype, change, kB of shared memory, streamed pairs and slots of each phase)
STREAMED: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], int, list[tuple[int, int]]]] = [
    ("echo", (4, 3, 0, 150), "float16", {"units": 32, "registers": 0, "warps": 1}, 7, [(5, 2)]),
    ("echo", (5, 3, 0, 150), "float16", {"units": 32, "registers": 25, "warps": 1}, 8, [(3, 2)]),
    ("lstm", (5, 9, 7, 180), "bfloat16", {"units": 64, "registers": 0, "warps": 1}, 116, [(3, 2)]),  # two tiles of rows
    ("lstm", (1, 1, 3, 180), "float16", {"units": 64, "registers": 0, "warps": 1}, 88, [(4, 2)]),  # one step
    ("gru_reset_before", (4, 5, 9, 260), "float16", {"units": 64, "registers": 0}, 92, [(4, 2), (4, 2)]),
    ("rnn_tanh", (4, 3, 7, 200), "float32", {"units": 64, "registers": 0}, 60, [(3, 2)]),  # a ring for each warp
]


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "kilobytes", "expected"), STREAMED, ids=str)
def test_reads_weights_from_l2_where_they_do_not_fit(tmp_path, monkeypatch, cell, sizes, dtype, change, kilobytes,
                                                     expected, arch):
    monkeypatch.setattr(persistent_plan, "AHEAD_BYTES", 1)
    task = task_of(cell, sizes, dtype, replace(KNOWN[arch], cores=6, shared=kilobytes << 10))
    config = cut(task, **change)
    plan = Persistent().plan(task, config)
    if arch == "sm_90a":
        assert [(p.streamed_pairs, p.slots) for p in plan.phases] == expected
    else:
        assert plan.streamed and not any(p.slots for p in plan.phases)
        if reason := Persistent().check(task, config):
            assert re.search("batch rows|registers per thread", reason)
            return
    check_numbers(tmp_path, Persistent(), task, config)


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "kilobytes", "stretches"), [
    ("echo", (5, 3, 0, 230), "float16", {"units": 32, "registers": 20, "warps": 1}, 11,
     [(0, 4, True), (4, 6, False), (6, 8, True)]),
    ("lstm", (4, 9, 7, 180), "float32", {"units": 64, "registers": 0, "warps": 1}, 150,  # two tiles of rows
     [(0, 7, True), (7, 12, True)]),
    ("rnn_tanh", (4, 3, 7, 200), "bfloat16", {"units": 64, "registers": 0, "warps": 1}, 227, [(0, 7, True)]),
], ids=["all", "streamed", "shared"])
def test_products_that_are_too_much_code_are_loops(tmp_path, monkeypatch, cell, sizes, dtype, change, kilobytes,
                                                   stretches):
    monkeypatch.setattr(persistent_plan, "AHEAD_BYTES", 1)
    monkeypatch.setattr(persistent_plan, "FLIGHT", 2 * -(-sizes[1] // 8))  # two pairs at a time: loops may leave a rest
    task = task_of(cell, sizes, dtype, replace(KNOWN["sm_90a"], cores=8, shared=kilobytes << 10))
    config = cut(task, **change)
    plan = Persistent().plan(task, config)
    monkeypatch.setattr(persistent_plan, "UNROLLED", plan.code(plan.phases[0], 3))
    (phase,) = (plan := Persistent().plan(task, config)).phases
    assert plan.stretches(phase) == stretches and plan.written(phase) < phase.pairs
    check_numbers(tmp_path, Persistent(), task, config)


@pytest.mark.parametrize(("cell", "cores", "traversal", "change"), [
    ("lstm", 6, ALONE, {"ahead": 0}), ("lstm", 6, Traversal(False, 2, True, True), {"ahead": 0}),
    ("lstm", 6, MASKED, {}),
    ("lstm", 12, MASKED, CLUSTER), (NORM, 12, MASKED, {"fences": "rare"}), (NORM, 12, MASKED, CLUSTER)], ids=str)
def test_fewer_rows_than_compiled(tmp_path, cell, cores, traversal, change):
    task = task_of(cell, (5, 9, 16, 34), "float16", replace(SMALL, cores=cores), traversal)
    check_numbers(tmp_path, Persistent(), task, cut(task, groups=2, units=24, **change), batch=2)


# groups that are clusters
CLUSTERS: list[Case] = [
    ("lstm", (7, 1, 24, 40), "float16", {}, Traversal()),
    ("lstm", (6, 5, 24, 33), "bfloat16", {"units": 8}, Traversal()),  # the last block has one unit
    ("lstm", (2, 23, 7, 65), "float16", {"groups": 2, "units": 24, "registers": 0}, Traversal()),  # two tiles and items
    ("lstm", (5, 9, 9, 40), "float32", {"registers": 50}, MASKED),
    ("lstm", (5, 4, 8, 24), "tf32", {"warps": 1}, Traversal(lengths=True)),
    ("rnn_tanh", (4, 3, 8, 40), "float32", {"units": 24, "warps": 2, "gate_warps": 2}, Traversal()),  # words of no unit
    ("gru", (7, 7, 17, 40), "bfloat16", {"interleave": 4, "units": 8}, Traversal(resets=True)),
    ("gru_reset_before", (1, 3, 9, 20), "float32", {"units": 8}, Traversal()),  # no step after the first
    ("gru_reset_before", (6, 10, 9, 20), "float16", {"units": 8, "warps": 1}, Traversal(False, 2, True, True)),
    ("rnn_relu", (1, 1, 1, 9), "float16", {"units": 8, "warps": 1}, Traversal()),
    ("pair", (6, 5, 24, 40), "bfloat16", {"units": 8}, Traversal(True)),  # products of two operands
    ("lstm", (9, 5, 24, 40), "float16", {"hoisted": "same"}, Traversal(sequences=True)),  # sequences end to end
    ("gru_reset_before", (12, 7, 9, 20), "bfloat16", {"units": 8, "warps": 1, "hoisted": "same"},
     Traversal(True, sequences=True)),
]
CLUSTER_STATISTICS: list[Case] = [
    (NORM, (7, 1, 24, 40), "float16", {}, ALONE),
    (NORM, (5, 9, 9, 40), "float32", {"registers": 50}, MASKED),
    ("blend", (6, 10, 9, 20), "float16", {"units": 8, "warps": 1}, Traversal(False, 2, True, True)),
    (NORM, (6, 5, 24, 33), "bfloat16", {"units": 8, "hoisted": "same"}, ALONE),
    (GRU_NORM, (2, 23, 7, 65), "float16", {"groups": 2, "units": 24, "registers": 0}, ALONE),
    ("gru_reset_before(layer_norm)", (1, 3, 9, 20), "float32", {"units": 8}, ALONE),  # no step after the first
    (GRU_NORM, (9, 5, 24, 40), "float16", {}, Traversal(sequences=True)),
]


@pytest.mark.parametrize("lazy", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), [
    *CLUSTERS, *some_slow(CLUSTER_STATISTICS, 3)], ids=str)
def test_state_travels_inside_clusters(tmp_path, cell, sizes, dtype, change, traversal, lazy):
    task = task_of(cell, sizes, dtype, replace(SMALL, cores=15), traversal)
    config = cut(task, **CLUSTER, **change)
    program = Persistent().program(task, Persistent().plan(task, config))
    last, plan = program.calls[-1], Persistent().plan(task, config)
    assert (last.grid, last.cluster, last.cooperative) == (plan.groups * plan.blocks, plan.blocks, False)
    assert not any(b.name.startswith(("exchange", "sums")) for b in program.buffers)
    check_numbers(tmp_path, Persistent(), task, config, lazy=lazy)


def test_what_clusters_cannot_do_is_refused():
    task, schedule = task_of("lstm", (40, 16, 24, 320), "float16", KNOWN["sm_90a"]), Persistent()
    def reason(**change: Any) -> str:
        change = {"groups": 2, "units": 32, "warps": 5, "registers": 50, **change}
        return schedule.check(task, cut(task, **{**CLUSTER, **change})) or ""
    assert not reason() and not reason(groups=6, units=20) and "a cluster would have 20 blocks" in reason(units=16)
    small = task_of("lstm", (40, 16, 24, 16), "float16", KNOWN["sm_90a"])
    assert "1 blocks" in (schedule.check(small, cut(small, **CLUSTER, warps=1)) or "")
    assert "8 clusters of 16 blocks, but 7 fit on the chip" in reason(groups=8, units=20)
    assert "fences" in reason(fences="every") and "outside of clusters" in reason(ahead=0)
    assert "only possible with carrier=cluster" in reason(groups=6, carrier="l2")


@pytest.mark.parametrize(("device", "values"), [("sm_90a", ("l2", "cluster")), ("sm_89", ("l2",))])
def test_clusters_are_offered_where_there_are_any(device, values):
    """A record of the time before the knob means l2."""
    (knob,) = (k for k in Persistent().knobs(task_of("lstm", (40, 16, 24, 320), "float16", KNOWN[device]))
               if k.name == "carrier")
    assert (knob.values, knob.before) == (values, "l2")


@pytest.mark.parametrize("cell,hidden,batch,dtype", [
    ("lstm", 2048, 1, "bfloat16"),  # 33.6 MB of the 63 MB on chip
    ("gru", 1536, 16, "float16"), ("lstm", 800, 20, "float32"), ("rnn_tanh", 1, 1, "float16")])
def test_default_configuration_is_valid(cell, hidden, batch, dtype):
    task, schedule = task_of(cell, (4, batch, hidden, hidden), dtype, KNOWN["sm_90a"]), Persistent()
    assert schedule.serves(task) is None and schedule.check(task, schedule.default(task)) is None


def test_what_cannot_be_is_refused_with_a_reason():
    schedule, task = Persistent(), task_of("lstm", (4, 20, 800, 800), "bfloat16", KNOWN["sm_90a"])
    for units, reason in ((2, "1200 blocks"), (21, "multiple of")):
        assert reason in str(schedule.check(task, {**schedule.default(task), "units": units}))
    assert "do not fit" in str(schedule.serves(task_of("lstm", (4, 1, 4096, 4096), "bfloat16", KNOWN["sm_90a"])))


known = known_by_name({"shared": Shared(), "thrice": Thrice()})
def drawn(task: Task) -> tuple[Any, Any, Any]:
    w = task.workload
    return inputs(w.cell, (w.seq, w.batch, w.input, w.hidden), w.dtype, task.graph.parameters, tuple(task.graph.states))


def emulated(task: Task, folder: Path) -> Emulated:
    return Emulated(Persistent().program(task, Persistent().plan(task, cut(task))), folder)


def test_a_mean_that_is_large_beside_the_deviations(tmp_path):
    """The state of all units is near 20: a sum of squares that is not about the mean would lose all of its digits."""
    task = task_of(NORM, (6, 3, 8, 40), "float32", SMALL)
    x, states, parameters = drawn(task)
    parameters["bias_hh"][1] += 9  # forget gates stay open
    states["c"] += np.float32(20)
    y, _ = emulated(task, tmp_path).run(x, states, parameters)
    wanted, _ = interpret(get(NORM), x, parameters, list(states.values()))
    assert relative(y[1:], wanted[1:]) < 2e-5


def test_a_row_that_is_no_number_harms_no_sequence_after_it(tmp_path):
    """The mean of the step before is not used where it is none."""
    task = task_of(NORM, (6, 3, 8, 40), "float32", SMALL, Traversal(resets=True))
    x, states, parameters = drawn(task)
    clean, resets = x.copy(), np.zeros((6, 3), bool)
    x[1, 1], resets[3, 1] = np.nan, True
    run = emulated(task, tmp_path).run
    y, wanted = (run(values, states, parameters, {"resets": resets})[0] for values in (x, clean))
    assert np.isnan(y[1:3, 1]).all() and np.isfinite(y[3:]).all() and relative(y[3:], wanted[3:]) < 1e-5


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


@pytest.mark.parametrize(("cell", "change"), [(NORM, {"units": 8}), (GRU_NORM, {"units": 16}), (NORM, {"units": 32}),
                                              (GRU_NORM, {"units": 40, "warps": 2, "gate_warps": 6, "registers": 0})])
def test_a_line_of_sums_has_one_writer_and_a_store_of_a_warp_fills_sectors(cell, change):
    task = task_of(cell, (5, 8, 24, 80), "float16", SMALL)
    plan = Persistent().plan(task, cut(task, **change))
    for e in range(len(plan.sums)):
        assert plan.sum_stride(e) % LINE == 0 and plan.sum_stride(e) >= plan.rows * plan.row_quads(e) * 4
        assert max(1, 32 // plan.lanes) * plan.row_quads(e) * 16 % 32 == 0


def test_the_recurrence_normalizes_what_is_rounded_once():
    """16 bits are the default where their bytes are worth the error, and never where values would be rounded again."""
    schedule, task = Persistent(), task_of(NORM, (256, 16, 1024, 1024), "float16", KNOWN["sm_90a"])
    config = schedule.default(task)
    assert config["hoisted"] == "same"
    kernels = lower(schedule.program(task, schedule.plan(task, config)), "sm_90a")[0]
    assert set(kernels["normalize"].arguments) == {"hoisted", "row_sums", "T", "B"}
    assert "row_sums" in kernels["persistent"].arguments
    assert schedule.default(task_of(NORM, (256, 16, 256, 256), "float16", KNOWN["sm_90a"]))["hoisted"] == "float32"
    assert all_schedules()["layout_transform"].default(task)["hoisted"] == "float32"


def test_statistics_need_whole_rows_of_lanes():
    assert [lanes_of(n) for n in (1, 2, 6, 16, 24, 32, 34, 64, 70)] == [1, 2, 8, 16, 32, 32, 64, 64, 96]
    task = task_of(NORM, (5, 9, 24, 80), "float16", SMALL)
    assert "of 64 lanes" in (Persistent().check(task, cut(task, units=40, gate_warps=3, warps=1)) or "")
    assert "need all of it" in (Persistent().check(task, cut(task, ahead=0, units=16)) or "")


@pytest.mark.parametrize("cell", [NORM, GRU_NORM])
@pytest.mark.parametrize("sizes", [(256, 16, 256, 256), (256, 16, 1024, 1024), (50, 1, 64, 64)])
def test_defaults_with_statistics(cell, sizes):
    task, schedule = task_of(cell, sizes, "float16", KNOWN["sm_90a"]), Persistent()
    config = schedule.default(task)
    assert schedule.check(task, config) is None and set(config) == {k.name for k in schedule.knobs(task)}
    assert config["ahead"] == 100 and Persistent().plan(task, config).sums == ((1, 1) if cell == NORM else (2,))
    plain = task_of(cell.split("(")[0], sizes, "float16", KNOWN["sm_90a"])
    assert schedule.expected(plain) < schedule.expected(task) < 4 * schedule.expected(plain)
