"""Cells that nobody has tuned borrow what was found for a built-in cell of the same products."""

from __future__ import annotations

import pytest
from test_tune_lookup import log_of, trial
from tune_fakes import DEVICE, Fake

from ecornn import Cell, pointwise, product
from ecornn.cells import get
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune.choose import choose
from ecornn.tune.log import Log
from ecornn.tune.transfer import lent
from ecornn.workload import Workload


class Leaky(Cell):
    """A vanilla cell that keeps half of its state."""

    name, states = "leaky", ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        (h,) = states
        wx, rh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        return [pointwise(lambda b, j: 0.5 * h[b, j] + wx[b, 0, j] + rh[b, 0, j], h)]


def task_of(cell: str, hidden: int = 8, batch: int = 4):
    found = get(cell)
    return make_task(found, Workload(found.identity(), hidden, hidden, batch, 10), DEVICE)


def of(cell: str, us: float = 1.0, **more):
    return trial(us, workload=Workload(cell, 8, 8, 4, 10), **more)


@pytest.mark.parametrize(("cell", "lender"), [
    ("rnn_relu(clip=3)", "rnn_relu"), ("rnn_tanh(zoneout=0.1)", "rnn_tanh"), ("lstm(peepholes)", "lstm"),
    ("gru(clip=3)", "gru"), ("lstm(coupled)", None), ("lstm(layer_norm)", None), ("lstm(projection)", None),
    ("slstm", None), ("slstm(heads=2)", None), ("gru_reset_before", None)])
def test_a_cell_of_the_same_products_lends_its_records(cell: str, lender: str | None):
    task = task_of(cell)
    found = lent(task, log_of(*(of(name, a=1) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", *(
        ["slstm"] if "heads" in cell else [])))))
    if lender is None:
        assert found is None
    else:
        assert found is not None and found[0] == lender
        assert [t.workload for t in found[1].trials()] == [task.workload]


def test_its_own_records_go_before_and_other_sizes_say_nothing():
    task = task_of("lstm(peepholes)")
    assert lent(task, log_of(of("lstm", a=1), of("lstm(peepholes)", 9.0, a=2))) is None
    assert lent(task_of("lstm(peepholes)", hidden=16), log_of(of("lstm", a=1))) is None
    assert lent(task, Log()) is None
    failed = of("lstm(peepholes)", a=2, times=None, error="build: no")
    assert lent(task, log_of(of("lstm", a=1), failed)) is not None, "a failure is nothing to use"


def test_the_line_says_whose_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ecornn.tune.choose.serving", lambda task, schedule: [Fake()])
    chosen = choose(task_of("lstm(peepholes)"), None, None, log_of(of("lstm", 2.0, a=1), of("lstm", 1.0, a=3)))
    assert chosen.config["a"] == 3 and chosen.provenance.endswith("; of lstm, which has the same products")
    unfit = choose(task_of("lstm(peepholes)"), None, None, log_of(of("lstm", a=99)))
    assert unfit.line is None and "no usable record" in unfit.provenance


def test_a_cell_of_the_users_own_takes_what_ships():
    task = make_task(Leaky(), Workload(Leaky().identity(), 1024, 1024, 16, 256, "float16"), resolve("sm_90a"))
    plain = make_task(get("rnn_tanh"), Workload("rnn_tanh", 1024, 1024, 16, 256, "float16"), resolve("sm_90a"))
    chosen, best = choose(task, None, None), choose(plain, None, None)
    assert (chosen.schedule.name, chosen.config) == (best.schedule.name, best.config)
    assert "of rnn_tanh" in chosen.provenance
