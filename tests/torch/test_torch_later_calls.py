"""Changes that a later call must see, by the short way or not: weights written in any way, or new at each call."""

import contextlib
import copy
import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.profiler import profile
from torch_pairs import B, H, I, T, alike, case, load, pair, states
from torch_values import BACKWARD, agree, double, error, flat

import ecornn.torch
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ShapeError, WeightsError
from ecornn.torch import engine
from ecornn.torch.kind import text_of
from ecornn.torch.snapshot import PLACES, Sample


def often(layer: Any, *args: Any) -> Any:
    return [layer(*args) for _ in range(4)][-1]


def memories(x: torch.Tensor) -> dict[str, torch.Tensor]:
    room = torch.empty(x.numel() + 1)
    room[1:] = x.flatten()
    return {"plain": x, "strided": torch.stack((x, x), -1)[..., 0], "off by four bytes": room[1:].view(x.shape),
            "a parameter": torch.nn.Parameter(x), "negative": torch.complex(x, -x).conj().imag,
            "turned": x.transpose(0, -1).contiguous().transpose(0, -1)}


@pytest.mark.parametrize("shape, options", [
    ((1, 4, I), {}), ((5, 4, I), {"num_layers": 2, "bidirectional": True}), ((5, I), {"bidirectional": True}),
    ((4, 5, I), {"batch_first": True}), ((4, 1, I), {"batch_first": True}), ((1, 5, I), {"batch_first": True}),
    ((5, I), {"batch_first": True, "bias": False})], ids=str)
def test_values(name: str, shape: tuple[int, ...], options: dict[str, Any], taken: list[Any]):
    theirs, ours = pair(name, **options)
    x = torch.randn(shape)
    for hx in (None, theirs(x.double())[1]):
        given = () if hx is None else (tuple(s.float() for s in hx) if name == "LSTM" else hx.float(),)
        exact = theirs(x.double(), *map(double, given))
        ours(x, *given), often(ours, x, *given), taken.clear()
        for kind, same in memories(x).items():
            before, found = same.clone(), ours(same, *given)
            agree(found, exact)
            for one, other in zip(flat(found), flat(exact), strict=True):
                assert one.dtype == torch.float32 and one.is_contiguous() == other.is_contiguous(), kind
            assert torch.equal(same, before)
        assert len(taken) == len(memories(x))
    # what is returned is the caller's own
    first, second = flat(ours(x)), flat(ours(x))
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in second}


@pytest.mark.parametrize("remembered", [False, True])
def test_what_does_not_fit_is_refused_and_said(remembered: bool, taken: list[Any]):
    ours = ecornn.torch.LSTM(I, H)
    x, state = torch.randn(3, 2, I), torch.zeros(1, 2, H)
    if remembered:
        often(ours, x, (state, state))
    taken.clear()
    for call, kind, words in [
            ((x, (state[:, :1], state)), ShapeError, ["h_0.shape"]),
            ((x, (state, state[..., 1:])), ShapeError, ["c_0.shape"]),
            ((x, (state, state.double())), DTypeError, ["c_0.dtype"]),
            ((x, (state.double(), state)), DTypeError, ["h_0.dtype"]),
            ((x, state), ArgumentError, ["hx", "(h_0, c_0)"]), ((x, (None, state)), ArgumentError, ["h_0"]),
            ((x, (state, None)), ArgumentError, ["c_0"]),
            ((x.double(),), DTypeError, ["input.dtype", "float64", "float32"]),
            ((x.bfloat16(),), DTypeError, ["float32, as the weights'"]), ((x.int(),), DTypeError, ["input.dtype"]),
            ((torch.randn(3, 2, I + 1),), ShapeError, ["input.shape"]), ((x[..., 1:],), ShapeError, ["input.shape"]),
            *(((wrong,), ArgumentError, ["a tensor or a PackedSequence"]) for wrong in (None, "x", [[1.0]], 3))]:
        with pytest.raises(kind) as caught:
            ours(*call)
        assert all(word in str(caught.value) for word in words)
    for kind in (ShapeError, DTypeError, DeviceError):  # PyTorch's users catch the one, NumPy's the other
        assert issubclass(kind, RuntimeError) and issubclass(kind, ValueError)
    assert not taken


