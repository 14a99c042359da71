"""ecornn.torch under what watches PyTorch's calls: modes, transforms, subclasses, tracers, exported programs."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, jacfwd, jvp, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_pairs import LENGTHS, B, H, I, T, case, operands, pair
from torch_values import agree, double, error, flat

import ecornn
import ecornn.torch
from ecornn.errors import ArgumentError, WeightsError
from ecornn.runtime.loader import Module
from ecornn.torch import engine
from ecornn.torch.kind import keeping, kind_of, text_of

# PyTorch's own: in forward derivatives, in copies of exported programs, and of gradients in vmap
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated", "ignore:.*LeafSpec",
                                     "ignore:There is a performance drop")


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


@pytest.fixture
def binds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    plain = Module.bind
    monkeypatch.setattr(Module, "bind", lambda *a, **k: (found.append(1), plain(*a, **k))[1])
    return found


@pytest.mark.parametrize("how", ["make_fx", "pre-dispatch", "functionalize"])
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_a_traced_graph_computes_with_its_inputs(name: str, how: str):
    theirs, ours, x = case(name, bidirectional=True)
    def call(x: Any) -> Any:
        return ours(2 * x)
    with torch.no_grad():
        if how == "functionalize":
            agree(functionalize(call)(x), theirs(2 * double(x)))
            call = functionalize(call)
        graph = make_fx(call, pre_dispatch=how == "pre-dispatch")(x)
        assert "ecornn.recurrent" in graph.code
        agree(graph(-x), theirs(-2 * double(x)))


class Noting:
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def noted(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Names(Noting, TorchDispatchMode):
    __torch_dispatch__ = Noting.noted


class Functions(Noting, TorchFunctionMode):
    __torch_function__ = Noting.noted


class Logged(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("given", ["padded", "packed"])
def test_modes_subclasses_and_the_profiler_see_the_operator(given: str):
    theirs, ours, x = case("GRU")
    x = torch.nn.utils.rnn.pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if given == "packed" else x
    with torch.no_grad():
        wanted = theirs(double(x))
        for mode in (Names(), Functions()):
            with mode:
                agree(ours(x), wanted)
            assert any("ecornn.recurrent" in name for name in mode.seen)
        with torch.profiler.profile() as profile:
            agree(ours(x), wanted)
        assert "ecornn::recurrent" in {event.key for event in profile.key_averages()}
        assert counted(ours, x)[0] == counted(theirs, double(x))[0] > 0
        if given == "padded":
            agree(ours(x.as_subclass(Logged)), wanted)
            weights = {name: w.detach().as_subclass(Logged) for name, w in ours.named_parameters()}
            assert type(functional_call(ours, weights, (x,))[0]) is Logged
            assert sum("ecornn.recurrent" in name for name in Logged.seen) == 2


def counted(call: Any, *args: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter:
        found = call(*args)
    return counter.get_total_flops(), found


@pytest.mark.parametrize(("name", "options"), [("LSTM", {}), ("GRU", {"bidirectional": True}),
                                               ("RNN", {"num_layers": 2, "dropout": 0.5})])
def test_a_training_step_counts_three_times_a_call(name: str, options: dict[str, Any]):
    """As the products that torch.nn's layers are made of in float64, where everything takes gradients."""
    steps = []
    for layer in pair(name, **options):
        layer.train()
        x = torch.randn(T, B, I, dtype=layer.weight_hh_l0.dtype, requires_grad=True)
        start = [s.detach().requires_grad_() for s in flat(layer(x)[1])]
        hx = tuple(start) if len(start) > 1 else start[0]
        for given in (x, torch.nn.utils.rnn.pack_padded_sequence(x, LENGTHS, enforce_sorted=False)):
            forward, found = counted(layer, given, hx)
            backward, _ = counted(sum(t.sum() for t in flat(found)).backward)  # type: ignore[union-attr]
            assert backward == 2 * forward > 0
            steps.append(forward)
    assert steps[:2] == steps[2:] and steps[0] > steps[1]


