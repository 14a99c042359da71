"""Gradients of every cell by its adjoint, against a tape over the cell's formula in NumPy, and that against PyTorch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import test_variants as variants
from step_cells import CELLS, LATE, SQUARE, Chain, Peephole, Residual, Thrice
from tape import Call, train

from ecornn.analysis import StepGraph, analyse
from ecornn.analysis.adjoint import Adjoint, adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.kept import KEEP, kept
from ecornn.cells import BUILTIN, Cell, get
from ecornn.numpy_gradients import reference_gradients
from ecornn.numpy_reference import random_weights
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.targets import KNOWN
from ecornn.workload import Workload

T, B, I, H = variants.T, variants.B, variants.I, variants.H
OF_STEP: dict[str, Any] = {**CELLS, "thrice": Thrice(), **LATE,
                           **{cell.name: cell for cell in (Peephole(), Chain(), Residual())}}
OPTIONED = [*BUILTIN, *(type(BUILTIN[name])(**options).spec() for name, options in variants.CASES),
            "lstm(gate=softsign,new=relu,out=scaled_tanh:1.5:0.7)", "rnn_tanh(new=softplus)",
            "gru(new=thresholded_relu:0.2)"]
ALL = list(dict.fromkeys([*OPTIONED, *OF_STEP]))
Step = Callable[[Any, list[Any], dict[str, Any]], list[Any]]


def cell_of(name: str | Cell) -> Cell:
    return name if isinstance(name, Cell) else OF_STEP.get(name) or get(name)


def width(name: str) -> int:
    return H if name in SQUARE or name == "residual" else I


def formula(name: str | Cell) -> Step:
    cell: Any = cell_of(name)
    if name in OF_STEP or cell is name:
        return lambda x, states, p: list(cell.formula(x, dict(zip(cell.states, states, strict=True)), p)[0].values())
    changed = {k: v for k, v in cell.options.items() if v != cell.OPTIONS[k]}
    return lambda x, states, p: variants.FORMULAS[cell.name](x, states, p, changed)


@cache
def graph_of(name: str) -> StepGraph:
    return analyse(cell_of(name), width(name), H)


@cache
def adjoint_of(name: str) -> Adjoint:
    return adjoint(graph_of(name), H)


class Sample(Call):
    def __init__(self, name: str, seed: int = 0) -> None:
        rng, graph = np.random.default_rng(seed), graph_of(name)
        x = rng.normal(size=(T, B, width(name)))
        parameters = {n: rng.uniform(-0.6, 0.6, shape) for n, shape in graph.parameters.items()}
        states = [rng.uniform(0.1, 1, (B, H)) for _ in graph.states]
        super().__init__(x, states, rng.normal(size=(T, B, H)), [rng.normal(size=(B, H)) for _ in states], parameters)


def by_tape(name: str, s: Call) -> list[Any]:
    found = train(cell_of(name), formula(name), s)
    return [found["dx"], *(found[f"gradient_{n}"] for n in s.parameters),
            *(found[f"d{n}_in"] for n in cell_of(name).states)]


def by_adjoint(name: str, s: Sample, keep: str = "gates") -> list[Any]:
    dx, parameters, states = backpropagate(adjoint_of(name), s.x, s.parameters, s.states, s.dy, s.dstates, keep)
    return [dx, *(parameters[n] for n in s.parameters), *states]


def close(got: Any, expected: Any, what: str) -> None:
    error = np.linalg.norm(got - expected)
    assert got.shape == expected.shape and error <= 1e-10 * max(np.linalg.norm(expected), 1e-3), f"{what}: {error}"


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("name", ALL)
def test_the_adjoint_agrees_with_a_tape(name: str, keep: str):
    s = Sample(name)
    for n, (got, expected) in enumerate(zip(by_adjoint(name, s, keep), by_tape(name, s), strict=True)):
        close(got, expected, ["x", *s.parameters, *cell_of(name).states][n])


@pytest.mark.parametrize("name", ["slstm", "rnn_tanh(new=softplus)"])
def test_smooth_functions_have_their_derivative_where_their_parts_have_none(name: str):
    """A padded step of a layer without bias: logsigmoid and softplus of 0, of max(., 0) and magnitudes."""
    s = Sample(name)
    s.x[:], s.states[0][:] = 0.0, 0.0
    for n, p in s.parameters.items():
        p[:] = p if n.startswith("weight") else 0.0
    s.dy[1:], s.dstates = 0.0, [np.zeros((B, H)) for _ in s.states]
    for got, expected in zip(by_adjoint(name, s), by_tape(name, s), strict=True):
        close(got, expected, name)


@pytest.mark.parametrize(("cell", "kind", "options"), [
    ("lstm", "LSTM", {}), ("gru", "GRU", {}), ("rnn_tanh", "RNN", {}), ("rnn_relu", "RNN", {"nonlinearity": "relu"})])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_gradients_are_pytorchs(cell: str, kind: str, options: dict[str, str], layers: int, both: bool):
    torch = pytest.importorskip("torch")
    module = getattr(torch.nn, kind)(I, H, layers, bidirectional=both, **options).double()
    weights = random_weights(cell, I, H, 3, layers, 1 + both)
    for name, weight in weights.items():
        getattr(module, name).data = torch.from_numpy(weight).double()
    rng, parts = np.random.default_rng(4), layers * (1 + both)
    count = len(BUILTIN[cell].states)
    x, dy = rng.normal(size=(T, B, I)), rng.normal(size=(T, B, H * (1 + both)))
    states, dstates = ([rng.normal(size=(parts, B, H)) for _ in range(count)] for _ in range(2))
    inputs = [torch.from_numpy(v).requires_grad_() for v in (x, *states)]
    y, last = module(inputs[0], tuple(inputs[1:]) if count > 1 else inputs[1])
    last = list(last) if count > 1 else [last]
    expected = torch.autograd.grad([y, *last], [*inputs, *module.parameters()],
                                   [torch.from_numpy(v) for v in (dy, *dstates)])
    given = [v[0] for v in states] if parts == 1 else states
    ends = [v[0] for v in dstates] if parts == 1 else dstates
    dx, dweights, firsts = reference_gradients(cell, x, weights, given, dy=dy, dstate=ends)
    found = [dx, *(v.reshape(parts, B, H) for v in firsts), *(dweights[n] for n, _ in module.named_parameters())]
    names = ["x", *BUILTIN[cell].states, *(n for n, _ in module.named_parameters())]
    for name, got, want in zip(names, found, expected, strict=True):
        close(got, want.numpy(), name)


@pytest.mark.parametrize("name", ALL)
def test_the_adjoint_has_as_many_exchanges_as_the_step(name: str):
    made = adjoint_of(name)
    assert len(made.recurrence.phases) == len(made.forward.phases)
    known = {*made.recurrence.states.values()}
    if made.rotated:
        first = made.recurrence.phases[0]
        assert known.issuperset((*first.operands, *(o for s in first.statistics for o in s.operands)))


def test_what_is_kept_of_an_lstm():
    made = adjoint_of("lstm")
    gates, states = (kept(made, keep) for keep in KEEP)
    assert gates.states == states.states == ("h", "c") and not states.values
    assert len(gates.values) == 4 and gates.units == 6 and states.units == 2
    products = {t.source for phase in states.replay.phases for p in phase.products for t in p.terms}
    assert len(products) == 4 and not states.replay.states
    assert len(made.recurrence.hoisted_outputs) == 7  # six factors, and dy
    assert [len(p.terms) for p in made.recurrence.phases[0].products] == [4]


@pytest.mark.parametrize("target", ["sm_90a", "llvm"])
def test_schedules_refuse_what_they_do_not_carry_out(target: str):
    from ecornn.host_cpu import detect

    device = KNOWN[target] if target in KNOWN else detect()
    work, made = Workload("lstm", I, H, 4, 2, "float32"), adjoint_of("lstm")
    for schedule in all_schedules().values():
        assert "which no schedule supports" in str(schedule.serves(Task(work, made.recurrence, device)))
