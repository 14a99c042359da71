"""torch tensors in and out on a CPU: no copies, and typed errors, also where elements do not lie in their memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import runtime_sample as sample
import torch

import ecornn
from ecornn.errors import ArgumentError, DeviceError, DTypeError
from ecornn.runtime import Layer, Module
from ecornn.runtime.columns import place_resets
from ecornn.runtime.torch_arrays import TorchMemory

H, I, BATCH = sample.H, sample.I, sample.BATCH
WEIGHTS = sample.weights()


@pytest.fixture(scope="module")
def layer() -> Layer:
    weights = {n: torch.nn.Parameter(torch.from_numpy(v)) for n, v in WEIGHTS.items()}
    return ecornn.load(sample.build(sample.manifest())).bind(weights)


def check(result: Any, wanted: Any, rtol: float = 2.0**-23) -> None:
    y, state = result
    assert all(isinstance(t, torch.Tensor) and not t.requires_grad for t in (y, *state))
    for got, want in zip((y, *state), (wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(got.to(torch.float64).numpy(), want, rtol=rtol)


def test_values_and_states(layer: Layer):
    x = torch.from_numpy(sample.inputs(9))
    wanted = sample.expected(sample.inputs(9), WEIGHTS)
    check(layer(x), wanted)
    _, state = layer(x[:4])
    check(layer(x[4:], state), sample.expected(x[4:].numpy(), WEIGHTS, [s.numpy() for s in state]))


def test_bfloat16():
    layer = ecornn.load(sample.build(sample.manifest(dtype="bfloat16"))).bind(
        {n: torch.from_numpy(v).bfloat16() for n, v in WEIGHTS.items()})
    rounded = {n: torch.from_numpy(v).bfloat16().double().numpy() for n, v in WEIGHTS.items()}
    x = torch.from_numpy(sample.inputs()).bfloat16()
    check(layer(x), sample.expected(x.double().numpy(), rounded), rtol=2.0**-8)


def test_a_contiguous_aligned_input_is_not_copied(layer: Layer):
    """The pointers that reach the module are the tensors' own; others are copies."""
    seen: list[tuple[int, ...]] = []
    run, layer._run = layer._run, lambda *a: seen.append(a)
    try:
        x, state = torch.zeros(6, BATCH, I), (torch.zeros(BATCH, H), torch.zeros(BATCH, H))
        out = torch.zeros(6, BATCH, H)
        _, after = layer(x, state, out=out)
        layer(torch.zeros(BATCH, 6, I).transpose(0, 1), state)
        layer(torch.zeros(6 * BATCH * I + 1)[1:].reshape(6, BATCH, I), state)
    finally:
        layer._run = run
    names = [b.name for b in layer.manifest.buffers]
    given = dict(zip(names, seen[0][4:], strict=True))
    assert given["x"] == x.data_ptr() and given["y"] == out.data_ptr()
    assert (given["h_in"], given["c_in"]) == tuple(s.data_ptr() for s in state)
    assert (given["h_out"], given["c_out"]) == tuple(s.data_ptr() for s in after)
    assert all(arguments[4 + names.index("x")] % 16 == 0 for arguments in seen)


def test_strided_and_misaligned(layer: Layer):
    x = sample.inputs()
    strided = torch.from_numpy(np.ascontiguousarray(x.transpose(1, 0, 2))).transpose(0, 1)
    shifted = torch.from_numpy(np.concatenate([[0], x.ravel()]).astype(np.float32))[1:].reshape(x.shape)
    assert shifted.data_ptr() % 16
    for tensor in (strided, shifted):
        check(layer(tensor), sample.expected(x, WEIGHTS))


