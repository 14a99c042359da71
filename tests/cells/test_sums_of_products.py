"""Products of several operands that are only added up are one: of published cells, on what is computed and in how much
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Call
from cuda_on_cpu import Emulated
from emulated import TINY
from emulated_training import check
from published import CELLS
from test_backward_emulated import LIMITS, Step
from test_published_cells import drawn, formula

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.sums import one_by_one
from ecornn.program import PACKED
from ecornn.schedules import Task, all_schedules
from ecornn.tune.oracle import relative_error
from ecornn.workload import Workload

# of each exchange with products: (products, operands), as the step is written, and summed
FEWER = {
    "cornn": ([(2, 2)], [(1, 2)]),
    "scrn": ([(2, 2)], [(1, 2)]),
    "lstm_fgr": ([(13, 4)], [(4, 4)]),
    "hornn": ([(3, 3)], [(1, 3)]),
    "lstm_nested": ([(4, 1), (8, 2)], [(4, 1), (4, 2)]),
    "lstm_peephole": ([(4, 1)], [(4, 1)]),
}


@pytest.mark.parametrize("name", FEWER)
def test_there_are_fewer_products(name: str):
    cell = CELLS[name]
    graphs = [analyse(cell, 5, cell.hidden, sums=False), analyse(cell, 5, cell.hidden)]
    graphs += [one_by_one(graphs[1])]
    found = [[(len(p.products), len(p.operands)) for p in g.product_phases] for g in graphs]
    assert tuple(found) == (*FEWER[name], FEWER[name][0])


@pytest.mark.parametrize("name", ["cornn", "lstm_fgr", "scrn"])
def test_gradients_are_the_same(name: str):
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    rng, hidden = np.random.default_rng(2), cell.hidden
    dy, dstates = rng.normal(size=(*x.shape[:2], hidden)), [rng.normal(size=s.shape) for s in states]
    graphs = [analyse(cell, x.shape[2], hidden, sums=sums) for sums in (True, False)]
    one, other = (backpropagate(adjoint(g, hidden), x, parameters, states, dy, dstates) for g in graphs)
    for got, want in zip((one[0], *one[1].values(), *one[2]), (other[0], *other[1].values(), *other[2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "schedule"), [("cornn", "persistent"), ("lstm_fgr", "layout_transform"),
                                                ("scrn", "fused_step")])
def test_emulated_on_a_gpu(name: str, schedule: str, tmp_path: Path):
    cell, found = CELLS[name], all_schedules()[schedule]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    task = task_of(name, x)
    assert found.serves(task) is None
    program = found.program(task, found.plan(task, found.default(task)))
    y, after = Emulated(program, tmp_path).run(x, dict(zip(cell.states, states, strict=True)), parameters)
    for got, want in zip((y, *(after[n] for n in cell.states)), (wanted, *last), strict=True):
        assert relative_error(got, want) <= 2e-5


def task_of(name: str, x: Any, sums: bool = True, hidden: int = 0) -> Task:
    cell = CELLS[name]
    hidden = hidden or cell.hidden
    work = Workload(name, hidden, x.shape[2], x.shape[1], x.shape[0])
    return Task(work, analyse(cell, x.shape[2], hidden, sums=sums), TINY)


def test_half_as_many_weights_are_on_the_chip():
    """Each product has room for each operand, zeros where it does not read one."""
    persistent, sizes = all_schedules()["persistent"], []
    for sums in (True, False):
        task = task_of("cornn", np.zeros((5, 3, 5)), sums, 64)
        program = persistent.program(task, persistent.plan(task, persistent.default(task)))
        sizes.append(sum(b.extent.fixed for b in program.buffers
                         if b.role == PACKED and b.name.startswith("recurrent")))
    assert sizes[0] == 2 * 64 * 64 and sizes[1] == 4 * 64 * 64


def test_trains_emulated_on_a_gpu(tmp_path: Path):
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
