"""Weights of ecornn.torch's layers that are written in ways which PyTorch does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_torch_layers import B, I, T, agree, double, flat, pair


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def halved(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)


def clamped(weight: torch.Tensor) -> None:
    weight.data.clamp_(-0.1, 0.1)


def averaged(weight: torch.Tensor) -> None:
    weight.data.copy_(0.9 * weight.data + 0.01)


def by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] *= 0.5


def in_inference_mode(weight: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(2)


def by_a_vector(weight: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(0.3 * weight.detach().reshape(-1), [weight])


def initialized(weight: torch.Tensor) -> None:
    torch.nn.init.uniform_(weight, -0.2, 0.2)


@pytest.mark.parametrize("write", [halved, clamped, averaged, by_numpy, in_inference_mode, by_a_vector, initialized])
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_writes_that_leave_no_trace_are_seen_on_a_cpu(write: Callable[[Any], None], name: str):
    """PyTorch counts only the last of these. Before and after a training step, too."""
    theirs, ours = pair("GRU")
    x, suspects = torch.randn(T, B, I), torch.optim.SGD(ours.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        ours(x)
    for train in (False, True):
        if train:
            ours(x)[0].sum().backward()
            suspects.step()
            ours(x)[0].sum().backward()
        write(getattr(ours, name))
        theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
        with torch.no_grad():
            agree(ours(x), theirs(double(x)))
        agree([t.detach() for t in flat(ours(x))], [t.detach() for t in flat(theirs(double(x)))])


def test_a_frozen_weight_that_is_written_in_training_is_seen():
    theirs, ours = pair("LSTM")
    x = torch.randn(T, B, I)
    ours.weight_ih_l0.requires_grad_(False)
    for _ in range(2):
        ours(x)[0].sum().backward()  # the others are suspects, and packed again alone
        ours.weight_ih_l0.data.mul_(0.5)
        theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
        agree([t.detach() for t in flat(ours(x))], [t.detach() for t in flat(theirs(double(x)))])


def slices(weight: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a larger tensor."""
    room = torch.zeros([2 * size for size in weight.shape], dtype=weight.dtype)
    found = room[tuple(slice(None, None, 2) for _ in weight.shape)]
    return found.copy_(weight)


def turned(weight: torch.Tensor) -> torch.Tensor:
    """The same values, the last axis first in memory."""
    return weight.T.contiguous().T if weight.dim() == 2 else slices(weight)


def negative(weight: torch.Tensor) -> torch.Tensor:
    """The same values as the imaginary part of a conjugate, which PyTorch has as a view with a bit."""
    return torch.complex(weight, -weight).conj().imag


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("laid", [slices, turned, negative])
def test_such_writes_to_weights_with_gaps_are_seen(laid: Callable[[Any], Any], dtype: torch.dtype):
    theirs, ours = pair("GRU")
    ours.to(dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    for name, weight in [*ours.named_parameters()]:
        setattr(ours, name, torch.nn.Parameter(laid(weight.detach())))
    with torch.no_grad():
        agree(ours(x), theirs(double(x)))
        for name in ("weight_hh_l0", "weight_ih_l0", "bias_hh_l0"):
            for write in (halved, clamped, averaged):
                write(getattr(ours, name))
                theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
                agree(ours(x), theirs(double(x)))