def test_operations_are_counted_of_what_has_no_values():
    _, ours, x = case("LSTM")
    wanted = counted(ours, x)[0]
    with torch._subclasses.FakeTensorMode():
        fake = ecornn.torch.LSTM(I, H)
        assert counted(fake, torch.empty(T, B, I))[0] == wanted > 0
        fake.train()
        assert counted(fake, torch.empty(T, B, I, requires_grad=True))[0] == wanted


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_vmap(name: str):
    theirs, ours = pair(name, num_layers=2, bidirectional=True)
    xs = torch.randn(3, T, B, I)
    with torch.no_grad():
        agree(vmap(lambda x: ours(x)[0])(xs), torch.stack([theirs(x)[0] for x in double(xs)]))
        agree(vmap(lambda x: ours(x)[0], in_dims=2, out_dims=1)(xs.movedim(0, 2)),
              torch.stack([theirs(x)[0] for x in double(xs)], 1))
        single = torch.randn(2, 3, T, I)
        agree(vmap(vmap(lambda x: ours(x)[0]))(single),
              torch.stack([torch.stack([theirs(x)[0] for x in some]) for some in double(single)]))
        state = torch.rand(3, 4, B, H) - 0.5
        hx: Callable[[Any], Any] = (lambda h: (h, 2 * h)) if name == "LSTM" else (lambda h: h)
        agree(vmap(lambda h: ours(xs[0], hx(h))[0])(state),
              torch.stack([theirs(double(xs[0]), hx(h))[0] for h in double(state)]))


def test_vmap_over_models():
    many, x = [pair("LSTM") for _ in range(3)], torch.randn(T, B, I)
    weights, buffers = stack_module_state([ours for _, ours in many])
    with torch.no_grad():
        found = vmap(lambda w, b: functional_call(many[0][1], (w, b), (x,))[0])(weights, buffers)
    agree(found, torch.stack([theirs(double(x))[0] for theirs, _ in many]))


