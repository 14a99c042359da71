"""Calls that are like an earlier one take the short way, and whatever is not like it does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.profiler import profile
from torch_pairs import H, I, pair
from torch_values import BACKWARD, agree, double, flat

import ecornn.torch
from ecornn.errors import ArgumentError, DTypeError, ShapeError, WeightsError


def often(layer: Any, *args: Any) -> Any:
    """The last result of as many calls as it takes until one of their kind is remembered, and one more."""
    return [layer(*args) for _ in range(4)][-1]


def memories(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in memory of all kinds."""
    room = torch.empty(x.numel() + 1)
    room[1:] = x.flatten()
    return {"plain": x, "strided": torch.stack((x, x), -1)[..., 0], "off by four bytes": room[1:].view(x.shape),
            "a parameter": torch.nn.Parameter(x), "negative": torch.complex(x, -x).conj().imag,
            "turned": x.transpose(0, -1).contiguous().transpose(0, -1)}


@pytest.mark.parametrize("shape, options", [
    ((1, 4, I), {}), ((5, 4, I), {"num_layers": 2, "bidirectional": True}), ((5, I), {"bidirectional": True}),
    ((4, 5, I), {"batch_first": True}), ((4, 1, I), {"batch_first": True}), ((1, 5, I), {"batch_first": True}),
    ((5, I), {"batch_first": True, "bias": False})], ids=str)
def test_values(name: str, shape: tuple[int, ...], options: dict[str, Any], taken: list[Any]):
    theirs, ours = pair(name, **options)
    x = torch.randn(shape)
    wanted = theirs(x.double())
    for hx in (None, wanted[1]):
        given = () if hx is None else (tuple(s.float() for s in hx) if name == "LSTM" else hx.float(),)
        exact = theirs(x.double(), *map(double, given))
        ours(x, *given), often(ours, x, *given), taken.clear()
        for kind, same in memories(x).items():
            before = same.clone()
            found = ours(same, *given)
            agree(found, exact)
            for one, other in zip(flat(found), flat(exact), strict=True):
                assert one.dtype == torch.float32 and one.is_contiguous() == other.is_contiguous(), kind
            assert torch.equal(same, before)
        assert len(taken) == len(memories(x))
    # what is returned is the caller's own
    first, second = flat(ours(x)), flat(ours(x))
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in second}


@pytest.mark.parametrize("remembered", [False, True])
def test_what_does_not_fit_is_refused_and_said(remembered: bool, taken: list[Any]):
    ours = ecornn.torch.LSTM(I, H)
    x, state = torch.randn(3, 2, I), torch.zeros(1, 2, H)
    if remembered:
        often(ours, x, (state, state))
    taken.clear()
    for call, kind, words in [
            ((x, (state[:, :1], state)), ShapeError, ["h_0.shape"]),
            ((x, (state, state[..., 1:])), ShapeError, ["c_0.shape"]),
            ((x, (state, state.double())), DTypeError, ["c_0.dtype"]),
            ((x, (state.double(), state)), DTypeError, ["h_0.dtype"]),
            ((x, state), ArgumentError, ["hx", "(h_0, c_0)"]),
            ((x, (None, state)), ArgumentError, ["h_0"]), ((x, (state, None)), ArgumentError, ["c_0"]),
            ((x.double(),), DTypeError, ["input.dtype", "float64"]),
            ((x.bfloat16(),), DTypeError, ["float32, as the weights'"]),
            ((torch.randn(3, 2, I + 1),), ShapeError, ["input.shape"]), ((x[..., 1:],), ShapeError, ["input.shape"])]:
        with pytest.raises(kind) as caught:
            ours(*call)
        assert all(word in str(caught.value) for word in words)
    assert not taken


def test_attributes_weights_and_threads_that_change(taken: list[Any], one_thread: None):
    theirs, ours = pair("GRU", num_layers=2, dropout=0.5)
    x = torch.randn(4, 4, I)
    agree(often(ours, x), theirs(x.double()))
    taken.clear()
    ours.batch_first = theirs.batch_first = True
    agree(often(ours, x), theirs(x.double()))
    ours.batch_first = theirs.batch_first = False
    ours.train()
    assert not torch.equal(ours(x)[0], ours(x)[0])  # what is dropped differs
    ours.eval()
    for write in (lambda w: w.mul_(2), lambda w: w.data.mul_(0.5), lambda w: w.numpy().__imul__(3)):
        for module in (ours, theirs):
            write(module.weight_hh_l1.detach())
        agree(ours(x), theirs(x.double()))
    ours.weight_ih_l0 = torch.nn.Parameter(ours.weight_ih_l0 * 0.5)
    theirs.weight_ih_l0 = torch.nn.Parameter(theirs.weight_ih_l0 * 0.5)
    agree(ours(x), theirs(x.double()))
    torch.set_num_threads(2)
    agree(often(ours, x), theirs(x.double()))
    copied = copy.deepcopy(ours)
    agree(often(copied, x), theirs(x.double()))
    assert len({*taken}) >= 3


@pytest.mark.parametrize(("name", "bias"), [("LSTM", True), ("GRU", True), ("GRU", False), ("RNN", True),
                                            ("LSTMCell", True), ("GRUCell", True), ("RNNCell", True)])
