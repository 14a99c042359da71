"""What a layer that replace() compiles still is: to isinstance, pickles, parametrizations and PyTorch's compilers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch_pairs import B, H, I, T, ancestors, copied, load
from torch_values import agree, double, error

import ecornn.torch
from ecornn.errors import ArgumentError, DeviceError, DTypeError, FallbackError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Own(torch.nn.LSTM):
    """Leaves the calls to torch.nn."""

    def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note

    def widths(self) -> tuple[int, int]:
        return self.input_size, self.hidden_size


class Model(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layer(2 * x)
        return y + 1


def compiled(layer: torch.nn.Module, **options: Any) -> Model:
    model = Model(layer).eval()
    assert ecornn.torch.replace(model, **options).swapped == ("layer",)
    return model


def by_torch(model: Model, x: torch.Tensor) -> torch.Tensor:
    exact = copy.deepcopy(model)
    ecornn.torch.restore(exact)
    return exact.double()(double(x)).detach()


def test_a_layer_is_what_it_was(name: str):
    model, x = compiled(getattr(torch.nn, name)(I, H)), torch.randn(T, B, I)
    assert isinstance(model.layer, getattr(torch.nn, name)) and isinstance(model.layer, getattr(ecornn.torch, name))
    assert type(model.layer).__name__ == name and type(model.layer)(I, H, 2, batch_first=True).num_layers == 2
    with torch.no_grad():
        agree(model(x), by_torch(model, x))
    assert ecornn.torch.restore(model) == ("layer",) and type(model.layer) is getattr(torch.nn, name)
    model = compiled(model.layer, fullgraph=True)
    assert type(model.layer) is getattr(ecornn.torch, name)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("layer", [lambda: Own(I, H, note="kept"), lambda: torch.nn.GRU(I, H)], ids=["own", "GRU"])
def test_copies(layer: Any, how: str):
    model, x = compiled(layer()), torch.randn(T, B, I)
    made = copied(model, how)
    assert type(made.layer) is type(model.layer) and made.layer.weight_hh_l0 is not model.layer.weight_hh_l0
    assert getattr(made.layer, "note", "kept") == "kept"
    with torch.no_grad():
        made.layer.weight_hh_l0.mul_(0.5)
        agree(made(x), by_torch(made, x))


def test_a_class_of_ones_own_that_leaves_calls_to_pytorch():
    model, x = compiled(Own(I, H, note="kept")), torch.randn(T, B, I)
    assert isinstance(model.layer, Own) and model.layer.widths() == (I, H) and model.layer.note == "kept"
    agree(model(x), by_torch(model, x))
    ecornn.torch.restore(model)
    assert type(model.layer) is Own


@pytest.mark.parametrize("method", ["forward", "check_forward_args", "permute_hidden"])
def test_a_class_that_has_a_part_of_the_call_is_left_alone(method: str):
    kind = type("Mine", (torch.nn.LSTM,), {method: lambda self, *args: args})
    assert ecornn.torch.replace(Model(kind(I, H))).kept == {
        "layer": f"Mine has methods of its own, which may do more: {method}"}
    other = type("Other", (torch.nn.RNNBase,), {})("LSTM", I, H)
    assert ecornn.torch.replace(Model(other)).kept == {"layer": "Other is no LSTM, GRU or RNN of torch.nn's"}


class Scaled(torch.nn.RNNBase):
    """A ``forward`` that goes on in the next class's, with arguments of its own."""

    def forward(self, x: torch.Tensor, hx: Any = None, scale: float = 3.0) -> Any:
        y, after = super().forward(scale * x, hx=hx)
        return y - 1, after


class ScaledLSTM(Scaled, torch.nn.LSTM):
    pass


class AndDoubled(ScaledLSTM):
    def forward(self, x: torch.Tensor, hx: Any = None) -> Any:
        y, after = super().forward(x, hx, 2.0)
        return 2 * y, after


@pytest.mark.parametrize("kind", [ScaledLSTM, AndDoubled])
def test_a_forward_that_goes_on_in_pytorchs_goes_on_in_ours(kind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_STRICT", "1")
    model, x = compiled(kind(I, H)), torch.randn(T, B, I)
    agree(model(x), by_torch(model, x))
    assert isinstance(model.layer, kind) and isinstance(model.layer, ecornn.torch.LSTM)
    assert "RecurrentForward" in ancestors(model(x))
    made = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        made.layer.weight_hh_l0.mul_(0.5)
        agree(made(x), by_torch(made, x))
    assert ecornn.torch.restore(model) == ("layer",) and type(model.layer) is kind


@pytest.mark.parametrize("forward", [torch.nn.LSTM.forward, lambda self, x: torch.nn.LSTM.forward(self, x)])
def test_a_forward_that_goes_elsewhere_is_left_alone(forward: Any):
    kind = type("Mine", (torch.nn.LSTM,), {"forward": forward})
    left = ecornn.torch.replace(Model(kind(I, H))).kept
    assert ("layer" in left) == (forward is not torch.nn.LSTM.forward)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_layer_that_is_under_a_parametrization_already(fullgraph: bool):
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.GRU(I, H), "weight_hh_l0")
    x, model = torch.randn(T, B, I), compiled(layer, fullgraph=fullgraph)
    with torch.no_grad():
        agree(model(x), by_torch(model, x))
        model.layer.parametrizations.weight_hh_l0.original0.mul_(2)
        agree(model(x), by_torch(model, x))
    y = model(x)
    y.sum().backward()
    assert model.layer.parametrizations.weight_hh_l0.original0.grad is not None
    torch.nn.utils.parametrize.remove_parametrizations(model.layer, "weight_hh_l0")
    assert isinstance(model.layer, ecornn.torch.GRU)
    with torch.no_grad():
        agree(model(x), by_torch(model, x))
    ecornn.torch.restore(model)
    assert type(model.layer) is torch.nn.GRU


