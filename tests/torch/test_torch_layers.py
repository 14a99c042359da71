"""ecornn.torch's layers against torch.nn's: a matrix of options, and what a layer that replace() compiles still is."""

import copy
import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch_pairs import LENGTHS, B, H, I, T, alike, ancestors, case, copied, load, operands, pair, states
from torch_values import BACKWARD, agree, double, same

import ecornn.compiler
import ecornn.torch
from ecornn.errors import ArgumentError, FallbackError
from ecornn.torch import compiling, engine

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
KINDS = [("LSTM", {}), ("GRU", {}), ("RNN", {"nonlinearity": "tanh"}), ("RNN", {"nonlinearity": "relu"}),
         ("LSTM", {"proj_size": 3})]


def calls(batch_first: bool, hx: Any) -> Iterator[tuple[Any, Any]]:
    shape = (B, T) if batch_first else (T, B)
    x = torch.randn(*shape, I)
    for given in (x, torch.randn(*shape, 2 * I)[..., ::2], pack_padded_sequence(x, sorted(LENGTHS)[::-1], batch_first),
                  pack_padded_sequence(x, LENGTHS, batch_first, enforce_sorted=False)):
        yield from ((given, None), (given, hx))


def small(name: str, options: dict[str, Any], layers: int, bidirectional: bool) -> Any:
    often = (layers, bidirectional) in {"LSTM": ((1, False), (2, True)), "RNN": ((2, True),)}.get(name, ()) and (
        options.get("nonlinearity") != "relu")
    return pytest.param(name, options, layers, bidirectional, marks=() if often else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "options", "layers", "bidirectional"), [
    small(*kind, layers, both) for kind in KINDS for layers in (1, 2, 3, 4) for both in (False, True)])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_matrix(name: str, options: dict[str, Any], layers: int, bidirectional: bool):
    options = options | {"num_layers": layers, "bidirectional": bidirectional}
    for bias, batch_first in itertools.product((True, False), (False, True)):
        theirs, ours = pair(name, bias=bias, batch_first=batch_first, **options)
        for x, hx in calls(batch_first, states(name, layers * (1 + bidirectional), B, options.get("proj_size", H))):
            with torch.inference_mode():
                agree(ours(x, hx), theirs(double(x), double(hx)))
    with torch.no_grad(), torch.random.fork_rng():
        torch.library.opcheck(torch.ops.ecornn.recurrent, operands(ours, torch.randn(T, B, I)),
                              test_utils=("test_schema", "test_faketensor"))


def test_the_arguments_of_the_constructor_are_torchs():
    assert ecornn.torch.RNN(I, H, 2, "relu", False).mode == "RNN_RELU"
    assert not ecornn.torch.RNN(I, H, 2, "relu", False).bias
    layer = ecornn.torch.LSTM(I, H, 3, False, True, 0.5, True, device="cpu", dtype=torch.float64)
    assert (layer.num_layers, layer.bias, layer.batch_first, layer.dropout, layer.bidirectional) == (
        3, False, True, 0.5, True)
    assert layer.weight_hh_l2_reverse.dtype == torch.float64
    refused(ArgumentError, "nonlinearity='sine'", ecornn.torch.RNN, I, H, nonlinearity="sine")


@pytest.mark.parametrize(("kind", "options"), [
    ("Adam", {"fused": True}), ("SGD", {"fused": True}), ("Adam", {"foreach": True}), ("SGD", {})])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_steps_are_seen(kind: str, options: dict[str, Any], compiled: bool):
    theirs, ours, x = case("GRU")
    call = torch.compile(ours, backend="eager") if compiled else ours
    optimizer = getattr(torch.optim, kind)(ours.parameters(), lr=0.1, **options)
    for _ in range(3):
        load(theirs, ours)
        with torch.no_grad():
            agree(call.eval()(x), theirs(double(x)))
        for _ in range(2):
            y = call.train()(x)[0]
            load(theirs, ours)
            agree(y, theirs(double(x))[0])
            y.sum().backward()
            optimizer.step()


