"""Which layer a training step on a GPU takes, when weights are packed in it, and which precision of float32 products it
is compiled with: by streams and captures, cuDNN's settings and a layer's own word, with layers that only take notes;
and what of packed sequences lies in which columns."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from refusals import refused
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence
from torch_pairs import training_case
from torch_values import BACKWARD, close, error

import ecornn.compiler
import ecornn.torch
from ecornn.errors import ArgumentError, DerivativeError, DeviceError, ScheduleError
from ecornn.torch import GRU, bound, compiling, engine, operator, packed, snapshot
from ecornn.torch.bound import BoundLayers
from ecornn.torch.by_address import Spare
from ecornn.torch.kind import kind_of, text_of
from ecornn.torch.replacing import specs
from ecornn.torch.snapshot import Snapshot, suspect

KIND = kind_of("GRU(input=3,hidden=4,layers=1,bias=1,bidirectional=0,projection=0)")
NO_BIAS = kind_of("GRU(input=3,hidden=4,layers=1,bias=0,bidirectional=0,projection=0)")
NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
pytestmark = pytest.mark.usefixtures("cudnn_settings")


class NotingLayer:
    def __init__(self, module: Any) -> None:
        self.module, self.device, self.packed, self.rest, self.checked = module, 0, [], [], 0
        self.manifest = SimpleNamespace(parameters=[SimpleNamespace(name=name, shape=()) for name in NAMES],
                                        packed_for_optional=module.packed_for_optional)

    def repack_at(self, pointers: list[int], dtype: str, queue: int, optional: bool) -> None:
        (self.rest if optional else self.packed).append((pointers, dtype, queue))

    def repack(self, weights: Any) -> None:
        self.checked += 1


class NotingModule:
    packed_for_optional: Any = msgspec.UNSET
    target = "cuda"

    def __init__(self) -> None:
        self.bound: list[NotingLayer] = []

    def bind(self, weights: Any, device: int, threads: int | None) -> NotingLayer:
        assert (threads is None) == (self.target == "cuda") and {*weights} == {*NAMES}
        self.bound.append(NotingLayer(self))
        return self.bound[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(stream=1, capturing=False, module=NotingModule(), specs=[])
    def compiled(spec: Any, target: str, infinite: bool = False) -> NotingModule:
        found.specs.append(spec)
        found.module.target = target
        return found.module
    monkeypatch.setattr(bound, "compiled", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


class Here:
    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return other is self or other == torch.device("cpu")

    def __hash__(self) -> int:
        return 0


HERE = Here()


def x_of(batch: int = 2, device: Any = HERE, dtype: torch.dtype = torch.float32, is_cpu: bool = False) -> Any:
    return SimpleNamespace(shape=(5, batch, 3), dtype=dtype, device=torch.device("cpu") if is_cpu else device,
                           is_cpu=is_cpu, is_cuda=not is_cpu)


def weights_of(kind: Any = KIND) -> list[torch.Tensor]:
    return [torch.zeros(shape, requires_grad=True) for shape in [(12, 3), (12, 4), (12,), (12,)][:len(kind.names)]]


def call(layers: BoundLayers, weights: Any, batch: int = 2, again: bool = False, states: bool = True,
         x: Any = None) -> Any:
    with layers.layer(weights, x or x_of(batch), "", again=again, states=states) as layer:
        return layer


def test_weights_that_changed_are_packed_in_place_on_the_current_stream(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    first = call(layers, weights)
    assert call(layers, weights, again=True) is first and not first.packed  # bind has packed
    suspect(weights)  # a backward pass
    assert call(layers, weights) is first and first.packed == [([w.data_ptr() for w in weights], "float32", 1)]
    assert call(layers, weights) is first and len(first.packed) == 1
    with torch.no_grad():
        weights[1].add_(1)
    assert call(layers, weights, again=True) is first and len(first.packed) == 2
    others = weights_of()
    assert call(layers, others) is first and first.checked == 1 and len(first.packed) == 2
    suspect(others)
    assert call(layers, others) is first and first.packed[-1][0] == [w.data_ptr() for w in others]
    assert gpu.module.bound == [first] and [(spec.batch, spec.training) for spec in gpu.specs] == [(2, True)]


def test_what_gradients_of_first_states_need_is_packed_where_these_are_wanted(gpu: Any):
    """Once for weights, but in each graph."""
    gpu.module.packed_for_optional = ("finish_weights",)
    layers, weights = BoundLayers(KIND), weights_of()
    layer = call(layers, weights)
    assert not layer.rest  # bind has packed
    one = layers.take(weights, x_of(), (5, 2))
    layers.give(one)
    suspect(weights)
    call(layers, weights, states=False)
    assert len(layer.packed) == 1 and not layer.rest and not layers.take_this(one, weights)
    for _ in range(2):
        call(layers, weights, again=True)
        assert layer.rest == layer.packed
    assert layers.take_this(one, weights)
    layers.give(one)
    others = weights_of()
    call(layers, others, states=False)
    call(layers, others, again=True)
    assert layer.checked == 1 and len(layer.rest) == 1  # others are checked, and all of them are packed
    gpu.capturing = True
    call(layers, others, states=False)
    for times in (2, 3):
        call(layers, others, again=True)
        assert len(layer.packed) == 2 and len(layer.rest) == times


def test_biases_that_are_not_there_are_zeros(gpu: Any):
    layers, weights = BoundLayers(NO_BIAS), weights_of(NO_BIAS)
    layer = call(layers, weights)
    suspect(weights)
    call(layers, weights)
    assert layer.packed == [([weights[0].data_ptr(), weights[1].data_ptr(), 0, 0], "float32", 1)]


def test_each_stream_has_a_layer_of_its_own(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    first = call(layers, weights)
    gpu.stream = 2
    second = call(layers, weights)
    assert second is not first and call(layers, weights, again=True) is second
    gpu.stream = 1
    assert call(layers, weights) is first and gpu.module.bound == [first, second]


def test_a_layer_that_is_under_way_keeps_its_weights(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    with layers.layer(weights, x_of(), "") as first:
        suspect(weights)
        second = call(layers, weights)
        assert second is not first and not first.packed and second.module is first.module


def test_graphs_take_a_layer_and_pack_in_every_forward_pass(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    gpu.capturing = True
    refused(ArgumentError, "before the capture", call, layers, weights)
    gpu.capturing = False
    warmed = call(layers, weights)
    gpu.stream, gpu.capturing = 9, True
    for times in (1, 2):
        assert call(layers, weights) is warmed and len(warmed.packed) == times
        assert call(layers, weights, again=True) is warmed and len(warmed.packed) == times
    gpu.stream, gpu.capturing = 1, False
    assert call(layers, weights) is not warmed
    gpu.capturing = True
    assert call(layers, weights) is warmed


def test_a_graph_of_a_backward_pass_alone_packs_what_it_reads(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    layer, gpu.capturing = call(layers, weights), True
    assert call(layers, weights, again=True) is layer and len(layer.packed) == 1


def test_weights_of_a_captured_step_are_packed_in_every_call(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    """The graph's optimizer leaves no trace on them."""
    weights = weights_of()
    before, gpu.capturing = Snapshot(weights), True
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    suspect(weights)
    assert snapshot.replayed(weights) and not snapshot.replayed(weights_of())
    assert not before.holds(weights) and not Snapshot(weights).holds(weights)
    assert Snapshot(weights).holds(weights, with_suspects=True)


