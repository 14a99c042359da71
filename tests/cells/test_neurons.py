"""Published neurons: gradients of the surrogates, against a tape over their formulas and against loops in PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Call, Layer, build
from emulated import check
from published import spiking
from published.base import Published
from tape import train
from test_backward_emulated import LIMITS, Step
from test_published_cells import I, drawn

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate

NEURONS: dict[str, Published] = {kind.name: kind() for kind in (
    spiking.LIF, spiking.LIFToZero, spiking.LIFAlone, spiking.ALIF, spiking.Izhikevich, spiking.EGRU)}


def call_of(cell: Published) -> Call:
    """Arguments of a training step; of Izhikevich's neurons from potentials at rest, in mV."""
    x, parameters, states = drawn(cell, seed=4)
    if cell.name == "izhikevich":
        states = [0 * states[0], 10 * states[1] - 55, 4 * states[2] - 13]
    rng = np.random.default_rng(2)
    dy = rng.normal(size=(*x.shape[:2], cell.hidden)).astype(np.float32)
    return Call(x, states, dy, [rng.normal(size=s.shape).astype(np.float32) for s in states], parameters)


def by_tape(cell: Published, call: Call) -> dict[str, Any]:
    return train(cell, lambda x, states, p: list(cell.numpy(x, *states, **p)), call)


@pytest.mark.parametrize("name", NEURONS)
def test_the_adjoint_agrees_with_a_tape(name: str):
    cell = NEURONS[name]
    call = call_of(cell)
    wanted = by_tape(cell, call)
    dx, weights, states = backpropagate(adjoint(analyse(cell, I, cell.hidden), cell.hidden), call.x, call.parameters,
                                        call.states, call.dy, call.dstates)
    found = {"dx": dx, **{f"gradient_{n}": g for n, g in weights.items()},
             **{f"d{n}_in": g for n, g in zip(cell.states, states, strict=True)}}
    assert 0.05 < (wanted["y"] != 0).mean() < 0.95 and np.abs(wanted["dx"][0]).max() > 1e-6  # of the first step
    for what, got in found.items():  # constants of a step are float32
        assert np.linalg.norm(got - wanted[what]) <= 1e-5 * np.linalg.norm(wanted[what]), what


@pytest.mark.parametrize("name", NEURONS)
def test_trained_on_the_cpu(name: str, tmp_path: Path):
    cell = NEURONS[name]
    call = call_of(cell)
    steps, batch, _ = call.x.shape
    layer = Layer(cell, I, cell.hidden, batch, steps)
    build(tmp_path, layer)
    check(layer(call), by_tape(cell, call), LIMITS["float32"])


@pytest.mark.parametrize("name", [n if n == "lif_to_zero" else pytest.param(n, marks=pytest.mark.exhaustive)
                                  for n in NEURONS])
def test_trained_emulated_on_a_gpu(name: str, tmp_path: Path):
    cell = NEURONS[name]
    call = call_of(cell)
    step = Step(tmp_path, None, cell, (*call.x.shape, cell.hidden), "float32")
    check(step.run(call), by_tape(cell, call), LIMITS["float32"])


def in_pytorch(name: str, torch: Any, p: dict[str, Any]) -> Any:
    """The step as a user of PyTorch writes it, with a Function that has the surrogate."""
    derivatives = {"fast_sigmoid": lambda v, s: 1 / (s * v.abs() + 1) ** 2,
                   "arctan": lambda v, s: s / 2 / (1 + (torch.pi / 2 * s * v) ** 2),
                   "triangle": lambda v, s: s * torch.clamp(1 - s * v.abs(), min=0)}

    class Fire(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Any, kind: str, slope: float) -> Any:
            ctx.save_for_backward(v)
            ctx.derivative, ctx.slope = derivatives[kind], slope
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * ctx.derivative(*ctx.saved_tensors, ctx.slope), None, None

    def current(x: Any, s: Any) -> Any:
        return x @ p["W"][0].T + s @ p["R"][0].T + p["b"][0]

    def lif(x: Any, s: Any, v: Any) -> Any:
        v = 0.9 * v + current(x, s) - 0.5 * s
        return Fire.apply(v - 0.5, "fast_sigmoid", 10.0), v

    def lif_to_zero(x: Any, s: Any, v: Any) -> Any:
        v = 0.9 * v * (1 - s.detach()) + current(x, s)
        return Fire.apply(v - 0.5, "arctan", 2.0), v

    def alif(x: Any, s: Any, v: Any, a: Any) -> Any:
        a = 0.97 * a + 0.03 * s
        limit = 0.5 + 0.8 * a
        v = 0.9 * v + 0.1 * current(x, s) - limit * s
        return Fire.apply(v - limit, "triangle", 1.0), v, a

    def izhikevich(x: Any, s: Any, v: Any, u: Any) -> Any:
        v, u = torch.lerp(v, torch.full_like(v, -65.0), s), u + 8 * s
        new = v + 0.5 * (0.04 * v**2 + 5 * v + 140 - u + 40 * current(x, s))
        return Fire.apply(new - 30, "fast_sigmoid", 0.1), new, u + 0.5 * 0.02 * (0.2 * v - u)

    return {"lif": lif, "lif_to_zero": lif_to_zero, "alif": alif, "izhikevich": izhikevich}[name]


@pytest.mark.parametrize("name", ["lif", "lif_to_zero", "alif", "izhikevich"])
def test_the_tape_agrees_with_pytorch(name: str):
    torch = pytest.importorskip("torch")
    cell = NEURONS[name]
    call = call_of(cell)
    wanted = by_tape(cell, call)
    p = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in call.parameters.items()}
    x, *first = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (call.x, *call.states))
    step, states, y = in_pytorch(name, torch, p), tuple(first), []
    for row in x:
        states = step(row, *states)
        y.append(states[0])
    found = torch.autograd.grad([torch.stack(y), *states], [x, *first, *p.values()],
                                [torch.tensor(g, dtype=torch.float64) for g in (call.dy, *call.dstates)])
    names = ["dx", *(f"d{n}_in" for n in cell.states), *(f"gradient_{n}" for n in p)]
    # both are float64 and add up in another order; the largest gradient scales what cancels to about nothing
    for what, got in zip(names, found, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted[what], rtol=1e-9, atol=1e-9 * np.abs(wanted[what]).max(),
                                   err_msg=what)