def test_rebind_reads_what_left_no_trace():
    theirs, ours = pair("GRU")
    model, x = torch.nn.Sequential(ours), torch.randn(T, B, I)
    ecornn.torch.rebind(model)
    with torch.no_grad():
        ours(x)
        ours.weight_hh_l0.data[2, 3] += 1
        theirs.weight_hh_l0[2, 3] += 1
        ecornn.torch.rebind(model)
        agree(ours(x), theirs(double(x)))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_seen_in_inference_mode(assign: bool):
    with torch.inference_mode():
        theirs, ours, x = case("GRU")
        ours(x)
        halved = {name: 0.5 * w for name, w in ours.state_dict().items()}
        torch.nn.Sequential(ours).load_state_dict({f"0.{name}": w for name, w in halved.items()}, assign=assign)
        theirs.load_state_dict({name: w.double() for name, w in halved.items()})
        agree(ours(x), theirs(double(x)))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_weights_are_as_pytorchs(value: float, monkeypatch: pytest.MonkeyPatch):
    """Also where products of pairs would be chosen, as on CPUs of AMD."""
    monkeypatch.setenv("ECORNN_CACHE", "off")  # which would have other modules, and give these to others
    plain, pairs = ecornn.compiler.compile_layer, {"pairs": 3, "project_pairs": 3, "rows": 1, "columns": 3,
                                                   "project_rows": 1, "project_columns": 3, "gates": 0,
                                                   "project_gates": 0}
    monkeypatch.setattr(ecornn.compiler, "compile_layer", lambda layer, *, target, config: plain(
        layer, target=target, config=pairs if config is None else config))
    compiling.outcomes.clear()
    theirs, ours = pair("GRU")
    x = torch.rand(T, B, I) + 0.1
    with torch.no_grad():
        agree(ours(x), theirs(double(x)))
        for layer in (theirs, ours):
            layer.weight_ih_l0[3, 2] = value  # a gate that is open, or closed
        agree(ours(x), theirs(double(x)))
    compiling.outcomes.clear()


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.LSTM(I, H, 2, bidirectional=True)
        self.inner = torch.nn.Sequential(torch.nn.Linear(2 * H, I))
        self.second = torch.nn.GRU(I, H)
        self.again = self.second
        self.cell = torch.nn.GRUCell(H, H)
        self.own = type("Own", (torch.nn.GRU,), {})(H, H)
        self.other = type("Other", (torch.nn.RNN,), {"forward": lambda self, x: x})(H, H)

    def forward(self, x: Any) -> Any:
        y, _ = self.second(self.inner(self.first(x)[0]))
        return self.own(y)[0], self.cell(y[-1])


def test_replace_swaps_what_it_can_and_says_what_it_could_not(monkeypatch: pytest.MonkeyPatch):
    model, x = Classifier().eval(), torch.randn(T, B, I)
    monkeypatch.setenv("ECORNN_STRICT", "1")
    refused(FallbackError, "other would not be compiled: Other overrides methods", ecornn.torch.replace, model)
    assert not isinstance(model.first, ecornn.torch.LSTM)
    monkeypatch.setenv("ECORNN_STRICT", "0")
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(double(x))
        names, weight = list(model.state_dict()), model.first.weight_ih_l0
        report = ecornn.torch.replace(model)
        assert report.swapped == ("first", "second", "cell", "own") and set(report.kept) == {"other"}
        assert "other: not compiled, Other overrides methods, which may change what it computes: forward" in str(report)
        assert isinstance(model.first, ecornn.torch.LSTM) and model.again is model.second
        assert list(model.state_dict()) == names and model.first.weight_ih_l0 is weight
        agree(model(x), wanted)
    assert ecornn.torch.replace(model).swapped == () and ecornn.torch.replace(torch.nn.GRU(I, H)).swapped == ("GRU",)
    assert "float8" in ecornn.torch.replace(torch.nn.GRU(I, H).to(torch.float8_e5m2)).kept["GRU"]
    assert ecornn.torch.replace(torch.nn.GRU(I, H).double()).swapped == ("GRU",)


def test_autocast_on_a_cpu_is_pytorchs():
    layer, x = ecornn.torch.LSTM(I, H).eval(), torch.randn(T, B, I)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            try:
                theirs = torch.nn.LSTM.forward(layer, given)
            except RuntimeError:  # on CPUs without AVX-512 PyTorch has no LSTM in bfloat16
                theirs = None
            with pytest.warns(UserWarning, match="own layer runs: compiled layers serve .* on a CPU, without autocast"):
                if theirs is not None:
                    same(layer(given), theirs)
                    continue
                refused(RuntimeError, "primitive descriptor", layer, given)


