"""Weights of ecornn.torch's layers that are written in ways which PyTorch does not count."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_layers import B, I, T, agree, double, flat, pair

import ecornn.torch
from ecornn.torch.snapshot import PLACES, Sample


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


def laid_out(shape: tuple[int, ...], how: str) -> torch.Tensor:
    weight = torch.randn(shape)
    return {"plain": lambda w: w, "slices": slices, "turned": turned}[how](weight)


@pytest.mark.parametrize("how", ["plain", "slices", "turned"])
@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (32, 800), (1, 9), (9, 1), (5, 5), (1000, 3), (36, 24),
                                   (1024, 256), (700,), (4, 6, 10)], ids=str)
def test_a_write_to_any_row_or_column_is_seen(shape: tuple[int, ...], how: str):
    """A single one within as many looks as there are times PLACES in the larger axis, as many on end at once."""
    bias, weight = torch.zeros(3), laid_out(shape, how)
    sample, turns = Sample([bias, weight]), max(1, math.ceil(1.1 * max(shape) / PLACES))
    assert all(sample.holds() for _ in range(2 * turns)) and not sample.differs(1)
    for axis, size in enumerate(shape):
        for number in {0, size - 1, *map(int, torch.randint(size, (20,)))}:
            part = weight.select(axis, number)
            part += 1
            assert sample.differs(1) and not sample.differs(0) and not all(sample.holds() for _ in range(turns))
            part -= 1
            sample.renew()
    for first in map(int, torch.randint(max(1, shape[0] - turns), (20,))):
        weight[first:first + turns] += 1
        assert not sample.holds()
        sample.renew()
        assert sample.holds()


WRITE = """
import sys, numpy
values = numpy.memmap(sys.argv[1], "float32", "r+", shape=(256, 64))
rows = [*map(int, sys.argv[2].split(","))]
values[rows] = -2 * values[rows]
"""


def test_rows_that_another_process_writes_are_seen(tmp_path: Path):
    """Consecutive ones, scattered ones, and a single one."""
    path = tmp_path / "weights"
    theirs, ours = torch.nn.LSTM(64, 64).double(), ecornn.torch.LSTM(64, 64)
    ours.weight_hh_l0.detach().numpy().tofile(path)
    ours.weight_hh_l0 = torch.nn.Parameter(torch.from_file(str(path), shared=True, size=256 * 64).view(256, 64))
    x = torch.randn(5, 2, 64)
    with torch.no_grad():
        ours(x)
        for rows in (np.arange(1, 36), np.random.default_rng(0).choice(256, 100, replace=False), np.array([77])):
            subprocess.run([sys.executable, "-c", WRITE, path, ",".join(map(str, rows))], check=True)
            theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
            agree(ours(x), theirs(double(x)))