def test_weights_that_come_and_go_leave_nothing(monkeypatch: pytest.MonkeyPatch):
    known = snapshot.Snapshots()
    monkeypatch.setattr(snapshot, "_snapshots", known)
    stays, numbers = Snapshot(weights := weights_of()), iter(range(10_000))
    monkeypatch.setattr(snapshot, "id", lambda _: next(numbers), raising=False)  # no tensor has another's
    for _ in range(2 * known.LEAST):
        Snapshot(weights)
        assert len(known._by_id) <= known.LEAST + len(weights)
    monkeypatch.undo()
    ids = [id(w) for w in weights]
    assert known.of((*ids,)) == [(stays, frozenset(range(len(ids))))]
    assert known.of((ids[1], 0)) == [(stays, {1})] and known.of((0,)) == []
    assert {one for one, _ in known.of((*ids, 1))} == {stays}
    known.add(later := Snapshot(weights), ids)
    assert {one for one, _ in known.of((*ids,))} == {stays, later}


def test_requests_of_any_batch_share_few_modules(gpu: Any):
    """On a GPU one of 16 rows takes a single row in at most 1.2 times the time of its own; on a CPU it does not."""
    for cpu, trained, rooms in ((False, BoundLayers(KIND), [9, 16, 32, 128, 256]), (False, None, [9, 16, 32, 128, 256]),
                                (True, BoundLayers(KIND), [9, 16, 1, 2, 32, 128, 256])):
        gpu.specs.clear()
        layers, weights = BoundLayers(KIND, trained), weights_of()
        for batch in (9, 12, 1, 2, 9, 5, 16, 20, 100, 60, 17, 200):
            layers.give(layers.take(weights, x_of(batch, is_cpu=cpu), (300, batch)))
        assert [spec.batch for spec in gpu.specs] == rooms


