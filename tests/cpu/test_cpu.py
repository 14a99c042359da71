"""The CPU schedule: values against float64, for every cell, tails of every kind, and every knob."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec.structs
import numpy as np
import pytest
from cpu_sample import Sample, rows_that_fit
from limits import relative as error
from step_cells import Chain, Peephole, Residual, run

from ecornn.cells import BUILTIN, get
from ecornn.host_cpu import detect
from ecornn.numpy_reference import STEPS, reference
from ecornn.schedules.cpu import CPUSequence
from ecornn.schedules.cpu.tiling import Tile, busiest, heights_of
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.workload import Workload

LIMIT = 1e-6  # relative; rounding of the inputs' products alone is about 2e-7


def expected(sample: Sample, x: np.ndarray, states: list[np.ndarray]):
    if hasattr(sample.cell, "formula"):
        y, last = run(sample.cell, x, dict(zip(sample.cell.states, states, strict=True)), sample.parameters)
        return y, list(last.values())
    weights = {sample.cell.parameter_name(n): p.reshape(-1, *p.shape[2:]) for n, p in sample.parameters.items()}
    return reference(sample.cell.name, x, weights, states)


def compare(sample: Sample, steps: int, batch: int, **call) -> None:
    x, states = sample.inputs(steps, batch)
    y, last = sample(x, states, **call)
    y_ref, last_ref = expected(sample, x, states)
    assert error(y, y_ref) < LIMIT
    for found, wanted in zip(last, last_ref, strict=True):
        assert error(found, wanted) < LIMIT


SIZES = [  # I, H, B, T
    (1, 1, 1, 1),     # nothing but padding
    (5, 7, 2, 3),     # less than a vector
    (16, 48, 5, 9),   # whole vectors, batch with a tail
    (33, 101, 3, 6),  # a tail in everything
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("cell", list(STEPS))
def test_built_in_cells(cell, size, tmp_path):
    sample = Sample(tmp_path, cell, *size)
    compare(sample, size[3], size[2])


@pytest.mark.parametrize("size", [(19, 19, 3, 5), (32, 32, 2, 4)], ids=str)
@pytest.mark.parametrize("cell", [Peephole(), Chain(), Residual()], ids=lambda c: c.name)
def test_cells_of_a_user(cell, size, tmp_path):
    compare(Sample(tmp_path, cell, *size), size[3], size[2])


@pytest.mark.parametrize("cell", ["rnn_relu", "lstm", "gru"])
def test_not_a_number_comes_out_where_it_went_in(cell, tmp_path):
    sample = Sample(tmp_path, cell, 5, 40, 3, 6)
    x, states = sample.inputs(6, 3)
    x[2, 1, 3] = np.nan
    (y, _), (wanted, _) = sample(x, states), expected(sample, x, states)
    assert np.isnan(wanted[2:, 1]).all() and np.array_equal(np.isnan(y), np.isnan(wanted))


def test_chain_has_every_kind_of_stage(tmp_path):
    from ecornn.schedules.cpu.memory import plan

    task = make_task(Chain(), Workload("chain", 19, 19), detect())
    assert [s.name for s in plan(task.graph).steps] == ["prologue", "phase1", "phase2", "phase3"]


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3)])
def test_other_lengths_smaller_batches_and_thread_counts(cell, gates, tmp_path):
    """Gru's tiles have the same rows on every CPU; those of lstm are higher with 32 registers than with 16."""
    sample = Sample(tmp_path, cell, 10, 40, 7, 8, rows=rows_that_fit(4, gates), columns=gates, chunk=4,
                    project_rows=rows_that_fit(3, gates), project_columns=gates, pairs=0, project_pairs=0)
    assert sample.config["rows"] > 1 and 7 % sample.config["rows"], "the last tile of rows is lower"
    for steps, batch, threads in ((1, 7, 1), (3, 1, 2), (4, 5, 3), (13, 4, 7), (40, 7, 2)):
        compare(sample, steps, batch, threads=threads)


