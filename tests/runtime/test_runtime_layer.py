"""A layer's calls: values, states, frameworks, what is refused before anything runs; on a CPU, and as on a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtime_sample as sample
import tvm_ffi

import ecornn
import ecornn.host_gpu
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ecornn.runtime import Layer, Module, memory
from ecornn.runtime.dlpack import CUDA, Block, ForeignArrays
from ecornn.runtime.memory import DeviceMemory

H, I, BATCH = sample.H, sample.I, sample.BATCH
WEIGHTS = sample.weights()


@pytest.fixture(scope="module")
def layer() -> Layer:
    return ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS, threads=3)


def runs(layer: Layer) -> int:
    return sample.stat(layer.module.path, "runs")


def agree(result: Any, wanted: Any, bits: int = 23) -> None:
    """Equal up to one rounding of the float64 result to ``bits`` of mantissa."""
    y, state = result
    for got, want in zip((y, *state), (wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-bits)


def at_once(count: int, turns: int, turn: Any) -> None:
    """``turn(thread, number)`` in so many threads, ``turns`` times in each."""
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(lambda n=n: [turn(n, number) for number in range(turns)]) for n in range(count)]:
            done.result()


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (1, BATCH), (6, 2), (40, BATCH), (3, 3)])
def test_values(layer: Layer, steps: int, batch: int):
    x = sample.inputs(steps, batch)
    y, state = layer(x)
    assert (y.shape, y.dtype) == ((steps, batch, H), np.float32)
    assert type(state) is tuple and [s.shape for s in state] == [(batch, H)] * 2
    agree((y, state), sample.expected(x, WEIGHTS))


def test_goes_on_where_the_last_call_stopped(layer: Layer):
    x = sample.inputs(9)
    _, state = layer(x[:4])
    kept = [s.copy() for s in state]
    result = layer(x[4:], state)
    agree(result, sample.expected(x[4:], WEIGHTS, kept))
    for before, now in zip(kept, state, strict=True):  # the caller's state is not written
        np.testing.assert_array_equal(before, now)


def test_zero_states_stay_zero(layer: Layer):
    x = sample.inputs(2)
    first, second = layer(x), layer(x)
    np.testing.assert_array_equal(first[0], second[0])


@pytest.mark.parametrize("make", [
    lambda x: np.asfortranarray(x), lambda x: np.repeat(x, 2, axis=2)[:, :, ::2], lambda x: x[::-1][::-1],
    lambda x: np.frombuffer(b"\0" * 4 + x.tobytes(), np.float32)[1:].reshape(x.shape),
    lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
], ids=["fortran", "strided", "reversed twice", "misaligned", "read-only"])
def test_any_layout_of_x_and_states(layer: Layer, make: Any):
    x, state = sample.inputs(), (sample.inputs(BATCH, H)[:, :, 0], sample.inputs(BATCH, H, 7)[:, :, 1])
    agree(layer(make(x), state), sample.expected(x, WEIGHTS, state))


def test_out(layer: Layer):
    x, out = sample.inputs(), np.full((6, BATCH, H), np.nan, np.float32)
    y, state = layer(x, out=out)
    assert y is out
    agree((out, state), sample.expected(x, WEIGHTS))


def test_threads_are_passed_on(layer: Layer):
    layer(sample.inputs())
    assert layer.threads == 3 and sample.stat(layer.module.path, "queue") == 3
    own = layer.module.bind(WEIGHTS)
    assert own.threads is not None and own.threads >= 1
    own(sample.inputs())
    assert sample.stat(layer.module.path, "queue") == own.threads


def test_calls_at_the_same_time_have_their_own_workspaces(layer: Layer):
    """The module fails a call whose workspace another one writes; T grows and shrinks meanwhile."""
    def turn(seed: int, n: int) -> None:
        x = sample.inputs(1 + (seed * 7 + n) % 11, seed=seed)
        agree(layer(x), sample.expected(x, WEIGHTS))

    at_once(6, 20, turn)
    assert sample.stat(layer.module.path, "most_running") > 1, "no two calls met: nothing was tested"


def test_the_workspace_is_kept(layer: Layer):
    fresh = layer.module.bind(WEIGHTS)
    places = set()
    for steps in (9, 9, 2, 5, 9):
        fresh(sample.inputs(steps))
        places.add(sample.stat(layer.module.path, "workspace"))
    assert len(places) == 1


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"x": np.zeros((6, I), np.float32)}, ShapeError, "x.shape=(6, 3)"),
    ({"x": np.zeros((0, 2, I), np.float32)}, ShapeError, "x.shape=(0, 2, 3)"),
    ({"x": np.zeros((6, 0, I), np.float32)}, ShapeError, "from 1 to 4"),
    ({"x": np.zeros((6, BATCH + 1, I), np.float32)}, ShapeError, "from 1 to 4"),
    ({"x": np.zeros((6, 2, I + 1), np.float32)}, ShapeError, "(T, B, 3)"),
    ({"x": np.broadcast_to(np.float32(0), (1 << 28, 4, I))}, ShapeError, "T up to"),
    ({"x": sample.inputs().astype(np.float64)}, DTypeError, "x.dtype='float64'"),
    ({"x": sample.inputs().astype(">f4")}, DTypeError, "x.dtype='>f4'"),
    ({"x": sample.inputs().tolist()}, ArgumentError, "x=<class 'list'>"),
    ({"x": None}, ArgumentError, "__dlpack__"),
    ({"state": np.zeros((2, BATCH, H), np.float32)}, ArgumentError, "state=<class 'numpy.ndarray'>"),
    ({"state": (np.zeros((BATCH, H), np.float32),)}, ShapeError, "len(state)=1"),
    ({"state": (np.zeros((BATCH, H), np.float32), np.zeros((1, H), np.float32))}, ShapeError, "state[1].shape=(1, 5)"),
    ({"state": (np.zeros((BATCH, H)), np.zeros((BATCH, H)))}, DTypeError, "state[0].dtype='float64'"),
    ({"state": (None, None)}, ArgumentError, "state[0]="),
    ({"out": np.zeros((6, BATCH, H + 1), np.float32)}, ShapeError, "out.shape=(6, 4, 6)"),
    ({"out": np.zeros((6, BATCH, H))}, DTypeError, "out.dtype"),
    ({"out": np.zeros((6, BATCH, 2 * H), np.float32)[:, :, ::2]}, ArgumentError, "strided"),
    ({"out": np.zeros(6 * BATCH * H + 1, np.float32)[1:].reshape(6, BATCH, H)}, ArgumentError, "misaligned"),
    ({"out": np.frombuffer(bytes(6 * BATCH * H * 4), np.float32).reshape(6, BATCH, H)}, ArgumentError, "read-only"),
    ({"out": [0.0]}, ArgumentError, "out=<class 'list'>"),
])
def test_bad_arguments_are_named_and_nothing_runs(layer: Layer, arguments: dict[str, Any], error: type[Exception],
                                                  words: str):
    before = runs(layer)
    with pytest.raises(error) as caught:
        layer(**({"x": sample.inputs()} | arguments))
    assert words in str(caught.value)
    assert runs(layer) == before


def test_out_must_not_be_memory_of_an_input(layer: Layer):
    memory = np.zeros(1 << 10, np.float32)
    x, out = memory[:6 * BATCH * I].reshape(6, BATCH, I), memory[64:64 + 6 * BATCH * H].reshape(6, BATCH, H)
    with pytest.raises(ArgumentError, match="memory of x"):
        layer(x, out=out)
    state = (memory[512:512 + BATCH * H].reshape(BATCH, H), np.zeros((BATCH, H), np.float32))
    out = memory[480:480 + 6 * BATCH * H].reshape(6, BATCH, H)
    with pytest.raises(ArgumentError, match="of a state"):
        layer(sample.inputs(), state, out=out)


def test_bfloat16_numpy():
    import ml_dtypes
    module = ecornn.load(sample.build(sample.manifest(dtype="bfloat16")))
    x = sample.inputs().astype(ml_dtypes.bfloat16)
    y, state = module.bind(WEIGHTS)(x)
    assert y.dtype == x.dtype
    agree((y, state), sample.expected(x, WEIGHTS), bits=8)
    with pytest.raises(DTypeError, match=r"x\.dtype='float32'"):
        module.bind(WEIGHTS)(sample.inputs())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_frameworks_through_dlpack(dtype: str):
    """tvm_ffi.Tensor has __dlpack__ and from_dlpack, and bfloat16 on a CPU, which NumPy has not."""
    import torch

    def foreign(array: np.ndarray) -> Any:
        return tvm_ffi.from_dlpack(torch.from_numpy(array).to(getattr(torch, dtype)))

    def numpy(tensor: Any) -> np.ndarray:
        return torch.from_dlpack(tensor).to(torch.float64).numpy()

    layer = ecornn.load(sample.build(sample.manifest(dtype=dtype))).bind(
        {name: foreign(value) for name, value in WEIGHTS.items()})
    rounded = {name: numpy(foreign(value)) for name, value in WEIGHTS.items()}
    x = foreign(sample.inputs(9))
    y, state = layer(x)
    assert {type(t) for t in (y, *state)} == {type(x)}
    wanted = sample.expected(numpy(x), rounded)
    agree((numpy(y), [numpy(s) for s in state]), wanted, bits=8 if dtype == "bfloat16" else 23)
    out = foreign(np.zeros((9, BATCH, H), np.float32))
    again, _ = layer(x, state, out=out)
    assert again is out
    agree((numpy(out), ()), (sample.expected(numpy(x), rounded, [numpy(s) for s in state])[0], ()),
          bits=8 if dtype == "bfloat16" else 23)
    with pytest.raises(ArgumentError, match=r"state\[0\]"):
        layer(x, (np.zeros((BATCH, H), np.float32),) * 2)


class Bare:
    """An array of a framework that hands arrays over, and takes none."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_results_for_frameworks_that_take_no_arrays_keep_their_memory(layer: Layer):
    """They are NumPy arrays of memory that nothing else holds."""
    inputs = [sample.inputs(5) for _ in range(20)]
    results = [layer(Bare(x)) for x in inputs]
    gc.collect()
    # would take the memory if it had been freed
    junk = [np.full(array.nbytes + memory.ALIGNMENT, 255, np.uint8) for y, state in results for array in (y, *state)]
    for x, result in zip(inputs, results, strict=True):
        agree(result, sample.expected(x, WEIGHTS))
    del junk