def test_states_in_a_list():
    theirs, ours = pair("LSTM")
    x, given = torch.randn(T, B, I), [torch.rand(1, B, H), torch.rand(1, B, H)]
    wanted = theirs(x.double(), [s.double() for s in given])
    for trained in (False, True):
        found = ours.train(trained).requires_grad_(trained)(x, given)
        agree(found, wanted)
        assert found[0].requires_grad == trained


@pytest.mark.parametrize("places", [("cpu", "cpu"), pytest.param(("cuda:0", "cpu"), marks=pytest.mark.gpu),
                                    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu)], ids=str)
def test_threads_take_devices_in_turns(places: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.device_count() < sum("cuda" in place for place in places):
        pytest.skip("needs as many GPUs")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact, x = torch.nn.GRU(5, 8, bidirectional=True).double(), torch.randn(7, 3, 5)
    layers = []
    for place in places:
        layers.append(ecornn.torch.GRU(5, 8, bidirectional=True).to(place))
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
        agree(found, right, BACKWARD)
    def work(first: int) -> bool:
        return all(torch.equal(one, other) for turn in range(12) for number in [(first + turn) % 2]
                   for one, other in zip(step(number), wanted[number], strict=True))
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(work, range(2))] == [True, True]


# -- layers that were replaced --------------------------------------------------------------------
class Own(torch.nn.LSTM):
    def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note

    def widths(self) -> tuple[int, int]:
        return self.input_size, self.hidden_size


class OwnCell(torch.nn.LSTMCell):
    """Leaves the calls to torch.nn."""


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


def parts_of(layer: torch.nn.Module) -> tuple[torch.Tensor, str]:
    cell = hasattr(layer, "weight_hh")
    return (torch.randn(B, I), "weight_hh") if cell else (torch.randn(T, B, I), "weight_hh_l0")


def agree_with_torch(model: Model, x: torch.Tensor, call: Any = None) -> None:
    ecornn.torch.restore(exact := copy.deepcopy(model))
    wanted, call = exact.double()(double(x)), model if call is None else call
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            agree(call(x), wanted)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_layer_is_what_it_was(name: str, fullgraph: bool, one_thread: None):
    kind, compiled_kind, seen = getattr(torch.nn, name), getattr(ecornn.torch, name), []
    theirs, layer, x = kind(I, H).double(), kind(I, H), torch.randn(T, B, I)
    load(theirs, layer)
    layer.register_forward_hook(lambda *_: seen.append(1))
    model = compiled(layer, fullgraph=fullgraph)
    alike(theirs, model.layer, x)
    assert seen == [1]
    found = type(model.layer)
    assert found is compiled_kind if fullgraph else issubclass(found, kind) and issubclass(found, compiled_kind)
    assert found.__name__ == name and found(I, H, 2, batch_first=True).num_layers == 2
    agree_with_torch(model, x)
    assert ecornn.torch.restore(model) == ("layer",) and type(model.layer) is kind


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("layer", [lambda: Own(I, H, note="kept"), lambda: torch.nn.GRU(I, H),
                                   lambda: OwnCell(I, H), lambda: torch.nn.LSTMCell(I, H)])
def test_copies(layer: Any, how: str):
    kind, shown = type(plain := layer()), repr(plain)
    model, (x, weight) = compiled(plain), parts_of(plain)
    assert isinstance(model.layer, kind)
    model(x).sum().backward()
    made = copied(model, how)
    assert f"(layer): Compiled{shown}\n" in repr(model) and repr(made) == repr(model)
    assert type(made.layer) is type(model.layer) and getattr(made.layer, weight) is not getattr(model.layer, weight)
    assert kind is not Own or (made.layer.note == "kept" and made.layer.widths() == (I, H))
    with torch.no_grad():
        getattr(made.layer, weight).mul_(0.5)
    agree_with_torch(made, x)
    assert ecornn.torch.restore(made) == ("layer",) and type(made.layer) is kind
    assert repr(made.layer) == shown


