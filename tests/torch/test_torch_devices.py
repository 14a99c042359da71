"""Layers on several devices of one process, called from several threads that take the devices in turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_torch_layers import error

import ecornn.torch

T, B, I, H = 7, 3, 5, 8
FLOAT32 = 2e-5  # relative
TURNS = 12


@pytest.mark.parametrize("places", [("cpu", "cpu"), pytest.param(("cuda:0", "cpu"), marks=pytest.mark.gpu),
                                    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu)], ids=str)
def test_threads_take_devices_in_turns(places: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    """Training steps and calls without gradients: the bits that each device gives alone, near float64's."""
    if torch.cuda.device_count() < sum("cuda" in place for place in places):
        pytest.skip("needs as many GPUs")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact, x = torch.nn.GRU(I, H, bidirectional=True).double(), torch.randn(T, B, I)
    layers = []
    for place in places:
        layers.append(ecornn.torch.GRU(I, H, bidirectional=True).to(place))
        layers[-1].load_state_dict(exact.state_dict())
    inputs = [x.to(place) for place in places]

    def step(number: int) -> list[torch.Tensor]:
        layer = layers[number]
        with torch.no_grad():
            alone = layer(inputs[number])[0]
        y, state = layer(inputs[number])
        gradients = torch.autograd.grad(y.square().sum() + state.sum(), [*layer.parameters()])
        return [t.detach().cpu() for t in (alone, y, state, *gradients)]

    wanted = [step(number) for number in range(2)]
    y, state = exact(x.double())
    right = [y, y, state, *torch.autograd.grad(y.square().sum() + state.sum(), [*exact.parameters()])]
    for found in wanted:
        assert all(error(one, other.detach()) < FLOAT32 for one, other in zip(found, right, strict=True))

    def work(first: int) -> bool:
        return all(torch.equal(one, other) for turn in range(TURNS) for number in [(first + turn) % 2]
                   for one, other in zip(step(number), wanted[number], strict=True))

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(work, range(2))] == [True, True]
