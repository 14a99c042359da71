"""Gradients of gradients and forward derivatives of compiled layers, in float64 on a CPU: against differences, which
PyTorch's checks take, and against torch.nn's, also of third order."""

from typing import Any

import numpy as np
import pytest
import torch
from published import CELLS, spiking
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.utils.rnn import pack_padded_sequence
from torch_pairs import LENGTHS, B, H, I, T

import ecornn.torch
from ecornn.bench.step_loop import torch_step
from ecornn.errors import DerivativeError
from ecornn.torch import Recurrent

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated")]
# compiling each takes seconds; what tangents of the others are, tests/cells/test_tangents.py computes
BUILTIN = ("rnn_tanh", "gru", "lstm", "rnn_relu", "indrnn", "gru_reset_before", "slstm", "lstm(layer_norm)",
           "lstm(peepholes,projection,coupled)", "gru(layer_norm)")
SMOOTH = [name for name, cell in CELLS.items() if not isinstance(cell, tuple(
    kind for kind in vars(spiking).values() if isinstance(kind, type) and kind.__module__ == spiking.__name__))]
CASES = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "rnn_tanh")) for name in (*BUILTIN, *SMOOTH[::3])]


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_differences(name: str) -> None:
    """Derivatives of y and the last states by x, first states, weights and sequences beside x are differences."""
    rng, cell = np.random.default_rng(3), CELLS.get(name, name)
    hidden = getattr(cell, "hidden", 4)
    width = hidden if getattr(cell, "square", False) else 3
    layer = Recurrent(cell, width, hidden, dtype=torch.float64)
    names, shapes = [n for n, _ in layer.named_parameters()], layer.cell.parameters(width, hidden)
    def drawn(*shape: int) -> torch.Tensor:
        return torch.as_tensor(np.abs(rng.standard_normal(shape)) + 0.1)
    state, inputs = ([drawn(*lead, 2, hidden) for _ in those] for lead, those in (
        ((1,), layer.state_names), ((3,), layer.cell.inputs)))
    weights = [torch.as_tensor(np.asarray(layer.cell.sample(n.removesuffix("_l0"), shapes[n.removesuffix("_l0")], rng)))
               .reshape(w.shape) for n, w in layer.named_parameters()]

    def call(x: Any, *rest: Any) -> Any:
        first, given = rest[:len(state)], rest[len(state):len(state) + len(inputs)]
        beside = {"inputs": dict(zip(layer.cell.inputs, given, strict=True))} if given else {}
        y, last = functional_call(layer, dict(zip(names, rest[len(state) + len(given):], strict=True)),
                                  (x, first if first[1:] else first[0]), beside)
        return *(y.values() if isinstance(y, dict) else [y]), *(last if isinstance(last, tuple) else [last])

    at = [t.double().requires_grad_() for t in (drawn(3, 2, width), *state, *inputs, *weights)]
    gradcheck(call, at, check_forward_ad=True, fast_mode=True)
    gradgradcheck(call, at, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=True)


def penalty(layer: Any, x: torch.Tensor, state: list[torch.Tensor], packs: bool) -> list[torch.Tensor]:
    x, state = x.clone().requires_grad_(), [s.clone().requires_grad_() for s in state]
    rows = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False, batch_first=layer.batch_first) if (
        packs) else x
    y, last = layer(rows, tuple(state) if state[1:] else state[0] if state else None)
    loss = (y.data if packs else y).square().sum() + sum(s.tanh().sum() for s in (
        last if isinstance(last, tuple) else [last]))
    asked = [x, *state, *layer.parameters()]
    found = torch.autograd.grad(loss, asked, create_graph=True)
    return [*found, *torch.autograd.grad(sum((g.norm() - 1).square() for g in found), asked)]


