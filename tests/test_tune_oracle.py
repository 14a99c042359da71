"""The float64 answers that candidates are checked against, and naming cells across processes."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from tune_fakes import DEVICE

import ecornn
from ecornn.cells import BUILTIN, Cell, pointwise, product
from ecornn.errors import ArgumentError, CellError, ScheduleError
from ecornn.numpy_reference import STEPS, reference
from ecornn.task import make_task
from ecornn.tune.cell_spec import load_cell, spec_of
from ecornn.tune.interpreter import interpret
from ecornn.tune.oracle import relative_error, write
from ecornn.workload import DTYPES, Workload


class Scaled(Cell):
    """A cell of this file: h' = max(h / 2, W x) * exp(-|R h|)."""

    name = "scaled"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        (h,) = states
        gx, gh = product(x, parameters["weight_ih"], 0), product(h, parameters["weight_hh"], 0)
        return [pointwise(lambda b, j: te.max(h[b, j] * 0.5, gx[b, j])
                          * te.exp(0.0 - te.abs(gh[b, j])), h)]


@pytest.mark.parametrize("name", STEPS)
def test_the_interpreter_agrees_with_the_reference(name):
    cell, rng = BUILTIN[name], np.random.default_rng(3)
    steps, batch, inputs, hidden = 5, 3, 4, 6
    task = make_task(cell, Workload(name, hidden, inputs, batch), DEVICE)
    shaped = {n: rng.normal(size=s) for n, s in cell.parameters(inputs, hidden).items()}
    flat = {cell.parameter_name(n): w.reshape(-1, *w.shape[2:]) for n, w in shaped.items()}
    x = rng.normal(size=(steps, batch, inputs))
    states = [rng.normal(size=(batch, hidden)) for _ in cell.states]
    y, last = interpret(task.graph, x, shaped, states)
    expected, expected_last = reference(name, x, flat, states)
    # both are float64, in other orders of summation; 1e-12 is 4500 of its roundings
    for got, want in zip((y, *last), (expected, *expected_last), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_the_interpreter_agrees_with_a_loop_for_a_users_cell():
    rng = np.random.default_rng(4)
    task = make_task(Scaled(), Workload("scaled", 5, 5, 2), DEVICE)
    weights = {"weight_ih": rng.normal(size=(1, 5, 5)), "weight_hh": rng.normal(size=(1, 5, 5))}
    x, h = rng.normal(size=(4, 2, 5)), rng.normal(size=(2, 5))
    y, last = interpret(task.graph, x, weights, [h])
    for step in range(4):
        h = np.maximum(h / 2, x[step] @ weights["weight_ih"][0].T) * np.exp(
            -np.abs(h @ weights["weight_hh"][0].T))
        np.testing.assert_allclose(y[step], h, rtol=1e-12)
    np.testing.assert_allclose(last[0], h, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_of_inputs_that_the_dtype_can_hold(dtype, tmp_path):
    from ecornn.tune.oracle import rounded

    path = tmp_path / "answers.npz"
    task = make_task(BUILTIN["lstm"], Workload("lstm", 6, 5, 3, 9, dtype), DEVICE)
    write(path, BUILTIN["lstm"], task, seed=0)
    with np.load(path, allow_pickle=False) as found:
        assert found["x"].shape == (8, 3, 5) and found["y"].shape == (8, 3, 6)
        assert {"first_0", "first_1", "last_0", "last_1", "w:weight_ih_l0"} <= set(found.files)
        for name in found.files:
            if name[0] in "xfw":
                np.testing.assert_array_equal(found[name], rounded(found[name], dtype))


def test_relative_error_never_passes_what_is_not_a_number():
    expected = np.ones((2, 3))
    assert relative_error(expected * (1 + 1e-6), expected) == pytest.approx(1e-6, rel=1e-3)
    poisoned = expected.copy()
    poisoned[0, 0] = np.nan
    assert relative_error(poisoned, expected) == np.inf
    assert relative_error(expected[:1], expected) == np.inf


def test_a_cell_is_named_so_that_another_process_finds_it(tmp_path):
    assert spec_of(BUILTIN["gru"]) == "gru" and load_cell("gru") is BUILTIN["gru"]
    spec = spec_of(Scaled())
    assert spec == f"{Path(__file__).resolve()}:Scaled"
    assert load_cell(spec).identity() == Scaled().identity()
    assert load_cell(f"{__name__}:Scaled").name == "scaled"

    class Local(Scaled):
        name = "local"

    with pytest.raises(CellError, match="top level"):
        spec_of(Local())
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(CellError, match="ZeroDivisionError"):
        load_cell(f"{broken}:Cell")
    with pytest.raises(ArgumentError, match="has no 'Nope'"):
        load_cell(f"{Path(__file__)}:Nope")
    with pytest.raises(ArgumentError, match=r"an ecornn\.Cell"):
        load_cell(f"{Path(__file__)}:DEVICE")


def test_a_worker_that_imports_a_script_does_not_tune(monkeypatch):
    monkeypatch.setenv("ECORNN_WORKER", "1")
    with pytest.raises(ScheduleError, match="__main__"):
        ecornn.tune.tune("lstm", hidden=8, target="cpu")


def test_compile_uses_the_record_and_removes_its_file(tmp_path, monkeypatch):
    from test_records import trial

    from ecornn.device import resolve
    from ecornn.schedules import all_schedules
    from ecornn.tune.log import append

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
    chosen = ecornn.compile("rnn_relu", hidden=16, batch=2, target="cpu", schedule="cpu_sequence",
                            config=default)
    assert chosen.manifest.config == default and "given by the caller" in chosen.manifest.provenance
    x = np.random.default_rng(0).uniform(-1, 1, (5, 2, 16)).astype(np.float32)
    weights = {p.name: np.full(p.shape, 0.03, np.float32) for p in tuned.manifest.parameters}
    expected, _ = reference("rnn_relu", x, weights)
    for module in (untuned, tuned, chosen):
        y, _ = module.bind(weights)(x)
        assert relative_error(y, expected) <= 1e-5
    del untuned, module
    gc.collect()
    assert not file.parent.exists() and (tmp_path / "kept.so").exists()


def test_what_compile_refuses():
    with pytest.raises(ArgumentError, match="a knob of cpu_sequence"):
        ecornn.compile("lstm", hidden=8, target="cpu", schedule="cpu_sequence", config={"nope": 1})
    with pytest.raises(ScheduleError, match="cpu_sequence"):
        ecornn.compile("lstm", hidden=8, target="cpu", dtype="bfloat16")
    with pytest.raises(ScheduleError, match="is for llvm, not cuda"):
        ecornn.compile("lstm", hidden=8, target="sm_90a", schedule="cpu_sequence")


def test_importing_the_tuner_imports_no_compiler():
    import subprocess

    program = ("import ecornn.tune, ecornn.compiler, ecornn.tune.worker, sys; "
               "assert not {'tvm', 'torch', 'xgboost'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_builder_imports_tvm_without_pytorch_which_a_users_file_may_import_later():
    import importlib.util
    import subprocess

    later = "import torch" if importlib.util.find_spec("torch") else "pass"
    program = (f"from ecornn.tune.building import ready; import sys; ready(None); "
               f"assert 'tvm' in sys.modules and 'torch' not in sys.modules; {later}; "
               "from ecornn.tune.quick_tvm import import_tvm; import_tvm()")
    subprocess.run([sys.executable, "-c", program], check=True)
