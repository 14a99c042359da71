"""Training with ecornn.torch on a CPU: gradients against torch.nn in float64, and what is kept for them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_cells import Peephole
from torch.autograd import gradcheck
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence
from torch_pairs import LENGTHS, B, H, I, T, alike, case, operands, pair, states, training_case, with_seed
from torch_values import BACKWARD, agree, close, double, flat, same

import ecornn.torch
from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.torch import LSTM, Recurrent, compiling, engine, replace
from ecornn.torch.kind import kind_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings(
    # PyTorch's, the last one of torch.compile where a graph breaks
    "ignore:LSTM with projections", "ignore:There is a performance drop", "ignore:The .grad attribute of a Tensor that",
    "ignore:.torch.jit.script")]


@pytest.mark.parametrize(("name", "bidirectional"), [("LSTM", True), ("GRU", False)])
def test_gradients_of_stacks(name: str, bidirectional: bool):
    torch.set_num_threads(2)
    alike(*case(name, num_layers=2, bidirectional=bidirectional), states(name, 2 + 2 * bidirectional))


def test_saved_tensors_may_be_away():
    """In a file, say, and at another address when they are back."""
    _, ours, x = case("LSTM")
    wanted = torch.autograd.grad(ours(x.requires_grad_())[0].square().sum(), x)[0]
    def back(values: torch.Tensor) -> torch.Tensor:
        room = torch.empty(values.numel() * values.element_size() + 4, dtype=torch.uint8)
        return room[4:].view(values.dtype).view(values.shape).copy_(values)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), back):
        y, _ = ours(x)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], wanted)


def test_under_torch_compile():
    theirs, ours = pair("LSTM")
    torch._dynamo.reset()
    fast = torch.compile(lambda x: ours(2 * x)[0].sin(), fullgraph=True)
    for steps, batch in ((T, B), (T + 3, 3), (T + 1, 2)):
        x = torch.randn(steps, batch, I, requires_grad=True)
        exact = x.detach().double().requires_grad_()
        fast(x).square().sum().backward()
        theirs(2 * exact)[0].sin().square().sum().backward()
        close(x.grad, exact.grad, BACKWARD)
    close([w.grad for w in ours.parameters()], [w.grad for w in theirs.parameters()], BACKWARD)


def test_packed_sequences_under_torch_compile():
    theirs, ours, x = case("GRU", bidirectional=True)
    torch._dynamo.reset()
    fast = torch.compile(lambda packed: ours(packed)[0].data.sin(), backend="aot_eager")
    x = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    exact = double(x)
    with torch.no_grad():
        agree(fast(x), theirs(exact)[0].data.sin())
    for call, packed in ((fast, x), (lambda packed: theirs(packed)[0].data.sin(), exact)):
        packed.data.requires_grad_()
        call(packed).square().sum().backward()
    found, wanted = ([t.grad for t in leaves] for leaves in ((x.data, *ours.parameters()),
                                                             (exact.data, *theirs.parameters())))
    close(found, wanted, BACKWARD)


def test_transforms():
    theirs, ours = pair("LSTM")
    xs = torch.randn(3, T, B, I)
    weights = {name: w.detach() for name, w in ours.named_parameters()}
    def loss(layer: Any, weights: Any, x: Any) -> Any:
        return functional_call(layer, weights, (x,))[0].square().sum()

    def exact(x: Any) -> dict[str, torch.Tensor]:
        wanted = {name: w.detach().requires_grad_() for name, w in theirs.named_parameters()}
        return dict(zip(wanted, torch.autograd.grad(loss(theirs, wanted, x.double()), [*wanted.values()]), strict=True))
    each, one = [exact(x) for x in xs], grad(lambda w: loss(ours, w, xs[0]))(weights)
    samples = vmap(grad(lambda w, x: loss(ours, w, x)), in_dims=(None, 0))(weights, xs)
    added = grad(lambda w: vmap(lambda x: loss(ours, w, x))(xs).sum())(weights)
    for name in weights:
        wanted = [some[name] for some in each]
        close([one[name], *samples[name], added[name]], [wanted[0], *wanted, sum(wanted)], BACKWARD)
    again = [grad(lambda x, layer=layer: grad(lambda x: layer(x)[0].square().sum())(x).sum())
             for layer in (ours, theirs)]
    close([again[0](xs[0])], [again[1](xs[0].double())], BACKWARD)


@pytest.mark.parametrize("p", [0.3, 0.7])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_draws_as_pytorch_does(packed: bool, p: float):
    theirs, ours, x = training_case("GRU", num_layers=2, dropout=p)
    theirs.float()
    x = pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if packed else x
    y, gradients = with_seed(ours, x, 3)
    wanted, exact = with_seed(theirs, x, 3)
    close(y, wanted)
    close(gradients, exact, 2 * BACKWARD)  # both in float32
    assert torch.equal(y, with_seed(ours, x, 3)[0]) and not torch.equal(y, with_seed(ours, x, 4)[0])
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(flat(ours(x)[0])[0], y)
        before = torch.random.get_rng_state()
        close(ours.eval()(x), theirs.eval()(x))
        assert torch.equal(torch.random.get_rng_state(), before)


def test_wrong_gradients_are_refused():
    _, ours, x = case("GRU")
    y, _ = ours(x)
    y.grad_fn.register_prehook(lambda gradients: (gradients[0][1:], *gradients[1:]))
    with pytest.raises(RuntimeError, match="changed the size"):
        y.sum().backward()
    state, given = torch.zeros(1, B, H), operands(ours, x)
    with torch.no_grad():
        y, after, kept = torch.ops.ecornn.recurrent_forward(*given)
        for dy, dstate, memory, kind, words in [
                (y[1:], after, kept, ShapeError, "dy.shape"), (y.double(), after, kept, DTypeError, "dy.dtype"),
                (y, state[..., 1:], kept, ShapeError, "dstate[0].shape"),
                (y, after, kept.new_empty(5), ShapeError, "memory.shape")]:
            with pytest.raises(kind) as caught:
                torch.ops.ecornn.recurrent_backward(*given, y, memory, [dy, dstate])
            assert words in str(caught.value)


def test_500_steps_stay_with_torch_nn():
    torch.manual_seed(1)
    steps, batch, width = 12, 16, 16
    ours, head = ecornn.torch.LSTM(2, width, 2), torch.nn.Linear(width, 2)
    models = [(layer, copy.deepcopy(head)) for layer in (torch.nn.LSTM(2, width, 2), ours)]
    models[0][0].load_state_dict(ours.state_dict())
    optimizers = [torch.optim.Adam([*layer.parameters(), *last.parameters()], lr=3e-3) for layer, last in models]
    first = worst = 0.0
    for number in range(500):
        x = torch.randn(steps, batch, 2)
        wanted, found = x.cumsum(0) / torch.arange(1, steps + 1)[:, None, None], []
        for (layer, last), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(last(layer(x)[0]), wanted)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        first, worst = first or found[0], max(worst, abs(found[0] - found[1]))
        assert worst < 1e-3, f"step {number}: {found}"
    assert found[1] < 0.2 * first, "it has not learned"


# -- float64 ------------------------------------------------------------------------------------
def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("make", [
    ecornn.torch.LSTM, pytest.param(ecornn.torch.GRU, marks=pytest.mark.exhaustive), ecornn.torch.RNN,
    lambda *sizes: Recurrent(Peephole(), *sizes)], ids=["LSTM", "GRU", "RNN", "own cell"])
def test_gradcheck(make: Callable[..., Any]):
    layer = make(3, 5).double()
    count = len(layer.state_names)
    def call(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, last = layer(x, given[:count] if count > 1 else given[0])
        return (y, *last) if count > 1 else (y, last)
    assert gradcheck(call, (normal(4, 2, 3), *(normal(1, 2, 5) for _ in range(count)), *layer.parameters()))


def test_single_values_of_large_weights_are_seen():
    """gradcheck writes these through ``.data``, which counts no versions."""
    layer, x = ecornn.torch.RNN(I, 40).double(), normal(T, B, I)
    before = layer(x)[0]
    layer.weight_hh_l0.data[7, 11] += 1.0
    assert not torch.equal(layer(x)[0], before)


def test_layers_of_float64_are_those_of_pytorch(name: str):
    theirs = getattr(torch.nn, name)(3, 5).double()
    model = torch.nn.ModuleDict({"layer": copy.deepcopy(theirs)})
    assert replace(model).swapped == ("layer",)
    x = normal(4, 2, 3)
    for packed in (False, True):
        found = []
        for layer in (theirs, model["layer"]):
            y, _ = layer(pack_padded_sequence(x, [2, 4], enforce_sorted=False) if packed else x)
            loss = flat(y)[0].sin().sum()
            found.append([loss, *torch.autograd.grad(loss, [x, *layer.parameters()])])
        agree(found[1], found[0], 1e-13)
        assert {t.dtype for t in found[1]} == {torch.float64}


# -- what graphs and layers say of what a training step keeps -----------------------------------


def forward_of(layer: torch.nn.Module, x: torch.Tensor) -> torch.fx.Node:
    graph = make_fx(lambda x: layer(x)[0], tracing_mode="fake", _allow_non_fake_inputs=True)(x).graph
    (found,) = (node for node in graph.nodes if "recurrent_forward" in str(node.target))
    return found


def test_graphs_say_what_a_step_keeps_and_keep_that(monkeypatch: pytest.MonkeyPatch):
    theirs, ours, x = case("GRU")
    usual, weights = forward_of(ours, x), engine.weights_of(ours)
    monkeypatch.setitem(compiling.KEPT, "cpu", "states")  # as another version, device or option may have it
    other = forward_of(ours, x)
    assert [kind_of(node.args[4]).keep for node in (usual, other)] == ["gates", "states"]
    exact = torch.autograd.grad(theirs(x.double())[0].square().sum(), [*theirs.parameters()])
    sizes = set()
    for node in (usual, other):  # a graph that was made before goes on with what it was made for
        with torch.no_grad():
            y, h, kept = torch.ops.ecornn.recurrent_forward(x, [], None, weights, node.args[4])
            found = torch.ops.ecornn.recurrent_backward(x, [], None, weights, node.args[4], y, kept,
                                                        [2 * y, torch.zeros_like(h)])
        assert kept.shape == node.meta["val"][-1].shape
        agree(found[1:], exact, BACKWARD)
        sizes.add(kept.numel())
    assert len(sizes) == 2


def test_who_asks_for_states_has_them():
    """A layer keeps less; its gradients are the same ones to rounding."""
    theirs, ours, x = case("LSTM")
    wanted = torch.autograd.grad(theirs(x.double())[0].square().sum(), [*theirs.parameters()])
    sizes = []
    for keep in (None, "states", "gates"):
        ours.keep = keep  # attributes may be set between calls
        y = ours(x)[0]
        (kept,) = (t for t in y.grad_fn.saved_tensors if t is not None and t.dtype is torch.uint8)
        sizes.append(kept.numel())
        agree(torch.autograd.grad(y.square().sum(), [*ours.parameters()]), wanted, BACKWARD)
    assert sizes[0] == sizes[2] > 4 * sizes[1]
    for made in (lambda: LSTM(3, 4, keep="all"), lambda: Recurrent("gru", 3, 4, keep="all")):
        with pytest.raises(ArgumentError, match=r"keep='all': expected None, states or gates"):
            made()
    assert LSTM(3, 4, keep="states").keep == Recurrent("gru", 3, 4, keep="states").keep == "states"


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "four"])
def test_a_step_by_addresses_is_the_checked_one(name: str, options: dict[str, Any]):
    """Value by value, for whatever gradients there are, and arguments that do not lie as a module reads them."""
    layer, x = getattr(ecornn.torch, name)(I, H, **options), torch.randn(B, T, I).transpose(0, 1)
    one, weights, first = engine.engine_of(layer), engine.weights_of(layer), flat(layer(x)[1])
    for state in ((), [torch.randn_like(s) for s in first]):
        y, *after, kept = one.forward(weights, x, state, None, passes := engine.Passes())
        same([y, *after], one.forward(weights, x, state, None)[:-1])
        for dy in (torch.ones(1).expand(y.shape), torch.randn(*y.shape, 2)[..., 0], None):
            for dstates, wanted in ((first, True), ([None] * len(first), False)):
                found, checked = (one.backward(weights, x, state, None, y, kept, [dy, *dstates], wanted, given)
                                  for given in (passes, None))
                assert [g is None for g in found] == [g is None for g in checked]
                same([g for g in found if g is not None], [g for g in checked if g is not None])