def test_a_frameworks_own_from_dlpack_is_found_below_its_top_package():
    """tvm.runtime.Tensor takes tvm_ffi.Tensor's place once TVM is imported."""
    code = f"""
import tvm.runtime, numpy as np, ecornn
layer = ecornn.load({str(sample.build(sample.manifest()))!r}).bind(
    {{"weight_l0": np.ones(({2 * H}, {I}), "f4"), "bias_l0": np.ones({H}, "f4")}})
y, state = layer(tvm.runtime.tensor(np.ones((2, 1, {I}), "f4")))
assert {{type(t) for t in (y, *state)}} == {{tvm.runtime.Tensor}}, (type(y), type(state[0]))
print(y.numpy()[0, 0, 0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == I + 1


def test_memory_handed_to_another_framework_outlives_everything():
    import torch

    from ecornn.runtime import dlpack

    layer = ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS)
    held = len(dlpack._exports)
    y, state = layer(tvm_ffi.from_dlpack(torch.from_numpy(sample.inputs(5))))
    wanted = sample.expected(sample.inputs(5), WEIGHTS)
    y = torch.from_dlpack(y)
    del layer, state
    np.zeros(1 << 16)  # would take the memory if it had been freed
    np.testing.assert_allclose(y.numpy(), wanted[0], rtol=2.0**-23)
    assert len(dlpack._exports) == held + 1
    del y
    assert len(dlpack._exports) == held


@pytest.fixture(scope="module")
def path() -> Path:
    return sample.build(sample.manifest(sample.GPU))


@pytest.fixture
def module(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    monkeypatch.setattr(ecornn.host_gpu, "detect", lambda index=0: sample.GPU)
    gc.collect()
    live = sample.stat(path, "live")
    yield ecornn.load(path)
    gc.collect()
    assert sample.stat(path, "live") == live, "device memory was not freed"


def test_numpy_goes_by_copies_and_waits(module: Module):
    layer = module.bind(WEIGHTS)
    assert layer.threads is None and "GPU 0" in repr(layer)
    x = sample.inputs(5, 3)
    wanted = sample.expected(x, WEIGHTS)
    copies, waits = sample.stat(module.path, "copies"), sample.stat(module.path, "synchronized")
    y, state = layer(x)
    assert sample.stat(module.path, "copies") == copies + 4  # x to the device; y, h, c back
    assert sample.stat(module.path, "synchronized") == waits + 1
    assert sample.stat(module.path, "queue") == 0
    agree((y, state), wanted)
    again = layer(x, state, out=np.empty_like(y))[0]
    np.testing.assert_allclose(again, sample.expected(x, WEIGHTS, state)[0], rtol=2.0**-23)


def test_device_memory_grows_with_the_sequence_only(module: Module):
    layer = module.bind(WEIGHTS)
    layer(sample.inputs(40))
    live = sample.stat(module.path, "live")
    for steps in (40, 3, 17, 40):
        layer(sample.inputs(steps))
    assert sample.stat(module.path, "live") == live
    layer(sample.inputs(400))  # the larger piece takes the smaller one's place
    assert sample.stat(module.path, "live") == live


def test_threads_do_not_share_device_memory(module: Module):
    layer = module.bind(WEIGHTS)

    def turn(seed: int, _: int) -> None:
        x = sample.inputs(8, seed=seed)
        agree(layer(x), sample.expected(x, WEIGHTS))

    at_once(4, 15, turn)
    assert sample.stat(module.path, "most_running") > 1, "no two calls met: nothing was tested"


def on_device(module: Module, array: np.ndarray, number: int = 0) -> Block:
    """A foreign array on the "device", as another framework would hand it over by DLPack."""
    memory = DeviceMemory(module.library, number, array.nbytes)
    block = Block(memory, array.shape, str(array.dtype), (CUDA, number))
    block.bits()[...] = array.view(np.uint32)
    return block


def host(block: Block) -> np.ndarray:
    return block.bits().view(np.float32)


def test_device_arrays_are_not_copied(module: Module):
    layer = module.bind({name: on_device(module, value) for name, value in WEIGHTS.items()})
    x = sample.inputs(7)
    copies = sample.stat(module.path, "copies")
    y, state = layer(on_device(module, x))
    y2, _ = layer(on_device(module, x), state)
    assert sample.stat(module.path, "copies") == copies
    np.testing.assert_allclose(host(y), sample.expected(x, WEIGHTS)[0], rtol=2.0**-23)
    np.testing.assert_allclose(host(y2), sample.expected(x, WEIGHTS, [host(s) for s in state])[0], rtol=2.0**-23)


def test_queues_do_not_share_a_workspace(module: Module, monkeypatch: pytest.MonkeyPatch):
    """The work of one stream may be under way when a call on another one starts."""
    layer, x, places = module.bind(WEIGHTS), on_device(module, sample.inputs(7)), {}
    for queue in (5, 6, 5, 6):
        monkeypatch.setattr(ForeignArrays, "queue", lambda self, device, queue=queue: queue)
        layer(x)
        assert sample.stat(module.path, "queue") == queue
        places.setdefault(queue, set()).add(sample.stat(module.path, "workspace"))
    assert all(len(seen) == 1 for seen in places.values()) and places[5] != places[6]


def test_a_graph_has_its_own_workspace(module: Module, monkeypatch: pytest.MonkeyPatch):
    """A replay may run beside later calls on the stream of the capture."""
    layer, x = module.bind(WEIGHTS), on_device(module, sample.inputs(7))
    layer(x)
    kept = sample.stat(module.path, "workspace")
    monkeypatch.setattr(ForeignArrays, "keeps_workspace", lambda self: False)
    layer(x)
    assert sample.stat(module.path, "workspace") != kept
    monkeypatch.undo()
    layer(x)
    assert sample.stat(module.path, "workspace") == kept


def test_wrong_places(module: Module):
    layer = module.bind(WEIGHTS)
    with pytest.raises(DeviceError, match=r"x.device='cuda:1' .* cuda:0"):
        layer(on_device(module, sample.inputs(), 1))
    with pytest.raises(ArgumentError, match=r"state\[0\]"):
        layer(sample.inputs(), (on_device(module, np.zeros((BATCH, H), np.float32)),) * 2)
    with pytest.raises(ArgumentError, match=r"threads=2 .* runs on a GPU"):
        module.bind(WEIGHTS, threads=2)
    cpu = ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS)
    with pytest.raises(DeviceError, match=r"x.device='cuda:0' .* cpu"):
        cpu(on_device(module, sample.inputs()))


def test_torch_tensors_must_be_on_the_gpu(module: Module):
    import torch
    with pytest.raises(DeviceError, match=r"x.device='cpu' .* cuda:0"):
        module.bind(WEIGHTS)(torch.from_numpy(sample.inputs()))
