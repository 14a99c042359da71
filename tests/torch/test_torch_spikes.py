"""Steps in PyTorch with a ``torch.autograd.Function`` of their own, as cells: spikes with surrogate gradients."""

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ecornn.torch
from ecornn.errors import CellError
from ecornn.torch.custom_gradient import own_backwards

T, B, I, H = 9, 4, 6, 8


class FastSigmoid(torch.autograd.Function):
    """The function as snnTorch writes it."""

    @staticmethod
    def forward(ctx, v, slope=25):
        ctx.save_for_backward(v)
        ctx.slope = slope
        return (v > 0).float()

    @staticmethod
    def backward(ctx, grad_output):
        (v,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        return grad_input / (ctx.slope * torch.abs(v) + 1.0) ** 2, None


class SuperSpike(torch.autograd.Function):
    """The function as Zenke's tutorials write it; `spike_fn` below calls it."""

    scale = 10.0

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        out = torch.zeros_like(input)
        return torch.where(input > 0, torch.ones_like(input), out)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output / (SuperSpike.scale * torch.abs(input) + 1.0) ** 2


spike_fn = SuperSpike.apply


class Triangle(torch.autograd.Function):
    """In the newer style, of v and a threshold that trains."""

    @staticmethod
    def forward(v, limit):
        return (v > limit).to(v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        v, limit = ctx.saved_tensors
        gradient = grad_output * torch.clamp(1.0 - 0.5 * (v - limit).abs(), min=0.0)
        return gradient, -gradient


class Signs(torch.autograd.Function):
    """Binary weights that train straight through, within [-1, 1]."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.sign(w)

    @staticmethod
    def backward(ctx, grad_output):
        (w,) = ctx.saved_tensors
        return torch.where(w.abs() <= 0.1, grad_output, 0.0)


class Both(torch.autograd.Function):
    """Two results; a gradient of the second would be the value's own."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        fires, shown = (v > 0).to(v), v * 2
        return fires, shown

    @staticmethod
    def backward(ctx, grad_output, other):
        (v,) = ctx.saved_tensors
        return grad_output * torch.exp(-v * v) + 2 * other


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v)

    @staticmethod
    def backward(ctx, grad_output):
        (v,) = ctx.saved_tensors
        return grad_output if v.abs().max() < 1 else 0 * grad_output


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.mark_dirty(v)
        return v.mul_(2)

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output


class LIF(nn.Module):
    """A recurrent layer of neurons; ``fire(v)`` are spikes at v = 0; the reset subtracts, or is to zero."""

    def __init__(self, fire: Callable[..., Any] = FastSigmoid.apply, zero: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.fire, self.zero, self.apart = I, H, fire, zero, apart
        self.x, self.r, self.limit = nn.Linear(I, H), nn.Linear(H, H, bias=False), nn.Parameter(torch.full((H,), 0.3))

    def forward(self, x, s, v):
        reset = s.detach() if self.apart else s
        kept = 0.9 * v * (1 - reset) if self.zero else 0.9 * v - self.limit * reset
        v = kept + self.x(x) + self.r(s)
        return self.fire(v - self.limit), v


class Learned(LIF):
    def forward(self, x, s, v):
        v = 0.8 * v + self.x(x) + self.r(s)
        return Triangle.apply(v, self.limit.expand_as(v)), v


class Binary(LIF):
    def forward(self, x, s, v):
        v = torch.tanh(0.8 * v + self.x(x) + nn.functional.linear(s, Signs.apply(self.r.weight)))
        return v - self.limit, v


class Shown(LIF):
    def forward(self, x, s, v):
        fires, shown = Both.apply(0.8 * v + self.x(x) + self.r(s))
        return fires - self.limit, shown


def loop(module: nn.Module, x: Any) -> Any:
    s, v, y = torch.zeros(B, H, dtype=x.dtype), torch.zeros(B, H, dtype=x.dtype), []
    for row in x:
        s, v = module(row, s, v)
        y.append(s)
    return torch.stack(y), v


STEPS = {"snntorch": LIF, "slope": lambda: LIF(lambda v: FastSigmoid.apply(v, 4.0)), "zenke": lambda: LIF(spike_fn),
         "to zero": lambda: LIF(spike_fn, zero=True), "apart": lambda: LIF(apart=True),
         "apart, to zero": lambda: LIF(zero=True, apart=True), "two operands": Learned, "weights": Binary,
         "two results": Shown}


@pytest.mark.parametrize("name", STEPS)
def test_a_layer_trains_as_the_loop_in_pytorch(name: str):
    torch.manual_seed(0)
    module = STEPS[name]()
    cell = ecornn.torch.cell(module)
    layer = ecornn.torch.Recurrent(cell, I, H)
    layer.load_state_dict(cell.weights())
    x, dy, dv = torch.randn(T, B, I, requires_grad=True), torch.randn(T, B, H), torch.randn(B, H)
    wanted, last = loop(module, x)
    y, (_, v) = layer(x)
    # spikes are equal: none of these voltages is so near to a threshold that roundings decide
    # float32 on both sides, in another order; voltages add up what is rounded at every step
    np.testing.assert_allclose(y.detach(), wanted.detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(v[-1].detach() if v.dim() == 3 else v.detach(), last.detach(), rtol=1e-4, atol=1e-5)
    named = {n.replace(".", "_") + "_l0": p for n, p in module.named_parameters()}
    own = dict(layer.named_parameters())
    assert {*own} == {*named}
    expected = torch.autograd.grad([wanted, last], [x, *named.values()], [dy, dv], allow_unused=True)
    found = torch.autograd.grad([y, v.reshape(B, H)], [x, *(own[n] for n in named)], [dy, dv], allow_unused=True)
    for what, got, want in zip(("x", *named), found, expected, strict=True):
        want = torch.zeros_like(got) if want is None else want
        error = torch.linalg.norm(got.reshape(want.shape) - want) / max(torch.linalg.norm(want), 1e-3)
        assert error <= 1e-4, f"{what}: {error}"


def test_the_surrogate_reaches_the_first_step():
    cell = ecornn.torch.cell(LIF())
    layer = ecornn.torch.Recurrent(cell, I, H)
    x = torch.randn(T, B, I, requires_grad=True)
    layer(x)[0][-1].sum().backward()
    assert float(x.grad[0].abs().max()) > 0


@pytest.mark.parametrize(("fire", "words"), [
    (Branching.apply, r"(?s)the backward of Branching, a torch.autograd.Function, cannot be traced.*grad_output times "
                      r"a value for each element.*test_torch_spikes.py:\d+"),
    (lambda v: InPlace.apply(v * 1.0), "the backward of InPlace, .*it writes to its argument")])
def test_what_cannot_be_traced_is_a_typed_error(fire: Callable[..., Any], words: str):
    with pytest.raises(CellError, match=words):
        ecornn.torch.cell(LIF(fire))


def test_functions_are_as_before():
    """Also if the step cannot be exported, and for other threads while one is."""
    before = [(kind.forward, kind.setup_context) for kind in (FastSigmoid, Triangle, Signs)]
    ecornn.torch.cell(LIF())
    with pytest.raises(CellError):
        ecornn.torch.cell(LIF(Branching.apply))
    assert before == [(kind.forward, kind.setup_context) for kind in (FastSigmoid, Triangle, Signs)]
    v, found = torch.linspace(-1, 1, 5), []

    def elsewhere() -> None:
        leaf, limit = v.clone().requires_grad_(), torch.zeros(5)
        found.extend([*torch.autograd.grad(FastSigmoid.apply(leaf).sum(), leaf),
                      *torch.autograd.grad(Triangle.apply(leaf, limit).sum(), leaf)])

    with own_backwards():
        assert FastSigmoid.forward is not before[0][0]
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    torch.testing.assert_close(found, [1 / (25 * v.abs() + 1) ** 2, 1 - 0.5 * v.abs()])


def test_a_pickle_has_the_surrogate():
    cell = ecornn.torch.cell(LIF(spike_fn))
    assert pickle.loads(pickle.dumps(cell)).identity() == cell.identity()
    assert ecornn.torch.cell(LIF()).identity() != cell.identity()
