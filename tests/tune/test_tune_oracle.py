"""The float64 answers that candidates are checked against; and naming cells across processes."""

import ctypes
import gc
import importlib.util
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import step_cells
from cuda_on_cpu import DTYPES as MEMORY
from cuda_on_cpu import Emulated
from msgspec import structs
from refusals import refused
from runtime_sample import FakeGPU
from test_persistent_emulated import SMALL
from test_records import trial

import ecornn
from ecornn.analysis import backpropagation, graph
from ecornn.analysis.graph import _Walk
from ecornn.analysis.operators import CUSTOM, OPERATORS
from ecornn.analysis.scalar import terms
from ecornn.cells import BUILTIN, Cell, get, pointwise, product
from ecornn.cells.naming import load_cell, spec_of
from ecornn.dtypes import DTYPES
from ecornn.errors import ArgumentError, CellError, MissingPackageError, ScheduleError
from ecornn.interpreter import FUNCTIONS, interpret
from ecornn.numpy_reference import reference
from ecornn.program import RUN
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.targets import resolve
from ecornn.task import make_manifest, make_task
from ecornn.tune import adjoint_oracle, timing
from ecornn.tune.log import append
from ecornn.tune.oracle import draw, relative_error, rounded, write
from ecornn.tune.record import tolerance
from ecornn.tune.timing import Measure, answers_of, arrays_for, check, measure
from ecornn.workload import Workload


class Scaled(Cell):
    name = "scaled"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,) = states
        gx, gh = product(x, parameters["weight_ih"], 0), product(h, parameters["weight_hh"], 0)
        return [pointwise(lambda b, j: te.max(h[b, j] * 0.5, gx[b, j]) * te.exp(0.0 - te.abs(gh[b, j])), h)]


