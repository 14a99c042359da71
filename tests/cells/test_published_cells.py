"""Published cells against formulas written apart: float32 on the CPU, and emulated; operands that are one product."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Call
from cuda_on_cpu import Emulated
from emulated import TINY, check
from published import CELLS
from published.base import Published
from test_backward_emulated import LIMITS, Step

import ecornn
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.sums import one_by_one
from ecornn.build.link import find_compiler
from ecornn.cli.cell_checks import Checks
from ecornn.host_cpu import detect
from ecornn.interpreter import output_numbers
from ecornn.program import PACKED
from ecornn.schedules import Task, all_schedules
from ecornn.schedules.cpu import CPUSequence
from ecornn.tune.oracle import relative_error
from ecornn.workload import Workload

T, B, I = 5, 3, 5
LIMIT = 1e-5  # relative; some roundings of float32
# Each of these has the products and exchanges of another cell.
LATER = {"lstm_1997", "lstm_slim3", "sublstm", "mgu2", "ligru", "mut1", "mut2", "caru", "fast_rnn", "mi_rnn", "ct_rnn",
         "mega_ema", "t_rnn", "min_gru", "brc", "echo_state", "cfn", "alif", "gru3", "unicornn", "antisymmetric"}
OWN_GRADIENTS = {"lru", "lif"}  # whose gradients with respect to a product are states of the backward pass
GPU = [s for s in all_schedules().values() if s.kind == "cuda"]


def drawn(cell: Published, seed: int = 0) -> tuple[Any, dict[str, Any], list[Any]]:
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


@pytest.mark.parametrize(("name", "only"), [
    ("cornn", "persistent"), ("lstm_fgr", "layout_transform"), ("scrn", "fused_step"),
    *(pytest.param(name, "", id=name, marks=pytest.mark.exhaustive) for name in CELLS)])
def test_emulated_on_a_gpu(name: str, only: str, tmp_path: Path):
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    task = Task(Workload(cell.identity(), cell.hidden, x.shape[2], B, T), analyse(cell, x.shape[2], cell.hidden), TINY)
    serving = [s for s in GPU if s.serves(task) is None and only in ("", s.name)]
    for schedule in serving:
        (folder := tmp_path / schedule.name).mkdir()
        emulated = Emulated(schedule.program(task, schedule.plan(task, schedule.default(task))), folder)
        y, after = emulated.run(x, dict(zip(cell.states, states, strict=True)), parameters)
        for what, got, want in zip(("y", *cell.states), (y, *(after[n] for n in cell.states)), (wanted, *last),
                                   strict=True):
            assert relative_error(got, want) <= 2 * LIMIT, (schedule.name, what)
    assert serving, "no schedule has it"


# of each exchange with products: (products, operands), as the step is written, and summed
FEWER = {
    "cornn": ([(2, 2)], [(1, 2)]), "scrn": ([(2, 2)], [(1, 2)]), "lstm_fgr": ([(13, 4)], [(4, 4)]),
    "hornn": ([(3, 3)], [(1, 3)]), "lstm_nested": ([(4, 1), (8, 2)], [(4, 1), (4, 2)]),
    "lstm_peephole": ([(4, 1)], [(4, 1)])}


@pytest.mark.parametrize("name", FEWER)
def test_there_are_fewer_products(name: str):
    cell = CELLS[name]
    graphs = [analyse(cell, 5, cell.hidden, sums=False), analyse(cell, 5, cell.hidden)]
    graphs += [one_by_one(graphs[1])]
    found = [[(len(p.products), len(p.operands)) for p in g.product_phases] for g in graphs]
    assert tuple(found) == (*FEWER[name], FEWER[name][0])


@pytest.mark.parametrize("name", ["cornn", "lstm_fgr", "scrn"])
def test_sums_of_products_have_the_same_gradients(name: str):
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    rng, hidden = np.random.default_rng(2), cell.hidden
    dy, dstates = rng.normal(size=(*x.shape[:2], hidden)), [rng.normal(size=s.shape) for s in states]
    graphs = [analyse(cell, x.shape[2], hidden, sums=sums) for sums in (True, False)]
    one, other = (backpropagate(adjoint(g, hidden), x, parameters, states, dy, dstates) for g in graphs)
    for got, want in zip((one[0], *one[1].values(), *one[2]), (other[0], *other[1].values(), *other[2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_half_as_many_weights_are_on_the_chip():
    persistent, sizes = all_schedules()["persistent"], []
    for sums in (True, False):
        task = Task(Workload("cornn", 64, I, B, T), analyse(CELLS["cornn"], I, 64, sums=sums), TINY)
        program = persistent.program(task, persistent.plan(task, persistent.default(task)))
        sizes.append(sum(b.extent.fixed for b in program.buffers
                         if b.role == PACKED and b.name.startswith("recurrent")))
    assert sizes[0] == 2 * 64 * 64 and sizes[1] == 4 * 64 * 64


def test_sums_of_products_train_emulated_on_a_gpu(tmp_path: Path):
    cell = CELLS["cornn"]
    x, parameters, states = drawn(cell)
    rng = np.random.default_rng(2)
    dy = rng.normal(size=(*x.shape[:2], cell.hidden)).astype(np.float32)
    dstates = [rng.normal(size=s.shape).astype(np.float32) for s in states]
    graph = analyse(cell, x.shape[2], cell.hidden, sums=False)
    dx, weights, first = backpropagate(adjoint(graph, cell.hidden), x, parameters, states, dy, dstates)
    step = Step(tmp_path, "persistent", cell, (*x.shape, cell.hidden), "float32")
    wanted = {"dx": dx, **{f"d{n}_in": d for n, d in zip(cell.states, first, strict=True)},
              **{f"gradient_{n}": g for n, g in weights.items()}}
    check(step.run(Call(x, states, dy, dstates, parameters)), wanted, LIMITS["float32"])