def test_pytorchs_defaults_are_not_those_of_a_layer(name: str, bias: bool, taken: list[Any]):
    theirs, ours = pair(name, bias=bias)
    x = torch.randn(3, I) if "Cell" in name else torch.randn(2, 3, I)
    wanted = theirs(x.double())

    def gradients(layer: Any, x: Any) -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(flat(layer(x))[0].sum(), [*layer.parameters()])

    with torch.device("meta"):
        agree(often(ours, x), wanted)
    torch.set_default_dtype(torch.float64)
    try:
        agree(often(ours, x), wanted)
        if "Cell" in name:
            agree(gradients(ours, x), gradients(theirs, x.double()), 1e-5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert taken


@pytest.mark.parametrize("name", ["GRU", "GRUCell"])
def test_who_watches_sees_the_operator(name: str, taken: list[Any]):
    ours = getattr(ecornn.torch, name)(I, H)
    x = torch.randn(3, I)
    often(ours, x)
    taken.clear()
    with profile() as seen:
        ours(x)
    assert "ecornn::recurrent" in {event.name for event in seen.events()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(flat(ours(mode.from_tensor(x)))[0]).__name__ == "FakeTensor"
    assert flat(torch.func.vmap(ours)(torch.stack((x, x))))[0].shape[0] == 2
    with torch.enable_grad():
        assert flat(ours(x))[0].requires_grad
    assert not taken
    ours(x)
    assert len(taken) == 1


@pytest.mark.parametrize("name", ["LSTM", pytest.param("GRU", marks=pytest.mark.exhaustive),
                                  pytest.param("RNN", marks=pytest.mark.exhaustive), "LSTMCell", "GRUCell"])
def test_zeros_without_memory(name: str, taken: list[Any]):
    """As autograd has them: an input, a state, a weight, a gradient. They ended the process."""
    exact, ours = pair(name)
    cell, count = name.endswith("Cell"), 2 if name.startswith("LSTM") else 1
    zero = torch._efficientzerotensor((3, I) if cell else (5, 3, I))
    zeros = [torch._efficientzerotensor((3, H) if cell else (1, 3, H))] * count
    x, state = torch.randn(zero.shape), tuple(zeros) if count > 1 else zeros[0]
    often(ours, x)
    agree(ours(zero), exact(torch.zeros(zero.shape).double()))
    often(ours, x, state)
    taken.clear()
    agree(ours(x, state), exact(x.double()))
    assert len(taken) == 1
    with torch.enable_grad():
        y, wanted = (flat(layer(given)) for layer, given in ((ours, x), (exact, x.double())))
        gradients = [torch._efficientzerotensor(y[0].shape), *map(torch.ones_like, y[1:])]
        found = torch.autograd.grad(y, [*ours.parameters()], gradients, materialize_grads=True)
        exact_ones = [torch.zeros_like(wanted[0]), *map(torch.ones_like, wanted[1:])]
        those = torch.autograd.grad(wanted, [*exact.parameters()], exact_ones, materialize_grads=True)
    for one, other in zip(found, those, strict=True):
        assert float((one - other).norm()) <= BACKWARD * float(other.norm())
    (weight,) = (n for n, _ in ours.named_parameters() if n.startswith("weight_hh"))
    getattr(ours, weight).data = torch._efficientzerotensor(getattr(ours, weight).shape)
    getattr(exact, weight).zero_()
    hx = torch.randn(zeros[0].shape)
    hx = (hx, hx) if count > 1 else hx
    agree(often(ours, x, hx), exact(x.double(), double(hx)))


@pytest.mark.parametrize("kind", ["RNN", "RNNCell"])
@pytest.mark.parametrize("gone", ["x", "state", "weight"])
def test_memory_that_was_given_back(kind: str, gone: str):
    """As FSDP does between calls. Nothing is read where nothing is, also in calls like those before."""
    layer = getattr(ecornn.torch, kind)(I, H)
    x, state = torch.randn(5, 4, I), torch.randn(1, 4, H)
    x, state = (x[0], state[0]) if kind == "RNNCell" else (x, state)
    weight = layer.weight_hh if kind == "RNNCell" else layer.weight_hh_l0
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            often(layer, x, state)
            tensor = {"x": x, "state": state, "weight": weight}[gone].detach()
            values, size = tensor.clone(), tensor.untyped_storage().size()
            tensor.untyped_storage().resize_(0)
            with pytest.raises((ArgumentError, RuntimeError)):  # some of PyTorch's own operations come first
                layer(x, state)
            tensor.untyped_storage().resize_(size)
            tensor.copy_(values)
            layer(x, state)


@pytest.mark.parametrize("name, value", [("num_layers", 1), ("bidirectional", False), ("bias", False),
                                         ("hidden_size", H + 1), ("input_size", I + 1)])
def test_attributes_that_change(name: str, value: Any, taken: list[Any]):
    """A layer is what its attributes say now, or it says that its weights are not."""
    layer = ecornn.torch.GRU(I, H, num_layers=2, bidirectional=True)
    x = torch.randn(5, 4, I)
    wanted = often(layer, x)
    was = getattr(layer, name)
    setattr(layer, name, value)
    with pytest.raises((WeightsError, ShapeError)):
        layer(x)
    setattr(layer, name, was)
    agree(layer(x), wanted)


@pytest.mark.parametrize("kind", ["GRU", "GRUCell"])
def test_a_weight_that_is_none(kind: str):
    layer = getattr(ecornn.torch, kind)(I, H)
    name, x = ("weight_hh" if kind == "GRUCell" else "weight_hh_l0"), torch.randn(5, 4, I)
    x = x[0] if kind == "GRUCell" else x
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            often(layer, x)
            weight = getattr(layer, name)
            setattr(layer, name, None)
            del weight
            with pytest.raises(WeightsError, match=f"{name} .* is None"):
                layer(x)
            layer = getattr(ecornn.torch, kind)(I, H)