def test_negated_views():
    """Memory that torch reads with the other sign, as the imaginary part of a conjugate."""
    x, weights = torch.from_numpy(sample.inputs()), {n: torch.from_numpy(v) for n, v in WEIGHTS.items()}
    state = torch.rand(BATCH, H), torch.rand(BATCH, H)
    layer = ecornn.load(sample.build(sample.manifest())).bind({n: torch._neg_view(-v) for n, v in weights.items()})
    result = layer(torch._neg_view(-x), tuple(torch._neg_view(-s) for s in state))
    check(result, sample.expected(sample.inputs(), WEIGHTS, [s.numpy() for s in state]))
    with pytest.raises(ArgumentError, match="out="):
        layer(x, out=torch._neg_view(torch.zeros(len(x), BATCH, H)))


def test_refused(layer: Layer):
    x = torch.from_numpy(sample.inputs())
    with pytest.raises(ArgumentError, match=r"x.requires_grad=True"):
        layer(x.clone().requires_grad_())
    with torch.no_grad():
        check(layer(x.clone().requires_grad_()), sample.expected(sample.inputs(), WEIGHTS))
    with pytest.raises(DTypeError, match=r"x\.dtype='float64'"):
        layer(x.double())
    with pytest.raises(DeviceError, match=r"x\.device='meta'"):
        layer(x.to("meta"))
    with pytest.raises(ArgumentError, match=r"state\[0\]=<class 'numpy.ndarray'>"):
        layer(x, (np.zeros((BATCH, H), np.float32),) * 2)
    with pytest.raises(ArgumentError, match=r"x\.layout"):
        layer(x.to_sparse())


def test_torch_is_imported_by_nobody_but_the_caller():
    """tvm_ffi tries to import torch by itself; kept from that, nothing of the runtime asks for it."""
    code = f"""
import sys
sys.modules["torch"] = None  # import torch raises ImportError
import numpy as np, ecornn
layer = ecornn.load({str(sample.build(sample.manifest()))!r}).bind(
    {{"weight_l0": np.ones(({2 * H}, {I}), "f4"), "bias_l0": np.ones({H}, "f4")}})
print(layer(np.ones((2, 1, {I}), "f4"))[0][0, 0, 0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == I + 1


def test_a_workspace_as_an_array():
    memory = TorchMemory(torch, 1024, "cpu")
    array = memory.array(torch.float16, (3, 5))
    assert array.data_ptr() == memory.pointer and array.shape == (3, 5) and array.dtype == torch.float16
    assert array.is_contiguous() and memory.pointer % 256 == 0


NEW = pytest.mark.filterwarnings("ignore:.*(beta state|prototype|deprecated|the matrix subclass)")


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


@NEW
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_without_elements(module: Module, kind: str, name: str):
    given = {n: torch.from_numpy(v) for n, v in WEIGHTS.items()}
    given[name] = KINDS[kind](given[name])
    with pytest.raises((ArgumentError, DTypeError), match=name):
        module.bind(given)


@NEW
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", ["x", "state", "out"])
def test_calls_without_elements(layer: Layer, argument: str, kind: str):
    x, state = torch.from_numpy(sample.inputs()), [torch.zeros(sample.BATCH, sample.H) for _ in "hc"]
    given: dict[str, Any] = {"x": x, "state": state, "out": torch.empty(*x.shape[:2], sample.H)}
    if argument == "state":
        state[1] = KINDS[kind](state[1])
    else:
        given[argument] = KINDS[kind](given[argument])
    with pytest.raises(ArgumentError):
        layer(**given)


@NEW
@pytest.mark.parametrize("kind", ["sparse", "meta", "freed", "fake", "nested"])
def test_masks_without_elements(kind: str):
    with pytest.raises(ArgumentError, match="resets"):
        place_resets(KINDS[kind](torch.zeros(6, 4, dtype=torch.uint8)), 6, 4, None, None, None)


@NEW
def test_a_matrix_is_an_array(module: Module):
    given = {n: np.asmatrix(v) if v.ndim == 2 else v for n, v in WEIGHTS.items()}
    x = sample.inputs()
    np.testing.assert_array_equal(module.bind(given)(x)[0], module.bind(WEIGHTS)(x)[0])
