"""Packed sequences in columns with gradients: what lies where, by PyTorch's own layers in place of a module."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import ecornn.torch
from ecornn.errors import DerivativeError
from ecornn.torch import operator, packed

H, I, LENGTHS = 5, 3, [8, 8, 8, 8, 3, 1, 1]


def by_torch(library: torch.nn.LSTM, names: list[str], columns: Any, tensors: Any) -> list[torch.Tensor]:
    """y in columns, and the states, each sequence apart."""
    x, h, c, *weights = tensors
    y, states = x.new_zeros(x.shape[0] * x.shape[1], 2 * H), []
    for number in range(columns.count):
        at = torch.from_numpy(columns.of_sequence(number))
        first = tuple(s[:, number:number + 1].contiguous() for s in (h, c))
        given = x.flatten(0, 1)[at][:, None], first
        rows, after = torch.func.functional_call(library, dict(zip(names, weights, strict=True)), given)
        y, states = y.index_copy(0, at, rows[:, 0]), [*states, after]
    return [y.view(*x.shape[:2], -1), *(torch.cat(each, 1) for each in zip(*states, strict=True))]


@pytest.fixture
def layer(monkeypatch) -> Any:
    """An LSTM, whose engine is PyTorch, as those of its layers are."""
    torch.manual_seed(0)
    library = torch.nn.LSTM(I, H, 2, bidirectional=True)

    def forward(engine, weights, x, state, columns):
        called.append(engine)
        return [*by_torch(engine.library, engine.names, columns, (x, *state, *weights)), x.new_empty(0)]

    def backward(engine, weights, x, state, columns, y, kept, gradients, want_state=True):
        with torch.enable_grad():
            tensors = [t.detach().requires_grad_() for t in (x, *state, *weights)]
            return torch.autograd.grad(by_torch(engine.library, engine.names, columns, tensors), tensors, gradients)

    def engine_of(library: torch.nn.LSTM, together: int) -> Any:
        return SimpleNamespace(library=library, names=[name for name, _ in library.named_parameters()], refused=set(),
                               training=lambda *_, **__: nullcontext(SimpleNamespace(together=together)))

    called: list[Any] = []
    engine = engine_of(library, 3)
    library.called = called
    engine.part = lambda number, kind: engine_of(torch.nn.LSTM(2 * H if number else I, H, bidirectional=True),
                                                 6 if number else 3)
    monkeypatch.setattr(operator, "training", SimpleNamespace(forward=forward, backward=backward))
    monkeypatch.setattr(packed, "engine_of", lambda module: engine)
    monkeypatch.setattr(packed, "_width", lambda gpu, sizes: 3)
    return library


@pytest.mark.parametrize("by_layer", [False, True])
def test_gradients_are_those_of_the_packed_layer(layer, by_layer):
    """Some sequences wrap around; those of first states are in the order of the sequences."""
    ours = ecornn.torch.LSTM(I, H, 2, bidirectional=True)
    ours.load_state_dict(layer.state_dict())
    if by_layer:
        ours.weight_hh_l0.register_post_accumulate_grad_hook(lambda _: None)
    found = []
    for module in (layer, ours):
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randn(n, I, generator=generator).requires_grad_() for n in LENGTHS[::-1]]
        state = [torch.randn(4, len(LENGTHS), H, generator=generator).requires_grad_() for _ in range(2)]
        y, after = module(pack_sequence(rows, enforce_sorted=False), tuple(state))
        outputs = [y.data, *after]
        dy = [torch.randn(o.shape, generator=generator) for o in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, [*rows, *state, *module.parameters()], dy)])
    for value, wanted in zip(*found[::-1], strict=True):
        torch.testing.assert_close(value, wanted)
    assert [engine.library.input_size for engine in layer.called] == ([I, 2 * H] if by_layer else [I])
    sizes = pack_sequence(rows, enforce_sorted=False).batch_sizes
    assert packed.laid(sizes.numpy().tobytes(), 3, 3).columns.wrapped.size


def test_gradients_of_gradients_are_refused(layer):
    ours = ecornn.torch.LSTM(I, H, 2, bidirectional=True)
    x = torch.randn(sum(LENGTHS), I).requires_grad_()
    rows = torch.split(x, LENGTHS)
    y, _ = ours(pack_sequence(rows), tuple(torch.zeros(4, len(LENGTHS), H) for _ in range(2)))
    (dx,) = torch.autograd.grad(y.data.sum(), x, create_graph=True)
    with pytest.raises(DerivativeError, match="restore"):
        dx.sum().backward()