@pytest.mark.parametrize("name", ["GRU", "LSTMCell"])
def test_spectral_norm_as_a_parametrization(name: str):
    """In training mode it iterates whenever a weight is read, of torch.nn's as often as they like; not in eval()."""
    weight = "weight_hh" if name == "LSTMCell" else "weight_hh_l0"
    theirs = getattr(torch.nn, name)(I, H)
    with torch.no_grad():  # one direction before all others, so that it converges soon
        getattr(theirs, weight).add_(1.0)
    torch.nn.utils.parametrizations.spectral_norm(theirs, weight)
    ours = copy.deepcopy(theirs)
    ecornn.torch.replace(ours)
    theirs.double()
    x, found = torch.randn(B, I) if name == "LSTMCell" else torch.randn(T, B, I), []
    with torch.no_grad():
        agree(ours.eval()(x), theirs.eval()(x.double()), 1e-5)  # the norm is estimated in either type
        for layer in (ours, theirs):
            layer.train()
            vector = layer.parametrizations[weight][0]._u
            vector.copy_(before := torch.nn.functional.normalize(torch.randn_like(vector), dim=0))
            for _ in range(50):
                layer(x.to(vector.dtype))
            assert not torch.equal(vector, before)
            found.append(layer(x.to(vector.dtype)))
        agree(*found, 1e-4)


@pytest.mark.parametrize("kind", ["buffer", "attribute", "gone"])
@pytest.mark.parametrize("name", ["GRU", "LSTMCell"])
def test_weights_that_are_no_parameters(name: str, kind: str):
    """As of layers that are frozen as buffers, or whose weights another module sets."""
    layer, theirs = getattr(torch.nn, name)(I, H), getattr(torch.nn, name)(I, H).double().requires_grad_(False)
    load(theirs, layer)
    for weight, value in [*layer.named_parameters()]:
        delattr(layer, weight)
        if kind == "buffer":
            layer.register_buffer(weight, value.detach())
        elif kind == "attribute":
            setattr(layer, weight, value.detach())
    report = ecornn.torch.replace(layer)
    if kind == "gone":
        assert not report.swapped and "which is no tensor" in report.kept[name]
        return
    x = torch.randn(B, I) if name == "LSTMCell" else torch.randn(T, B, I)
    assert report.swapped == (name,)
    agree(layer(x), theirs(x.double()))
    with torch.no_grad():
        for module in (layer, theirs):
            getattr(module, "weight_hh" if name == "LSTMCell" else "weight_hh_l0").mul_(2)
        agree(layer(x), theirs(x.double()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_symbolic_traces_have_a_layer_as_one_node_and_torch_jit_script_none(fullgraph: bool):
    model, x = compiled(torch.nn.LSTM(I, H), fullgraph=fullgraph), torch.randn(T, B, I)
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["layer"]
    with torch.no_grad():
        agree(graph(x), by_torch(model, x))
    with pytest.raises(FallbackError, match=r"call ecornn\.torch\.restore\(model\) first"):
        torch.jit.script(model)
    ecornn.torch.restore(model)
    torch.jit.script(model)


def test_torch_compile_does_not_look_into_what_it_refuses():
    """It took a layer's own code, and the compiler's, for the model's: hundreds of frames."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, x = compiled(torch.nn.LSTM(I, H)), torch.randn(T, B, I)
    fast = torch.compile(model, backend="eager")
    for _ in range(2):
        agree(fast(x), by_torch(model, x))
        with torch.no_grad():
            agree(fast(x), by_torch(model, x))
    assert counters["frames"]["total"] < 5
    ecornn.torch.restore(other := copy.deepcopy(model))
    whole = torch.compile(compiled(other.layer, fullgraph=True), backend="eager", fullgraph=True)
    with torch.no_grad():
        agree(whole(x), by_torch(model, x))


def test_errors_are_those_that_pytorchs_users_catch_and_numpys():
    layer = ecornn.torch.LSTM(I, H)
    for wrong, kind in ((torch.randn(T, B, I + 1), ShapeError), (torch.randn(T, B, I).int(), DTypeError)):
        for caught in (kind, RuntimeError, ValueError):
            with pytest.raises(caught):
                layer(wrong)
    assert issubclass(DeviceError, RuntimeError) and issubclass(DeviceError, ValueError)
    for wrong in (None, "x", [[1.0]], 3):
        with pytest.raises(ArgumentError, match="a tensor or a PackedSequence"):
            layer(wrong)
    assert error(layer(torch.zeros(T, B, I))[0].detach(), by_torch(Model(layer), torch.zeros(T, B, I)) - 1) < 1e-6