def test_calls_of_few_steps_have_layers_of_their_own(gpu: Any):
    layers, weights, seen = BoundLayers(KIND, BoundLayers(KIND)), weights_of(), {}
    for steps in (1, 300, 1, 2, 3, 4, 7, 8, 9, 500):
        one = layers.take(weights, x_of(), (steps, 2))
        seen[steps] = one
        layers.give(one)
    assert [spec.seq for spec in gpu.specs] == [1, 256, 2, 4, 8]
    assert seen[3] is seen[4] and seen[7] is seen[8] and seen[9] is seen[500] is seen[300]


def test_few_steps_that_are_rare_have_the_module_of_longer_ones(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    """If there is or will be one; their own is compiled once they are frequent, and serves them when it is there."""
    asked: list[compiling.Job] = []
    monkeypatch.setattr(compiling, "start", lambda spec, target: next(
        (job for job in asked if job.spec == spec), None) or asked.append(compiling.Job(spec, target)) or asked[-1])
    layers, weights = BoundLayers(KIND, BoundLayers(KIND)), weights_of()
    def take(steps: int) -> Any:
        with compiling.accepting():
            layers.give(one := layers.take(weights, x_of(), (steps, 2)))
        return one
    for steps in (300, 3):
        with pytest.raises(compiling.PendingError):
            take(steps)
    assert [job.spec.seq for job in asked] == [256]
    asked[0].outcome = gpu.module
    long = take(300)
    for _ in range(2, bound.OFTEN):
        assert take(3) is long and len(asked) == 1
        assert not layers.serves(x_of(), (3, 2)) and layers.serves(x_of(), (300, 2))
    assert take(3) is long and take(4) is long and [job.spec.seq for job in asked] == [256, 4]
    asked[1].outcome = NotingModule()
    assert take(3) is take(4) is not long and take(2) is long and layers.serves(x_of(), (3, 2)) and len(asked) == 2


def test_few_steps_have_their_own_module_at_once_if_there_are_no_longer_ones(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "start", lambda spec, target: compiling.Job(spec, target, gpu.module))
    layers, weights = BoundLayers(KIND, BoundLayers(KIND)), weights_of()
    with compiling.accepting():
        for steps in (1, 300, 1):
            layers.give(layers.take(weights, x_of(), (steps, 2)))
    assert layers.serves(x_of(), (1, 2)) and layers.serves(x_of(), (300, 2))


def test_weights_elsewhere_are_refused(gpu: Any):
    with pytest.raises(DeviceError, match=r"weights\.device='cpu'.*cuda:1"), \
            BoundLayers(KIND).layer(weights_of(), x_of(device=torch.device("cuda:1")), ""):
        pass
    assert not gpu.module.bound


def test_what_no_schedule_serves_is_found_out_once(monkeypatch: pytest.MonkeyPatch):
    times = []
    def refuses(*args: Any, **kwargs: Any) -> None:
        times.append(args)
        raise ScheduleError("too large")
    compiling.outcomes.clear()
    monkeypatch.setattr(ecornn.compiler, "compile_layer", refuses)
    for _ in range(3):
        with pytest.raises(ScheduleError, match="too large"):
            compiling.compiled(KIND.spec(2, 3, "float32", "", "states"), "cuda")
    assert len(times) == 1
    compiling.outcomes.clear()


# -- the precision of float32 products ----------------------------------------------------------
def precision(layer: Any, gpu: Any, x: Any = None) -> str | None:
    kind, weights = kind_of(text_of(layer)), [*layer.parameters()]
    for trains in (False, True):
        call(BoundLayers(kind, None if trains else BoundLayers(kind)), weights, x=x)
    one, other = gpu.specs[-2:]
    assert one.workload.precision == other.workload.precision
    return one.workload.precision


def test_pytorchs_default_is_tf32(gpu: Any):
    assert precision(GRU(3, 4), gpu) == "tf32"
    for x in (x_of(dtype=torch.bfloat16), x_of(is_cpu=True)):
        assert precision(GRU(3, 4), gpu, x) is None


@pytest.mark.parametrize("setting, allowed", [
    (lambda b: setattr(b.cudnn, "allow_tf32", False), False),
    (lambda b: setattr(b.cudnn.rnn, "fp32_precision", "ieee"), False),
    (lambda b: setattr(b.cudnn.rnn, "fp32_precision", "tf32"), True),
    (lambda b: setattr(b.cudnn.conv, "fp32_precision", "ieee"), True),
    (lambda b: setattr(b.cuda.matmul, "fp32_precision", "ieee"), True),
    (lambda b: (setattr(b, "fp32_precision", "tf32"), setattr(b.cudnn.rnn, "fp32_precision", "ieee")), False),
    (lambda b: (setattr(b, "fp32_precision", "ieee"), setattr(b.cudnn.rnn, "fp32_precision", "tf32")), True),
], ids=["allow_tf32", "rnn ieee", "rnn tf32", "conv ieee", "matmul ieee", "rnn over all", "tf32 over all"])
def test_cudnns_settings_are_followed(setting: Any, allowed: bool, gpu: Any):
    setting(torch.backends)
    wanted = "tf32" if allowed else None
    assert precision(GRU(3, 4), gpu) == wanted
    assert precision(GRU(3, 4, tf32=True), gpu) == "tf32" and precision(GRU(3, 4, tf32=False), gpu) is None


def test_what_pytorch_says_of_the_whole_backend_is_followed(gpu: Any):
    """The setting of RNNs is left open here."""
    torch.backends.cudnn.allow_tf32 = False
    for generic, allowed in (("ieee", False), ("tf32", True)):
        torch.backends.fp32_precision = generic
        assert precision(GRU(3, 4), gpu) == ("tf32" if allowed else None)
        assert torch.backends.cudnn.rnn.fp32_precision == generic


def test_a_change_between_calls_takes_another_module_and_back_the_first(gpu: Any):
    layer = GRU(3, 4)
    kind, weights = kind_of(text_of(layer)), [*layer.parameters()]
    layers = BoundLayers(kind, BoundLayers(kind))
    first = call(layers, weights)
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    assert call(layers, weights) is not first and [spec.workload.precision for spec in gpu.specs] == ["tf32", None]
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    assert call(layers, weights) is first and len(gpu.specs) == 2


def test_what_is_kept_is_of_the_module_that_runs(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(engine, "compiled", lambda spec, target: seen.append(spec) or SimpleNamespace(manifest=None))
    monkeypatch.setattr(engine, "kept_layout", lambda manifest, steps, batch: ({}, 7))
    assert engine.kept_bytes(kind_of(text_of(GRU(3, 4))), x_of(device=torch.device("cuda")), None) == 7
    assert seen[0].workload.precision == "tf32"


@pytest.mark.parametrize("option, value, words", [
    ("tf32", False, "tf32='all': expected None, True or False"),
    ("keep", "states", "keep='all': expected None, states or gates")])
def test_options_of_replace(option: str, value: Any, words: str):
    model = torch.nn.Sequential(torch.nn.LSTM(3, 4), torch.nn.LSTMCell(3, 4))
    assert ecornn.torch.replace(model, **{option: value}).swapped == ("0", "1")
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert getattr(one[0], option) == value == getattr(kind_of(text_of(one[0])), option)
    ecornn.torch.restore(model)
    assert not hasattr(model[0], option)
    ecornn.torch.replace(model)
    assert getattr(model[0], option) is None and option not in text_of(model[0])
    refused(ArgumentError, words, ecornn.torch.replace, model, **{option: "all"})


def test_a_layers_attribute_may_be_set():
    layer = GRU(3, 4)
    first = engine.engine_of(layer)
    assert engine.engine_of(layer) is first and first.kind.tf32 is None
    layer.tf32 = False
    assert engine.engine_of(layer).kind.tf32 is False


def test_prepare_compiles_what_will_run():
    with FakeTensorMode():
        found = specs(GRU(3, 4), torch.empty(5, 2, 3, device="cuda"), None)
    assert [(spec.workload.precision, target) for spec, target in found] == [("tf32", "cuda")]


@pytest.mark.gpu
def test_a_layer_on_a_gpu_is_as_exact_as_cudnn(name: str):
    """By default as near as cuDNN with TF32, to twice its error; exact where PyTorch is told so, and by the option."""
    torch.manual_seed(0)
    layer = getattr(torch.nn, name)(200, 256).cuda()
    ours, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
    ecornn.torch.replace(ours)
    x = torch.randn(30, 9, 200, device="cuda")
    def error_of(one: Any) -> float:
        with torch.no_grad():
            return error(one(x)[0], exact(x.double())[0])
    assert 1e-5 < error_of(ours) <= 2 * error_of(layer)
    ours.tf32 = False
    assert error_of(ours) < 1e-5
    ours.tf32, torch.backends.cudnn.allow_tf32 = None, False
    assert error_of(ours) < 1e-5
    ours.tf32 = True
    assert error_of(ours) > 1e-5

    ours.tf32 = None
    exact_x = x.double().requires_grad_()
    ours(x.requires_grad_())[0].square().sum().backward()
    exact(exact_x)[0].square().sum().backward()
    assert error(x.grad, exact_x.grad) < 2e-5


# -- packed sequences in columns, with gradients: PyTorch's own layers in place of a module -------
H, I, LENGTHS = 5, 3, [8, 8, 8, 8, 3, 1, 1]


def by_torch(library: torch.nn.LSTM, names: list[str], columns: Any, tensors: Any) -> list[torch.Tensor]:
    x, h, c, *weights = tensors
    y, states = x.new_zeros(x.shape[0] * x.shape[1], 2 * H), []
    for number in range(columns.count):
        at = torch.from_numpy(columns.of_sequence(number))
        first = tuple(s[:, number:number + 1].contiguous() for s in (h, c))
        given = x.flatten(0, 1)[at][:, None], first
        rows, after = torch.func.functional_call(library, dict(zip(names, weights, strict=True)), given)
        y, states = y.index_copy(0, at, rows[:, 0]), [*states, after]
    return [y.view(*x.shape[:2], -1), *(torch.cat(each, 1) for each in zip(*states, strict=True))]


@pytest.fixture
def lstm(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    library = torch.nn.LSTM(I, H, 2, bidirectional=True)
    def forward(engine, weights, x, state, columns, passes):
        called.append(engine)
        return [*by_torch(engine.library, engine.names, columns, (x, *state, *weights)), x.new_empty(0)]

    def backward(engine, weights, x, state, columns, y, kept, gradients, want_state=True, passes=None):
        with torch.enable_grad():
            tensors = [t.detach().requires_grad_() for t in (x, *state, *weights)]
            return torch.autograd.grad(by_torch(engine.library, engine.names, columns, tensors), tensors, gradients)

    def engine_of(library: torch.nn.LSTM, together: int) -> Any:
        made = SimpleNamespace(library=library, names=[name for name, _ in library.named_parameters()], refused=set(),
                               training=lambda *_, **__: nullcontext(SimpleNamespace(together=together)))
        made.forward, made.backward = partial(forward, made), partial(backward, made)
        return made
    called: list[Any] = []
    engine = engine_of(library, 3)
    library.called = called
    engine.part = lambda number, kind: engine_of(torch.nn.LSTM(2 * H if number else I, H, bidirectional=True),
                                                 6 if number else 3)
    monkeypatch.setattr(packed, "engine_of", lambda module: engine)
    monkeypatch.setattr(packed, "_width", lambda gpu, sizes: 3)
    return library


@pytest.mark.parametrize("by_layer", [False, True])
def test_gradients_are_those_of_the_packed_layer(lstm: Any, by_layer: bool):
    """Some sequences wrap around; those of first states are in the order of the sequences."""
    ours = ecornn.torch.LSTM(I, H, 2, bidirectional=True)
    ours.load_state_dict(lstm.state_dict())
    if by_layer:
        ours.weight_hh_l0.register_post_accumulate_grad_hook(lambda _: None)
    found = []
    for module in (lstm, ours):
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randn(n, I, generator=generator).requires_grad_() for n in LENGTHS[::-1]]
        state = [torch.randn(4, len(LENGTHS), H, generator=generator).requires_grad_() for _ in range(2)]
        y, after = module(pack_sequence(rows, enforce_sorted=False), tuple(state))
        outputs = [y.data, *after]
        dy = [torch.randn(o.shape, generator=generator) for o in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, [*rows, *state, *module.parameters()], dy)])
    for value, wanted in zip(*found[::-1], strict=True):
        torch.testing.assert_close(value, wanted)
    assert [engine.library.input_size for engine in lstm.called] == ([I, 2 * H] if by_layer else [I])
    sizes = pack_sequence(rows, enforce_sorted=False).batch_sizes
    assert packed.laid(sizes.numpy().tobytes(), 3, 3).columns.wrapped.size


