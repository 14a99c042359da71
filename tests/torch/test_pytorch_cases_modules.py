"""What PyTorch tests of every module (its test_modules.py and common_modules.py), of ecornn.torch's layers.

docs/PYTORCH_CASES.md lists these by intent, with what differs and why.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from pytorch_cases import (
    BACKWARD,
    NAMES,
    B,
    H,
    I,
    T,
    agree,
    alike,
    close,
    double,
    error,
    flat,
    gradients,
    pair,
    primed,
    states,
)

import ecornn.torch
from ecornn.errors import DerivativeError, DTypeError

pytestmark = pytest.mark.usefixtures("one_thread")


def options_of(bias: bool, batch_first: bool, deep: bool) -> dict[str, Any]:
    return {"bias": bias, "batch_first": batch_first, **({"num_layers": 2, "bidirectional": True} if deep else {})}


@pytest.mark.parametrize("deep", [False, True], ids=["one layer", "two of two directions"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_without_a_batch(name: str, bias: bool, batch_first: bool, deep: bool):
    """test_forward: one sequence is a batch of one."""
    theirs, ours = (layer.eval() for layer in pair(name, **options_of(bias, batch_first, deep)))
    primed(ours)
    x, parts = torch.randn(T, I), 4 if deep else 1
    for hx in (None, states(name, parts, 0)):
        with torch.no_grad():
            y, after = ours(x, hx)
            close((y, after), theirs(double(x), double(hx)))
            many = None if hx is None else tuple(s.unsqueeze(1) for s in flat(hx))
            some = ours(x.unsqueeze(0 if batch_first else 1), many if many is None or name == "LSTM" else many[0])
        close([t.squeeze() for t in flat((y, after))], [t.squeeze() for t in flat(some)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_factory_kwargs(name: str, dtype: torch.dtype):
    """test_factory_kwargs, test_device_ctx_init: parameters are made of the type and where they were asked for."""
    kind = getattr(ecornn.torch, name)
    assert {w.dtype for w in kind(I, H, 2, dtype=dtype).parameters()} == {dtype}
    assert {w.device.type for w in kind(I, H, device="meta").parameters()} == {"meta"}
    with torch.device("meta"):
        assert {w.device.type for w in kind(I, H).parameters()} == {"meta"}


@pytest.mark.parametrize("name", NAMES)
def test_to_empty(name: str):
    """test_to_empty: a layer made on ``meta`` gets memory, and is a layer."""
    layer = getattr(ecornn.torch, name)(I, H, device="meta").to_empty(device="cpu")
    layer.load_state_dict((other := getattr(torch.nn, name)(I, H)).state_dict())
    x = torch.randn(T, B, I)
    with torch.no_grad():
        close(layer(x), other.double()(x.double()))


@pytest.mark.parametrize("name", NAMES)
def test_repr(name: str):
    """test_repr"""
    for options in ({}, {"num_layers": 2, "bias": False, "batch_first": True, "dropout": 0.5, "bidirectional": True}):
        ours, theirs = (getattr(where, name)(I, H, **options) for where in (ecornn.torch, torch.nn))
        assert repr(ours) == repr(theirs) == str(ours)


@pytest.mark.parametrize("how", ["state_dict", "torch.save", "pickle", "deepcopy"])
@pytest.mark.parametrize("name", NAMES)
def test_save_load_and_pickle(name: str, how: str):
    """test_save_load, test_pickle: another layer that gives the same, and is not the same."""
    _, ours = pair(name)
    x = torch.randn(T, B, I)
    wanted = flat(ours(x))
    file = io.BytesIO()
    if how == "state_dict":
        torch.save(ours.state_dict(), file)
        file.seek(0)
        other = getattr(ecornn.torch, name)(I, H)
        other.load_state_dict(torch.load(file))
    elif how == "torch.save":
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(ours) if how == "deepcopy" else pickle.loads(pickle.dumps(ours))
    assert all(torch.equal(one, two) for one, two in zip(flat(other(x)), wanted, strict=True))
    with torch.no_grad():
        other.weight_hh_l0.zero_()
    assert all(torch.equal(one, two) for one, two in zip(flat(ours(x)), wanted, strict=True))
    assert not torch.equal(other(x)[0], wanted[0])


def gaps(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, not one after the other."""
    if how == "interleaved":
        return torch.stack((torch.full_like(tensor, torch.nan), tensor), -1)[..., 1]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("how", ["interleaved", "transposed"])