def test_attributes_weights_and_threads_that_change(taken: list[Any], one_thread: None):
    theirs, ours = pair("GRU", num_layers=2, dropout=0.5)
    x = torch.randn(4, 4, I)
    agree(often(ours, x), theirs(x.double()))
    taken.clear()
    ours.batch_first = theirs.batch_first = True
    agree(often(ours, x), theirs(x.double()))
    ours.batch_first = theirs.batch_first = False
    ours.train()
    assert not torch.equal(ours(x)[0], ours(x)[0])  # what is dropped differs
    ours.eval()
    for write in (lambda w: w.mul_(2), lambda w: w.data.mul_(0.5), lambda w: w.numpy().__imul__(3)):
        for module in (ours, theirs):
            write(module.weight_hh_l1.detach())
        agree(ours(x), theirs(x.double()))
    ours.weight_ih_l0 = torch.nn.Parameter(ours.weight_ih_l0 * 0.5)
    theirs.weight_ih_l0 = torch.nn.Parameter(theirs.weight_ih_l0 * 0.5)
    agree(ours(x), theirs(x.double()))
    torch.set_num_threads(2)
    agree(often(ours, x), theirs(x.double()))
    agree(often(copy.deepcopy(ours), x), theirs(x.double()))
    assert len({*taken}) >= 3


@pytest.mark.parametrize(("name", "bias"), [("LSTM", True), ("GRU", True), ("GRU", False), ("RNN", True),
                                            ("LSTMCell", True), ("GRUCell", True), ("RNNCell", True)])
