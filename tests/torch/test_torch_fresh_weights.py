"""Weights that are new at each call, on a CPU: packed where the last ones were, by the module's code."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_torch_layers import B, H, I, T, agree, double
from torch.func import functional_call

import ecornn.torch
from ecornn.errors import ShapeError
from ecornn.torch import engine


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pair() -> tuple[Any, Any]:
    return ecornn.torch.GRU(I, H), torch.nn.GRU(I, H).double()


def fresh(layer: torch.nn.Module, scale: float) -> dict[str, torch.Tensor]:
    return {name: scale * torch.randn(weight.shape) for name, weight in layer.named_parameters()}


def wide(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().double() for name, weight in weights.items()}


def bound(layers: Any) -> list[Any]:
    return [one for known in layers._bound.values() for one in known.values()]


def test_inference_packs_in_place():
    ours, theirs = pair()
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
    ours, theirs = pair()
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
    ours, _ = pair()
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
    ours, theirs = pair()
    x, wrong = torch.randn(T, B, I), []
    sets = [fresh(ours, 0.3) for _ in range(4)]
    with torch.no_grad():
        wanted = [functional_call(theirs, wide(weights), (x.double(),))[0] for weights in sets]

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(40):
                y = functional_call_by(ours, sets[number], x)
                if not float((y - wanted[number]).norm() / wanted[number].norm()) < 1e-6:
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def functional_call_by(layer: Any, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """As functional_call, which writes into the module and is no function of threads."""
    return engine.engine_of(layer).run([*weights.values()], x, [], None)[0]


def test_parametrized_layers():
    ours = torch.nn.utils.parametrizations.weight_norm(torch.nn.LSTM(I, H), "weight_hh_l0")
    theirs = torch.nn.utils.parametrizations.weight_norm(torch.nn.LSTM(I, H), "weight_hh_l0").double()
    theirs.load_state_dict(double_all(ours.state_dict()))
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


def double_all(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in state.items()}
