"""What graphs of ecornn.torch say of what a training step keeps: they are cached by it, and have its size in them."""

from __future__ import annotations

import pytest
import torch
from test_torch_layers import B, I, T, error, pair
from torch.fx.experimental.proxy_tensor import make_fx

from ecornn.errors import ArgumentError
from ecornn.torch import LSTM, Recurrent, compiling, engine, replace, restore
from ecornn.torch.kind import keeping, kind_of, text_of


def forward_of(layer: torch.nn.Module, x: torch.Tensor) -> torch.fx.Node:
    """The node of a traced call that keeps what a backward pass reads."""
    graph = make_fx(lambda x: layer(x)[0], tracing_mode="fake", _allow_non_fake_inputs=True)(x).graph
    (found,) = (node for node in graph.nodes if "recurrent_forward" in str(node.target))
    return found


def test_graphs_say_what_a_step_keeps_and_keep_that(monkeypatch: pytest.MonkeyPatch):
    theirs, ours = pair("GRU")
    x = torch.randn(T, B, I)
    usual, weights = forward_of(ours, x), engine.weights_of(ours)
    monkeypatch.setitem(compiling.KEPT, "cpu", "states")  # as another version, device or option may have it
    other = forward_of(ours, x)
    assert [kind_of(node.args[4]).keep for node in (usual, other)] == ["gates", "states"]
    exact = torch.autograd.grad(theirs(x.double())[0].square().sum(), [*theirs.parameters()])
    sizes = set()
    for node in (usual, other):  # a graph that was made before goes on with what it was made for
        with torch.no_grad():
            y, h, kept = torch.ops.ecornn.recurrent_forward(x, [], None, weights, node.args[4])
            found = torch.ops.ecornn.recurrent_backward(x, [], None, weights, node.args[4], y, kept,
                                                        [2 * y, torch.zeros_like(h)])
        assert kept.shape == node.meta["val"][-1].shape
        assert all(error(one, wanted) < 2e-5 for one, wanted in zip(found[1:], exact, strict=True))
        sizes.add(kept.numel())
    assert len(sizes) == 2


def test_texts_of_kinds_that_keep():
    for layer in (pair("LSTM")[1], Recurrent("gru", 3, 4)):
        for text in (text_of(layer), keeping(text_of(layer), "states")):
            assert kind_of(text).text == text
        assert kind_of(text).keep == "states" and kind_of(text).cell == kind_of(text_of(layer)).cell


def test_who_asks_for_states_has_them():
    """A layer, or a whole model, keeps less; its gradients are the same ones to rounding."""
    theirs, ours = pair("LSTM")
    x = torch.randn(T, B, I)
    wanted = torch.autograd.grad(theirs(x.double())[0].square().sum(), [*theirs.parameters()])
    sizes = []
    for keep in (None, "states", "gates"):
        ours.keep = keep  # attributes may be set between calls
        y = ours(x)[0]
        (kept,) = (t for t in y.grad_fn.saved_tensors if t is not None and t.dtype is torch.uint8)
        sizes.append(kept.numel())
        found = torch.autograd.grad(y.square().sum(), [*ours.parameters()])
        assert all(error(one, exact) < 2e-5 for one, exact in zip(found, wanted, strict=True))
    assert sizes[0] == sizes[2] > 4 * sizes[1]
    model = torch.nn.Sequential(torch.nn.GRU(3, 4))
    replace(model, keep="states")
    assert model[0].keep == "states" and kind_of(text_of(model[0])).keep == "states"
    restore(model)
    assert not hasattr(model[0], "keep")
    for made in (lambda: LSTM(3, 4, keep="all"), lambda: Recurrent("gru", 3, 4, keep="all"),
                 lambda: replace(model, keep="all")):
        with pytest.raises(ArgumentError, match=r"keep='all' is not allowed; expected None, states or gates"):
            made()
    assert LSTM(3, 4, keep="states").keep == Recurrent("gru", 3, 4, keep="states").keep == "states"
