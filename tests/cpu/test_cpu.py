"""The CPU schedule against float64, for every cell, tails of every kind, and every knob; polynomials of functions."""

from collections import Counter
from dataclasses import replace

import msgspec.structs
import numpy as np
import pytest
from cpu_sample import Sample, rows_that_fit
from exact import relative as error
from step_cells import Chain, Peephole, Residual, run
from tvm import tirx

from ecornn.build.module import build_module
from ecornn.cells import BUILTIN, get
from ecornn.host_cpu import detect
from ecornn.manifest import Manifest
from ecornn.numpy_reference import STEPS, reference
from ecornn.program import Buffer, Parallel, Program
from ecornn.schedules.cpu import CPUSequence
from ecornn.schedules.cpu import emit as math
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.tiling import Tile, busiest, heights_of, lanes_of
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
    compare(Sample(tmp_path, cell, *size), size[3], size[2])


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
    assert ahead("skylake-avx512", 256, 20) == 0 and ahead("znver4", 800, 20) == 0


@pytest.mark.parametrize(("hidden", "vectors"), [(16, 1), (40, 3), (48, 3)])
def test_a_step_of_one_row_that_one_thread_takes_computes_no_more_vectors_than_it_has(hidden: int, vectors: int):
    """Tiles of two vectors of units, which two threads would share, have four where there are three."""
    device = msgspec.structs.replace(detect(), arch="znver4", cores=2, l2=1 << 20, features=("avx2", "avx512f", "fma"))
    task = make_task(get("lstm"), Workload("lstm", hidden, 1, 1, 1), device)
    config = CPUSequence().default(task)
    assert config["team"] == 1 and CPUSequence().plan(task, config).width == vectors * 16


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
    compare(Sample(tmp_path, "lstm", 9, 27, 3, 4, features=features), 4, 3)


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
    assert schedule.check(task, config) is None and {k.name for k in schedule.knobs(task)} == set(config)
    assert all(config[k.name] in k.values for k in schedule.knobs(task))
    values = schedule.features(task, schedule.plan(task, config))
    assert all(np.isfinite(v) for v in values.values()) and values["step_padded_flops"] >= values["step_flops"]


def test_serves_says_why_not():
    schedule, task = CPUSequence(), make_task(get("gru"), Workload("gru", 8, 8), detect())
    assert schedule.serves(task) is None
    trains = replace(task, workload=msgspec.structs.replace(task.workload, weights="int16"),
                     traversal=msgspec.structs.replace(task.traversal, keep="gates"))
    assert "float32" in str(schedule.serves(trains))
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


COUNT = 1 << 20
# relative of tanh, absolute of sigmoid, relative of exp: as emit.py says
LIMITS = {"float32": (3e-7, 1.5e-7, 2e-7), "float64": (1e-15, 3e-16, 4e-16)}


@pytest.fixture(scope="module", params=LIMITS)
def functions(request, tmp_path_factory):
    import tvm_ffi
    real = request.param
    device, (a, b), bound = detect(), (tirx.Var(n, "float32") for n in "ab"), tirx.const(0.25, "float32")
    of_scalars = {"relu": tirx.Max(a, tirx.const(0.0, "float32")), "above": tirx.Max(bound, a),
                  "below": tirx.Min(a, bound), "larger": tirx.Max(a, b), "smaller": tirx.Min(a, b)}
    e = Emitter(lanes_of(device, real), real)
    for name in ("thread", "threads", "T", "B"):
        e.scalar(name)
    source, second = e.pointer("x"), e.pointer("other")
    names = ("tanh", "sigmoid", "exp", *of_scalars)
    outputs = [e.pointer(name) for name in names]
    with e.loop("i", COUNT // e.lanes) as i:
        at = e.let("at", i * e.index(e.lanes))
        value = {a: e.let("value", e.vload(source, at)), b: e.let("value", e.vload(second, at))}
        for name, output in zip(names, outputs, strict=True):
            found = (math.vector(e, of_scalars[name], value.__getitem__) if name in of_scalars
                     else getattr(math, name)(e, value[a]))
            e.vstore(output, at, found)
    buffers = tuple(Buffer(n, "workspace", real) for n in ("x", "other", *names))
    program = Program.running({"worker": e.function("worker")}, buffers, (Parallel("worker"),))
    manifest = Manifest(Workload("lstm", 1, 1), device, "test", {}, "", (), "", (), buffers, {}, {})
    file = tmp_path_factory.mktemp("math") / "math.so"
    build_module(program, manifest, file)
    module = tvm_ffi.load_module(str(file))
    def call(x, other=0.0):
        arrays = [*(np.resize(v, COUNT).astype(real) for v in (x, other)), *(np.full(COUNT, -7, real) for _ in names)]
        module.run(1, 1, 0, 1, *[a.ctypes.data for a in arrays])
        return dict(zip(("x", "other", *names), (a[:len(x)] for a in arrays), strict=True))
    call.real = real
    return call


def samples(real: str) -> np.ndarray:
    largest = np.array([np.finfo(real).max]).view(f"u{np.dtype(real).itemsize}")[0]
    positive = np.linspace(0, 1, COUNT // 4, dtype=np.longdouble) * np.longdouble(largest)
    positive = positive.astype(largest.dtype).view(real)
    dense = np.linspace(-20, 20, COUNT // 4, dtype=real)
    return np.concatenate([positive, -positive, dense])


def test_errors(functions):
    got, limits, kind = functions(samples(functions.real)), LIMITS[functions.real], np.finfo(functions.real)
    x = got["x"].astype(np.longdouble)
    tanh, normal = np.tanh(x), np.abs(x) > kind.tiny
    assert np.max(np.abs(got["tanh"] - tanh)[normal] / np.abs(tanh)[normal]) < limits[0]
    assert np.max(np.abs(got["sigmoid"] - (0.5 + 0.5 * np.tanh(0.5 * x)))) < limits[1]
    with np.errstate(over="ignore", under="ignore"):
        exp = np.exp(np.clip(x, -2000, 2000))
    usual = (exp <= kind.max) & (exp >= kind.tiny)
    assert np.max(np.abs(got["exp"] - exp)[usual] / exp[usual]) < limits[2]
    assert np.all(np.isinf(got["exp"][exp > np.longdouble(1.0001) * kind.max]))
    assert np.max(np.abs(got["exp"] - exp)[exp < kind.tiny]) < 1.5 * kind.smallest_subnormal


def test_special_values(functions):
    got = functions(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0]))
    assert np.array_equal(got["tanh"], [1, -1, np.nan, 0, 0], equal_nan=True)
    assert np.array_equal(got["sigmoid"], [1, 0, np.nan, 0.5, 0.5], equal_nan=True)
    assert np.array_equal(got["exp"], [np.inf, 0, np.nan, 1, 1], equal_nan=True)


def test_extremes_are_those_of_numpy_for_nan_too(functions):
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -0.5, 1e-45, -1e-45, 3e38], functions.real)
    x, other = (v.ravel() for v in np.meshgrid(values, values))
    got = functions(x, other)
    for name, wanted in {"relu": np.maximum(x, 0), "above": np.maximum(x, 0.25), "below": np.minimum(x, 0.25),
                         "larger": np.maximum(x, other), "smaller": np.minimum(x, other)}.items():
        assert np.array_equal(got[name], wanted, equal_nan=True), name