@pytest.mark.parametrize(("name", "options", "packs"), [
    pytest.param(*case, marks=[pytest.mark.exhaustive] * (n > 0)) for n, case in enumerate((
        ("RNN", {"bidirectional": True}, True),
        ("LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 3}, True),
        ("LSTM", {"num_layers": 2, "bidirectional": True}, False), ("GRU", {"num_layers": 3}, True),
        ("GRU", {"bias": False, "batch_first": True, "bidirectional": True}, False),
        ("RNN", {"nonlinearity": "relu", "num_layers": 2}, False)))])
def test_gradient_penalties_are_those_of_torch(name: str, options: Any, packs: bool) -> None:
    """All gradients of all gradients; the same bits again."""
    theirs, ours = (getattr(of, name)(I, H, dtype=torch.float64, **options) for of in (torch.nn, ecornn.torch))
    ours.load_state_dict(theirs.state_dict())
    ours.wait = True
    parts = theirs.num_layers * (1 + theirs.bidirectional)
    widths = [theirs.proj_size or H, H][:1 + (name == "LSTM")]
    x = torch.randn(*((B, T) if theirs.batch_first else (T, B)), I, dtype=torch.float64)
    for state in ([], [torch.randn(parts, B, width, dtype=torch.float64) for width in widths]):
        found, again, wanted = (penalty(layer, x, state, packs) for layer in (ours, ours, theirs))
        assert all(map(torch.equal, found, again))
        for value, exact in zip(found, wanted, strict=True):
            # float64, which other orders of sums and of second derivatives round differently
            torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-10)


def test_transforms_of_third_order() -> None:
    """Every order of forward and backward, of which each goes through the others."""
    theirs, ours = (of.RNN(I, H, dtype=torch.float64) for of in (torch.nn, ecornn.torch))
    ours.load_state_dict(theirs.state_dict())
    ours.wait = True
    x, v, u = torch.randn(3, T, B, I, dtype=torch.float64)
    def ahead(f: Any, v: Any) -> Any:
        return lambda x: jvp(f, (x,), (v,))[1]
    def back(f: Any, v: Any) -> Any:
        return grad(lambda x: (f(x) * v).sum())
    def dual(f: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent
    found = []
    for layer in (ours, theirs):
        def rows(x: Any, layer: Any = layer) -> Any:
            return layer(x)[0]
        def loss(x: Any, rows: Any = rows) -> Any:
            return rows(x).tanh().square().sum()
        found.append([dual(rows), hessian(loss)(x), *(f(x) for f in (
            ahead(rows, v), ahead(ahead(rows, v), u), *(
                third(second(grad(loss), v), u) for second in (ahead, back) for third in (ahead, back)),
            grad(ahead(ahead(loss, v), u)), ahead(grad(ahead(loss, v)), u)))])
    for value, wanted in zip(*found, strict=True):
        # float64, rounded in three orders of derivatives
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)
    def at_x(x: Any) -> Any:
        return jvp(lambda x: ours(x)[0], (x,), (v,))[1]
    assert torch.equal(vmap(at_x)(torch.stack([x, u])), torch.stack([at_x(x), at_x(u)]))


def test_derivatives_that_a_cell_says() -> None:
    """Backward twice they are those of the same loop in PyTorch; forward over backward they may not be."""
    layer = Recurrent(spiking.LIF(), I, H, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)
    prepare, step = torch_step(layer.cell, I, H, B).functions("cpu", torch.float64)
    shapes = layer.cell.parameters(I, H)

    def loop(x: Any, *weights: Any) -> Any:
        prepared = prepare([w.reshape(shape) for w, shape in zip(weights, shapes.values(), strict=True)])
        states, rows = [x.new_zeros(B, H) for _ in layer.state_names], []
        for row in x:
            states = step(row, states, prepared)
            rows.append(states[0])
        return torch.stack(rows)

    seconds = []
    for call in (lambda x, *_: layer(x)[0], loop):
        at = [x.clone().requires_grad_(), *layer.parameters()]
        firsts = torch.autograd.grad((call(*at) * torch.linspace(-1, 2, T * B * H).view(T, B, H)).sum(), at,
                                     create_graph=True)
        seconds.append([*firsts, *torch.autograd.grad(sum(g.square().sum() for g in firsts), at)])
    assert all(g.abs().max() > 0 for g in seconds[0])
    for value, wanted in zip(*seconds, strict=True):
        # float64; entries that cancel are rounded as the sums that they are left of
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-10)
    with pytest.raises(DerivativeError, match="says its own derivatives"):
        jvp(grad(lambda x: layer(x)[0].square().sum()), (x,), (x,))