@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_tensors(name: str, how: str):
    """test_non_contiguous_tensors: of x, of states and of the gradients that come back."""
    _, ours = pair(name)
    x, hx = torch.randn(T, B, I), states(name, 1)
    apart = tuple(gaps(s, how) for s in hx) if name == "LSTM" else gaps(hx, how)
    assert not gaps(x, how).is_contiguous()
    found = flat(ours(x, hx))
    directions = [torch.randn(t.shape) for t in found]
    wanted, exact = gradients(ours, x, hx, directions)
    for given in itertools.product((x, gaps(x, how)), (hx, apart), (directions, [gaps(d, how) for d in directions])):
        found, made = gradients(ours, *given)
        for one, other in zip((*flat(found), *made), (*flat(wanted), *exact), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", NAMES)
def test_grad(name: str, bias: bool):
    """test_grad: gradients of x, states and weights. PyTorch's are by differences in float64; these against its own."""
    alike(*pair(name, bias=bias), torch.randn(T, B, I), states(name, 1))


@pytest.mark.parametrize("name", NAMES)
def test_grad_without_a_batch(name: str):
    theirs, ours = pair(name)
    alike(theirs, primed(ours, trains=True), torch.randn(T, I), states(name, 1, 0))


@pytest.mark.parametrize("name", NAMES)
def test_gradgrad(name: str):
    """test_gradgrad. Differs: gradients of gradients are refused, with the way out, as cuDNN refuses them."""
    theirs, ours = pair(name)
    x = torch.randn(T, B, I, requires_grad=True)
    first, = torch.autograd.grad(ours(x)[0].square().sum(), x, create_graph=True)
    exact = x.detach().double().requires_grad_()
    wanted, = torch.autograd.grad(theirs(exact)[0].square().sum(), exact)
    assert error(first.detach(), wanted) < BACKWARD
    with pytest.raises(DerivativeError, match=r"ecornn\.torch\.restore"):
        first.sum().backward()
    ecornn.torch.restore(ours)
    torch.autograd.grad(ours(x)[0].square().sum(), x, create_graph=True)[0].sum().backward()
    assert x.grad is not None


def test_modes_differ_where_there_is_dropout():
    """test_if_train_and_eval_modes_differ"""
    _, ours = pair("GRU", num_layers=2, dropout=0.5)
    x = torch.randn(T, B, I)
    with torch.no_grad():
        assert not torch.equal(ours(x)[0], ours(x)[0])
        ours.eval()
        assert torch.equal(ours(x)[0], ours(x)[0])


@pytest.mark.parametrize("swap", [False, True], ids=["set", "swap"])
@pytest.mark.parametrize("name", NAMES)
def test_to(name: str, swap: bool):
    """test_to: parameters get another type, also by swapping tensors, which none may refer to weakly."""
    theirs, ours = pair(name)
    x = torch.randn(T, B, I)
    with torch.no_grad():
        ours(x)
    ours(x)[0].sum().backward()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for layer in (ours, theirs):
            layer.bfloat16()
        assert {w.dtype for w in ours.parameters()} == {torch.bfloat16}
        ours.float()
        theirs.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    with torch.no_grad():
        close(ours(x), theirs(x.double()))
    alike(theirs, ours, x)


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"hidden_size": 0}, ValueError, "hidden_size must be greater than zero"),
    ({"input_size": 0}, ValueError, "input_size must be greater than zero"),
    ({"num_layers": 0}, ValueError, "num_layers must be greater than zero"),
    ({"input_size": 7.0}, TypeError, "input_size should be of type int, got: float"),
    ({"hidden_size": "11"}, TypeError, "hidden_size should be of type int, got: str"),
    ({"bias": 0}, TypeError, "bias should be of type bool, got: int"),
    ({"bias": "True"}, TypeError, "bias should be of type bool, got: str"),
    ({"batch_first": 1}, TypeError, "batch_first should be of type bool, got: int"),
    ({"dropout": 1.5}, ValueError, "dropout should be a number in range"),
    ({"dropout": True}, ValueError, "dropout should be a number in range"),
    ({"colour": 3}, TypeError, "unexpected keyword argument 'colour'"),
])
def test_construction_errors(options: dict[str, Any], kind: type[Exception], words: str):
    """test_errors: what PyTorch says of a wrong constructor's argument is what ours says."""
    for where, name in itertools.product((torch.nn, ecornn.torch), NAMES):
        with pytest.raises(kind, match=words):
            getattr(where, name)(**{"input_size": I, "hidden_size": H, **options})


@pytest.mark.parametrize("name", NAMES)
def test_forward_errors(name: str):
    """test_errors: a wrong data type is a ValueError that says which is expected."""
    theirs, ours = (getattr(where, name)(I, H) for where in (torch.nn, ecornn.torch))
    x = torch.randn(T, B, I).double()
    for layer in (theirs, ours):
        with pytest.raises(ValueError, match=r"float64.*float32"):
            layer(x)
    with pytest.raises(DTypeError, match="as the weights'"):
        ours(x)


@pytest.mark.parametrize("name", NAMES)
def test_other_types_than_float32(name: str):
    """test_forward of other data types: values are PyTorch's, whoever computes them."""
    ours, theirs = (getattr(where, name)(I, H).double() for where in (ecornn.torch, torch.nn))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(T, B, I).double()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch, torch.no_grad():
        warnings.simplefilter("ignore")
        patch.setenv("ECORNN_STRICT", "0")
        agree(ours(x), theirs(x), 1e-12)
