"""Which precision of float32 products ecornn.torch asks the compiler for on a GPU: cuDNN's settings, and a layer's own
word; with a compiler that only takes notes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ecornn.torch
from ecornn.errors import ArgumentError
from ecornn.torch import bound, engine, training
from ecornn.torch.bound import BoundLayers
from ecornn.torch.kind import kind_of, text_of
from ecornn.torch.replacing import Call, specs

WHERE = (("generic", "all"), ("cuda", "all"), ("cuda", "rnn"), ("cuda", "conv"), ("cuda", "matmul"))


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """PyTorch's default, and what was there before again afterwards."""
    before = [torch._C._get_fp32_precision_getter(*where) for where in WHERE]
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True
    yield
    for where, value in zip(WHERE, before, strict=True):
        torch._C._set_fp32_precision_setter(*where, value)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs that are compiled."""
    found: list[Any] = []

    def bind(weights: Any, device: int, threads: int | None) -> Any:
        return SimpleNamespace(device=0, manifest=SimpleNamespace(parameters=[]))

    def compiled(spec: Any, target: str, infinite: bool = False) -> Any:
        found.append(spec)
        return SimpleNamespace(bind=bind)

    monkeypatch.setattr(bound, "compiled", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def x_of(dtype: torch.dtype = torch.float32, is_cpu: bool = False) -> Any:
    return SimpleNamespace(shape=(5, 2, 3), dtype=dtype, device=torch.device("cpu"), is_cpu=is_cpu)


def take(layers: BoundLayers, weights: Any, x: Any = None) -> Any:
    with layers.layer(weights, x or x_of(), "") as layer:
        return layer


def layer_of(**options: Any) -> Any:
    return ecornn.torch.GRU(3, 4, **options)


def precision(layer: Any, asked: list[Any], x: Any = None) -> str | None:
    """What a new layer of this kind is compiled with, also if it trains."""
    kind, weights = kind_of(text_of(layer)), [*layer.parameters()]
    for trains in (False, True):
        take(BoundLayers(kind, None if trains else BoundLayers(kind)), weights, x)
    one, other = asked[-2:]
    assert one.workload.precision == other.workload.precision
    return one.workload.precision


def test_pytorchs_default_is_tf32(asked: list[Any]):
    assert precision(layer_of(), asked) == "tf32"
    for x in (x_of(torch.bfloat16), x_of(is_cpu=True)):
        assert precision(layer_of(), asked, x) is None


@pytest.mark.parametrize("setting, allowed", [
    (lambda b: setattr(b.cudnn, "allow_tf32", False), False),
    (lambda b: setattr(b.cudnn.rnn, "fp32_precision", "ieee"), False),
    (lambda b: setattr(b.cudnn.rnn, "fp32_precision", "tf32"), True),
    (lambda b: setattr(b.cudnn.conv, "fp32_precision", "ieee"), True),
    (lambda b: setattr(b.cuda.matmul, "fp32_precision", "ieee"), True),
    (lambda b: (setattr(b, "fp32_precision", "tf32"), setattr(b.cudnn.rnn, "fp32_precision", "ieee")), False),
    (lambda b: (setattr(b, "fp32_precision", "ieee"), setattr(b.cudnn.rnn, "fp32_precision", "tf32")), True),
], ids=["allow_tf32", "rnn ieee", "rnn tf32", "conv ieee", "matmul ieee", "rnn over all", "tf32 over all"])
def test_cudnns_settings_are_followed(setting: Any, allowed: bool, asked: list[Any]):
    setting(torch.backends)
    wanted = "tf32" if allowed else None
    assert precision(layer_of(), asked) == wanted
    assert precision(layer_of(tf32=True), asked) == "tf32" and precision(layer_of(tf32=False), asked) is None


def test_what_pytorch_says_of_the_whole_backend_is_followed(asked: list[Any]):
    """The setting of RNNs is left open here."""
    torch.backends.cudnn.allow_tf32 = False
    for generic, allowed in (("ieee", False), ("tf32", True)):
        torch.backends.fp32_precision = generic
        assert precision(layer_of(), asked) == ("tf32" if allowed else None)
        assert torch.backends.cudnn.rnn.fp32_precision == generic


def test_a_change_between_calls_takes_another_module_and_back_the_first(asked: list[Any]):
    layer = layer_of()
    kind, weights = kind_of(text_of(layer)), [*layer.parameters()]
    layers = BoundLayers(kind, BoundLayers(kind))
    first = take(layers, weights)
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    second = take(layers, weights)
    assert second is not first and [spec.workload.precision for spec in asked] == ["tf32", None]
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    assert take(layers, weights) is first and len(asked) == 2


def test_what_is_kept_is_of_the_module_that_runs(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(training, "compiled", lambda spec, target: seen.append(spec) or SimpleNamespace(manifest=None))
    monkeypatch.setattr(training, "kept_layout", lambda manifest, steps, batch: ({}, 7))
    x = SimpleNamespace(shape=(5, 2, 3), dtype=torch.float32, device=torch.device("cuda"), is_cpu=False, is_cuda=True)
    assert training.kept_bytes(kind_of(text_of(layer_of())), x, None) == 7
    assert seen[0].workload.precision == "tf32"


def test_the_option_of_replace():
    model = torch.nn.Sequential(torch.nn.LSTM(3, 4), torch.nn.LSTMCell(3, 4))
    assert ecornn.torch.replace(model, tf32=False).swapped == ("0", "1")
    made: Any = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in (model, *made):
        assert one[0].tf32 is False and kind_of(text_of(one[0])).tf32 is False
    ecornn.torch.restore(model)
    assert not hasattr(model[0], "tf32")
    ecornn.torch.replace(model)
    assert model[0].tf32 is None and "tf32" not in text_of(model[0])
    with pytest.raises(ArgumentError, match="tf32='high' is not allowed; expected None, True or False"):
        ecornn.torch.replace(model, tf32="high")  # type: ignore[arg-type]


@pytest.mark.parametrize("tf32", [None, True, False])
def test_texts_of_kinds_say_it(tf32: bool | None):
    layer = ecornn.torch.Recurrent("lstm(peepholes)", 3, 4, tf32=tf32)
    for one in (layer, ecornn.torch.LSTM(3, 4, tf32=tf32)):
        kind = kind_of(text_of(one))
        assert kind.tf32 is tf32 and kind.text == text_of(one)
    with pytest.raises(ArgumentError, match="text_of"):
        kind_of(text_of(ecornn.torch.LSTM(3, 4)).replace(")", ",other=1)"))


def test_a_layers_attribute_may_be_set():
    layer = layer_of()
    first = engine.engine_of(layer)
    assert engine.engine_of(layer) is first and first.kind.tf32 is None
    layer.tf32 = False
    assert engine.engine_of(layer).kind.tf32 is False


def test_prepare_compiles_what_will_run():
    layer = layer_of()
    call = Call(5, 2, "float32", "", "cuda", True, "tf32")
    assert [spec.workload.precision for spec in specs(layer, call)] == ["tf32"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_a_layer_on_a_gpu_is_as_exact_as_cudnn(name: str):
    """By default as near as cuDNN with TF32, to twice its error; exact where PyTorch is told so, and by the option."""
    torch.manual_seed(0)
    layer = getattr(torch.nn, name)(200, 256).cuda()
    ours, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
    ecornn.torch.replace(ours)
    x = torch.randn(30, 9, 200, device="cuda")

    def error(one: Any) -> float:
        with torch.no_grad():
            wanted = exact(x.double())[0]
            return float((one(x)[0].double() - wanted).norm() / wanted.norm())

    assert 1e-5 < error(ours) <= 2 * error(layer)
    ours.tf32 = False
    assert error(ours) < 1e-5
    ours.tf32, torch.backends.cudnn.allow_tf32 = None, False
    assert error(ours) < 1e-5
    ours.tf32 = True
    assert error(ours) > 1e-5

    x.requires_grad_()
    ours.tf32 = None
    ours(x)[0].square().sum().backward()
    found, x.grad = x.grad, None
    exact_x = x.detach().double().requires_grad_()
    exact(exact_x)[0].square().sum().backward()
    assert float((found.double() - exact_x.grad).norm() / exact_x.grad.norm()) < 2e-5
