"""Calls on a GPU that are like an earlier one take the short way, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ecornn.torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]
I, H = 24, 40


def flat(result: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


def equal(one: Any, other: Any) -> bool:
    """Whether two results are, bit for bit."""
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "shape", "options"), [
    ("LSTM", (1, 4, I), {}), ("GRU", (5, 4, I), {"num_layers": 2, "bidirectional": True}), ("RNN", (5, I), {}),
    ("LSTM", (4, 50, I), {"batch_first": True}), ("LSTMCell", (4, I), {}), ("GRUCell", (I,), {})], ids=str)
def test_values(name: str, shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, taken: list[Any]):
    layer = getattr(ecornn.torch, name)(I, H, device="cuda", dtype=dtype, **options)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    short = not name.endswith("Cell")  # cells have gone the long way on an H100 so far
    for state in (None, layer(x) if name.endswith("Cell") else layer(x)[1]):
        given = () if state is None else (state,)
        wanted = layer(x, *given)
        for _ in range(3):
            layer(x, *given)
        taken.clear()
        assert equal(layer(x, *given), wanted) and len(taken) == short
        strided = torch.stack((x, x), -1)[..., 0]
        assert equal(layer(strided, *given), wanted) and len(taken) == 2 * short


def test_streams_weights_and_graphs(taken: list[Any]):
    layer = ecornn.torch.LSTM(I, H, device="cuda", dtype=torch.float16)
    x = torch.randn(9, 3, I, device="cuda", dtype=torch.float16)
    for _ in range(4):
        wanted = layer(x)
    taken.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        other = layer(x)
        torch.cuda.synchronize()
    assert equal(other, wanted) and len(taken) == 1
    layer.weight_hh_l0.mul_(2)
    changed = layer(x)
    assert len(taken) == 1 and not equal(changed, wanted)
    layer(x), layer(x)
    taken.clear()
    assert equal(layer(x), changed) and len(taken) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    assert len(taken) == 1
    graph.replay()
    torch.cuda.synchronize()
    assert equal(captured, changed)


def test_what_differs_goes_the_long_way(taken: list[Any]):
    layer = ecornn.torch.GRU(I, H, device="cuda")
    x = torch.randn(9, 3, I, device="cuda")
    for _ in range(4):
        layer(x)
    taken.clear()
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x)[0].dtype is torch.bfloat16
    with torch.enable_grad():
        assert layer(x)[0].requires_grad
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = not before
        layer(x)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert not taken
    layer(x)
    assert len(taken) == 1
