"""ecornn.torch against torch.nn: a matrix of options as PyTorch's own tests have, and what surrounds a layer."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch_pairs import LENGTHS, B, H, I, T, load, operands, pair, states
from torch_values import BACKWARD, agree, double, same

import ecornn.compiler
import ecornn.torch
from ecornn.errors import ArgumentError, DTypeError
from ecornn.torch import compiling

KINDS = [("LSTM", {}), ("GRU", {}), ("RNN", {"nonlinearity": "tanh"}), ("RNN", {"nonlinearity": "relu"})]


def calls(batch_first: bool, hx: Any) -> Iterator[tuple[Any, Any]]:
    """(input, hx) of every kind: contiguous, strided, packed in order and in any order; from zeros and from states."""
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
def test_matrix(name: str, options: dict[str, Any], layers: int, bidirectional: bool):
    for bias, batch_first in itertools.product((True, False), (False, True)):
        theirs, ours = pair(name, num_layers=layers, bidirectional=bidirectional, bias=bias,
                            batch_first=batch_first, **options)
        for x, hx in calls(batch_first, states(name, layers * (1 + bidirectional))):
            with torch.inference_mode():
                agree(ours(x, hx), theirs(double(x), double(hx)))


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projections(layers: int, bidirectional: bool):
    options = {"num_layers": layers, "bidirectional": bidirectional, "proj_size": 3}
    for bias, batch_first in ((True, False), (False, True)):
        theirs, ours = pair("LSTM", bias=bias, batch_first=batch_first, **options)
        for x, hx in calls(batch_first, states("LSTM", layers * (1 + bidirectional), B, 3)):
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
    with pytest.raises(ArgumentError, match="nonlinearity='sine'"):
        ecornn.torch.RNN(I, H, nonlinearity="sine")


@pytest.mark.parametrize("called_before", [False, True])
def test_functional_call_uses_its_own_weights(called_before: bool):
    theirs, ours = pair("LSTM")
    x, halved = torch.randn(T, B, I), {name: 0.5 * w for name, w in ours.state_dict().items()}
    with torch.no_grad():
        if called_before:
            ours(x)
        agree(torch.func.functional_call(ours, halved, (x,)),
              torch.func.functional_call(theirs, {name: w.double() for name, w in halved.items()}, (x.double(),)))
        agree(ours(x), theirs(double(x)))
    halved["weight_hh_l0"].requires_grad_()
    ours.train().requires_grad_(False)
    assert torch.func.functional_call(ours, halved, (x,))[0].requires_grad


@pytest.mark.parametrize(("kind", "options"), [
    ("Adam", {"fused": True}), ("SGD", {"fused": True}), ("Adam", {"foreach": True}), ("SGD", {})])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_steps_are_seen(kind: str, options: dict[str, Any], compiled: bool):
    theirs, ours = pair("GRU")
    call = torch.compile(ours, backend="eager") if compiled else ours
    x = torch.randn(T, B, I)
    with torch.no_grad():
        call(x)
    optimizer = getattr(torch.optim, kind)(ours.parameters(), lr=0.1, **options)
    call.train()
    call(x)[0].sum().backward()
    optimizer.step()
    call.eval()
    load(theirs, ours)
    with torch.no_grad():
        agree(call(x), theirs(double(x)))


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
        theirs, ours = pair("GRU")
        x = torch.randn(T, B, I)
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


def test_other_batches_use_what_was_compiled():
    theirs, ours = pair("GRU")
    compiling.outcomes.clear()
    with torch.no_grad():
        for batch in (4, 3, 1, 2, 4):
            x = torch.randn(T, batch, I)
            agree(ours(x), theirs(double(x)))
    assert len(compiling.outcomes) == 1


def test_under_torch_compile():
    """Through the registered operator, with its shapes known, and without a break in the graph."""
    theirs, ours = pair("LSTM", num_layers=2, bidirectional=True)

    def run(layer: Any, x: Any) -> Any:
        y, (h, _) = layer(x * 2)
        return torch.relu(y).sum(0), h + 1

    fast = torch.compile(lambda x: run(ours, x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for x in (torch.randn(T, B, I), torch.randn(T, B, I)):
            agree(fast(x), run(theirs, double(x)))
        torch.library.opcheck(torch.ops.ecornn.recurrent, operands(ours, x),
                              test_utils=("test_schema", "test_faketensor"))


def test_packed_sequences_under_torch_compile():
    theirs, ours = pair("GRU", bidirectional=True)
    packed = pack_padded_sequence(torch.randn(T, B, I), LENGTHS, enforce_sorted=False)
    fast = torch.compile(lambda given: ours(given)[0].data + 1, backend="aot_eager")
    with torch.no_grad():
        agree(fast(packed), theirs(double(packed))[0].data + 1)


class Classifier(torch.nn.Module):
    """Recurrent layers of every kind that replace() meets."""

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


def test_replace_swaps_what_it_can_and_says_what_it_could_not():
    model = Classifier().eval()
    x = torch.randn(T, B, I)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(double(x))
        names, weight = list(model.state_dict()), model.first.weight_ih_l0
        report = ecornn.torch.replace(model)
        assert report.swapped == ("first", "second", "cell", "own") and set(report.kept) == {"other"}
        assert "other: left alone, Other has methods of its own, which may do more: forward" in str(report)
        assert isinstance(model.first, ecornn.torch.LSTM) and model.again is model.second
        assert list(model.state_dict()) == names and model.first.weight_ih_l0 is weight
        agree(model(x), wanted)
    assert ecornn.torch.replace(model).swapped == ()
    assert ecornn.torch.replace(torch.nn.GRU(I, H)).swapped == ("GRU",)
    assert "bfloat16" in ecornn.torch.replace(torch.nn.GRU(I, H).bfloat16()).kept["GRU"]
    assert ecornn.torch.replace(torch.nn.GRU(I, H).double()).swapped == ("GRU",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_on_a_cpu_are_pytorchs(dtype: Any):
    layer, x = ecornn.torch.LSTM(I, H).eval().to(dtype), torch.randn(T, B, I, dtype=dtype)
    with torch.no_grad():
        wanted = torch.nn.LSTM.forward(layer, x)
        with pytest.warns(UserWarning, match="own layer runs: compiled ones are for float32 and float64 on a CPU"):
            same(layer(x), wanted)
        with pytest.raises(DTypeError, match="float32"):
            layer(x.float())


def test_autocast_on_a_cpu_is_pytorchs():
    layer, x = ecornn.torch.LSTM(I, H).eval(), torch.randn(T, B, I)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            try:
                theirs = torch.nn.LSTM.forward(layer, given)
            except RuntimeError:  # on CPUs without AVX-512 PyTorch has no LSTM in bfloat16
                theirs = None
            with pytest.warns(UserWarning, match="own layer runs: compiled ones are for float32 and float64 on a CPU"):
                if theirs is not None:
                    same(layer(given), theirs)
                    continue
                with pytest.raises(RuntimeError, match="primitive descriptor"):
                    layer(given)


def test_no_sequences_and_one_that_is_traced(name: str):
    layer, theirs = getattr(ecornn.torch, name)(I, H, batch_first=True).eval(), getattr(torch.nn, name)
    with torch.no_grad():
        empty, x = torch.zeros(0, T, I), torch.randn(B, T, I)
        same(layer(empty), theirs.forward(layer, empty))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            traced = torch.jit.trace(layer, (x,))
        same(traced(2 * x[:2, :3]), theirs.forward(layer, 2 * x[:2, :3]))


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
    """Training steps and calls without gradients: the bits that each device gives alone, near float64's."""
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
