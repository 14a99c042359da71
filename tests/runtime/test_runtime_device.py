"""CUDA modules without a GPU: the sample's "device" memory is host memory that it keeps count of."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import runtime_sample as sample

import ecornn
import ecornn.host_gpu
from ecornn.errors import ArgumentError, DeviceError
from ecornn.runtime import Layer, Module
from ecornn.runtime.dlpack import CUDA, Block
from ecornn.runtime.memory import DeviceMemory

H, I, BATCH = sample.H, sample.I, sample.BATCH
WEIGHTS = sample.weights()


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
    for got, want in zip((y, *state), (wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=2.0**-23)
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
    layer, failures = module.bind(WEIGHTS), []

    def work(seed: int) -> None:
        try:
            for _ in range(15):
                x = sample.inputs(8, seed=seed)
                np.testing.assert_allclose(layer(x)[0], sample.expected(x, WEIGHTS)[0], rtol=2.0**-23)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert sample.stat(module.path, "most_running") > 1, "no two calls met: nothing was tested"


def on_device(module: Module, array: np.ndarray, number: int = 0) -> Block:
    """A foreign array on the "device", as another framework would hand it over by DLPack."""
    memory = DeviceMemory(module.library, number, array.nbytes)
    block = Block(memory, array.shape, str(array.dtype), (CUDA, number))
    block.bits()[...] = array.view(np.uint32)
    return block


def host(block: Block) -> np.ndarray:
    return block.bits().view(np.float32)


def run_on_device(module: Module, layer: Layer) -> None:
    x = sample.inputs(7)
    copies = sample.stat(module.path, "copies")
    y, state = layer(on_device(module, x))
    y2, _ = layer(on_device(module, x), state)
    assert sample.stat(module.path, "copies") == copies
    np.testing.assert_allclose(host(y), sample.expected(x, WEIGHTS)[0], rtol=2.0**-23)
    np.testing.assert_allclose(host(y2), sample.expected(x, WEIGHTS, [host(s) for s in state])[0], rtol=2.0**-23)


def test_device_arrays_are_not_copied(module: Module):
    layer = module.bind({name: on_device(module, value) for name, value in WEIGHTS.items()})
    run_on_device(module, layer)


def test_queues_do_not_share_a_workspace(module: Module, monkeypatch: pytest.MonkeyPatch):
    """The work of one stream may be under way when a call on another one starts."""
    from ecornn.runtime.dlpack import ForeignArrays

    layer, x, places = module.bind(WEIGHTS), on_device(module, sample.inputs(7)), {}
    for queue in (5, 6, 5, 6):
        monkeypatch.setattr(ForeignArrays, "queue", lambda self, device, queue=queue: queue)
        layer(x)
        assert sample.stat(module.path, "queue") == queue
        places.setdefault(queue, set()).add(sample.stat(module.path, "workspace"))
    assert all(len(seen) == 1 for seen in places.values()) and places[5] != places[6]


def test_a_graph_has_its_own_workspace(module: Module, monkeypatch: pytest.MonkeyPatch):
    """A replay may run beside later calls on the stream of the capture."""
    from ecornn.runtime.dlpack import ForeignArrays

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
