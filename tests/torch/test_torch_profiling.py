"""``ecornn.torch.profile()``: what each recurrent layer of a model gains, and the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ecornn.torch
from ecornn.errors import ArgumentError
from ecornn.torch import profiling


class Reader(torch.nn.Module):
    """A layer, a cell that is called at each step, one that nobody calls, statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.LSTM(6, 8)
        self.norm, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
        self.cell, self.unused = torch.nn.GRUCell(8, 5), torch.nn.RNN(3, 3)

    def forward(self, x: torch.Tensor, *, times: int = 2) -> dict[str, Any]:
        y, (h, _) = self.encoder(x)
        state = None
        for step in y[:times]:
            state = self.cell(self.drop(self.norm(step)), state)
        return {"y": y, "states": (state, h)}


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SECONDS", 0.1)


@pytest.mark.parametrize("replaced", [False, True])
def test_layers_and_the_model_are_timed_and_stay_as_they_are(replaced: bool, monkeypatch: pytest.MonkeyPatch):
    fast(monkeypatch)
    model, x = Reader(), torch.randn(4, 3, 6)
    if replaced:
        ecornn.torch.replace(model, keep="states")
    before, classes = copy.deepcopy(model.state_dict()), [type(one) for one in model.modules()]
    random = torch.get_rng_state()
    found = ecornn.torch.profile(model, x, times=3)
    assert [(one.name, one.kind, one.calls) for one in found.layers] == [("encoder", "LSTM(6, 8)", 1),
                                                                        ("cell", "GRUCell(8, 5)", 3)]
    assert all(0 < time < 60 for one in (*found.layers, found.model) for time in (one.before, one.after))
    assert found.model.kind == "Reader" and found.model.before > found.layers[0].before / 10
    lines = str(found).splitlines()
    assert len(lines) == 4 and len({*map(len, lines)}) == 1 and lines[1].startswith("encoder LSTM(6, 8)")
    assert lines[1].endswith(f"{found.layers[0].ratio:.2f}x")
    # nothing of it is seen in the model, nor in the order of random numbers
    assert [type(one) for one in model.modules()] == classes and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model.encoder._forward_pre_hooks
    assert getattr(model.encoder, "keep", None) == ("states" if replaced else None)


@pytest.mark.parametrize("grad", [True, False])
def test_the_backward_pass_is_timed_if_gradients_are_enabled(grad: bool, monkeypatch: pytest.MonkeyPatch):
    """Of packed sequences, too. One side is PyTorch's, the other is not."""
    fast(monkeypatch)
    asked, own = [], []
    real, forward = torch.autograd.grad, torch.nn.GRU.forward
    monkeypatch.setattr(torch.autograd, "grad", lambda *given, **more: asked.append(1) or real(*given, **more))
    monkeypatch.setattr(torch.nn.GRU, "forward", lambda self, *given: own.append(type(self)) or forward(self, *given))
    layer = torch.nn.GRU(6, 7)
    with torch.set_grad_enabled(grad):
        found = ecornn.torch.profile(layer, pack_sequence([torch.randn(n, 6) for n in (4, 2)]))
    assert bool(asked) == grad and {*own} == {torch.nn.GRU}
    assert [one.name for one in found.layers] == [""] and isinstance(layer(pack_sequence([torch.randn(2, 6)]))[0],
                                                                     PackedSequence)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ArgumentError, match="a model with a layer that can be compiled: no recurrent layers"):
        ecornn.torch.profile(torch.nn.Linear(3, 3), torch.randn(2, 3))
    half = torch.nn.GRU(3, 3).half()
    with pytest.raises(ArgumentError, match=r"left alone, its weights are torch\.float16"):
        ecornn.torch.profile(half, torch.randn(2, 3).half())