def test_pytorchs_defaults_are_not_those_of_a_layer(name: str, bias: bool, taken: list[Any]):
    theirs, ours = pair(name, bias=bias)
    x = torch.randn(3, I) if "Cell" in name else torch.randn(2, 3, I)
    wanted = theirs(x.double())
    def gradients(layer: Any, x: Any) -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(flat(layer(x))[0].sum(), [*layer.parameters()])
    with torch.device("meta"):
        agree(often(ours, x), wanted)
    torch.set_default_dtype(torch.float64)
    try:
        agree(often(ours, x), wanted)
        if "Cell" in name:
            agree(gradients(ours, x), gradients(theirs, x.double()), 1e-5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert taken


@pytest.mark.parametrize("name", ["GRU", "GRUCell"])
def test_who_watches_sees_the_operator(name: str, taken: list[Any]):
    ours, x = getattr(ecornn.torch, name)(I, H), torch.randn(3, I)
    often(ours, x)
    taken.clear()
    with profile() as seen:
        ours(x)
    assert "ecornn::recurrent" in {event.name for event in seen.events()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(flat(ours(mode.from_tensor(x)))[0]).__name__ == "FakeTensor"
    assert flat(torch.func.vmap(ours)(torch.stack((x, x))))[0].shape[0] == 2
    with torch.enable_grad():
        assert flat(ours(x))[0].requires_grad
    assert not taken
    ours(x)
    assert len(taken) == 1


@pytest.mark.parametrize("name", ["LSTM", pytest.param("GRU", marks=pytest.mark.exhaustive),
                                  pytest.param("RNN", marks=pytest.mark.exhaustive), "LSTMCell", "GRUCell"])
def test_zeros_without_memory(name: str, taken: list[Any]):
    """As autograd has them: an input, a state, a weight, a gradient. They ended the process."""
    exact, ours = pair(name)
    cell, count = name.endswith("Cell"), 2 if name.startswith("LSTM") else 1
    zero = torch._efficientzerotensor((2, 3, I) if cell else (2, 5, 3, I))[1]
    zeros = [torch._efficientzerotensor((2, 3, H) if cell else (2, 1, 3, H))[1]] * count
    x, state = torch.randn(zero.shape), tuple(zeros) if count > 1 else zeros[0]
    often(ours, x)
    agree(ours(zero), exact(torch.zeros(zero.shape).double()))
    often(ours, x, state)
    taken.clear()
    agree(ours(x, state), exact(x.double()))
    assert len(taken) == 1
    with torch.enable_grad():
        y, wanted = (flat(layer(given)) for layer, given in ((ours, x), (exact, x.double())))
        gradients = [torch._efficientzerotensor(y[0].shape), *map(torch.ones_like, y[1:])]
        found = torch.autograd.grad(y, [*ours.parameters()], gradients, materialize_grads=True)
        exact_ones = [torch.zeros_like(wanted[0]), *map(torch.ones_like, wanted[1:])]
        those = torch.autograd.grad(wanted, [*exact.parameters()], exact_ones, materialize_grads=True)
    for one, other in zip(found, those, strict=True):
        assert float((one - other).norm()) <= BACKWARD * float(other.norm())
    (weight,) = (n for n, _ in ours.named_parameters() if n.startswith("weight_hh"))
    getattr(ours, weight).data = torch._efficientzerotensor(getattr(ours, weight).shape)
    getattr(exact, weight).zero_()
    hx = torch.randn(zeros[0].shape)
    hx = (hx, hx) if count > 1 else hx
    agree(often(ours, x, hx), exact(x.double(), double(hx)))


@pytest.mark.parametrize("kind", ["RNN", "RNNCell"])
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("gone", ["x", "state", "weight"])
def test_memory_that_was_given_back(kind: str, gone: str, view: bool):
    """FSDP gives memory back between calls. Nothing is read where nothing is, also in calls like those before;
    the ``data_ptr()`` of a view is then its offset."""
    layer = getattr(ecornn.torch, kind)(I, H)
    x, state = torch.randn(2, 5, 4, I), torch.randn(2, 1, 4, H)
    x, state = (x[:, 0], state[:, 0]) if kind == "RNNCell" else (x, state)
    x, state = (x[1], state[1]) if view else (x[1].clone(), state[1].clone())
    weight = layer.weight_hh if kind == "RNNCell" else layer.weight_hh_l0
    if view:
        weight.data = torch.stack([weight.data, weight.data])[1]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            often(layer, x, state)
            tensor = {"x": x, "state": state, "weight": weight}[gone].detach()
            values, size = tensor.clone(), tensor.untyped_storage().size()
            tensor.untyped_storage().resize_(0)
            with pytest.raises((ArgumentError, RuntimeError)):  # some of PyTorch's own operations come first
                layer(x, state)
            tensor.untyped_storage().resize_(size)
            tensor.copy_(values)
            layer(x, state)


@pytest.mark.parametrize("name, value", [("num_layers", 1), ("bidirectional", False), ("bias", False),
                                         ("hidden_size", H + 1), ("input_size", I + 1)])
def test_attributes_that_change(name: str, value: Any, taken: list[Any]):
    """A layer is what its attributes say now, or it says that its weights are not."""
    layer, x = ecornn.torch.GRU(I, H, num_layers=2, bidirectional=True), torch.randn(5, 4, I)
    wanted, was = often(layer, x), getattr(layer, name)
    setattr(layer, name, value)
    with pytest.raises((WeightsError, ShapeError)):
        layer(x)
    setattr(layer, name, was)
    agree(layer(x), wanted)


@pytest.mark.parametrize("kind", ["GRU", "GRUCell"])
def test_a_weight_that_is_none(kind: str):
    layer = getattr(ecornn.torch, kind)(I, H)
    name, x = ("weight_hh" if kind == "GRUCell" else "weight_hh_l0"), torch.randn(5, 4, I)
    x = x[0] if kind == "GRUCell" else x
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            often(layer, x)
            weight = getattr(layer, name)
            setattr(layer, name, None)
            del weight
            refused(WeightsError, f"{name} .* is None", layer, x)
            layer = getattr(ecornn.torch, kind)(I, H)


# -- writes that leave no trace ------------------------------------------------------------------
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "halved": lambda weight: weight.data.mul_(0.5), "clamped": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "averaged": lambda weight: weight.data.copy_(0.9 * weight.data + 0.01),
    "by numpy": lambda weight: weight.detach().numpy().__imul__(0.5),
    "in inference mode": torch.inference_mode()(lambda weight: weight.mul_(2)),
    "by a vector": lambda weight: torch.nn.utils.vector_to_parameters(0.3 * weight.detach().reshape(-1), [weight]),
    "initialized": lambda weight: torch.nn.init.uniform_(weight, -0.2, 0.2)}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("weight", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_writes_that_leave_no_trace_are_seen_on_a_cpu(how: str, weight: str):
    """PyTorch counts only the last of these. Before and after a training step, too."""
    theirs, ours, x = case("GRU")
    suspects = torch.optim.SGD(ours.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        ours(x)
    for train in (False, True):
        if train:
            ours(x)[0].sum().backward()
            suspects.step()
            ours(x)[0].sum().backward()
        WRITES[how](getattr(ours, weight))
        load(theirs, ours)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                agree(ours(x), theirs(double(x)))


def test_a_frozen_weight_that_is_written_in_training_is_seen():
    theirs, ours, x = case("LSTM")
    ours.weight_ih_l0.requires_grad_(False)
    for _ in range(2):
        ours(x)[0].sum().backward()  # the others are suspects, and packed again alone
        ours.weight_ih_l0.data.mul_(0.5)
        load(theirs, ours)
        agree(ours(x), theirs(double(x)))


def slices(weight: torch.Tensor) -> torch.Tensor:
    room = torch.zeros([2 * size for size in weight.shape], dtype=weight.dtype)
    return room[tuple(slice(None, None, 2) for _ in weight.shape)].copy_(weight)


def turned(weight: torch.Tensor) -> torch.Tensor:
    return weight.T.contiguous().T if weight.dim() == 2 else slices(weight)


def negative(weight: torch.Tensor) -> torch.Tensor:
    return torch.complex(weight, -weight).conj().imag


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("laid", [slices, turned, negative])
def test_such_writes_to_weights_with_gaps_are_seen(laid: Callable[[Any], Any], dtype: torch.dtype):
    theirs, ours = pair("GRU")
    ours.to(dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    for name, weight in [*ours.named_parameters()]:
        setattr(ours, name, torch.nn.Parameter(laid(weight.detach())))
    with torch.no_grad():
        agree(ours(x), theirs(double(x)))
        for name in ("weight_hh_l0", "weight_ih_l0", "bias_hh_l0"):
            for how in ("halved", "clamped", "averaged"):
                WRITES[how](getattr(ours, name))
                load(theirs, ours)
                agree(ours(x), theirs(double(x)))


@pytest.mark.parametrize("how", ["plain", "slices", "turned"])
@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (32, 800), (1, 9), (9, 1), (5, 5), (1000, 3), (36, 24),
                                   (1024, 256), (700,), (4, 6, 10)], ids=str)
def test_a_write_to_any_row_or_column_is_seen(shape: tuple[int, ...], how: str):
    """A single one within as many looks as there are times PLACES in the larger axis, as many on end at once."""
    bias, weight = torch.zeros(3), torch.randn(shape)
    weight = {"plain": lambda w: w, "slices": slices, "turned": turned}[how](weight)
    sample, turns = Sample([bias, weight]), max(1, math.ceil(1.1 * max(shape) / PLACES))
    assert all(sample.holds() for _ in range(2 * turns)) and not sample.differs(1)
    for axis, size in enumerate(shape):
        for number in {0, size - 1, *map(int, torch.randint(size, (20,)))}:
            part = weight.select(axis, number)
            part += 1
            assert sample.differs(1) and not sample.differs(0) and not all(sample.holds() for _ in range(turns))
            part -= 1
            sample.renew()
    for first in map(int, torch.randint(max(1, shape[0] - turns), (20,))):
        weight[first:first + turns] += 1
        assert not sample.holds()
        sample.renew()
        assert sample.holds()


WRITE = """
import sys, numpy
values = numpy.memmap(sys.argv[1], "float32", "r+", shape=(256, 64))
rows = [*map(int, sys.argv[2].split(","))]
values[rows] = -2 * values[rows]
"""


def test_rows_that_another_process_writes_are_seen(tmp_path: Path):
    path = tmp_path / "weights"
    theirs, ours = torch.nn.LSTM(64, 64).double(), ecornn.torch.LSTM(64, 64)
    ours.weight_hh_l0.detach().numpy().tofile(path)
    ours.weight_hh_l0 = torch.nn.Parameter(torch.from_file(str(path), shared=True, size=256 * 64).view(256, 64))
    x = torch.randn(5, 2, 64)
    with torch.no_grad():
        ours(x)
        for rows in (np.arange(1, 36), np.random.default_rng(0).choice(256, 100, replace=False), np.array([77])):
            subprocess.run([sys.executable, "-c", WRITE, path, ",".join(map(str, rows))], check=True)
            load(theirs, ours)
            agree(ours(x), theirs(double(x)))


# -- weights that are new at each call -----------------------------------------------------------
def fresh(layer: torch.nn.Module, scale: float) -> dict[str, torch.Tensor]:
    return {name: scale * torch.randn(weight.shape) for name, weight in layer.named_parameters()}


def wide(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().double() for name, weight in weights.items()}


def bound(layers: Any) -> list[Any]:
    return [one for known in layers._bound.values() for one in known.values()]


@pytest.mark.parametrize(("name", "options"), [("GRU", {}), ("LSTM", {"proj_size": 5, "bias": False})])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_inference_packs_in_place(name: str, options: dict[str, Any]):
    theirs, ours, x = case(name, **options)
    found = engine.engine_of(ours)
    with torch.no_grad():
        for number in range(4):
            weights = fresh(ours, 0.3)
            if number == 2:  # rows with gaps, which are copied first
                weights["weight_hh_l0"] = slices(weights["weight_hh_l0"])
            agree(functional_call(ours, weights, (x,)), functional_call(theirs, wide(weights), (x.double(),)))
        (one,) = bound(found.inference)
        assert one.packs == 3
        weights |= {last: torch.randn(weight.shape) for last, weight in [*weights.items()][-1:]}  # no other one
        agree(functional_call(ours, weights, (x,)), functional_call(theirs, wide(weights), (x.double(),)))
        assert bound(found.inference) == [one] and one.packs == 4
        functional_call(ours, weights, (x,))
        assert one.packs == 4
        agree(ours(x), theirs(double(x)))


def test_training_packs_in_place():
    """Also where two calls with different weights are under way, as in meta-learning."""
    theirs, ours, x = case("GRU")
    found, graphs = engine.engine_of(ours.train().requires_grad_(False)), []
    for _ in range(3):
        weights = {k: v.requires_grad_() for k, v in fresh(ours, 0.3).items()}
        exact = {k: v.requires_grad_() for k, v in wide(weights).items()}
        graphs.append((functional_call(ours, weights, (x,))[0].square().sum(), weights,
                       functional_call(theirs, exact, (x.double(),))[0].square().sum(), exact))
    for loss, weights, wanted, exact in reversed(graphs):
        agree(torch.autograd.grad(loss, [*weights.values()]), torch.autograd.grad(wanted, [*exact.values()]), 2e-6)
    (one,) = bound(found.trained)
    assert one.packs == 4  # two forward, and two on the way back


def test_weights_that_do_not_fit_are_refused():
    """Their memory is not read: the addresses alone are given to the module."""
    _, ours, x = case("GRU")
    with torch.no_grad():
        wanted = ours(x)[0]
        for weights in (fresh(ours, 1), fresh(ours, 1)):
            weights["weight_hh_l0"] = weights["weight_hh_l0"][:-1]
            refused(ShapeError, "weight_hh_l0", functional_call, ours, weights, (x,))
        assert torch.equal(ours(x)[0], wanted)


@pytest.mark.parametrize("trains", [False, True])
def test_threads_with_weights_of_their_own(trains: bool):
    theirs, ours, x = case("GRU")
    sets = [fresh(ours, 0.3) for _ in range(4)]
    def run(weights: dict[str, torch.Tensor], exact: bool = False) -> torch.Tensor:
        """As functional_call, which writes into the module and is no function of threads."""
        with torch.set_grad_enabled(trains):
            leaf = (x.double() if exact else x.clone()).requires_grad_(trains)
            y = functional_call(theirs, wide(weights), (leaf,))[0] if exact else (
                torch.ops.ecornn.recurrent_forward(leaf, [], None, [*weights.values()], text_of(ours))[0] if trains else
                engine.engine_of(ours).run([*weights.values()], leaf, [], None)[0])
            return torch.autograd.grad(y.square().sum(), leaf)[0] if trains else y

    wanted = [run(weights, exact=True) for weights in sets]
    with ThreadPoolExecutor(4) as threads:
        for found, exact in zip(threads.map(lambda w: [run(w) for _ in range(40)], sets), wanted, strict=True):
            assert max(error(one, exact) for one in found) < (BACKWARD if trains else 1e-6)


@pytest.mark.parametrize("options", [
    {}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}, {"bias": False},
    {"num_layers": 2, "dropout": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_later_training_calls_have_the_same_gradients(name: str, options: dict[str, Any],
                                                      monkeypatch: pytest.MonkeyPatch):
    """They go the short way, but with dropout; in any memory, after any step, with states and without."""
    theirs, ours, x = case(name, **options)
    alike(theirs, ours, x)
    monkeypatch.setattr(type(ours), "_any_call", lambda *_: pytest.fail("the long way"))
    hx = states(name, 2 * theirs.num_layers if theirs.bidirectional else theirs.num_layers)
    for given in (None, hx):
        for laid in memories(x).values():
            with torch.no_grad():
                for weight in ours.parameters():
                    weight.mul_(0.9)
            load(theirs, ours)
            alike(theirs, ours, laid.detach(), given)
    if "dropout" in options:
        refused(pytest.fail.Exception, "the long way", ours.train(), x)


def test_later_training_calls_that_differ_go_the_long_way(monkeypatch: pytest.MonkeyPatch):
    _, ours, x = case("LSTM", num_layers=2)
    long, ways = type(ours)._any_call, list[int]()
    monkeypatch.setattr(type(ours), "_any_call", lambda *args: (ways.append(1), long(*args))[1])

    def goes_the_long_way(call: Callable[[], Any]) -> bool:
        ways.clear()
        with contextlib.suppress(DTypeError):
            call()
        return bool(ways)

    assert goes_the_long_way(lambda: ours(x)) and not goes_the_long_way(lambda: ours(x))
    assert goes_the_long_way(lambda: ours(x[:, 0])) and goes_the_long_way(lambda: ours(x[:, 0]))
    assert goes_the_long_way(lambda: ours(x[:-1])) and not goes_the_long_way(lambda: ours(x[:-1]))
    mine = {name: Marked(weight.detach()).requires_grad_() for name, weight in ours.named_parameters()}
    assert goes_the_long_way(lambda: functional_call(ours, mine, x))
    hook = ours.weight_hh_l0.register_post_accumulate_grad_hook(lambda _: None)
    assert goes_the_long_way(lambda: ours(x))
    hook.remove()
    assert not goes_the_long_way(lambda: ours(x))
    ours.double()
    assert goes_the_long_way(lambda: ours(x))


class Marked(torch.Tensor):
    """A tensor of a class of a user's own."""


@pytest.mark.parametrize("trains", [False, True])
def test_an_input_that_has_left_a_transform(trains: bool):
    """The transform leaves a wrapper behind, which nothing unwraps any more."""
    _, ours, x = case("GRU")
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(x)
    with torch.set_grad_enabled(trains):
        for _ in range(3):
            found, wanted = ours(left[0])[0], ours(x)[0]
            assert torch.equal(found, wanted)
            if trains:
                assert torch.equal(torch.autograd.grad(found.sum(), ours.weight_hh_l0)[0],
                                   torch.autograd.grad(wanted.sum(), ours.weight_hh_l0)[0])
