"""On a GPU: torch's stream and allocator, CUDA graphs, and NumPy by way of copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ecornn
from ecornn.errors import DeviceError
from ecornn.numpy_reference import random_weights
from ecornn.runtime import Module

pytestmark = pytest.mark.gpu
T, B, I, H = 12, 4, 48, 64
WEIGHTS = random_weights("lstm", I, H)
LIMIT = 2e-5  # relative, of float32 with float32 accumulation over 12 steps


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    path = tmp_path_factory.mktemp("gpu") / "lstm.so"
    return ecornn.compile("lstm", hidden=H, input=I, batch=B, seq=T, dtype="float32", target="cuda", out=path)


def inputs(steps: int = T, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((steps, B, I)).astype(np.float32)


def check(result: Any, x: np.ndarray, state: Any = None) -> None:
    y, after = result
    wanted, last = ecornn.reference("lstm", x, WEIGHTS, state)
    for got, want in zip((y, *after), (wanted, *last), strict=True):
        got = got.cpu().numpy() if isinstance(got, torch.Tensor) else got
        assert np.linalg.norm(got - want) <= LIMIT * np.linalg.norm(want)


def test_torch(module: Module):
    layer = module.bind({n: torch.from_numpy(w).cuda() for n, w in WEIGHTS.items()})
    x = inputs()
    y, state = layer(torch.from_numpy(x).cuda())
    assert y.device.type == "cuda"
    check((y, state), x)
    check(layer(torch.from_numpy(x).cuda(), state), x, tuple(s.cpu().numpy() for s in state))


def test_numpy(module: Module):
    layer = module.bind(WEIGHTS)
    for steps in (3, 40, T):
        check(layer(inputs(steps)), inputs(steps))


def test_work_follows_the_current_stream(module: Module):
    """The input is written on a side stream, behind work that takes long: any other stream reads too soon."""
    layer, x = module.bind(WEIGHTS), inputs()
    layer(torch.zeros(T, B, I, device="cuda"))
    source, target = torch.from_numpy(x).cuda(), torch.zeros(T, B, I, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        target.copy_(source)
        result = layer(target)
        assert not side.query(), "the call waited for its stream"
    side.synchronize()
    check(result, x)


def test_a_cuda_graph(module: Module):
    """Captured once, replayed on new inputs, beside calls that are not in the graph."""
    layer = module.bind(WEIGHTS)
    x = torch.from_numpy(inputs()).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(x)
    for seed in (1, 2):
        x.copy_(torch.from_numpy(inputs(seed=seed)))
        graph.replay()
        other = layer(torch.from_numpy(inputs(seed=9)).cuda())
        torch.cuda.synchronize()
        check(result, inputs(seed=seed))
        check(other, inputs(seed=9))


def test_no_memory_but_torchs(module: Module, monkeypatch: pytest.MonkeyPatch):
    layer, x = module.bind(WEIGHTS), torch.from_numpy(inputs()).cuda()
    from ecornn.runtime import torch_arrays

    made: list[int] = []
    memory = torch_arrays.TorchMemory
    monkeypatch.setattr(torch_arrays, "TorchMemory", lambda *a: made.append(a[1]) or memory(*a))
    layer(x)
    first = len(made)
    for _ in range(5):
        layer(x)
    assert len(made) == first, "a workspace is made once for one T"
    free = torch.cuda.mem_get_info()[0]
    held = torch.cuda.memory_reserved()
    for _ in range(5):
        layer(x)
    assert torch.cuda.mem_get_info()[0] - free == held - torch.cuda.memory_reserved()


def test_tensors_elsewhere(module: Module):
    with pytest.raises(DeviceError, match=r"x\.device='cpu'"):
        module.bind(WEIGHTS)(torch.from_numpy(inputs()))


def test_save_and_load(module: Module, tmp_path: Path):
    module.save(tmp_path / "again.so")
    check(ecornn.load(tmp_path / "again.so").bind(WEIGHTS)(inputs()), inputs())
