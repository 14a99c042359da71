"""Training with ecornn.torch on a CPU: gradients against torch.nn in float64, and what surrounds a backward pass."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_torch_layers import KINDS, LENGTHS, B, H, I, T, double, error, flat, operands, pair
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ecornn.torch
from ecornn.errors import DerivativeError, DTypeError, FallbackError, ShapeError
from ecornn.runtime.loader import Module
from ecornn.torch.kind import text_of

FORWARD, BACKWARD = 1e-5, 2e-5  # relative, of float32 against float64
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings(
    # PyTorch's, the last one of torch.compile where a graph breaks
    "ignore:LSTM with projections", "ignore:There is a performance drop", "ignore:The .grad attribute of a Tensor that",
    "ignore:.torch.jit.script")]


def leaves(value: Any) -> list[torch.Tensor]:
    """Tensors that gradients are asked of."""
    return [t for t in flat(value) if t.requires_grad] if value is not None else []


def step(layer: Any, x: Any, hx: Any, weights: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a layer gives, and the gradients of a sum of that with ``weights``: of its parameters, x and states."""
    found = flat(layer(x, hx))
    loss = sum((t * w.to(t.dtype)).sum() for t, w in zip(found, weights, strict=True))
    return found, list(torch.autograd.grad(loss, [*layer.parameters(), *leaves(x), *leaves(hx)]))


def check(theirs: Any, ours: Any, x: Any, hx: Any) -> None:
    """Values and all gradients of ours, within float32's of theirs in float64."""
    weights = [torch.randn(t.shape) for t in flat(theirs(double(x), double(hx)))]
    found, gradients = step(ours, x, hx, weights)
    wanted, exact = step(theirs, double(x), double(hx), weights)
    assert all("RecurrentForward" in ancestors(t) for t in found)
    assert len(gradients) == len(exact)
    for one, other in zip(found, wanted, strict=True):
        assert error(one.detach(), other.detach()) < FORWARD
    for one, other in zip(gradients, exact, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32
        assert error(one, other) < BACKWARD


def ancestors(tensor: torch.Tensor) -> str:
    """The names of the functions that it comes from."""
    seen, todo, names = set(), [tensor.grad_fn], []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            todo += [before for before, _ in node.next_functions]
    return " ".join(names)


def given(batch_first: bool, parts: int, states: int, width: int = H) -> tuple[torch.Tensor, Any]:
    x = torch.randn(*((B, T) if batch_first else (T, B)), I, requires_grad=True)
    hx = [torch.rand(parts, B, width if n == 0 else H, requires_grad=True) for n in range(states)]
    return x, tuple(hx) if states > 1 else hx[0]


@pytest.mark.parametrize(("name", "options"), [
    pytest.param(name, options, marks=[pytest.mark.exhaustive] * ("relu" in options.values()))
    for name, options in KINDS])
def test_gradients(name: str, options: dict[str, Any]):
    for bias, batch_first in ((True, False), (False, True)):
        theirs, ours = pair(name, bias=bias, batch_first=batch_first, **options)
        x, hx = given(batch_first, 1, 1 + (name == "LSTM"))
        check(theirs.train(), ours.train(), x, hx)
        check(theirs, ours.eval(), x, None)
    x = torch.randn(T, 3, I, requires_grad=True)  # fewer rows than were compiled for
    check(*pair(name, **options), x, None)


@pytest.mark.parametrize(("name", "bidirectional"), [("LSTM", True), ("GRU", False)])
def test_gradients_of_stacks(name: str, bidirectional: bool):
    theirs, ours = pair(name, num_layers=2, bidirectional=bidirectional)
    torch.set_num_threads(2)
    check(theirs, ours, *given(False, 2 + 2 * bidirectional, 1 + (name == "LSTM")))


def test_gradients_of_projections():
    theirs, ours = pair("LSTM", num_layers=2, proj_size=3)
    check(theirs, ours, *given(False, 2, 2, 3))
    check(theirs, ours, torch.randn(T, B, I, requires_grad=True), None)


@pytest.mark.parametrize(("name", "bidirectional"), [("LSTM", True), ("GRU", False)])
def test_gradients_of_packed_sequences(name: str, bidirectional: bool):
    theirs, ours = pair(name, bidirectional=bidirectional)
    for is_sorted in (True, False):
        x, hx = given(False, 1 + bidirectional, 1 + (name == "LSTM"))
        x = pack_padded_sequence(x, sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS, enforce_sorted=is_sorted)
        x = PackedSequence(x.data.detach().requires_grad_(), *x[1:])
        check(theirs, ours, x, hx)
        check(theirs, ours, x, None)


def test_one_sequence_without_a_batch():
    theirs, ours = pair("GRU")
    check(theirs, ours, torch.randn(T, I, requires_grad=True), torch.rand(1, H, requires_grad=True))


@pytest.mark.parametrize("asked", ["x", "weights", "one weight", "state"])
def test_only_some_inputs_require_gradients(asked: str):
    theirs, ours = pair("GRU")
    x, hx = torch.randn(T, B, I), torch.rand(1, B, H)
    for layer in (theirs, ours):
        layer.requires_grad_(asked == "weights")
        layer.bias_hh_l0.requires_grad_(asked in ("weights", "one weight"))
    (x if asked == "x" else hx).requires_grad_(asked in ("x", "state"))
    made = []
    for layer, kind in ((theirs, torch.float64), (ours, torch.float32)):
        leaf = [t.detach().to(kind).requires_grad_(t.requires_grad) for t in (x, hx)]
        y, _ = layer(*leaf)
        y.square().sum().backward()
        made.append([t.grad for t in (*leaf, *layer.parameters())])
    for one, other in zip(*reversed(made), strict=True):
        assert (one is None) == (other is None)
        assert one is None or error(one, other) < BACKWARD
    assert any(one is not None for one in made[1])


def losses(layer: Any, xs: Any) -> Any:
    return [layer(x)[0].square().sum() for x in xs]


def test_accumulation_and_a_layer_that_is_called_twice():
    theirs, ours = pair("LSTM")
    xs = [torch.randn(T, B, I) for _ in range(3)]
    for layer, some in ((theirs, [x.double() for x in xs]), (ours, xs)):
        for loss in losses(layer, some):
            loss.backward()  # added to what is there
        first, second, _ = losses(layer, some)
        (first + second).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert error(one.grad, other.grad) < BACKWARD


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool):
    _, ours = pair("LSTM")
    x = torch.randn(T, B, I, requires_grad=True)
    wanted = torch.autograd.grad(ours(x)[0].square().sum(), x)[0]
    checkpoint(lambda x: ours(x)[0].square().sum(), x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, wanted)


