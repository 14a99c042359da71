"""Published cells, each against a formula that was written apart from its te step: in float32 on the CPU, and emulated
GPU code of some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated
from emulated import TINY
from published import CELLS
from published.base import Published

import ecornn
from ecornn.analysis import analyse
from ecornn.build.link import find_compiler
from ecornn.cli.cell_checks import Checks
from ecornn.host_cpu import detect
from ecornn.interpreter import output_numbers
from ecornn.schedules import Task, all_schedules
from ecornn.schedules.cpu import CPUSequence
from ecornn.tune.oracle import relative_error
from ecornn.workload import Workload

T, B, I = 5, 3, 5
LIMIT = 1e-5  # relative; some roundings of float32
# Each of these has the products and exchanges of another cell.
LATER = {"lstm_1997", "lstm_slim3", "sublstm", "mgu2", "ligru", "mut1", "mut2", "caru", "fast_rnn", "mi_rnn", "ct_rnn",
         "mega_ema", "t_rnn", "min_gru", "brc", "echo_state", "cfn", "alif", "gru3", "unicornn",
         "antisymmetric"}
OWN_GRADIENTS = {"lru", "lif"}  # whose gradients with respect to a product are states of the backward pass
GPU = [s for s in all_schedules().values() if s.kind == "cuda"]


def drawn(cell: Published, seed: int = 0) -> tuple[Any, dict[str, Any], list[Any]]:
    """x (T, B, I), parameters in te shape, and first states; values of float32."""
    rng, hidden = np.random.default_rng(seed), cell.hidden
    parameters, width = {}, hidden if cell.square else I
    for name, shape in cell.parameters(width, hidden).items():
        low, high = cell.ranges.get(name, (-1.0, 1.0))
        value = cell.fixed[name](hidden) if name in cell.fixed else rng.uniform(low, high, shape)
        parameters[name] = np.float32(value)
    states = [rng.uniform(-1, 1, (B, hidden)).astype(np.float32) for _ in cell.states]
    states = [abs(s) if n in cell.nonnegative else s for n, s in zip(cell.states, states, strict=True)]
    return rng.normal(size=(T, B, width)).astype(np.float32), parameters, states


def formula(cell: Published, x: Any, parameters: dict[str, Any], states: list[Any]) -> tuple[Any, list[Any]]:
    """y and the last states by the cell's formula, in float64."""
    p, now, y = {n: v.astype(np.float64) for n, v in parameters.items()}, [s.astype(np.float64) for s in states], []
    for row in x.astype(np.float64):
        made = list(cell.numpy(row, *now, **p))
        now = made[:len(now)]
        y.append(np.concatenate([made[n] for n in output_numbers(cell)], axis=1))
    return np.stack(y), now


def flat(cell: Published, parameters: dict[str, Any]) -> dict[str, Any]:
    return {cell.parameter_name(n): v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}


def test_there_are_many():
    assert len(CELLS) >= 45 and all(cell.__doc__ for cell in CELLS.values())


@pytest.mark.parametrize("name", CELLS)
def test_the_te_step_is_the_formula(name: str):
    """In float64, so that what float32 would hide shows."""
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    y, after = ecornn.reference(cell, x, flat(cell, parameters), states)
    assert np.abs(wanted).max() > 1e-3
    for got, want in zip((y, *after), (wanted, *last), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-7)  # constants of a step are float32


@pytest.fixture(scope="module")
def quick_host_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The C++ around a cell's code is not what is tested here, and to optimise it takes most of the time."""
    script = tmp_path_factory.mktemp("compiler") / "c++"
    script.write_text(f'#!/bin/sh\nexec {" ".join(find_compiler())} "$@" -O0\n')
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(script))
        yield


@pytest.mark.usefixtures("quick_host_code")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in LATER else n for n in CELLS])
def test_compiled_for_the_cpu(name: str):
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    module = ecornn.compile(cell, hidden=cell.hidden, input=x.shape[2], batch=B, seq=T, target="cpu")
    y, after = module.bind(flat(cell, parameters), threads=1)(x, states)
    for what, got, want in zip(("y", *cell.states), (y, *after), (wanted, *last), strict=True):
        assert relative_error(got, want) <= LIMIT, what


@pytest.mark.usefixtures("quick_host_code")
@pytest.mark.parametrize("name", [n if n in OWN_GRADIENTS else pytest.param(n, marks=pytest.mark.exhaustive)
                                  for n in CELLS])
def test_trained_on_the_cpu(name: str):
    """Its gradients are those that the analysis derives, which agree with differences of the te step in float64."""
    cell = CELLS[name]
    checks = Checks(cell, cell.hidden if cell.square else I, cell.hidden, B)
    assert checks.derivative().result == "right"
    for outcome in checks.run_one(detect(), CPUSequence(), "float32", None):
        assert outcome.result == "right", outcome.why


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CELLS)
def test_emulated_on_a_gpu(name: str, tmp_path: Path):
    """By every schedule that serves the cell, in float32."""
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    work = Workload(cell.identity(), cell.hidden, x.shape[2], B, T)
    task = Task(work, analyse(cell, x.shape[2], cell.hidden), TINY)
    serving = [s for s in GPU if s.serves(task) is None]
    for schedule in serving:
        (folder := tmp_path / schedule.name).mkdir()
        emulated = Emulated(schedule.program(task, schedule.plan(task, schedule.default(task))), folder)
        y, after = emulated.run(x, dict(zip(cell.states, states, strict=True)), parameters)
        for what, got, want in zip(("y", *cell.states), (y, *(after[n] for n in cell.states)), (wanted, *last),
                                   strict=True):
            assert relative_error(got, want) <= 2 * LIMIT, (schedule.name, what)
    assert serving, "no schedule has it"