def test_states_in_place(tmp_path):
    compare(Sample(tmp_path, "gru_reset_before", 8, 21, 3, 5), 5, 3, in_place=True)


def test_asking_ahead_changes_no_value(tmp_path):
    found = []
    for ahead in (0, 1):
        (tmp_path / str(ahead)).mkdir()
        sample = Sample(tmp_path / str(ahead), "gru", 12, 100, 7, 6, rows=3, columns=3, pairs=0, ahead=ahead)
        assert bool(ahead) == ("prefetch" in sample.generated.emitted["asm"] or "prfm" in
                               sample.generated.emitted["asm"])
        compare(sample, 6, 7, threads=2)
        x, states = sample.inputs(6, 7)
        found += [sample(x, states, threads=threads)[0] for threads in (1, 3)]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_asks_ahead_where_l3_is_slow_and_weights_come_from_there():
    def ahead(arch: str, hidden: int, batch: int) -> int:
        device = msgspec.structs.replace(detect(), arch=arch, cores=2, l2=1 << 20, features=("avx2", "avx512f", "fma"))
        return CPUSequence().default(make_task(get("gru"), Workload("gru", hidden, hidden, batch), device))["ahead"]

    assert ahead("skylake-avx512", 800, 20) == 1
    assert ahead("skylake-avx512", 800, 1) == 0  # L3 is all that a batch row waits for
    assert ahead("skylake-avx512", 256, 20) == 0
    assert ahead("znver4", 800, 20) == 0


@pytest.mark.parametrize(("hidden", "vectors"), [(16, 1), (40, 3), (48, 3)])
def test_a_step_of_one_row_that_one_thread_takes_computes_no_more_vectors_than_it_has(hidden: int, vectors: int):
    """Tiles of two vectors of units, which two threads would share, have four where there are three."""
    device = msgspec.structs.replace(detect(), arch="znver4", cores=2, l2=1 << 20, features=("avx2", "avx512f", "fma"))
    task = make_task(get("lstm"), Workload("lstm", hidden, 1, 1, 1), device)
    config = CPUSequence().default(task)
    shape = CPUSequence().plan(task, config)
    assert config["team"] == 1 and shape.width == vectors * 16


def test_last_row_tile_is_no_higher_than_the_batch():
    schedule = CPUSequence()
    device = msgspec.structs.replace(detect(), features=("avx2", "avx512f", "fma"))
    task = make_task(get("gru"), Workload("gru", 800, 800, 20), device)
    config = {**schedule.default(task), "rows": 7, "columns": 3, "pairs": 0}
    values = schedule.features(task, schedule.plan(task, config))
    assert values["step_padded_flops"] == values["step_flops"]


@pytest.mark.parametrize("seed", range(6))
def test_random_configurations(seed, tmp_path):
    schedule, generator = CPUSequence(), np.random.default_rng(seed)
    name = ("lstm", "gru_reset_before", "rnn_tanh")[seed % 3]
    task = make_task(get(name), Workload(name, 90, 24, 7, 11), detect())
    for _ in range(1000):
        config = {k.name: int(generator.choice(k.values)) for k in schedule.knobs(task)}
        if schedule.check(task, config) is None:
            break
    compare(Sample(tmp_path, name, 24, 90, 7, 11, **config), 11, 7)


@pytest.mark.parametrize("features", [(), ("avx", "avx2", "fma")], ids=["sse", "avx2"])
def test_narrower_vectors(features, tmp_path):
    sample = Sample(tmp_path, "lstm", 9, 27, 3, 4, features=features)
    compare(sample, 4, 3)


@pytest.mark.parametrize("target", ["znver3", "znver4", "haswell", "skylake-avx512"])
def test_short_steps_take_one_thread(target):
    schedule = CPUSequence()
    for hidden, team in ((64, 1), (256, 0)):
        task = make_task(get("rnn_tanh"), Workload("rnn_tanh", hidden, hidden, 1), resolve(target))
        assert schedule.default(task)["team"] == team


