"""Layers of torch.float64 on a CPU: torch.autograd.gradcheck, and PyTorch's own values to the last digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_cells import Peephole
from torch.autograd import gradcheck
from torch.nn.utils.rnn import pack_padded_sequence

import ecornn.torch

T, B, I, H = 4, 2, 3, 5
LAYERS = {"LSTM": lambda: ecornn.torch.LSTM(I, H), "GRU": lambda: ecornn.torch.GRU(I, H),
          "RNN": lambda: ecornn.torch.RNN(I, H), "own cell": lambda: ecornn.torch.Recurrent(Peephole(), I, H)}


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch):
    """Nothing here may fall back to PyTorch's own layers."""
    torch.manual_seed(0)
    monkeypatch.setenv("ECORNN_STRICT", "1")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n == "GRU")) for n in LAYERS])
def test_gradcheck(name: str):
    """Of x, first states and all weights, each value moved by itself."""
    layer: Any = LAYERS[name]().double()
    count = len(layer.state_names)

    def call(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, last = layer(x, given[:count] if count > 1 else given[0])
        return (y, *last) if count > 1 else (y, last)

    states = [normal(1, B, H) for _ in range(count)]
    assert gradcheck(call, (normal(T, B, I), *states, *layer.parameters()))


def test_single_values_of_large_weights_are_seen():
    """gradcheck writes these through ``.data``, which counts no versions."""
    layer, x = ecornn.torch.RNN(I, 40).double(), normal(T, B, I)
    before = layer(x)[0]
    layer.weight_hh_l0.data[7, 11] += 1.0
    assert not torch.equal(layer(x)[0], before)


def test_replaced_layers_are_those_of_pytorch():
    """Padded, packed, and their gradients."""
    theirs = torch.nn.GRU(I, H).double()
    model = torch.nn.ModuleDict({"layer": torch.nn.GRU(I, H).double()})
    model["layer"].load_state_dict(theirs.state_dict())
    assert ecornn.torch.replace(model).swapped == ("layer",)
    x = normal(T, B, I)
    for packed in (False, True):
        found = []
        for layer in (model["layer"], theirs):
            y, _ = layer(pack_padded_sequence(x, [2, 4], enforce_sorted=False) if packed else x)
            loss = (y if isinstance(y, torch.Tensor) else y.data).sin().sum()
            found.append([loss, *torch.autograd.grad(loss, [x, *layer.parameters()])])
        for ours, wanted in zip(*found, strict=True):
            assert ours.dtype == torch.float64
            assert (ours - wanted).norm() <= 1e-13 * wanted.norm()
