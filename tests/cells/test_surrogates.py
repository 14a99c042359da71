"""Spikes and other values with derivatives of their own, in cells of TVM expressions."""

from typing import Any

import numpy as np
import pytest
from step_cells import Formula
from tape import Call, train
from tvm import te, tirx

import ecornn
import ecornn.analysis.operators as operators
from ecornn import pointwise, product
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.digest import digest
from ecornn.bench.step_loop import torch_step
from ecornn.cells.naming import pickled, received
from ecornn.cells.surrogates import SURROGATES
from ecornn.cli.cell_checks import Checks
from ecornn.errors import ArgumentError
from ecornn.numpy_gradients import spike as numpy_spike

T, B, I, H = 6, 3, 5, 8
SLOPES = {"fast_sigmoid": 25.0, "arctan": 2.0, "sigmoid": 25.0, "triangle": 1.0, "straight_through": None}


class Neuron(Formula):
    """A recurrent LIF layer with a learned threshold, whose reset subtracts it."""

    name, states, shapes = "neuron", ("s", "v"), {"W": (1, "I"), "R": (1, "H"), "b": (1,)}

    def __init__(self, surrogate: str = "fast_sigmoid", slope: float | None = None) -> None:
        self.surrogate, self.slope = surrogate, slope

    def step(self, x, states, p):
        (s, v), wx, rs, limit = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        new = pointwise(lambda b, j: 0.75 * v[b, j] + wx[b, j] + rs[b, j] - limit[0, j] * s[b, j], v)
        return [pointwise(lambda b, j: ecornn.spike(new[b, j], limit[0, j], surrogate=self.surrogate,
                                                    slope=self.slope), s), new]

    def numpy(self, x, s, v, W, R, b):
        new = 0.75 * v + x @ W[0].T + s @ R[0].T - b[0] * s
        return numpy_spike(new, b[0], self.surrogate, self.slope or SLOPES[self.surrogate]), new


def sample(cell: Formula) -> Call:
    rng = np.random.default_rng(3)
    parameters = {n: rng.uniform(-0.7, 0.7, shape) for n, shape in cell.parameters(I, H).items()}
    first, last = ([rng.normal(size=(B, H)) for _ in cell.states] for _ in range(2))
    return Call(rng.normal(size=(T, B, I)), first, rng.normal(size=(T, B, H)), last, parameters)


def by_tape(cell: Formula, call: Call) -> dict[str, Any]:
    return train(cell, lambda x, states, p: list(cell.numpy(x, *states, **p)), call)


@pytest.mark.parametrize(("surrogate", "slope"), [*((name, None) for name in SURROGATES), ("fast_sigmoid", 3.0),
                                                   ("arctan", 0.5), ("sigmoid", 4), ("triangle", 0.3)])
