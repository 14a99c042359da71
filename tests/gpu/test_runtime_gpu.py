"""On a GPU: torch's stream and allocator, CUDA graphs, NumPy, the short way, and more bytes than 32 bits count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import relative
from torch_values import flat

import ecornn
import ecornn.torch
from ecornn.errors import DeviceError
from ecornn.numpy_reference import random_weights
from ecornn.runtime import Module, torch_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]
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
    layer, x = module.bind({n: torch.from_numpy(w).cuda() for n, w in WEIGHTS.items()}), inputs()
    y, state = layer(torch.from_numpy(x).cuda())
    assert y.device.type == "cuda"
    check((y, state), x)
    check(layer(torch.from_numpy(x).cuda(), state), x, tuple(s.cpu().numpy() for s in state))


def test_numpy(module: Module):
    layer = module.bind(WEIGHTS)
    for steps, rows in ((3, B), (40, B), (40, 1), (T, 3)):
        x = inputs(steps)[:, :rows].copy()
        check(layer(x), x)


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
    layer, x = module.bind(WEIGHTS), torch.from_numpy(inputs()).cuda()
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
    made: list[int] = []
    memory = torch_arrays.TorchMemory
    monkeypatch.setattr(torch_arrays, "TorchMemory", lambda *a: made.append(a[1]) or memory(*a))
    layer(x)
    first = len(made)
    for _ in range(5):
        layer(x)
    assert len(made) == first, "a workspace is made once for one T"
    free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for _ in range(5):
        layer(x)
    assert torch.cuda.mem_get_info()[0] - free == held - torch.cuda.memory_reserved()


def test_tensors_elsewhere(module: Module):
    with pytest.raises(DeviceError, match=r"x\.device='cpu'"):
        module.bind(WEIGHTS)(torch.from_numpy(inputs()))


def test_save_and_load(module: Module, tmp_path: Path):
    module.save(tmp_path / "again.so")
    check(ecornn.load(tmp_path / "again.so").bind(WEIGHTS)(inputs()), inputs())


LIBRARY = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}


@pytest.mark.parametrize(("cell", "T", "B", "H"), [
    ("lstm", 100, 65536, 64),  # many blocks in turns
    ("gru", 80, 65536, 128),
    ("rnn_tanh", 4000, 2048, 256),  # groups of blocks
    ("lstm", 2000, 512, 512),
])
def test_the_longest_call(cell: str, T: int, B: int, H: int):
    """Rows do not depend on each other: the first, the last, some between tell whether offsets are right."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of GPU memory")
    torch.manual_seed(0)
    library = LIBRARY[cell](H, H).cuda().half()
    module = ecornn.compile(cell, hidden=H, batch=B, seq=T, dtype="float16", target="cuda")
    layer = module.bind({k: v.detach() for k, v in library.named_parameters()})
    T = module.manifest.longest
    assert max(b.extent.at(T) for b in module.manifest.buffers) > (1 << 31) * 0.95
    x = torch.randn(T, B, H, device="cuda", dtype=torch.float16)
    y = torch.full_like(x, float("nan"))
    rows = torch.tensor([0, 1, B // 3, B // 2, B - 9, B - 2, B - 1], device="cuda")
    with torch.no_grad():
        layer(x, out=y)
        some, found = x[:, rows].contiguous(), y[:, rows].double().cpu().numpy()
        rounded = library(some)[0].double().cpu().numpy()
        expected = library.double()(some.double())[0].cpu().numpy()
    assert torch.isfinite(y[-1]).all() and relative(found, expected) <= 2 * relative(rounded, expected) + 1e-6


WIDTH, UNITS = 24, 40


def equal(one: Any, other: Any) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "shape", "options"), [
    ("LSTM", (1, 4, WIDTH), {}), ("GRU", (5, 4, WIDTH), {"num_layers": 2, "bidirectional": True}),
    ("RNN", (5, WIDTH), {}), ("LSTM", (4, 50, WIDTH), {"batch_first": True}), ("LSTMCell", (4, WIDTH), {}),
    ("GRUCell", (WIDTH,), {})], ids=str)
def test_values(name: str, shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, taken: list[Any]):
    layer = getattr(ecornn.torch, name)(WIDTH, UNITS, device="cuda", dtype=dtype, **options)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    for state in (None, layer(x) if name.endswith("Cell") else layer(x)[1]):
        given = () if state is None else (state,)
        wanted = layer(x, *given)
        for _ in range(3):
            layer(x, *given)
        taken.clear()
        assert equal(layer(x, *given), wanted) and len(taken) == 1
        assert equal(layer(torch.stack((x, x), -1)[..., 0], *given), wanted) and len(taken) == 2


def test_streams_weights_and_graphs(taken: list[Any]):
    layer = ecornn.torch.LSTM(WIDTH, UNITS, device="cuda", dtype=torch.float16)
    x = torch.randn(9, 3, WIDTH, device="cuda", dtype=torch.float16)
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
    layer = ecornn.torch.GRU(WIDTH, UNITS, device="cuda")
    x = torch.randn(9, 3, WIDTH, device="cuda")
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
