"""ecornn.torch.Recurrent: cells of one's own, and built-in ones with options, as layers that train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch_pairs import B, H, I, T, alike, states, with_seed
from torch_values import BACKWARD, close

import ecornn
import ecornn.torch
from ecornn.errors import ArgumentError, FallbackError
from ecornn.torch.kind import cell_of, kind_of, name_of, text_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Smoothed(ecornn.Cell):
    """A leaky unit and a smoothed copy of it, whose two states have parameters of their own."""

    name = "smoothed"
    states = ("h", "slow")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden), "rate": (2, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> list[Any]:
        from tvm import te

        h, slow = states
        ih, hh, v = ecornn.product(x, p["weight_ih"], 0), ecornn.product(h, p["weight_hh"], 0), p["rate"]
        new = ecornn.pointwise(lambda b, j: te.tanh(ih[b, j] + hh[b, j] + v[0, j] * slow[b, j]), h)
        return [new, ecornn.pointwise(lambda b, j: slow[b, j] + te.sigmoid(v[1, j]) * (new[b, j] - slow[b, j]), h)]


class ByHand(torch.nn.Module):
    """The same in PyTorch's operations, of the parameters of a Recurrent in float64: y and the states."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, hx: Any) -> Any:
        layer, ends = self.layer, [[], []]
        for number in range(layer.num_layers):
            rows = []
            for way, end in enumerate(("", "_reverse")[:1 + layer.bidirectional]):
                w, r, v = (getattr(layer, f"{name}_l{number}{end}") for name in ("weight_ih", "weight_hh", "rate"))
                place = number * (1 + layer.bidirectional) + way
                (h, slow), outputs = [s[place] for s in hx], [None] * len(x)
                for t in reversed(range(len(x))) if way else range(len(x)):
                    h = torch.tanh(x[t] @ w.T + h @ r.T + v[:H] * slow)
                    slow = slow + torch.sigmoid(v[H:]) * (h - slow)
                    outputs[t] = h
                rows.append(torch.stack(outputs))
                ends[0].append(h)
                ends[1].append(slow)
            x = torch.cat(rows, -1)
        return x, tuple(torch.stack(states) for states in ends)


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_a_cell_of_ones_own(layers: int, bidirectional: bool):
    ours = ecornn.torch.Recurrent(Smoothed(), I, H, layers, bidirectional=bidirectional)
    assert max(float(w.detach().abs().max()) for w in ours.parameters()) <= H ** -0.5
    theirs = copy.deepcopy(ours).double()
    assert list(theirs.state_dict())[:3] == ["weight_ih_l0", "weight_hh_l0", "rate_l0"]
    x, hx = torch.randn(T, B, I), states("LSTM", layers * (1 + bidirectional))
    alike(ByHand(theirs), ours, x, hx)
    if layers == 1:
        y = ours(x, hx)[0]
        with torch.no_grad():
            close(ours(x, hx)[0], y)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(ours, fullgraph=True, backend="aot_eager")(x, hx)[0], y)
        first = ecornn.torch.Recurrent(Smoothed(), I, H, batch_first=True)
        first.load_state_dict(ours.state_dict())
        assert torch.equal(first(x.transpose(0, 1), hx)[0].transpose(0, 1), y)
        with pytest.raises(FallbackError, match="PyTorch has no layer"):
            ours.bfloat16()(x.bfloat16())


def test_built_in_cells_with_options_train_as_layers():
    """And their names are understood in any process, as those of cells whose class has a place in a module."""
    ours = ecornn.torch.Recurrent("lstm(clip=3)", I, H, num_layers=2, dropout=0.5)
    theirs = torch.nn.LSTM(I, H, 2, dropout=0.5)  # which clips nothing here
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(T, B, I)
    close(with_seed(ours, x, 5)[1], with_seed(theirs, x, 5)[1], 2 * BACKWARD)
    assert "lstm(clip=3), 7, 11, num_layers=2, dropout=0.5" in repr(ours).replace("3.0", "3")
    assert kind_of(text_of(ours)).cell is ours.cell
    name = name_of(Smoothed())
    assert name.startswith("smoothed@") and name.endswith(f"={__name__}:Smoothed")
    with pytest.raises(ArgumentError, match="make an ecornn"):
        cell_of("smoothed@00000000")
    with pytest.raises(ArgumentError, match="the cell that"):
        cell_of(f"smoothed@00000000={__name__}:Smoothed")


def test_a_training_step_does_not_analyse_the_cell_again(monkeypatch: pytest.MonkeyPatch):
    """Its weights are new after each step; its identity, which takes longer than the step, is not."""
    layer = ecornn.torch.Recurrent(Smoothed(), I, H)
    optimizer, x, asked, before = torch.optim.SGD(layer.parameters(), 0.1), torch.randn(T, B, I), [], []
    identity = ecornn.Cell.identity
    for _ in range(3):
        before.append(len(asked))
        monkeypatch.setattr(ecornn.Cell, "identity", lambda cell: asked.append(cell) or identity(cell))
        optimizer.zero_grad()
        layer(x)[0].square().mean().backward()
        optimizer.step()
        monkeypatch.undo()
    assert len(asked) == before[1]