def test_the_interpreter_knows_sums_of_anything_and_refuses_what_it_does_not():
    """Batch, input and hidden sizes that are alike, sums that start elsewhere, indices that are computed."""
    from tvm import te, tirx

    class Odd(Scaled):
        def step(self, x, states, parameters):
            (h,), W = states, parameters["weight_ih"]
            k, n, m = (te.reduce_axis(range, "k") for range in ((0, 3), (1, 3), (0, 2)))
            total = te.compute((3,), lambda b: te.sum(h[b, k], axis=k, init=tirx.const(2.0, "float32")))
            late = te.compute((3, 3), lambda b, j: te.sum(x[b, n] * W[0, n, j] * h[n, b], axis=[n, m]))
            return [pointwise(lambda b, j: tirx.Cast("float32", tirx.Cast("int32", total[b] * 2.0)) + late[b, j]
                              + te.if_then_else(j % 2 == 0, h[b, (j + 1) // 2], x[b, 2 - j]), h)]

    class Lowest(Scaled):
        def step(self, x, states, parameters):
            (h,), k = states, te.reduce_axis((0, 3), "k")
            top = te.compute((3,), lambda b: te.min(h[b, k], axis=k), name="top")
            return [pointwise(lambda b, j: h[b, j] - top[b], h)]

    rng = np.random.default_rng(5)
    x, h, W = rng.normal(size=(1, 3, 3)), rng.normal(size=(3, 3)), rng.normal(size=(1, 3, 3))
    weights = {"weight_ih": W, "weight_hh": W}
    y, _ = interpret(Odd(), x, weights, [h])
    wanted = np.array([[np.trunc(2 * (2 + h[b].sum())) + sum(2 * x[0, b, n] * W[0, n, j] * h[n, b] for n in (1, 2))
                        + (h[b, (j + 1) // 2] if j % 2 == 0 else x[0, b, 2 - j]) for j in range(3)] for b in range(3)])
    np.testing.assert_allclose(y[0], wanted, rtol=1e-12)
    with pytest.raises(CellError, match="reduction 'top', which is neither a sum nor a maximum"):
        interpret(Lowest(), x, weights, [h])


class OneMore(_Walk):
    def gate(self, e, parameter):
        return (super().gate(e, parameter) + 1) % self.shapes[parameter][0]


class OneLess(_Walk):
    def level_by_level(self, e, name):
        parts = terms(e)
        if len({self.level_of(t) for _, t in parts}) > 1:
            e = parts[0][1] if not parts[0][0] else e
            for negated, term in parts[1:-1]:
                e = e - term if negated else e + term
        return super().level_by_level(e, name)


class Plus(_Walk):
    def level_by_level(self, e, name):
        if type(e).__name__ == "Sub":
            e = e.a + e.b
        return super().level_by_level(e, name)


@pytest.mark.parametrize(("cell", "walk"), [
    ("lstm", OneMore), ("lstm(peepholes)", OneMore), ("lstm(layer_norm)", Plus),
    *(pytest.param(cell, walk, marks=pytest.mark.exhaustive) for cell, walk in (
        ("lstm", OneLess), ("lstm(peepholes,coupled)", Plus), ("gated", OneMore), ("gated", OneLess),
        ("gated", Plus)))])
def test_the_check_of_candidates_sees_an_error_of_the_analysis(tmp_path, monkeypatch, cell, walk):
    """The tuner's own check, of modules made by the analysis as it is, and by one with an error."""
    found, work = step_cells.CELLS.get(cell) or get(cell), Workload(cell, 12, 10, 2, 5)
    write(tmp_path / "answers.npz", found, work, seed=1)
    answers = answers_of(str(tmp_path / "answers.npz"))
    def error() -> float:
        module = ecornn.compile(found, hidden=12, input=10, batch=2, seq=5, target="cpu")
        memory = arrays_for(module)
        weights = {n[2:]: memory.weight(values) for n, values in answers.items() if n.startswith("w:")}
        return check(module.bind(weights), memory, answers)

    assert error() <= tolerance(work)
    monkeypatch.setattr(graph, "_Walk", walk)
    write(tmp_path / "again.npz", found, work, seed=1)
    again = answers_of(str(tmp_path / "again.npz"))
    assert all(np.array_equal(values, again[name]) for name, values in answers.items())
    assert error() > 10 * tolerance(work)


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_of_inputs_that_the_dtype_can_hold(dtype, tmp_path):
    path = tmp_path / "answers.npz"
    write(path, BUILTIN["lstm"], Workload("lstm", 6, 5, 3, 9, dtype), seed=0)
    with np.load(path, allow_pickle=False) as found:
        assert found["x"].shape == (8, 3, 5) and found["y"].shape == (8, 3, 6)
        assert {"first_0", "first_1", "last_0", "last_1", "w:weight_ih_l0"} <= set(found.files)
        for name in found.files:
            if name[0] in "xfw":
                np.testing.assert_array_equal(found[name], rounded(found[name], dtype))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_operator_of_cells_can_be_checked(name):
    function = {"rsqrt": lambda z: z ** -0.5, "fabs": abs, "exp10": lambda z: 10 ** z, "round": round,
                "nearbyint": round, "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
                "if_then_else": lambda a, b, c: b if a else c}.get(name) or getattr(math, name)
    operands = (0.625, 1.5)[:getattr(FUNCTIONS[name].numpy, "nin", 1)]
    values = {"acosh": [(1.75,)], "atan2": [(-0.625, 0.5)],
              "if_then_else": [(1, 2, 3), (0, 2, 3)]}.get(name, [operands])
    for value in values:
        assert float(FUNCTIONS[name].numpy(*value)) == pytest.approx(function(*value), rel=1e-15)


def test_the_interpreter_has_every_function_of_the_analysis():
    """But for values with derivatives of their own, which are no function: tests/cells/test_surrogates.py."""
    assert {key for key, row in OPERATORS.items() if not row.fields} - {CUSTOM} <= set(FUNCTIONS)


class Phased(Scaled):
    def sample(self, name, shape, rng):
        return super().sample(name, shape, rng) if name == "weight_ih" else rng.uniform(5, 9, shape)


def test_checks_use_the_parameters_that_a_cell_samples(tmp_path):
    path = tmp_path / "answers.npz"
    write(path, Phased(), Workload(Phased().identity(), 6, 5, 3, 9), seed=0)
    with np.load(path, allow_pickle=False) as found:
        first, second = found["w:weight_ih_l0"], found["w:weight_hh_l0"]
    assert abs(first).max() < 6 ** -0.5 and second.min() > 5


@pytest.mark.parametrize(("made", "words"), [
    (lambda rng: rng.uniform(5, 9, 3), "returned values of shape (3,); expected finite ones of shape (1, 6, 5)"),
    (lambda rng: np.full((1, 6, 5), np.nan), "returned values of which some are not finite"),
    (lambda rng: {}["missing"], "failed: KeyError: 'missing'")])
def test_samples_that_are_none_point_at_the_line(made, words):
    class Odd(Scaled):
        def sample(self, name, shape, rng):
            return made(rng)

    with pytest.raises(CellError, match=re.escape(words)) as caught:
        draw(Odd(), Workload("scaled", 6, 5, 3, 9), np.random.default_rng(0))
    assert caught.value.at is not None and caught.value.at[0] == __file__


def test_relative_error_never_passes_what_is_not_a_number():
    expected = np.ones((2, 3))
    assert relative_error(expected * (1 + 1e-6), expected) == pytest.approx(1e-6, rel=1e-3)
    poisoned = expected.copy()
    poisoned[0, 0] = np.nan
    assert relative_error(poisoned, expected) == np.inf and relative_error(expected[:1], expected) == np.inf


@dataclass
class Device:
    emulated: Emulated
    gpu: FakeGPU
    runs: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gpu.library, name)

    def run(self, steps: int, batch: int, device: int, queue: int, *pointers: int) -> None:
        self.runs += 1
        program, given = self.emulated.program, {}
        takes = program.entries[RUN].takes
        assert len(takes) == len(pointers) and all(pointers)
        for buffer, pointer in zip((b for n in takes for b in program.buffers if b.name == n), pointers, strict=True):
            first = max(p for p in self.gpu.held if p <= pointer)
            room = first + self.gpu.held[first][1] - pointer
            assert room >= buffer.nbytes(steps), buffer.name
            raw = (ctypes.c_char * room).from_address(pointer)
            given[buffer.name] = np.frombuffer(raw, np.uint8)[:room // buffer.itemsize * buffer.itemsize].view(
                MEMORY[buffer.dtype])
        self.emulated.carry_out(given, steps, batch)


def module_of(cell: Any, task: Task, schedule: str, change: dict[str, Any], folder: Path) -> SimpleNamespace:
    found = all_schedules()[schedule]
    config = {**found.default(task), **change}
    assert found.check(task, config) is None
    program = found.program(task, found.plan(task, config))
    manifest = make_manifest(cell, task, found, config, program, "test")
    device = Device(Emulated(program, folder), FakeGPU(manifest, folder, None))
    return SimpleNamespace(manifest=manifest, library=device)


@pytest.mark.parametrize(("name", "sizes", "dtype", "schedule", "change"), [
    ("lstm", (3, 40), "bfloat16", "persistent", {"hoisted": "same"}),
    ("gru", (5, 24), "float32", "layout_transform", {}),
    pytest.param("indrnn", (3, 7), "tf32", "elementwise", {}, marks=pytest.mark.exhaustive),
    ("pair", (2, 24), "float16", "persistent", {"units": 8, "hoisted": "float32"}),
], ids=str)
def test_a_module_of_a_recurrence_is_checked_and_timed(name, sizes, dtype, schedule, change, tmp_path, monkeypatch):
    """As the process with the GPU does it: within the tolerance, and beyond it where a weight or an output is off."""
    batch, hidden = sizes
    cell = step_cells.CELLS.get(name) or get(name)
    kind, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
    work = Workload(cell.identity(), hidden, hidden, batch, 5, kind, precision=precision).adjoint
    module = module_of(cell, make_task(cell, work, SMALL), schedule, change, tmp_path)
    monkeypatch.setattr("ecornn.runtime.loader.load", lambda path: module)
    monkeypatch.setattr("ecornn.tune.timing.torch_sees_gpu", lambda: False)
    monkeypatch.setattr("ecornn.runtime.loader.check_host", lambda device, number: None)
    monkeypatch.setattr(timing, "race", lambda runs, bound, fewest, seconds: [[one.clock(one.run)] for one in runs])
    path = tmp_path / "answers.npz"
    adjoint_oracle.write(path, cell, work, seed=1)
    request = Measure(("module.so",), str(path), tolerance(work), work.seq, 0)
    (one,) = measure(request)
    # that of indrnn multiplies nothing, and what it leaves has all bits of float32
    assert 0 < one.check <= (2e-5 if name == "indrnn" else tolerance(work)) and one.times.median > 0
    assert module.library.runs == 3  # two are checked, one is timed

    kept = dict(np.load(path))
    for wrong in ("y", "last_0", *(["w:"] if name != "indrnn" else [])):  # whose factors have the weights in them
        other = tmp_path / f"{wrong[:1]}.npz"
        np.savez(other, **{n: 1.1 * v + 0.1 if n.startswith(wrong) else v for n, v in kept.items()})
        with pytest.raises(ScheduleError, match="wrong output"):
            measure(structs.replace(request, answers=str(other)))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_relu", "lstm(layer_norm)", "lstm(peepholes,clip=0.75)", "slstm",
                                  "indrnn", "blend"])
def test_answers_are_proven_by_somebody_who_knows_nothing_of_the_analysis(name, monkeypatch):
    """An error of a derivative, of a sum over steps or of the direction is seen, whatever the cell."""
    cell = step_cells.CELLS.get(name) or get(name)
    work = Workload(cell.identity(), 12, 12, 3, 9, "float16").adjoint
    x, y, first, last, flat = adjoint_oracle.answers(cell, work, np.random.default_rng(0))
    graph = make_task(cell, work, SMALL).graph
    assert x.shape == (8, 3, len(graph.hoisted_outputs), 12) and y.shape == (8, 3, len(graph.outputs), 12)
    assert len(first) == len(last) == len(graph.states) and {*flat} == {
        cell.parameter_name(n) for n in cell.parameters(12, 12)}
    def one_off(*arguments: Any) -> Any:
        found = backpropagation.carry_out(*arguments)
        weight = next(iter(found.parameters))
        return replace(found, parameters=found.parameters | {weight: found.parameters[weight] * 1.01})
    monkeypatch.setattr(adjoint_oracle, "carry_out", one_off)
    with pytest.raises(CellError, match=f"gradients that were derived for {name.partition('(')[0]}.* are wrong: of"):
        adjoint_oracle.answers(cell, work, np.random.default_rng(0))


def test_a_cell_is_named_so_that_another_process_finds_it():
    assert spec_of(BUILTIN["gru"]) == "gru" and load_cell("gru") is BUILTIN["gru"]
    spec = spec_of(Scaled())
    assert spec == f"{Path(__file__).resolve()}:Scaled" and load_cell(spec).identity() == Scaled().identity()
    assert load_cell(f"{__name__}:Scaled").name == "scaled"
    refused(ArgumentError, "does not define 'Nope'", load_cell, f"{Path(__file__)}:Nope")
    refused(ArgumentError, r"an ecornn\.Cell", load_cell, f"{Path(__file__)}:DTYPES")


def test_a_class_that_no_other_process_has_is_sent(monkeypatch):
    class Local(Scaled):
        name = "local"

        def __init__(self, held: Any) -> None:
            self.held = held

    spec = spec_of(Local(3))
    code = "import sys; from ecornn.cells.naming import received; cell = received(sys.argv[1]); " \
           "print(cell.held, cell.identity())"
    done = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.split() == ["3", Local(3).identity()]
    refused(ArgumentError, "does not define", load_cell, spec)  # what a text may name runs no pickle
    with pytest.raises(CellError, match="cannot be sent to the tuner's processes, TypeError"):
        spec_of(Local(threading.Lock()))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingPackageError, match="cloudpickle"):
        spec_of(Local(3))


def test_a_worker_that_imports_a_script_does_not_tune(monkeypatch):
    monkeypatch.setenv("ECORNN_WORKER", "1")
    refused(ScheduleError, "__main__", ecornn.tune.tune, "lstm", hidden=8, target="cpu")


def test_compile_uses_the_record_and_removes_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path))
    untuned = ecornn.compile("rnn_relu", hidden=16, batch=2, target="cpu")
    assert untuned.manifest.provenance.startswith("untuned default of cpu_sequence: no record applies")
    file = untuned.path
    assert file.exists()
    schedule, device = all_schedules()["cpu_sequence"], resolve("cpu")
    work = Workload("rnn_relu", 16, 16, 2)
    task = make_task(BUILTIN["rnn_relu"], work, device)
    default = dict(schedule.default(task))
    other = next({**default, k.name: v} for k in schedule.knobs(task) for v in k.values
                 if v != default[k.name] and not schedule.check(task, {**default, k.name: v}))
    append(tmp_path / "log.jsonl", trial(workload=work, device=device, schedule=schedule.name,
                                         revision=schedule.revision, config=other, check=1e-7))
    tuned = ecornn.compile("rnn_relu", hidden=16, batch=2, target="cpu", out=tmp_path / "kept.so")
    assert tuned.manifest.config == other and "record log.jsonl:1" in tuned.manifest.provenance
    chosen = ecornn.compile("rnn_relu", hidden=16, batch=2, target="cpu", schedule="cpu_sequence", config=default)
    assert chosen.manifest.config == default and "the caller gave this configuration" in chosen.manifest.provenance
    x = np.random.default_rng(0).uniform(-1, 1, (5, 2, 16)).astype(np.float32)
    weights = {p.name: np.full(p.shape, 0.03, np.float32) for p in tuned.manifest.parameters}
    expected, _ = reference("rnn_relu", x, weights)
    for module in (untuned, tuned, chosen):
        y, _ = module.bind(weights)(x)
        assert relative_error(y, expected) <= 1e-5
    del untuned, module
    gc.collect()
    assert not file.parent.exists() and (tmp_path / "kept.so").exists()


def test_a_builder_imports_tvm_alone_and_a_users_file_may_import_the_rest_later():
    later = "import torch" if importlib.util.find_spec("torch") else "pass"
    program = (f"from ecornn.tune.building import ready; import sys; ready(None); "
               f"assert 'tvm' in sys.modules and not {{'torch', 'ml_dtypes'}} & set(sys.modules); {later}; "
               "import ml_dtypes; assert ml_dtypes.bfloat16; from ecornn.quick_tvm import import_tvm; import_tvm()")
    subprocess.run([sys.executable, "-c", program], check=True)
