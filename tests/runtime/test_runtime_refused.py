"""Arrays whose elements do not lie in their memory: a typed error, wherever one is given, and no crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import runtime_sample as sample
import torch

import ecornn
from ecornn.errors import ArgumentError, DTypeError
from ecornn.runtime import Layer, Module
from ecornn.runtime.columns import place_resets

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta state|prototype|deprecated|the matrix subclass)")
WEIGHTS = sample.weights()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As parameters are that are gathered for a call alone: its shape is there, its memory is not."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch._subclasses.FakeTensorMode().from_tensor(tensor)


KINDS: dict[str, Any] = {
    "sparse": torch.Tensor.to_sparse, "compressed": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "another library's": torch.Tensor.to_mkldnn, "meta": lambda t: t.to("meta"), "freed": freed, "fake": fake,
    "functional": torch._to_functional_tensor, "nested": lambda t: torch.nested.nested_tensor([t]),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "float8": lambda t: t.to(torch.float8_e4m3fn), "no shape": lambda t: torch.nn.UninitializedParameter(),
    "masked": lambda t: np.ma.masked_array(t.numpy(), mask=True)}


@pytest.fixture(scope="module")
def module() -> Module:
    return ecornn.load(sample.build(sample.manifest()))


@pytest.fixture(scope="module")
def layer(module: Module) -> Layer:
    return module.bind(WEIGHTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(module: Module, kind: str, name: str):
    given = {n: torch.from_numpy(v) for n, v in WEIGHTS.items()}
    given[name] = KINDS[kind](given[name])
    with pytest.raises((ArgumentError, DTypeError), match=name):
        module.bind(given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", ["x", "state", "out"])
def test_calls(layer: Layer, argument: str, kind: str):
    x, state = torch.from_numpy(sample.inputs()), [torch.zeros(sample.BATCH, sample.H) for _ in "hc"]
    given: dict[str, Any] = {"x": x, "state": state, "out": torch.empty(*x.shape[:2], sample.H)}
    if argument == "state":
        state[1] = KINDS[kind](state[1])
    else:
        given[argument] = KINDS[kind](given[argument])
    with pytest.raises(ArgumentError):
        layer(**given)


@pytest.mark.parametrize("kind", ["sparse", "meta", "freed", "fake", "nested"])
def test_masks(kind: str):
    with pytest.raises(ArgumentError, match="resets"):
        place_resets(KINDS[kind](torch.zeros(6, 4, dtype=torch.uint8)), 6, 4, None, None, None)


def test_a_matrix_is_an_array(module: Module):
    given = {n: np.asmatrix(v) if v.ndim == 2 else v for n, v in WEIGHTS.items()}
    x = sample.inputs()
    np.testing.assert_array_equal(module.bind(given)(x)[0], module.bind(WEIGHTS)(x)[0])
