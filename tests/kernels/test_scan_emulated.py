"""`scan`, emulated, against float64: published cells and random affine steps, with all that a layer may have; what is
too large for float32; and where it is chosen."""

from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
from affine_steps import RandomAffine
from cuda_on_cpu import Emulated
from emulated import check_numbers, known_by_name, task_of
from test_backward_emulated import Step
from test_backward_emulated import check as check_step
from test_backward_recurrence_emulated import check_asked, check_recurrence, recurrence_of
from test_stacks_cuda import SIDES, check_results, program_of
from tvm import te

from ecornn.cells import Cell, pointwise
from ecornn.schedules import all_schedules
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, SERIAL, Overlap, Stack, Traversal

SCHEDULE = all_schedules()["scan"]
SLOW = pytest.mark.exhaustive  # what takes seconds to compile, beside others like it
SMALL = {"threads": 32, "prefetch": 8, "group": 4}  # little to emulate


class Growth(Cell):
    """A state that is multiplied by 4 in each step."""

    name, states = "growth", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> list[Any]:
        (h,) = states
        return [pointwise(lambda b, j: 4.0 * h[b, j] + x[b, j], h)]


class Slow(Cell):
    """A decay of 1 - 2**-12, and half of x."""

    name, states = "slow", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> list[Any]:
        (h,) = states
        return [pointwise(lambda b, j: (1.0 - 2.0**-12) * h[b, j] + 0.5 * te.tanh(x[b, j]), h)]


class Delayed(Cell):
    """A line of two states: y is x of two steps before; the second one's old value is the first one's new one."""

    name, states, output = "delayed", ("old", "older"), "older"

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> list[Any]:
        old, older = states
        return [pointwise(lambda b, j: x[b, j] + 0.0 * older[b, j], old), pointwise(lambda b, j: old[b, j], old)]


RANDOM = {cell.name: cell for cell in map(RandomAffine, range(5))}
OWN = {"slow": Slow(), "growth": Growth(), "delayed": Delayed()}
known = known_by_name({**published.CELLS, **RANDOM, **OWN})
ALL = Traversal(lengths=True, resets=True)  # lengths are multiples of 5: of so many rows some go through all chunks
BACK = Traversal(True, lengths=True, resets=True)


@pytest.mark.parametrize(("cell", "sizes", "dtype", "knobs", "traversal"), [
    ("min_gru", (1, 1, 1, 1), "float32", {"chunks": 4}, ALONE),  # chunks without steps
    ("min_gru", (45, 2, 5, 8), "bfloat16", {"chunks": 4, "units": 4, "hoisted": "same"}, ALONE),
    pytest.param("min_lstm", (23, 5, 5, 7), "float32", {"chunks": 8}, ALL, marks=SLOW),
    ("qrnn", (30, 2, 5, 6), "float16", {"chunks": 4, "units": 2}, Traversal(False, 2)),
    ("qrnn", (21, 5, 5, 7), "float32", {"chunks": 16}, BACK),  # h is read by no step
    ("hgrn", (19, 4, 5, 9), "bfloat16", {"chunks": 4}, ALL),  # o is read by no step, and rows end in earlier chunks
    ("rg_lru", (26, 2, 6, 6), "float32", {"chunks": 8, "units": 2}, Traversal(True)),
    ("lru", (33, 7, 5, 6), "float32", {"chunks": 8}, ALL),  # a complex number
    pytest.param("lru", (17, 2, 5, 8), "float16", {"chunks": 4, "units": 2}, Traversal(True), marks=SLOW),
    pytest.param("selective_ssm", (25, 2, 7, 7), "float32", {"chunks": 4}, Traversal(resets=True), marks=SLOW),
    ("mega_ema", (40, 8, 3, 5), "tf32", {"chunks": 32}, Traversal(lengths=True)),
    pytest.param("t_rnn", (12, 3, 3, 33), "bfloat16", {"chunks": 8}, Traversal(True, 2, True, True), marks=SLOW),
    ("delayed", (11, 3, 4, 4), "float32", {"chunks": 8}, ALL),
    ("slow", (300, 1, 2, 2), "float32", {"chunks": 64}, ALONE),  # more maps than groups
    *(pytest.param(name, (14 + n, 4, 3, 4), "float32", {"chunks": (4, 8, 16)[n % 3]}, (ALL, ALONE, BACK)[n % 3],
                   marks=SLOW if n > 1 else ()) for n, name in enumerate(RANDOM))], ids=str)
