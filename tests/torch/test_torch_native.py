"""Training steps by C++ (native.cc): the same bits as by Python, whoever comes in between."""

import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import HIDDEN, INPUT, LAYERS, RandomCall, by_python, check, is_native, pair

import ecornn.torch
from ecornn.torch import native

SIZES = ((1, 1), (4, 3), (7, 2))


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    native.library.compile()
    yield
    native.library.functions, native.library.calls = None, 0


def called(layer: Any, steps: int = 4, batch: int = 3, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y of a call by C++."""
    shape = (batch, steps) if layer.batch_first else (steps, batch)
    for _ in range(3):
        x = torch.randn(*shape, INPUT, **options)
        y = layer(x)[0]
    assert is_native(y)
    return x, y


@pytest.mark.parametrize(("name", "options"), LAYERS, ids=[f"{name} {' '.join(o)}" for name, o in LAYERS])
def test_the_same_bits_of_random_calls(name: str, options: dict[str, Any]) -> None:
    ours, plain = pair(name, options)
    native_calls = sum(check(ours, plain, RandomCall(seed, ours, SIZES)) for seed in range(60))
    assert native_calls > 40


def test_training_with_evaluation_in_between() -> None:
    ours, plain = pair("LSTM", {})
    both = [(layer, torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)) for layer in (ours, plain)]
    for step in range(12):
        x = torch.randn(4, 3, INPUT)
        results = []
        for layer, optimizer in both:
            with contextlib.nullcontext() if layer is ours else by_python():
                y = layer(x)[0]
                optimizer.zero_grad()
                y.square().sum().backward()
                optimizer.step()
                if step % 3 == 1:
                    layer.weight_hh_l0.data.mul_(0.9)  # counts no version
                with torch.no_grad():
                    results += [y, layer(x)[0]]
                assert (layer is ours and step > 1) == is_native(y)
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_two_graphs_with_other_weights_in_between() -> None:
    """The first graph's backward pass finds weights packed that are not its own."""
    ours, plain = pair("GRU", {})
    called(ours)
    gradients = []
    for layer in (ours, plain):
        with contextlib.nullcontext() if layer is ours else by_python():
            torch.manual_seed(1)
            x = torch.randn(4, 3, INPUT)
            first = layer(x)[0]
            before = layer.weight_hh_l0.detach().clone()
            layer.weight_hh_l0.data.add_(1.0)
            second = layer(x)[0]
            layer.weight_hh_l0.data.copy_(before)
            for y in (first, second, layer(x)[0]):
                gradients.append(torch.autograd.grad(y.sum(), layer.parameters()))
    for one, other in zip(gradients[:3], gradients[3:], strict=True):
        assert all(map(torch.equal, one, other))


def test_changed_weights_are_refused_in_a_backward_pass() -> None:
    ours, _ = pair("GRU", {})
    _, y = called(ours)
    with torch.no_grad():
        ours.weight_hh_l0.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    _, y = called(ours)
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_used_twice() -> None:
    ours, _ = pair("GRU", {})
    _, y = called(ours)
    first = torch.autograd.grad(y.sum(), ours.parameters(), retain_graph=True)
    second = torch.autograd.grad(y.sum(), ours.parameters())
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients_of_gradients_and_several_at_once(batch_first: bool) -> None:
    ours, plain = pair("GRU", {"batch_first": batch_first})
    x, y = called(ours, requires_grad=True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    again = torch.autograd.grad(dx.square().sum(), [x, *ours.parameters()])
    with by_python():
        (dx,) = torch.autograd.grad(plain(x)[0].sum(), x, create_graph=True)
        wanted = torch.autograd.grad(dx.square().sum(), [x, *plain.parameters()])
    assert all(map(torch.equal, again, wanted))
    y = ours(x)[0]
    assert is_native(y)
    many = torch.randn(5, *y.shape)
    (found,) = torch.autograd.grad(y, x, many, is_grads_batched=True)
    with by_python():
        (expected,) = torch.autograd.grad(plain(x)[0], x, many, is_grads_batched=True)
    assert torch.equal(found, expected)


def test_what_is_saved_goes_through_hooks() -> None:
    ours, plain = pair("LSTM", {"num_layers": 2})
    x, _ = called(ours)
    moved: list[torch.Size] = []

    def away(tensor: torch.Tensor) -> Any:
        moved.append(tensor.shape)
        return torch.cat([tensor.detach().flatten()[:1], tensor.detach().flatten()]), tensor.shape

    with torch.autograd.graph.saved_tensors_hooks(away, lambda kept: kept[0][1:].view(kept[1])):  # not aligned
        y = ours(x)[0]
    assert is_native(y) and len(moved) == 3 + 8
    found = torch.autograd.grad(y.sum(), ours.parameters())
    with by_python():
        assert all(map(torch.equal, found, torch.autograd.grad(plain(x)[0].sum(), plain.parameters())))
    again = torch.utils.checkpoint.checkpoint(lambda x: ours(x)[0], x, use_reentrant=False)
    assert all(map(torch.equal, found, torch.autograd.grad(again.sum(), ours.parameters())))


def test_other_weights_go_by_python() -> None:
    ours, plain = pair("GRU", {})
    x, _ = called(ours)
    with torch.no_grad():
        for layer in (ours, plain):
            layer.weight_hh_l0.data = layer.weight_hh_l0.data.clone() + 1  # elsewhere
    y = ours(x)[0]
    with by_python():
        assert not is_native(y) and torch.equal(y, plain(x)[0])
    called(ours)  # a new step
    ours.weight_hh_l0.requires_grad_(False)
    assert not is_native(ours(x)[0])
    ours.weight_hh_l0.requires_grad_(True)
    given = {name: w.detach().clone().requires_grad_() for name, w in ours.named_parameters()}
    y = torch.func.functional_call(ours, given, x)[0]
    assert torch.equal(y, ours(x)[0]) and given["weight_hh_l0"].grad is None
    y.sum().backward()
    assert given["weight_hh_l0"].grad is not None and ours.weight_hh_l0.grad is None


@pytest.mark.parametrize("shared", [False, True])
def test_threads(shared: bool) -> None:
    """Threads train layers of their own, or share one: each has its own gradients."""
    layer, plain = pair("GRU", {})
    called(layer)
    wrong: list[Any] = []

    def train(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        own = layer if shared else copy.deepcopy(layer)
        for _ in range(60):
            x = torch.randn(4, 3, INPUT, generator=generator)
            found = torch.autograd.grad(own(x)[0].square().sum(), own.parameters())
            results.append((x, found))

    results: list[Any] = []
    threads = [threading.Thread(target=train, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 240
    with by_python():
        for x, found in results:
            expected = torch.autograd.grad(plain(x)[0].square().sum(), plain.parameters())
            wrong += [x] * (not all(map(torch.equal, found, expected)))
    assert not wrong


def test_nothing_is_left_of_a_layer() -> None:
    ours, _ = pair("GRU", {})
    _, y = called(ours)
    (call,) = [c for c in ecornn.torch.engine.engine_of(ours).calls.values() if c is not None]
    (step,) = call._native.values()
    layer, gone = weakref.ref(ours), weakref.ref(step)
    del ours, call, step
    gc.collect()
    assert gone() is not None  # the graph needs it
    y.sum().backward()
    del y
    gc.collect()
    assert layer() is None and gone() is None


def test_hidden_layers_of_a_long_chain_end_without_recursion() -> None:
    ours, _ = pair("GRU", {})
    called(ours, 1, 1)
    x = torch.randn(1, 1, INPUT)
    state = torch.zeros(1, 1, HIDDEN)
    for _ in range(5000):
        _, state = ours(x, state)
    state.sum().backward()


PROGRAM = """
import time
import torch
import ecornn.torch
from ecornn.torch import compiling, native

compiling.NICENESS = 0  # other tests leave nothing to who stands behind them
layer = torch.nn.GRU(5, 6)
ecornn.torch.replace(layer, wait=True)
begin = time.monotonic()
while not (y := layer(torch.randn(4, 3, 5))[0]).grad_fn.name() == "RecurrentBackward":
    y.sum().backward()
    if native.library.calls > native.CALLS:
        time.sleep(0.01)
    assert time.monotonic() - begin < 600 and (wanted or native.library.calls < 2 * native.CALLS)
y.sum().backward()
print("native after", native.library.calls, "calls")
"""


def test_a_program_gets_it_in_the_background() -> None:
    said = subprocess.run([sys.executable, "-c", f"wanted = True\n{PROGRAM}"], capture_output=True, text=True,
                          check=True, timeout=900)
    assert int(said.stdout.split()[2]) > native.CALLS


def test_the_variable_turns_it_off() -> None:
    said = subprocess.run([sys.executable, "-c", f"wanted = False\n{PROGRAM}"], capture_output=True, text=True,
                          env={**os.environ, native.VARIABLE: "0"}, check=False, timeout=900)
    assert "AssertionError" in said.stderr


def test_without_a_compiler_steps_go_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def call(self, *_: Any) -> Any:
            raise RuntimeError("no C++ compiler")

    fresh = native.Library()
    fresh.run(Fails())  # type: ignore[arg-type]
    assert fresh.functions is None and fresh() is None


def test_nothing_is_compiled_without_a_cache_that_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh, new = native.Library(), tmp_path / "not" / "yet"
    monkeypatch.setenv("ECORNN_CACHE", str(new))
    assert fresh.wanted()
    monkeypatch.setattr(native.os, "access", lambda path, mode: path not in (tmp_path, new))
    assert not fresh.wanted()
    monkeypatch.setenv("ECORNN_CACHE", "off")
    assert not fresh.wanted()
