"""A layer's calls: values, states, frameworks, what is refused before anything runs; on a CPU, and as on a GPU."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import runtime_sample as sample
import torch
import tvm_ffi
from refusals import refused

import ecornn
import ecornn.host_gpu
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ecornn.runtime import Layer, Module, dlpack, memory
from ecornn.runtime.columns import place_resets
from ecornn.runtime.dlpack import CUDA, Block, ForeignArrays
from ecornn.runtime.memory import DeviceMemory
from ecornn.runtime.torch_arrays import TorchMemory

H, I, BATCH = sample.H, sample.I, sample.BATCH
WEIGHTS = sample.weights()


@pytest.fixture(scope="module")
def layer() -> Layer:
    return ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS, threads=3)


def at_once(layer: Layer, count: int, turns: int, steps: Callable[[int, int], int]) -> None:
    def calls(seed: int) -> None:
        for turn in range(turns):
            x = sample.inputs(steps(seed, turn), seed=seed)
            agree(layer(x), sample.expected(x, WEIGHTS))
    with ThreadPoolExecutor(count) as threads:
        assert len([*threads.map(calls, range(count))]) == count
    assert sample.stat(layer.module.path, "most_running") > 1, "no two calls met: nothing was tested"


def agree(result: Any, wanted: Any, bits: int = 23) -> None:
    """Equal up to one rounding of the float64 result to ``bits`` of mantissa."""
    y, state = result
    for got, want in zip((y, *state), (wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-bits)


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
    agree(layer(x[4:], state), sample.expected(x[4:], WEIGHTS, kept))
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
    at_once(layer, 6, 20, lambda seed, turn: 1 + (seed * 7 + turn) % 11)


def test_the_workspace_is_kept(layer: Layer):
    fresh, places = layer.module.bind(WEIGHTS), set()
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
    ({"x": sample.inputs().tolist()}, ArgumentError, "x=<class 'list'>"), ({"x": None}, ArgumentError, "__dlpack__"),
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
    ({"out": [0.0]}, ArgumentError, "out=<class 'list'>")])
def test_bad_arguments_are_named_and_nothing_runs(layer, arguments, error, words):
    before = sample.stat(layer.module.path, "runs")
    with pytest.raises(error) as caught:
        layer(**({"x": sample.inputs()} | arguments))
    assert words in str(caught.value) and sample.stat(layer.module.path, "runs") == before


def test_out_must_not_be_memory_of_an_input(layer: Layer):
    memory = np.zeros(1 << 10, np.float32)
    x, out = memory[:6 * BATCH * I].reshape(6, BATCH, I), memory[64:64 + 6 * BATCH * H].reshape(6, BATCH, H)
    refused(ArgumentError, "memory of x", layer, x, out=out)
    state = (memory[512:512 + BATCH * H].reshape(BATCH, H), np.zeros((BATCH, H), np.float32))
    out = memory[480:480 + 6 * BATCH * H].reshape(6, BATCH, H)
    with pytest.raises(ArgumentError, match="of a state"):
        layer(sample.inputs(), state, out=out)


def test_bfloat16_numpy():
    module = ecornn.load(sample.build(sample.manifest(dtype="bfloat16")))
    x = sample.inputs().astype(ml_dtypes.bfloat16)
    y, state = module.bind(WEIGHTS)(x)
    assert y.dtype == x.dtype
    agree((y, state), sample.expected(x, WEIGHTS), bits=8)
    with pytest.raises(DTypeError, match=r"x\.dtype='float32'"):
        module.bind(WEIGHTS)(sample.inputs())


@pytest.mark.parametrize("framework", [tvm_ffi.from_dlpack, torch.nn.Parameter], ids=["tvm_ffi", "torch"])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 23), ("bfloat16", 8)])
def test_other_frameworks(framework: Callable[[torch.Tensor], Any], dtype: str, bits: int):
    """tvm_ffi.Tensor has bfloat16, which NumPy has not. Weights may be parameters; results take no gradients."""
    def foreign(array: np.ndarray) -> Any:
        return framework(torch.from_numpy(array).to(getattr(torch, dtype)))

    def numpy(tensor: Any) -> np.ndarray:
        return torch.from_dlpack(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor).double().numpy()
    given = {name: foreign(value) for name, value in WEIGHTS.items()}
    layer = ecornn.load(sample.build(sample.manifest(dtype=dtype))).bind(given)
    rounded, x, out = {name: numpy(value) for name, value in given.items()}, *map(
        foreign, (sample.inputs(9), np.zeros((9, BATCH, H), np.float32)))
    with torch.no_grad():
        y, state = layer(x)
        again, last = layer(x, state, out=out)
    states = [numpy(s) for s in state]
    assert {type(t) for t in (y, *state)} == {torch.Tensor if framework is torch.nn.Parameter else type(x)}
    assert again is out and not any(getattr(t, "requires_grad", False) for t in (y, *state, *last))
    agree((numpy(y), states), sample.expected(numpy(x), rounded), bits)
    agree((numpy(out), map(numpy, last)), sample.expected(numpy(x), rounded, states), bits)
    with pytest.raises(ArgumentError, match=r"state\[0\]"), torch.no_grad():
        layer(x, (np.zeros((BATCH, H), np.float32),) * 2)


@pytest.mark.parametrize(("first", "kind"), [("import tvm.runtime", "tvm.runtime.tensor"),
                                             ("sys.modules['torch'] = None", "np.asarray")], ids=["TVM", "no torch"])
def test_frameworks_of_another_process(first: str, kind: str):
    """tvm.runtime.Tensor takes tvm_ffi.Tensor's place once TVM is imported. Nothing of the runtime asks for torch."""
    code = f"""
import sys
{first}
import numpy as np, ecornn
layer = ecornn.load({str(sample.build(sample.manifest()))!r}).bind(
    {{"weight_l0": np.ones(({2 * H}, {I}), "f4"), "bias_l0": np.ones({H}, "f4")}})
x = {kind}(np.ones((2, 1, {I}), "f4"))
y, state = layer(x)
assert {{type(t) for t in (y, *state)}} == {{type(x)}}, (type(y), type(state[0]))
assert np.from_dlpack(y)[0, 0, 0] == {I + 1}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Bare:
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


def test_memory_handed_to_another_framework_outlives_everything():
    layer, held = ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS), len(dlpack._exports)
    y, state = layer(tvm_ffi.from_dlpack(torch.from_numpy(sample.inputs(5))))
    wanted, y = sample.expected(sample.inputs(5), WEIGHTS), torch.from_dlpack(y)
    del layer, state
    np.zeros(1 << 16)  # would take the memory if it had been freed
    np.testing.assert_allclose(y.numpy(), wanted[0], rtol=2.0**-23)
    assert len(dlpack._exports) == held + 1
    del y
    assert len(dlpack._exports) == held


def test_a_contiguous_aligned_tensor_is_not_copied(layer: Layer, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(layer, "_run", lambda *a: seen.append(a))
    x, state, out = torch.zeros(6, BATCH, I), (torch.zeros(BATCH, H), torch.zeros(BATCH, H)), torch.zeros(6, BATCH, H)
    _, after = layer(x, state, out=out)
    layer(torch.zeros(BATCH, 6, I).transpose(0, 1), state)
    layer(torch.zeros(6 * BATCH * I + 1)[1:].reshape(6, BATCH, I), state)
    names = [b.name for b in layer.manifest.buffers]
    given = dict(zip(names, seen[0][4:], strict=True))
    assert given["x"] == x.data_ptr() and given["y"] == out.data_ptr()
    assert (given["h_in"], given["c_in"]) == tuple(s.data_ptr() for s in state)
    assert (given["h_out"], given["c_out"]) == tuple(s.data_ptr() for s in after)
    assert all(arguments[4 + names.index("x")] % 16 == 0 for arguments in seen)


def test_strided_and_misaligned_tensors(layer: Layer):
    x = sample.inputs()
    strided = torch.from_numpy(np.ascontiguousarray(x.transpose(1, 0, 2))).transpose(0, 1)
    shifted = torch.from_numpy(np.concatenate([[0], x.ravel()]).astype(np.float32))[1:].reshape(x.shape)
    assert shifted.data_ptr() % 16
    for tensor in (strided, shifted):
        agree(layer(tensor), sample.expected(x, WEIGHTS))


def test_negated_views():
    x, weights = torch.from_numpy(sample.inputs()), {n: torch.from_numpy(v) for n, v in WEIGHTS.items()}
    state = torch.rand(BATCH, H), torch.rand(BATCH, H)
    layer = ecornn.load(sample.build(sample.manifest())).bind({n: torch._neg_view(-v) for n, v in weights.items()})
    result = layer(torch._neg_view(-x), tuple(torch._neg_view(-s) for s in state))
    agree(result, sample.expected(sample.inputs(), WEIGHTS, [s.numpy() for s in state]))
    refused(ArgumentError, "out=", layer, x, out=torch._neg_view(torch.zeros(len(x), BATCH, H)))


def test_tensors_that_are_refused(layer: Layer):
    x = torch.from_numpy(sample.inputs())
    for kind, words, *given in (
            (ArgumentError, r"x.requires_grad=True", x.clone().requires_grad_()),
            (DTypeError, r"x\.dtype='float64'", x.double()),
            (DeviceError, r"x\.device='meta'", x.to("meta")), (ArgumentError, r"x\.layout", x.to_sparse()),
            (ArgumentError, r"state\[0\]=<class 'numpy.ndarray'>", x, (np.zeros((BATCH, H), np.float32),) * 2)):
        refused(kind, words, layer, *given)
    with torch.no_grad():
        agree(layer(x.clone().requires_grad_()), sample.expected(sample.inputs(), WEIGHTS))


def test_a_workspace_as_an_array():
    memory = TorchMemory(torch, 1024, "cpu")
    array = memory.array(torch.float16, (3, 5))
    assert array.data_ptr() == memory.pointer and array.shape == (3, 5) and array.dtype == torch.float16
    assert array.is_contiguous() and memory.pointer % 256 == 0


NEW = pytest.mark.filterwarnings("ignore:.*(beta state|prototype|deprecated|the matrix subclass)")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_view(tensor: torch.Tensor) -> torch.Tensor:
    """Its ``data_ptr()`` is its offset, not 0."""
    both = torch.stack([tensor, tensor])
    view = both[1]
    both.untyped_storage().resize_(0)
    return view


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch._subclasses.FakeTensorMode().from_tensor(tensor)


KINDS: dict[str, Any] = {
    "sparse": torch.Tensor.to_sparse, "compressed": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "another library's": torch.Tensor.to_mkldnn, "meta": lambda t: t.to("meta"), "freed": freed, "fake": fake,
    "freed view": freed_view, "fake view": lambda t: fake(torch.stack([t, t]))[1],
    "functional": torch._to_functional_tensor, "nested": lambda t: torch.nested.nested_tensor([t]),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "float8": lambda t: t.to(torch.float8_e4m3fn), "no shape": lambda t: torch.nn.UninitializedParameter(),
    "masked": lambda t: np.ma.masked_array(t.numpy(), mask=True)}


@NEW
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_without_elements(layer: Layer, kind: str, name: str):
    given = {n: torch.from_numpy(v) for n, v in WEIGHTS.items()}
    given[name] = KINDS[kind](given[name])
    refused((ArgumentError, DTypeError), name, layer.module.bind, given)


@NEW
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", ["x", "state", "out"])
def test_calls_without_elements(layer: Layer, argument: str, kind: str):
    x, h = torch.from_numpy(sample.inputs()), torch.zeros(BATCH, H)
    given: dict[str, Any] = {"x": x, "state": h.clone(), "out": torch.empty(*x.shape[:2], H)}
    given[argument] = KINDS[kind](given[argument])
    given["state"] = [h, given["state"]]
    with pytest.raises(ArgumentError):
        layer(**given)


@NEW
@pytest.mark.parametrize("kind", ["sparse", "meta", "freed", "fake", "nested"])
def test_masks_without_elements(kind: str):
    with pytest.raises(ArgumentError, match="resets"):
        place_resets(KINDS[kind](torch.zeros(6, 4, dtype=torch.uint8)), 6, 4, None, None, None)


@NEW
def test_a_matrix_is_an_array(layer: Layer):
    given = {n: np.asmatrix(v) if v.ndim == 2 else v for n, v in WEIGHTS.items()}
    x = sample.inputs()
    np.testing.assert_array_equal(layer.module.bind(given)(x)[0], layer(x)[0])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    monkeypatch.setattr(ecornn.host_gpu, "detect", lambda index=0: sample.GPU)
    path = sample.build(sample.manifest(sample.GPU))
    gc.collect()
    live = sample.stat(path, "live")
    yield ecornn.load(path)
    gc.collect()
    assert sample.stat(path, "live") == live, "device memory was not freed"


def test_numpy_goes_by_copies_and_waits(module: Module):
    layer = module.bind(WEIGHTS)
    assert layer.threads is None and "GPU 0" in repr(layer)
    x = sample.inputs(5, 3)
    copies, waits = sample.stat(module.path, "copies"), sample.stat(module.path, "synchronized")
    y, state = layer(x)
    assert sample.stat(module.path, "copies") == copies + 4  # x to the device; y, h, c back
    assert sample.stat(module.path, "synchronized") == waits + 1 and sample.stat(module.path, "queue") == 0
    agree((y, state), sample.expected(x, WEIGHTS))
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
    at_once(module.bind(WEIGHTS), 4, 15, lambda seed, turn: 8)


def on_device(module: Module, array: np.ndarray, number: int = 0) -> Block:
    block = Block(DeviceMemory(module.library, number, array.nbytes), array.shape, str(array.dtype), (CUDA, number))
    block.bits()[...] = array.view(np.uint32)
    return block


def host(block: Block) -> np.ndarray:
    return block.bits().view(np.float32)


def test_device_arrays_are_not_copied(module: Module):
    layer = module.bind({name: on_device(module, value) for name, value in WEIGHTS.items()})
    x, copies = sample.inputs(7), sample.stat(module.path, "copies")
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
    layer, cpu = module.bind(WEIGHTS), ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS)
    state = (on_device(module, np.zeros((BATCH, H), np.float32)),) * 2
    for kind, words, call in (
            (DeviceError, r"x.device='cuda:1': .*cuda:0", lambda: layer(on_device(module, sample.inputs(), 1))),
            (ArgumentError, r"state\[0\]", lambda: layer(sample.inputs(), state)),
            (ArgumentError, r"threads=2: .*runs on a GPU", lambda: module.bind(WEIGHTS, threads=2)),
            (DeviceError, r"x.device='cuda:0': .*cpu", lambda: cpu(on_device(module, sample.inputs()))),
            (DeviceError, r"x.device='cpu': .*cuda:0", lambda: layer(torch.from_numpy(sample.inputs())))):
        refused(kind, words, call)