def test_check_counts_registers():
    schedule = CPUSequence()
    task = make_task(get("lstm"), Workload("lstm", 256, 256, 20), detect())
    for features, fits, spills in ((("avx512f",), 6, 7), (("avx2",), 2, 3)):
        wide = replace(task, device=msgspec.structs.replace(task.device, features=features))
        config = {**schedule.default(wide), "columns": 4, "rows": fits, "pairs": 0, "gates": 0}
        assert schedule.check(wide, config) is None
        assert "vector registers" in str(schedule.check(wide, {**config, "rows": spills}))
        if fits > 4:  # pairs keep the weights of two values of k, and more sums on their way
            assert schedule.check(wide, {**config, "rows": 4, "pairs": 3}) is None
            assert "vector registers" in str(schedule.check(wide, {**config, "rows": 5, "pairs": 3}))


@pytest.mark.parametrize("cell", [*BUILTIN, Chain(), Residual()], ids=lambda c: getattr(c, "name", c))
@pytest.mark.parametrize("batch", [1, 20, 256])
def test_default_fits_and_is_a_choice_of_the_knobs(cell, batch):
    schedule, found = CPUSequence(), get(cell)
    task = make_task(found, Workload(found.name, 256, 256, batch), detect())
    config = schedule.default(task)
    assert schedule.check(task, config) is None
    assert {k.name for k in schedule.knobs(task)} == set(config)
    assert all(config[k.name] in k.values for k in schedule.knobs(task))
    values = schedule.features(task, schedule.plan(task, config))
    assert all(np.isfinite(v) for v in values.values())
    assert values["step_padded_flops"] >= values["step_flops"]


def test_serves_says_why_not():
    schedule = CPUSequence()
    task = make_task(get("gru"), Workload("gru", 8, 8), detect())
    assert schedule.serves(task) is None
    half = replace(task, workload=msgspec.structs.replace(task.workload, dtype="float16"))
    assert "float32" in str(schedule.serves(half))
    gpu = replace(task, device=msgspec.structs.replace(task.device, kind="cuda"))
    assert "CPU" in str(schedule.serves(gpu))


def test_heights_of_row_tiles():
    for rows, tile, hoisted, wanted in (
            (7, Tile(3, 1, 1), True, [3, 3, 3]), (7, Tile(3, 1, 1), False, [3, 3, 1]),
            (6, Tile(3, 1, 1), False, [3, 3]), (7, Tile(3, 1, 1, pairs=3), False, [3, 3, 3]),
            (2, Tile(3, 1, 1), False, [2]), (2, Tile(3, 1, 1), True, [3])):
        assert heights_of(rows, tile, hoisted) == Counter(wanted)


def test_thread_with_the_most_to_do():
    """Of tasks that differ it is not the number that decides: 5 of 75 tasks are 28 to 36 rows."""
    for costs, times, threads, wanted in (([8, 8, 4], 25, 16, 36), ([7, 7, 6], 25, 16, 34), ([3], 5, 2, 9),
                                          ([1, 2], 1, 3, 2), ([4, 1], 3, 1, 15)):
        tasks, total = costs * times, len(costs) * times
        parts = [sum(tasks[total * i // threads:total * (i + 1) // threads]) for i in range(threads)]
        assert busiest([(cost, 1) for cost in costs], times, threads) == wanted == max(parts)


def test_the_largest_sizes_are_chosen_for_as_fast_as_others():
    """A list with an entry for each tile of rows did not end."""
    task = make_task(get("lstm"), Workload("lstm", 64, 64, 1 << 20, 1 << 20), resolve("znver3"))
    schedule = CPUSequence()
    config = schedule.default(task)
    assert schedule.check(task, config) is None
    assert schedule.features(task, schedule.plan(task, config))["project_tasks"] > 2**20