@pytest.mark.parametrize("method", ["forward", "check_forward_args", "permute_hidden"])
def test_a_class_that_has_a_part_of_the_call_is_left_alone(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_STRICT", "0")
    kind = type("Mine", (torch.nn.LSTM,), {method: lambda self, *args: args})
    assert ecornn.torch.replace(Model(kind(I, H))).kept == {
        "layer": f"Mine overrides methods, which may change what it computes: {method}"}
    other = type("Other", (torch.nn.RNNBase,), {})("LSTM", I, H)
    assert ecornn.torch.replace(Model(other)).kept == {"layer": "Other is not an LSTM, GRU or RNN of torch.nn"}


class Scaled(torch.nn.RNNBase):
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
    agree_with_torch(model, x)
    assert isinstance(model.layer, kind) and isinstance(model.layer, ecornn.torch.LSTM)
    assert "RecurrentForward" in ancestors(model(x))
    made = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        made.layer.weight_hh_l0.mul_(0.5)
    agree_with_torch(made, x)
    assert ecornn.torch.restore(model) == ("layer",) and type(model.layer) is kind


@pytest.mark.parametrize("forward", [torch.nn.LSTM.forward, lambda self, x: torch.nn.LSTM.forward(self, x)])
def test_a_forward_that_goes_elsewhere_is_left_alone(forward: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_STRICT", "0")
    kind = type("Mine", (torch.nn.LSTM,), {"forward": forward})
    assert ("layer" in ecornn.torch.replace(Model(kind(I, H))).kept) == (forward is not torch.nn.LSTM.forward)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_layer_that_is_under_a_parametrization_already(fullgraph: bool):
    model = compiled(parametrizations.weight_norm(torch.nn.GRU(I, H), "weight_hh_l0"), fullgraph=fullgraph)
    ecornn.torch.restore(exact := copy.deepcopy(model))
    x = torch.randn(T, B, I)
    for _ in range(3):
        for one, rows in ((model, x), (exact.double(), x.double())):
            one.zero_grad()
            one(rows).square().sum().backward()
            with torch.no_grad():
                for p in one.parameters():
                    p -= 0.01 * p.grad
        agree_with_torch(model, x)
    agree([p.grad for p in model.parameters()], [p.grad for p in exact.parameters()], 1e-5)
    assert sum(map(len, engine.engine_of(model.layer).trained._bound.values())) == 1  # packed in place
    parametrize.remove_parametrizations(model.layer, "weight_hh_l0")
    assert isinstance(model.layer, ecornn.torch.GRU)
    agree_with_torch(model, x)
    ecornn.torch.restore(model)
    assert type(model.layer) is torch.nn.GRU


@pytest.mark.parametrize("name", ["GRU", "LSTMCell"])
def test_spectral_norm_as_a_parametrization(name: str):
    """In training mode it iterates whenever a weight is read, of torch.nn's as often as they like; not in eval()."""
    x, weight = parts_of(theirs := getattr(torch.nn, name)(I, H))
    with torch.no_grad():  # one direction before all others, so that it converges soon
        getattr(theirs, weight).add_(1.0)
    parametrizations.spectral_norm(theirs, weight)
    ours = copy.deepcopy(theirs)
    ecornn.torch.replace(ours)
    theirs.double()
    found = []
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
        assert not report.swapped and ", not a tensor" in report.kept[name]
        return
    x, hh = parts_of(theirs)
    assert report.swapped == (name,)
    agree(layer(x), theirs(x.double()))
    with torch.no_grad():
        for module in (layer, theirs):
            getattr(module, hh).mul_(2)
        agree(layer(x), theirs(x.double()))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "LSTMCell"])
def test_symbolic_traces_have_a_layer_as_one_node_and_torch_jit_script_none(name: str, fullgraph: bool):
    model = compiled(getattr(torch.nn, name)(I, H), fullgraph=fullgraph)
    x, _ = parts_of(model.layer)
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["layer"]
    refused(FallbackError, r"call ecornn\.torch\.restore\(model\) first", torch.jit.script, model)
    agree_with_torch(model, x, graph)
    ecornn.torch.restore(model)
    agree_with_torch(model, x, torch.jit.script(model))


def test_torch_compile_does_not_look_into_what_it_refuses():
    """It took a layer's own code, and the compiler's, for the model's: hundreds of frames."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, x = compiled(torch.nn.LSTM(I, H)), torch.randn(T, B, I)
    fast = torch.compile(model, backend="eager")
    for _ in range(2):
        agree_with_torch(model, x, fast)
    assert counters["frames"]["total"] < 5
    ecornn.torch.restore(other := copy.deepcopy(model))
    agree_with_torch(model, x, torch.compile(compiled(other.layer, fullgraph=True), backend="eager", fullgraph=True))