def test_second_gradients_are_refused(lstm: Any, monkeypatch: Any):
    ours = ecornn.torch.LSTM(I, H, 2, bidirectional=True)
    own = packed.engine_of(ours)
    own.kind = kind_of(text_of(ours))
    no = Mock(side_effect=ScheduleError)
    monkeypatch.setattr(operator, "engine_for", lambda kind, _: own if kind == own.kind else no())
    x = torch.randn(sum(LENGTHS), I).requires_grad_()
    y, _ = ours(pack_sequence(torch.split(x, LENGTHS)), [torch.zeros(4, len(LENGTHS), H)] * 2)
    (dx,) = torch.autograd.grad(y.data.sum(), x, create_graph=True)
    with pytest.raises(DerivativeError, match="'lstm': no"):
        dx.sum().backward()


def test_memory_of_a_step_is_taken_again_once_nobody_has_it():
    """A step on a CPU takes the memory again, but not while a graph, a view or another call has it."""
    spare, x, size = Spare(), torch.zeros(1), Spare.LEAST

    def place(nbytes: int = size) -> int:
        return spare.take(x, nbytes).data_ptr()

    held = spare.take(x, size + 5)
    first = held.data_ptr()
    assert held.shape == (size + 5,) and place() != first
    part = held[7:]
    del held
    assert place() != first
    del part
    assert place() == first and spare.take(x, size).shape == (size,)
    larger = place(size + 6)
    assert larger == place(size + 6) == place()
    assert spare.take(x, size - 1).untyped_storage().nbytes() == size - 1  # malloc has some of these

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(kept)
            return x + 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
            return gradient * len(ctx.saved_tensors), None

    result = Keeps.apply(torch.zeros(1, requires_grad=True), spare.take(x, size))
    assert place() != larger
    result.backward(retain_graph=True)
    assert place() != larger
    result.backward()
    assert place() == larger


def test_a_large_step_keeps_its_values_apart_from_those_of_another_graph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Spare, "LEAST", 0)
    theirs, ours, x = training_case("LSTM")
    both = torch.stack((x, x.flip(0))).unbind()
    for net in (theirs, ours):
        net.zero_grad()
        (net(both[0].to(net.weight_hh_l0.dtype))[0] * net(both[1].to(net.weight_hh_l0.dtype))[0]).sum().backward()
    close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()], BACKWARD)