@pytest.mark.parametrize("no_grad", [False, True])
def test_forward_derivatives(no_grad: bool):
    theirs, ours = pair("GRU")
    ours.train()
    x, tangent = torch.randn(T, B, I), torch.randn(T, B, I)
    with torch.set_grad_enabled(not no_grad):
        wanted = jvp(lambda x: theirs(x)[0], (double(x),), (double(tangent),))
        agree(jvp(lambda x: ours(x)[0], (x,), (tangent,)), wanted)
        with forward_ad.dual_level():
            agree(forward_ad.unpack_dual(ours(forward_ad.make_dual(x, tangent))[0]), wanted)
        agree(jacfwd(lambda x: ours(x)[0])(x), jacfwd(lambda x: theirs(x)[0])(double(x)))
        agree(jvp(lambda x: ours.eval()(x)[0], (x,), (tangent,)), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functional_call_under_torch_compile(backend: str, binds: list[int]):
    theirs, ours, x = case("LSTM", num_layers=2, bidirectional=True)
    halved = {name: 0.5 * w for name, w in ours.state_dict().items()}
    fast = torch.compile(lambda x, weights: functional_call(ours, weights, (x,)), backend=backend, fullgraph=True)
    with torch.no_grad():
        ours(x)
        binds.clear()
        for _ in range(3):
            agree(fast(x, halved), functional_call(theirs, {n: w.double() for n, w in halved.items()}, (double(x),)))
        assert len(binds) == 1
        for _ in range(3):
            agree(fast(x, dict(ours.named_parameters())), theirs(double(x)))
        assert len(binds) == 1, "the layer has packed its own before"


@pytest.mark.parametrize("strict", [False, True])
def test_copies_of_an_exported_program_have_weights_of_their_own(strict: bool, binds: list[int]):
    theirs, ours, x = case("GRU")
    dims = {0: torch.export.Dim("T", min=2, max=99), 1: torch.export.Dim("B", min=2, max=99)}
    with torch.no_grad():
        program = torch.export.export(ours, (x,), dynamic_shapes=(dims,), strict=strict)
        other = copy.deepcopy(program)
        changed, doubled = other.module(), copy.deepcopy(theirs)
        for weight in (changed.weight_hh_l0, doubled.weight_hh_l0):
            weight.mul_(2)
        for layer, wanted in ((program.module(), theirs), (changed, doubled)):
            layer(x)
            binds.clear()
            agree(layer(x), wanted(double(x)))
            assert not binds
            longer = torch.randn(T + 3, B - 1, I)
            agree(layer(longer), wanted(double(longer)))
        changed.weight_hh_l0.data.mul_(0.5)
        ecornn.torch.rebind(changed)
        agree(changed(x), theirs(double(x)))


def test_what_a_layer_is_as_text():
    for name, options in (("LSTM", {"proj_size": 3, "num_layers": 2}), ("GRU", {"bias": False, "bidirectional": True}),
                          ("RNN", {"nonlinearity": "relu"})):
        layer = getattr(ecornn.torch, name)(I, H, **options)
        kind = kind_of(text_of(layer))
        assert list(kind.names) == layer._flat_weights_names
        assert (kind.mode, kind.width) == (layer.mode, layer.proj_size or H)
    for tf32 in (None, True, False):
        for layer in (ecornn.torch.Recurrent("lstm(peepholes)", 3, 4, tf32=tf32), ecornn.torch.LSTM(3, 4, tf32=tf32)):
            text, kept = text_of(layer), keeping(text_of(layer), "states")
            one, other = kind_of(text), kind_of(kept)
            assert (one.text, one.tf32, one.keep) == (text, tf32, None)
            assert (other.text, other.tf32, other.keep, other.cell) == (kept, tf32, "states", one.cell)
    for wrong in ("", "LSTM", "GRU(input=7)", text + ",more=1)", text.replace(")", ",more=1)"), text.replace("3", "x")):
        with pytest.raises(ArgumentError, match="kind="):
            kind_of(wrong)
    with pytest.raises(WeightsError, match="3 weights"):
        torch.ops.ecornn.recurrent(torch.zeros(T, B, 3), [], None, engine.weights_of(layer)[:3], text)


def test_the_operators_as_pytorch_checks_them():
    layer, x = ecornn.torch.GRU(I, H).eval().requires_grad_(False), torch.randn(T, B, I)
    torch.library.opcheck(torch.ops.ecornn.recurrent, operands(layer, x, torch.rand(1, B, H)), test_utils=(
        "test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"))
    layer.requires_grad_()
    found = torch.ops.ecornn.recurrent(*operands(layer, x))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        found[0].sum().backward()
    x = torch.randn(8, 8, I, requires_grad=True)  # what is kept fills its bytes
    torch.library.opcheck(torch.ops.ecornn.recurrent_forward, operands(ecornn.torch.LSTM(I, H), x))


def test_weights_that_are_new_at_each_call_share_what_was_compiled():
    """Of a weight norm, under torch.compile: one engine, however many calls."""
    theirs, ours, x = case("GRU")
    for layer in (theirs, ours):
        torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    fast = torch.compile(ours, backend="aot_eager")
    with torch.no_grad():
        for _ in range(4):
            agree(fast(x), theirs(double(x)))
            for layer in (theirs, ours):
                layer.parametrizations.weight_hh_l0.original0.mul_(0.5)
    assert len(engine._weights[ours.weight_ih_l0]) == 1


def test_an_assigned_weight_at_an_old_ones_place():
    """Of the same memory, and perhaps of the same id and version."""
    theirs, ours, x = case("GRU")
    with torch.no_grad():
        for scale in (1.0, 0.5, 0.25):
            memory = ours.weight_hh_l0.data
            del ours.weight_hh_l0
            ours.weight_hh_l0 = torch.nn.Parameter(memory)
            ours.weight_hh_l0.mul_(scale)
            theirs.weight_hh_l0.mul_(scale)
            agree(ours(x), theirs(double(x)))


@pytest.mark.parametrize("kind", ["make_fx", "pre-dispatch", "vmap", "functionalize", "jvp", "dual"])
def test_a_layer_of_modules_refuses_what_it_cannot_see(kind: str):
    """It is no operator: it read memory that is none, or what it computed was lost."""
    module = ecornn.compile("gru", hidden=H, input=I, batch=B, seq=T, target="cpu")
    weights = {p.name: np.ones(p.shape, np.float32) for p in module.manifest.parameters}
    layer, x = module.bind(weights), torch.randn(T, B, I)
    def call(x: Any) -> Any:
        return layer(x)[0]
    with pytest.raises(ArgumentError, match=r"^x="), torch.no_grad():
        if kind in ("make_fx", "pre-dispatch"):
            make_fx(call, pre_dispatch=kind == "pre-dispatch")(x)
        elif kind == "jvp":
            jvp(call, (x,), (x,))
        elif kind == "dual":
            with forward_ad.dual_level():
                call(forward_ad.make_dual(x, x))
        else:
            {"vmap": vmap, "functionalize": functionalize}[kind](call)(x[None])
    assert error(call(x), call(x.clone()).double()) == 0
    assert torch.equal(call(torch._efficientzerotensor((T, B, I))), call(torch.zeros(T, B, I)))