def test_gradients_are_the_surrogates(surrogate: str, slope: float | None):
    assert {name: row.slope for name, row in SURROGATES.items()} == SLOPES
    cell = Neuron(surrogate, slope)
    call = sample(cell)
    wanted = by_tape(cell, call)
    dx, weights, states = backpropagate(adjoint(analyse(cell, I, H), H), call.x, call.parameters, call.states, call.dy,
                                        call.dstates)
    found = {"dx": dx, **{f"gradient_{n}": g for n, g in weights.items()},
             **{f"d{n}_in": g for n, g in zip(cell.states, states, strict=True)}}
    assert set(np.unique(wanted["y"])) == {0.0, 1.0} and all(np.abs(wanted[n]).max() > 1e-3 for n in found)
    for name, got in found.items():  # constants of a step, such as pi / 2, are float32
        np.testing.assert_allclose(got, wanted[name], rtol=2e-6, atol=2e-6 * np.abs(wanted[name]).max(), err_msg=name)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_derivatives_are_those_of_snntorch(surrogate: str):
    """By its formulas, and for the triangle by SpikingJelly's, as their backward passes have them."""
    u, slope = np.linspace(-1.5, 1.5, 13), SLOPES[surrogate]
    published = {"fast_sigmoid": lambda: 1 / (slope * abs(u) + 1.0) ** 2,
                 "arctan": lambda: slope / 2 / (1 + (np.pi / 2 * slope * u) ** 2),
                 "sigmoid": lambda: slope * np.exp(-slope * u) / (np.exp(-slope * u) + 1) ** 2,
                 "triangle": lambda: np.where(abs(u) > 1 / slope, 0.0, -slope**2 * abs(u) + slope),
                 "straight_through": lambda: np.ones_like(u)}[surrogate]()

    class Alone(Formula):
        name, states = "alone", ("h",)

        def step(self, x, states, p):
            return [pointwise(lambda b, j: ecornn.spike(states[0][b, j] + 0.0 * x[b, j], surrogate=surrogate), x)]

    h = u[None]
    y = ecornn.reference(Alone(), 0 * h[None], {}, [h])[0]
    np.testing.assert_array_equal(y[0, 0], [0] * 7 + [1] * 6)  # 0 at 0
    _, _, (found,) = backpropagate(adjoint(analyse(Alone(), 13, 13), 13), 0 * h[None], {}, [h], 0 * h[None],
                                   [np.ones_like(h)])
    # the step has its constants in float32, the published formula in float64
    np.testing.assert_allclose(found[0], published, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wrong", [False, True])
def test_differences_of_tangents_show_the_derivatives(wrong: bool, monkeypatch: pytest.MonkeyPatch):
    """The search and `ecornn check-cell` compare derived gradients with these; a wrong derivative is found."""
    checks = Checks(Neuron("arctan"), I, H, B)
    if wrong:
        row = operators.OPERATORS[operators.CUSTOM]
        monkeypatch.setitem(operators.OPERATORS, operators.CUSTOM, operators.Operator(row.numpy, lambda e, v, r: (
            0.0, v[2] * 1.01, 0.0)))
    assert checks.derivative().result == ("wrong" if wrong else "right")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_for_the_cpu(dtype: str):
    cell = Neuron("arctan")
    call = sample(cell)
    wanted = by_tape(cell, call)
    module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cpu", training=True)
    weights = {cell.parameter_name(n): v.reshape(-1, *v.shape[2:]).astype(dtype) for n, v in call.parameters.items()}
    layer = module.bind(weights, threads=1)
    y, after = layer(call.x.astype(dtype), [s.astype(dtype) for s in call.states])
    # float32 against float64: spikes are exact, and voltages add up what is rounded at every step
    np.testing.assert_allclose(y, wanted["y"], atol=1e-6)
    np.testing.assert_allclose(after[1], wanted["v_out"], rtol=1e-4, atol=1e-5)


def test_the_loop_in_pytorch_has_the_gradients():
    torch = pytest.importorskip("torch")
    cell = Neuron("sigmoid", 2.0)
    call = sample(cell)
    wanted = by_tape(cell, call)
    prepare, step = torch_step(cell, I, H, B).functions("cpu", torch.float64)
    x = torch.tensor(call.x, requires_grad=True)
    parameters = [torch.tensor(v, requires_grad=True) for v in call.parameters.values()]
    states, y = [torch.tensor(s) for s in call.states], []
    for row in x:
        states = step(row, states, prepare(parameters))
        y.append(states[0])
    found = torch.autograd.grad([torch.stack(y), *states], [x, *parameters],
                                [torch.tensor(call.dy), *map(torch.tensor, call.dstates)])
    for name, got in zip(("dx", *(f"gradient_{n}" for n in call.parameters)), found, strict=True):
        # both are float64 and add up in another order
        np.testing.assert_allclose(got.numpy(), wanted[name], rtol=1e-9, atol=1e-9, err_msg=name)


def test_a_surrogate_is_part_of_what_a_cell_is():
    cells = [Neuron(), Neuron("arctan"), Neuron(slope=10.0)]
    assert len({digest(cell) for cell in cells}) == 3
    assert digest(Neuron(slope=25.0)) == digest(Neuron())
    again = received(pickled(Neuron(slope=10.0)))
    assert digest(again) == digest(cells[2])


def test_a_value_without_pairs_has_no_gradient():
    class Stopped(Formula):
        name, states = "stopped", ("h",)

        def step(self, x, states, p):
            (h,) = states
            return [pointwise(lambda b, j: ecornn.custom_gradient(te.tanh(h[b, j])) * h[b, j] + x[b, j], h)]

    h = np.array([[0.5, -1.0]])
    _, _, (found,) = backpropagate(adjoint(analyse(Stopped(), 2, 2), 2), 0 * h[None], {}, [h], 0 * h[None],
                                   [np.ones_like(h)])
    np.testing.assert_allclose(found, np.tanh(h))


def test_a_derivative_does_not_change_another_operators():
    """The magnitude in a surrogate says nothing about a maximum beside it, which has 0 at 0, as PyTorch's relu."""
    class Both(Formula):
        name, states = "both", ("h",)

        def step(self, x, states, p):
            (h,), zero = states, tirx.const(0.0, "float32")
            return [pointwise(lambda b, j: ecornn.spike(h[b, j]) + tirx.max(h[b, j], zero) + x[b, j], h)]

    h = np.zeros((1, 2))
    _, _, (found,) = backpropagate(adjoint(analyse(Both(), 2, 2), 2), 0 * h[None], {}, [h], 0 * h[None],
                                   [np.ones_like(h)])
    np.testing.assert_array_equal(found, np.ones_like(h))


@pytest.mark.parametrize(("arguments", "words"), [
    ({"surrogate": "fast_sigmod"}, "surrogate='fast_sigmod': did you mean fast_sigmoid"),
    ({"surrogate": None}, "surrogate=None: expected one of"),
    ({"slope": 0}, "slope=0: expected a number above 0"), ({"slope": -1.0}, "slope=-1.0"),
    ({"slope": float("nan")}, "slope=nan"), ({"slope": "steep"}, "slope='steep'"),
    ({"surrogate": "straight_through", "slope": 2.0}, "slope=2.0: expected None: straight_through has no slope"),
    ({"threshold": "high"}, "threshold='high': expected a scalar"),
])
def test_wrong_arguments_are_typed_errors(arguments: dict[str, Any], words: str):
    with pytest.raises(ArgumentError, match=words.replace("(", r"\(")):
        ecornn.spike(tirx.Var("v", "float32"), **arguments)


def test_tensors_and_other_pairs_are_refused():
    h, v = te.placeholder((B, H), "float32", name="h"), tirx.Var("v", "float32")
    with pytest.raises(ArgumentError, match=r"^v=.*h\[b, j\] within pointwise"):
        ecornn.spike(h)
    with pytest.raises(ArgumentError, match=r"pairs\[0\]=.*a tuple of an operand and the derivative"):
        ecornn.custom_gradient(v > 0.0, v)
    with pytest.raises(ArgumentError, match=r"pairs\[1\]\[1\]=.*a scalar"):
        ecornn.custom_gradient(v > 0.0, (v, 1.0), (v, None))