def test_saved_tensors_may_be_away():
    """In a file, say, and at another address when they are back."""
    _, ours = pair("LSTM")
    x = torch.randn(T, B, I, requires_grad=True)
    wanted = torch.autograd.grad(ours(x)[0].square().sum(), x)[0]

    def back(values: torch.Tensor) -> torch.Tensor:
        room = torch.empty(values.numel() * values.element_size() + 4, dtype=torch.uint8)
        return room[4:].view(values.dtype).view(values.shape).copy_(values)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), back):
        y, _ = ours(x)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], wanted)


def test_under_torch_compile():
    """In one graph, also of other T and B, whose sizes are symbols then."""
    theirs, ours = pair("LSTM")
    torch._dynamo.reset()
    fast = torch.compile(lambda x: ours(2 * x)[0].sin(), fullgraph=True)
    for steps, batch in ((T, B), (T + 3, 3), (T + 1, 2)):
        x = torch.randn(steps, batch, I, requires_grad=True)
        exact = x.detach().double().requires_grad_()
        fast(x).square().sum().backward()
        theirs(2 * exact)[0].sin().square().sum().backward()
        assert error(x.grad, exact.grad) < BACKWARD
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert error(one.grad, other.grad) < BACKWARD


def test_packed_sequences_under_torch_compile():
    theirs, ours = pair("GRU")
    torch._dynamo.reset()
    fast = torch.compile(lambda packed: ours(packed)[0].data.sin(), backend="aot_eager")
    x = pack_padded_sequence(torch.randn(T, B, I), LENGTHS, enforce_sorted=False)
    exact = double(x)
    for call, packed in ((fast, x), (lambda packed: theirs(packed)[0].data.sin(), exact)):
        packed.data.requires_grad_()
        call(packed).square().sum().backward()
    for one, other in zip([x.data, *ours.parameters()], [exact.data, *theirs.parameters()], strict=True):
        assert error(one.grad, other.grad) < BACKWARD


def test_the_operators_as_pytorch_checks_them():
    layer, x = ecornn.torch.LSTM(I, H), torch.randn(8, 8, I, requires_grad=True)  # what is kept fills its bytes
    torch.library.opcheck(torch.ops.ecornn.recurrent_forward, operands(layer, x))


