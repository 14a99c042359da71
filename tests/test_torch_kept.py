"""What graphs of ecornn.torch say of what a training step keeps: they are cached by it, and have its size in them."""

from __future__ import annotations

import pytest
import torch
from test_torch_layers import B, I, T, error, pair
from torch.fx.experimental.proxy_tensor import make_fx

from ecornn.torch import Recurrent, compiling, engine
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
