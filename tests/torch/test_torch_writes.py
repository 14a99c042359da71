"""Weights of ecornn.torch's layers that are written in ways which PyTorch does not count; and those that are new at
each call: packed where the last ones were, by the module's code."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch_pairs import B, H, I, T, load, pair
from torch_values import agree, double, error

import ecornn.torch
from ecornn.errors import ShapeError
from ecornn.torch import engine
from ecornn.torch.snapshot import PLACES, Sample

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "halved": lambda weight: weight.data.mul_(0.5),
    "clamped": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "averaged": lambda weight: weight.data.copy_(0.9 * weight.data + 0.01),
    "by numpy": lambda weight: weight.detach().numpy().__imul__(0.5),
    "in inference mode": torch.inference_mode()(lambda weight: weight.mul_(2)),
    "by a vector": lambda weight: torch.nn.utils.vector_to_parameters(0.3 * weight.detach().reshape(-1), [weight]),
    "initialized": lambda weight: torch.nn.init.uniform_(weight, -0.2, 0.2),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("weight", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_writes_that_leave_no_trace_are_seen_on_a_cpu(how: str, weight: str):
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
        WRITES[how](getattr(ours, weight))
        load(theirs, ours)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                agree(ours(x), theirs(double(x)))


def test_a_frozen_weight_that_is_written_in_training_is_seen():
    theirs, ours = pair("LSTM")
    x = torch.randn(T, B, I)
    ours.weight_ih_l0.requires_grad_(False)
    for _ in range(2):
        ours(x)[0].sum().backward()  # the others are suspects, and packed again alone
        ours.weight_ih_l0.data.mul_(0.5)
        load(theirs, ours)
        agree(ours(x), theirs(double(x)))


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
            for how in ("halved", "clamped", "averaged"):
                WRITES[how](getattr(ours, name))
                load(theirs, ours)
                agree(ours(x), theirs(double(x)))


@pytest.mark.parametrize("how", ["plain", "slices", "turned"])
@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (32, 800), (1, 9), (9, 1), (5, 5), (1000, 3), (36, 24),
                                   (1024, 256), (700,), (4, 6, 10)], ids=str)
def test_a_write_to_any_row_or_column_is_seen(shape: tuple[int, ...], how: str):
    """A single one within as many looks as there are times PLACES in the larger axis, as many on end at once."""
    bias, weight = torch.zeros(3), torch.randn(shape)
    weight = {"plain": lambda w: w, "slices": slices, "turned": turned}[how](weight)
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
            load(theirs, ours)
            agree(ours(x), theirs(double(x)))


# -- weights that are new at each call -----------------------------------------------------------
def fresh(layer: torch.nn.Module, scale: float) -> dict[str, torch.Tensor]:
    return {name: scale * torch.randn(weight.shape) for name, weight in layer.named_parameters()}


def wide(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().double() for name, weight in weights.items()}


def bound(layers: Any) -> list[Any]:
    return [one for known in layers._bound.values() for one in known.values()]


def test_inference_packs_in_place():
    theirs, ours = pair("GRU")
    x, found = torch.randn(T, B, I), engine.engine_of(ours)
    with torch.no_grad():
        for number in range(4):
            weights = fresh(ours, 0.3)
            if number == 2:  # rows with gaps, which are copied first
                weights["weight_hh_l0"] = torch.randn(3 * H, 2 * H)[:, ::2]
            agree(functional_call(ours, weights, (x,)), functional_call(theirs, wide(weights), (x.double(),)))
        (one,) = bound(found.inference)
        assert one.packs == 3
        weights["bias_hh_l0"] = torch.randn(3 * H)  # the others are the same tensors
        agree(functional_call(ours, weights, (x,)), functional_call(theirs, wide(weights), (x.double(),)))
        assert bound(found.inference) == [one] and one.packs == 4
        functional_call(ours, weights, (x,))
        assert one.packs == 4


def test_training_packs_in_place():
    """Also where two calls with different weights are under way, as in meta-learning."""
    theirs, ours = pair("GRU")
    x, found, graphs = torch.randn(T, B, I), engine.engine_of(ours), []
    for _ in range(3):
        weights = {k: v.requires_grad_() for k, v in fresh(ours, 0.3).items()}
        exact = {k: v.requires_grad_() for k, v in wide(weights).items()}
        graphs.append((functional_call(ours, weights, (x,))[0].square().sum(), weights,
                       functional_call(theirs, exact, (x.double(),))[0].square().sum(), exact))
    for loss, weights, wanted, exact in reversed(graphs):
        agree(torch.autograd.grad(loss, [*weights.values()]), torch.autograd.grad(wanted, [*exact.values()]), 2e-6)
    (one,) = bound(found.trained)
    assert one.packs == 4  # two forward, and two on the way back


def test_weights_that_do_not_fit_are_refused():
    """Their memory is not read: the addresses alone are given to the module."""
    _, ours = pair("GRU")
    x = torch.randn(T, B, I)
    with torch.no_grad():
        wanted = ours(x)[0]
        for weights in (fresh(ours, 1), fresh(ours, 1)):
            weights["weight_hh_l0"] = weights["weight_hh_l0"][:-1]
            with pytest.raises(ShapeError, match="weight_hh_l0"):
                functional_call(ours, weights, (x,))
        assert torch.equal(ours(x)[0], wanted)


def test_a_projection_and_no_biases():
    options: dict[str, Any] = {"proj_size": 5, "bias": False}
    ours, theirs, x = ecornn.torch.LSTM(I, H, **options), torch.nn.LSTM(I, H, **options).double(), torch.randn(T, B, I)
    with torch.no_grad():
        for _ in range(3):
            weights = fresh(ours, 0.3)
            agree(functional_call(ours, weights, (x,)), functional_call(theirs, wide(weights), (x.double(),)))
        assert len(bound(engine.engine_of(ours).inference)) == 1


def test_threads_with_weights_of_their_own():
    """A layer that another thread calls keeps its weights."""
    theirs, ours = pair("GRU")
    x = torch.randn(T, B, I)
    sets = [fresh(ours, 0.3) for _ in range(4)]
    with torch.no_grad():
        wanted = [functional_call(theirs, wide(weights), (x.double(),))[0] for weights in sets]

    def run(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """As functional_call, which writes into the module and is no function of threads."""
        with torch.no_grad():
            return [engine.engine_of(ours).run([*weights.values()], x, [], None)[0] for _ in range(40)]

    with ThreadPoolExecutor(4) as threads:
        for found, exact in zip(threads.map(run, sets), wanted, strict=True):
            assert max(error(y, exact) for y in found) < 1e-6


def test_parametrized_layers():
    ours = torch.nn.utils.parametrizations.weight_norm(torch.nn.LSTM(I, H), "weight_hh_l0")
    theirs = torch.nn.utils.parametrizations.weight_norm(torch.nn.LSTM(I, H), "weight_hh_l0").double()
    load(theirs, ours)
    ecornn.torch.replace(ours)
    x = torch.randn(T, B, I)
    for _ in range(3):
        for layer, rows in ((ours, x), (theirs, double(x))):
            layer.zero_grad()
            layer(rows)[0].square().sum().backward()
            with torch.no_grad():
                for p in layer.parameters():
                    p -= 0.01 * p.grad
    agree([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()], 1e-5)
    assert len(bound(engine.engine_of(ours).trained)) == 1
