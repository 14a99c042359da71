"""ecornn.torch against torch.nn: a matrix of options as PyTorch's own tests have, and what surrounds a layer."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import ecornn.compiler
import ecornn.torch
from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.torch import compiling, engine
from ecornn.torch.kind import text_of

I, H, T, B = 7, 11, 6, 4
LENGTHS = [3, 6, 1, 5]
KINDS = [("LSTM", {}), ("GRU", {}), ("RNN", {"nonlinearity": "tanh"}), ("RNN", {"nonlinearity": "relu"})]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """torch's layer in float64 and ours, with the same weights."""
    ours = getattr(ecornn.torch, name)(I, H, **options).eval()
    theirs = getattr(torch.nn, name)(I, H, **options).double().eval()
    theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
    return theirs, ours


def flat(result: Any) -> list[Any]:
    """Every tensor of a result, in order."""
    if isinstance(result, torch.nn.utils.rnn.PackedSequence):
        return [result.data]
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


def error(found: Any, wanted: Any) -> float:
    value = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return value if np.isfinite(value) else float("inf")


def agree(ours: Any, theirs: Any, limit: float = 1e-6) -> None:
    found, wanted = flat(ours), flat(theirs)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and error(one, other) < limit


def double(value: Any) -> Any:
    if isinstance(value, tuple) and not isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return tuple(double(v) for v in value)
    return None if value is None else value.double()


def calls(batch_first: bool, parts: int, states: int):
    """(input, hx) of every kind."""
    def hx(batch: int) -> Any:
        made = tuple(torch.rand(parts, batch, H) - 0.5 for _ in range(states))
        return made if states > 1 else made[0]

    for contiguous, start in itertools.product((True, False), (None, hx(B))):
        x = torch.randn(B, T, I) if batch_first else torch.randn(T, B, I)
        if not contiguous:
            x = torch.randn(*x.shape[:2], 2 * I)[..., ::2]
        yield x, start
    x = torch.randn(B, T, I) if batch_first else torch.randn(T, B, I)
    for is_sorted, start in itertools.product((True, False), (None, hx(B))):
        lengths = sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS
        yield torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first, is_sorted), start


def operands(layer: Any, x: Any, *state: Any) -> tuple[Any, ...]:
    """Of the operator."""
    return x, list(state), None, engine.weights_of(layer), text_of(layer)


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
        states = 1 + (name == "LSTM")
        for x, hx in calls(batch_first, layers * (1 + bidirectional), states):
            with torch.inference_mode():
                agree(ours(x, hx), theirs(double(x), double(hx)))


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projections(layers: int, bidirectional: bool):
    options = {"num_layers": layers, "bidirectional": bidirectional, "proj_size": 3}
    for bias, batch_first in ((True, False), (False, True)):
        theirs, ours = pair("LSTM", bias=bias, batch_first=batch_first, **options)
        for x, hx in calls(batch_first, layers * (1 + bidirectional), 2):
            hx = hx and (hx[0][..., :3].contiguous(), hx[1])
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


def test_one_sequence_without_a_batch():
    theirs, ours = pair("LSTM", bidirectional=True)
    x, hx = torch.randn(T, I), (torch.rand(2, H), torch.rand(2, H))
    with torch.no_grad():
        agree(ours(x, hx), theirs(double(x), double(hx)))