def test_results(tmp_path: Path, cell: str, sizes: Any, dtype: str, knobs: dict[str, Any], traversal: Traversal):
    task = task_of(cell, sizes, dtype, traversal=traversal)
    assert SCHEDULE.serves(task) is None
    check_numbers(tmp_path, SCHEDULE, task, {**SCHEDULE.default(task), **SMALL, **knobs})


@pytest.mark.parametrize(("cell", "sizes", "dtype", "knobs", "traversal"), [
    pytest.param("qrnn", (19, 4, 5, 6), "float32", {"chunks": 4}, Traversal(True, 2, True, True, keep="states"),
                 marks=SLOW),
    ("leaky", (22, 2, 6, 6), "bfloat16", {"chunks": 8, "units": 2}, Traversal(keep="states"))], ids=str)
def test_kept_states(tmp_path: Path, cell: str, sizes: Any, dtype: str, knobs: dict[str, Any], traversal: Traversal):
    test_results(tmp_path, cell, sizes, dtype, knobs, traversal)


@pytest.mark.parametrize(("cell", "sizes", "dtype", "knobs", "traversal"), [
    ("brc", (21, 5, 5, 7), "float32", {"chunks": 4}, ALL),  # nonlinear, as the next ones are
    pytest.param("unicornn", (18, 4, 5, 6), "float32", {"chunks": 8}, BACK, marks=SLOW),
    ("highway", (23, 2, 5, 8), "bfloat16", {"chunks": 4, "units": 2, "hoisted": "same"}, Traversal(resets=True)),
    ("indrnn", (33, 2, 5, 8), "float16", {"chunks": 8, "units": 2}, Traversal(True)),
    ("indrnn", (9, 1, 5, 8), "tf32", {"chunks": 4}, ALONE),
    pytest.param("rwkv4", (17, 2, 5, 4), "float32", {"chunks": 4}, ALONE, marks=SLOW),
    pytest.param("lru", (25, 5, 5, 6), "float32", {"chunks": 16}, ALL, marks=SLOW),
    pytest.param("qrnn", (1, 1, 1, 1), "float32", {"chunks": 4}, ALONE, marks=SLOW)], ids=str)
def test_recurrences_of_adjoints(tmp_path: Path, cell: str, sizes: Any, dtype: str, knobs: dict[str, Any],
                                 traversal: Traversal):
    layer = task_of(cell, sizes, dtype, traversal=traversal)
    check_recurrence(tmp_path, SCHEDULE, layer, {**check_asked(SCHEDULE, recurrence_of(layer)), **SMALL, **knobs})


@pytest.mark.parametrize(("forward", "cell", "sizes", "dtype", "traversal"), [
    pytest.param("scan", "leaky", (13, 3, 7, 7), "float32", ALL, marks=SLOW),
    pytest.param("elementwise", "highway", (11, 3, 5, 8), "float32", BACK, marks=SLOW),
    pytest.param("elementwise", "indrnn", (12, 3, 5, 8), "bfloat16", ALONE, marks=SLOW)], ids=str)
def test_training_steps(tmp_path: Path, forward: str, cell: str, sizes: Any, dtype: str, traversal: Traversal):
    """Gradients of a whole layer, whose backward pass is a scan."""
    step = Step(tmp_path, forward, cell, sizes, dtype, traversal, "gates", behind="scan")
    assert {"backward_compose0", "backward_carry0", "backward_replay"} <= {*step.program.functions}
    check_step(step, cell, sizes, dtype, traversal)


@SLOW
@pytest.mark.parametrize("overlap", [SERIAL, SIDES], ids=str)
def test_a_stack(tmp_path: Path, overlap: Overlap):
    """Two directions at the same time have maps of their own."""
    stack = Stack(1, True, True, True)
    program = program_of("scan", "t_rnn", stack, "float32", overlap=overlap, **SMALL)
    check_results(Emulated(program, tmp_path), "t_rnn", stack, "float32")


