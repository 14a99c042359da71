"""Training steps by C++ on a GPU: the same bits as by Python, with streams and CUDA graphs in between."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_cases import INPUT, LAYERS, RandomCall, by_python, check, is_native, pair

from ecornn.torch import native

SIZES = ((1, 1), (4, 3), (16, 2))
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    native.library.compile()
    yield
    native.library.functions, native.library.calls = None, 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("name", "options"), LAYERS, ids=[f"{name} {' '.join(o)}" for name, o in LAYERS])
def test_the_same_bits_of_random_calls(name: str, options: dict[str, Any], dtype: str) -> None:
    ours, plain = pair(name, options, "cuda", getattr(torch, dtype))
    native_calls = sum(check(ours, plain, RandomCall(seed, ours, SIZES)) for seed in range(40))
    assert native_calls > 10  # gradients of first states go by Python here


def test_streams_and_a_graph_in_between() -> None:
    """A fused optimizer, which counts no versions, in two streams; then a graph takes the layer of one of them."""
    ours, plain = pair("LSTM", {"num_layers": 2}, "cuda")
    optimizers = {layer: torch.optim.SGD(layer.parameters(), 0.05, fused=True) for layer in (ours, plain)}
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    kinds = []

    def step(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)[0]
        kinds.append(is_native(y))
        optimizers[layer].zero_grad(set_to_none=True)
        y.square().sum().backward()
        optimizers[layer].step()
        return y.detach()

    def compare(number: int) -> None:
        x = torch.randn(4, 3, INPUT, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[number // 3 % 2]):
            found = step(ours, x)
        torch.cuda.synchronize()
        with by_python():
            assert torch.equal(found, step(plain, x)), number
            with torch.no_grad():
                assert torch.equal(ours(x)[0], plain(x)[0]), number
        torch.cuda.synchronize()

    for number in range(18):
        compare(number)
    assert sum(kinds) > 8
    x, graph = torch.randn(4, 3, INPUT, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.stream(streams[0]):
        for _ in range(3):
            ours(x)[0].sum().backward()
    torch.cuda.synchronize()
    ours.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=streams[0]):
        y = ours(x)[0]
        y.sum().backward()
    assert not is_native(y)
    y = y.detach()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = torch.autograd.grad(plain(x)[0].sum(), plain.parameters())
    for parameter, gradient in zip(ours.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    ours.zero_grad(set_to_none=True)
    for number in range(6):
        compare(number)
    graph.replay()
    torch.cuda.synchronize()
    with by_python():
        assert torch.equal(y, plain(x)[0])


def test_a_backward_pass_that_is_captured_alone_goes_by_python() -> None:
    ours, plain = pair("GRU", {}, "cuda")
    x, graph, stream = torch.randn(4, 3, INPUT, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(ours(x)[0].sum(), ours.parameters())
        y = ours(x)[0]
        dy = torch.ones_like(y)
    assert is_native(y)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = torch.autograd.grad(y, ours.parameters(), dy)
    graph.replay()
    torch.cuda.synchronize()
    with by_python():
        assert all(map(torch.equal, found, torch.autograd.grad(plain(x)[0].sum(), plain.parameters())))


# PyTorch says so of any weights that graphs on two streams share
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_threads_share_a_layer() -> None:
    layer, plain = pair("GRU", {}, "cuda")
    results: list[Any] = []

    def train(number: int) -> None:
        generator = torch.Generator("cuda").manual_seed(number)
        with torch.cuda.stream(torch.cuda.Stream()) if number % 2 else contextlib.nullcontext():
            for _ in range(40):
                x = torch.randn(4, 3, INPUT, device="cuda", generator=generator)
                found = torch.autograd.grad(layer(x)[0].square().sum(), layer.parameters())
                torch.cuda.current_stream().synchronize()
                results.append((x, found))

    train(0)
    threads = [threading.Thread(target=train, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    with by_python():
        for x, found in results:
            expected = torch.autograd.grad(plain(x)[0].square().sum(), plain.parameters())
            assert all(map(torch.equal, found, expected))