def test_state_dict_both_ways():
    """torch's state_dict into ours is in the matrix's set-up, reversed; here ours into torch's, and a file."""
    ours = ecornn.torch.GRU(I, H, 2, bidirectional=True)
    theirs = torch.nn.GRU(I, H, 2, bidirectional=True)
    assert list(ours.state_dict()) == list(theirs.state_dict()) and repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict())
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = torch.nn.GRU(I, H, 2, bidirectional=True)
    other.load_state_dict(torch.load(file))
    for one, two in zip(theirs.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_changed_weights_are_seen():
    theirs, ours = pair("GRU")
    x = torch.randn(T, B, I)
    with torch.no_grad():
        agree(ours(x), theirs(double(x)))
        ours.weight_hh_l0.mul_(0.5)
        theirs.weight_hh_l0.mul_(0.5)
        agree(ours(x), theirs(double(x)))
        fresh = torch.randn_like(ours.bias_ih_l0)
        ours.bias_ih_l0 = torch.nn.Parameter(fresh)
        theirs.bias_ih_l0 = torch.nn.Parameter(fresh.double())
        agree(ours(x), theirs(double(x)))


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


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_parametrized_weights(kind: str):
    theirs, ours = pair("GRU")
    x = torch.randn(T, B, I)
    made = [getattr(torch.nn.utils.parametrizations, kind)(layer, "weight_hh_l0") for layer in (theirs, ours)]
    made[0].load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
    with torch.no_grad():
        for scale in (1, 0.3, 0.3, 0.3):
            for layer in made:
                next(layer.parametrizations.weight_hh_l0.parameters())[:H].mul_(scale)
            agree(ours(x), theirs(double(x)))


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
    theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
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


def test_weights_that_went_through_another_type_are_seen():
    """float32 again, perhaps where they were, but no longer what they were."""
    theirs, ours = pair("GRU")
    x = torch.randn(T, B, I)
    with torch.no_grad():
        ours(x)
        ours.half().float()
        theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
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


def test_copies_are_layers_of_their_own():
    theirs, ours = pair("GRU")
    x, other = torch.randn(T, B, I), copy.deepcopy(ours)
    with torch.no_grad():
        ours(x)
        other.weight_hh_l0.zero_()
        agree(ours(x), theirs(double(x)))
        assert error(other(x)[0], theirs(double(x))[0]) > 1e-3


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

    class Model(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            y, (h, _) = self.layer(x * 2)
            return torch.relu(y).sum(0), h + 1

    x = torch.randn(T, B, I)
    fast = torch.compile(Model(ours), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        agree(fast(x), Model(theirs)(double(x)))
        again = torch.randn(T, B, I)
        agree(fast(again), Model(theirs)(double(again)))
        torch.library.opcheck(torch.ops.ecornn.recurrent, operands(ours, x),
                              test_utils=("test_schema", "test_faketensor"))


def test_packed_sequences_under_torch_compile():
    theirs, ours = pair("GRU", bidirectional=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(T, B, I), LENGTHS, enforce_sorted=False)
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


def same(found: Any, wanted: Any) -> None:
    """Bit for bit, and of one type."""
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


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


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
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
    x, states = torch.randn(T, B, I), [torch.rand(1, B, H), torch.rand(1, B, H)]
    wanted = [t.detach() for t in flat(theirs(x.double(), [s.double() for s in states]))]
    for trained in (False, True):
        found = flat(ours.train(trained).requires_grad_(trained)(x, states))
        agree([t.detach() for t in found], wanted)
        assert found[0].requires_grad == trained


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match="proj_size"):
        ecornn.torch.LSTM(I, H, proj_size=H)
    layer, state = ecornn.torch.LSTM(I, H).eval(), torch.zeros(1, B, H)
    x = torch.randn(T, B, I)
    with torch.no_grad():
        for call, kind, words in [((x[..., 1:],), ShapeError, "input.shape"), ((x.double(),), DTypeError, "float64"),
                                  ((x, (state, state[..., 1:])), ShapeError, "c_0.shape"),
                                  ((x.bfloat16(),), DTypeError, "float32, as the weights'"),
                                  ((x, state), ArgumentError, "(h_0, c_0)"),
                                  ((x, (state, None)), ArgumentError, "c_0"),
                                  ((x, (state.double(), state)), DTypeError, "h_0.dtype")]:
            with pytest.raises(kind) as caught:
                layer(*call)
            assert words in str(caught.value)