def ran(folder: Path, cell: str, x: np.ndarray, first: np.ndarray, knobs: dict[str, Any],
        traversal: Traversal = ALONE, masks: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """y of a float32 layer of one state without parameters."""
    steps, batch, hidden = x.shape
    task = task_of(cell, (steps, batch, hidden, hidden), "float32", traversal=traversal)
    plan = SCHEDULE.plan(task, {**SCHEDULE.default(task), **SMALL, **knobs})
    rows, _ = Emulated(SCHEDULE.program(task, plan), folder).run(x, {"h": first}, {}, masks or {})
    return rows


def test_coefficients_too_large_for_float32(tmp_path: Path):
    """Zeros stay zeros, where a chunk's coefficient is 4 to its steps; a reset ends what has grown; NaN stays NaN."""
    steps, names = 400, ("zero", "late", "reset", "nan")
    x, resets = np.zeros((steps, len(names), 1), np.float32), np.zeros((steps, len(names)), bool)
    x[steps - 3, 1], x[0, 2], x[5, 3] = 1, 1, np.nan
    resets[350, 2] = True
    y = ran(tmp_path, "growth", x, np.zeros(x.shape[1:], np.float32), {"chunks": 4}, Traversal(resets=True),
            {"resets": resets})
    wanted, h = np.zeros_like(x), np.zeros(x.shape[1:], np.float32)
    with np.errstate(over="ignore"):
        for t in range(steps):
            h = np.float32(4) * np.where(resets[t, :, None], np.float32(0), h) + x[t]
            wanted[t] = h
    np.testing.assert_array_equal(y, wanted)
    assert np.isinf(wanted[300, 2]) and np.isnan(wanted[-1, 3]) and wanted[-1, 1] == 16


@pytest.mark.parametrize("steps", [100_000, pytest.param(1_000_000, marks=SLOW)])
def test_many_steps_with_a_decay_near_one(tmp_path: Path, steps: int):
    rng = np.random.default_rng(0)
    x, h = rng.standard_normal((steps, 1, 1)).astype(np.float32), 0.5
    y = ran(tmp_path, "slow", x, np.full((1, 1), h, np.float32), {"chunks": 1024, "prefetch": 16})
    wanted = np.array([h := (1 - 2.0**-12) * h + v for v in (0.5 * np.tanh(x[:, 0, 0].astype(float))).tolist()])
    assert np.abs(y[:, 0, 0] - wanted).max() < 1e-5 * np.abs(wanted).max()


SHAPES = [(16384, 1, 1024), (65536, 1, 256), (131072, 1, 512), (4096, 4, 512), (2048, 8, 256)]  # T, B, H


@pytest.mark.parametrize("cell", ["min_gru", "qrnn", "lru", "rg_lru", "mega_ema"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_chosen_where_units_are_few_and_steps_are_many(cell: str, dtype: str):
    def first(T: int, B: int, H: int) -> str:
        return serving_or_raise(task_of(cell, (T, B, H, H), dtype, KNOWN["sm_90a"]))[0].name
    assert {first(*shape) for shape in SHAPES} == {"scan"}
    full = [(65536, 64, 256), (16384, 16, 1024), (131072, 1, 16384), (2048, 20, 800 + 32), (300, 64, 512)]
    assert {first(*shape) for shape in full} == {"elementwise"}  # units that fill the chip
    assert {first(T, 1, 256) for T in (1, 10, 50)} == {"elementwise"}  # no time to gain
    assert first(65536, 1, 1) == "scan" and "scan" not in {first(1000, B, 1024) for B in (16, 17, 64)}


@pytest.mark.parametrize("cell", ["brc", "indrnn", "min_gru", "highway"])
def test_it_is_chosen_for_adjoints_of_few_units(cell: str):
    def first(T: int, B: int, H: int) -> str:
        return serving_or_raise(recurrence_of(task_of(cell, (T, B, H, H), "bfloat16", KNOWN["sm_90a"])))[0].name
    assert first(16384, 1, 256) == "scan" and first(16384, 64, 256) == "elementwise" == first(20, 1, 256)


@pytest.mark.parametrize(("cell", "why"), [
    ("brc", "no affine map"), ("rwkv4", "no affine map"), ("gru1", "recurrent product")])
def test_it_refuses_what_is_no_affine_map(cell: str, why: str):
    assert why in str(SCHEDULE.serves(task_of(cell, (64, 2, 8, 8), "float32")))