def test_transforms():
    """torch.func's, of one another as far as gradients are taken once."""
    theirs, ours = pair("LSTM")
    xs = torch.randn(3, T, B, I)
    weights = {name: w.detach() for name, w in ours.named_parameters()}

    def loss(layer: Any, weights: Any, x: Any) -> Any:
        return functional_call(layer, weights, (x,))[0].square().sum()

    def exact(x: Any) -> dict[str, torch.Tensor]:
        wanted = {name: w.detach().requires_grad_() for name, w in theirs.named_parameters()}
        return dict(zip(wanted, torch.autograd.grad(loss(theirs, wanted, x.double()), [*wanted.values()]), strict=True))

    each = [exact(x) for x in xs]
    for name, value in grad(lambda w: loss(ours, w, xs[0]))(weights).items():
        assert error(value, each[0][name]) < BACKWARD
    samples = vmap(grad(lambda w, x: loss(ours, w, x)), in_dims=(None, 0))(weights, xs)
    added = grad(lambda w: vmap(lambda x: loss(ours, w, x))(xs).sum())(weights)
    for name in weights:
        for n, wanted in enumerate(each):
            assert error(samples[name][n], wanted[name]) < BACKWARD
        assert error(added[name], sum(wanted[name] for wanted in each)) < BACKWARD
    with pytest.raises(DerivativeError):
        grad(lambda x: grad(lambda x: ours(x)[0].square().sum())(x).sum())(xs[0])


def with_seed(layer: Any, x: Any, seed: int) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(seed)
    y = flat(layer(x)[0])[0]
    return y, list(torch.autograd.grad(y.square().sum(), layer.parameters()))


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_draws_as_pytorch_does(packed: bool):
    theirs, ours = (layer.train() for layer in pair("GRU", num_layers=2, dropout=0.5))
    theirs.float()
    x: Any = torch.randn(T, B, I)
    x = pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if packed else x
    y, gradients = with_seed(ours, x, 3)
    wanted, exact = with_seed(theirs, x, 3)
    assert error(y.detach(), wanted.detach().double()) < FORWARD
    for one, other in zip(gradients, exact, strict=True):
        assert error(one, other.double()) < 2 * BACKWARD  # both in float32
    assert torch.equal(y, with_seed(ours, x, 3)[0]) and not torch.equal(y, with_seed(ours, x, 4)[0])
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(flat(ours(x)[0])[0], y)
        before = torch.random.get_rng_state()
        ours.eval()(x)
        assert torch.equal(torch.random.get_rng_state(), before)


def test_weights_that_change_before_the_backward_pass():
    _, ours = pair("GRU")
    x = torch.randn(T, B, I)
    y, _ = ours(x)
    with torch.no_grad():
        ours.weight_hh_l0.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, _ = ours(x)
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice():
    _, ours = pair("LSTM")
    x = torch.randn(T, B, I, requires_grad=True)
    loss = ours(x)[0].square().sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()  # what was kept is read, and stays
    assert torch.equal(x.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients_are_refused_and_restore_helps():
    theirs, ours = pair("RNN")
    x = torch.randn(T, B, I, requires_grad=True)

    def penalty(layer: Any, x: Any) -> Any:
        return torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)[0].square().sum()

    found = penalty(ours, x)
    with pytest.raises(DerivativeError, match=r"ecornn\.torch\.restore"):
        found.backward()
    assert ecornn.torch.restore(torch.nn.Sequential(ours)) == ("0",) and type(ours) is torch.nn.RNN
    penalty(ours, x).backward()
    exact = x.detach().double().requires_grad_()
    penalty(theirs, exact).backward()
    assert error(x.grad, exact.grad) < BACKWARD


def test_wrong_gradients_are_refused():
    """By PyTorch where a hook returns one, by the layer where its operator is called."""
    _, ours = pair("GRU")
    y, _ = ours(torch.randn(T, B, I))
    y.grad_fn.register_prehook(lambda gradients: (gradients[0][1:], *gradients[1:]))
    with pytest.raises(RuntimeError, match="changed the size"):
        y.sum().backward()
    x, state = torch.randn(T, B, I), torch.zeros(1, B, H)
    given = operands(ours, x)
    with torch.no_grad():
        y, after, kept = torch.ops.ecornn.recurrent_forward(*given)
        for dy, dstate, memory, kind, words in [
                (y[1:], after, kept, ShapeError, "dy.shape"), (y.double(), after, kept, DTypeError, "dy.dtype"),
                (y, state[..., 1:], kept, ShapeError, "dstate[0].shape"),
                (y, after, kept.new_empty(5), ShapeError, "memory.shape")]:
            with pytest.raises(kind) as caught:
                torch.ops.ecornn.recurrent_backward(*given, y, memory, [dy, dstate])
            assert words in str(caught.value)


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"fused": True}), ("SGD", {}), ("Adam", {"fused": True})])
def test_every_step_of_an_optimizer_is_seen(kind: str, options: dict[str, Any]):
    theirs, ours = pair("GRU")
    x = torch.randn(T, B, I)
    made = [getattr(torch.optim, kind)(layer.parameters(), lr=0.1, **options) for layer in (theirs, ours)]
    for _ in range(3):
        for layer, optimizer, value in zip((theirs, ours), made, (x.double(), x), strict=True):
            optimizer.zero_grad()
            layer(value)[0].square().sum().backward()
            optimizer.step()
    with torch.no_grad():
        assert error(ours(x)[0], theirs(x.double())[0]) < 1e-4  # of steps, which differ by more than their gradients


def test_threads_that_train_the_same_layer():
    """Each with weights of its own, which are not packed where another one's call reads."""
    theirs, ours = pair("GRU")
    x, scales = torch.randn(T, B, I), (1.0, 0.5, 0.25, 2.0)

    def run(layer: Any, x: Any, scale: float) -> torch.Tensor:
        weights = {name: (scale * w).detach() for name, w in layer.named_parameters()}
        x = x.clone().requires_grad_()
        operator = torch.ops.ecornn.recurrent_forward
        y = operator(x, [], None, [*weights.values()], text_of(layer))[0] if layer is ours else functional_call(
            layer, weights, (x,))[0]
        return torch.autograd.grad(y.square().sum(), x)[0]

    wanted = [run(theirs, x.double(), scale) for scale in scales]
    with ThreadPoolExecutor(len(scales)) as pool:
        found = [*pool.map(lambda scale: [run(ours, x, scale) for _ in range(20)], scales)]
    for some, exact in zip(found, wanted, strict=True):
        assert max(error(one, exact) for one in some) < BACKWARD


def test_scaled_gradients():
    theirs, ours = pair("GRU")
    scaler, optimizer = torch.amp.GradScaler("cpu", 2.0 ** 10), torch.optim.SGD(ours.parameters(), lr=0.0)
    x = torch.randn(T, B, I)
    scaler.scale(ours(x)[0].square().sum()).backward()
    theirs(x.double())[0].square().sum().backward()
    scaler.unscale_(optimizer)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert error(one.grad, other.grad) < BACKWARD


def test_weights_are_packed_where_they_were(monkeypatch: pytest.MonkeyPatch):
    """One module and one memory for all steps; nothing is packed where nothing changed."""
    bound: list[int] = []
    plain = Module.bind
    monkeypatch.setattr(Module, "bind", lambda *a, **k: (bound.append(1), plain(*a, **k))[1])
    _, ours = pair("GRU")
    optimizer, x = torch.optim.SGD(ours.parameters(), lr=0.1), torch.randn(T, B, I)
    for _ in range(4):
        ours(x)[0].square().sum().backward()
        optimizer.step()
    assert len(bound) == 1


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_a_model_whose_layers_were_replaced_trains_on(name: str):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = getattr(torch.nn, name)(I, H), torch.nn.Linear(H, 2)

        def forward(self, x: Any) -> Any:
            return self.head(self.rnn(x)[0][-1])

    model = Model().train()
    exact, x = copy.deepcopy(model).double(), torch.randn(T, B, I)
    assert ecornn.torch.replace(model).swapped == ("rnn",)
    for layer, value in ((exact, x.double()), (model, x)):
        torch.nn.functional.cross_entropy(layer(value), torch.arange(B) % 2).backward()
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert error(one.grad, other.grad) < BACKWARD


def test_500_steps_stay_with_torch_nn():
    """Losses of Adam from the same weights, in float32: the running mean of a sequence."""
    torch.manual_seed(1)
    steps, batch, width = 12, 16, 16
    ours, head = ecornn.torch.LSTM(2, width, 2), torch.nn.Linear(width, 2)
    models = [(layer, copy.deepcopy(head)) for layer in (torch.nn.LSTM(2, width, 2), ours)]
    models[0][0].load_state_dict(ours.state_dict())
    optimizers = [torch.optim.Adam([*layer.parameters(), *last.parameters()], lr=3e-3) for layer, last in models]
    first = worst = 0.0
    for number in range(500):
        x = torch.randn(steps, batch, 2)
        wanted = x.cumsum(0) / torch.arange(1, steps + 1)[:, None, None]
        found = []
        for (layer, last), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(last(layer(x)[0]), wanted)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        first, worst = first or found[0], max(worst, abs(found[0] - found[1]))
        assert worst < 1e-3, f"step {number}: {found}"
    assert found[1] < 0.2 * first, "it has not learned"


def test_what_must_be_pytorchs_says_so(monkeypatch: pytest.MonkeyPatch):
    layer, x = ecornn.torch.GRU(I, H).bfloat16(), torch.randn(T, B, I).bfloat16()
    with pytest.raises(FallbackError, match=r"float64 on a CPU.*this is torch\.bfloat16"):
        layer(x)
    monkeypatch.setenv("ECORNN_STRICT", "0")
    with pytest.warns(UserWarning, match=r"PyTorch's own layer runs: .*this is torch\.bfloat16 on cpu"):
        layer(x)[0].sum().backward()
    assert layer.weight_hh_l0.grad is not None
