"""Which layer a training step on a GPU takes, and when weights are packed in it: by streams and captures, with layers
that only take notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from ecornn.errors import ArgumentError, DeviceError, ScheduleError
from ecornn.torch import background, bound, compiling, snapshot
from ecornn.torch.bound import BoundLayers
from ecornn.torch.kind import kind_of
from ecornn.torch.snapshot import Snapshot, suspect

KIND = kind_of("GRU(input=3,hidden=4,layers=1,bias=1,bidirectional=0,projection=0)")
NO_BIAS = kind_of("GRU(input=3,hidden=4,layers=1,bias=0,bidirectional=0,projection=0)")
NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


class NotingLayer:
    def __init__(self, module: Any) -> None:
        self.module, self.device, self.packed, self.rest, self.checked = module, 0, [], [], 0
        self.manifest = SimpleNamespace(parameters=[SimpleNamespace(name=name) for name in NAMES],
                                        packed_for_optional=module.packed_for_optional)

    def repack_at(self, pointers: list[int], dtype: str, queue: int, optional: bool) -> None:
        (self.rest if optional else self.packed).append((pointers, dtype, queue))

    def repack(self, weights: Any) -> None:
        self.checked += 1


class NotingModule:
    packed_for_optional: Any = msgspec.UNSET

    def __init__(self) -> None:
        self.bound: list[NotingLayer] = []

    def bind(self, weights: Any, device: int, threads: int | None) -> NotingLayer:
        assert threads is None and {*weights} == {*NAMES}
        self.bound.append(NotingLayer(self))
        return self.bound[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU's stream, capture and module, to be set."""
    found = SimpleNamespace(stream=1, capturing=False, module=NotingModule(), rooms=[])

    def compiled(spec: Any, target: str, infinite: bool = False) -> NotingModule:
        assert target == "cuda" and spec.training
        found.rooms.append(spec.batch)
        return found.module

    monkeypatch.setattr(bound, "compiled", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


class Here:
    """The device of the weights, which are on the CPU, as if it were a GPU."""

    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return other is self or other == torch.device("cpu")

    def __hash__(self) -> int:
        return 0


HERE = Here()


def x_of(batch: int = 2, device: Any = HERE) -> Any:
    return SimpleNamespace(shape=(5, batch, 3), dtype=torch.float32, device=device, is_cpu=False)


def weights_of(kind: Any = KIND) -> list[torch.Tensor]:
    shapes = [(12, 3), (12, 4), (12,), (12,)][:len(kind.names)]
    return [torch.zeros(shape, requires_grad=True) for shape in shapes]


def call(layers: BoundLayers, weights: Any, batch: int = 2, again: bool = False, states: bool = True) -> Any:
    with layers.layer(weights, x_of(batch), "", again=again, states=states) as layer:
        return layer


def test_weights_that_changed_are_packed_in_place_on_the_current_stream(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    first = call(layers, weights)
    assert call(layers, weights, again=True) is first and not first.packed  # bind has packed
    suspect(weights)  # a backward pass
    assert call(layers, weights) is first
    assert first.packed == [([w.data_ptr() for w in weights], "float32", 1)]
    assert call(layers, weights) is first and len(first.packed) == 1
    with torch.no_grad():
        weights[1].add_(1)
    assert call(layers, weights, again=True) is first and len(first.packed) == 2
    others = weights_of()
    assert call(layers, others) is first and first.checked == 1 and len(first.packed) == 2
    suspect(others)
    assert call(layers, others) is first and first.packed[-1][0] == [w.data_ptr() for w in others]
    assert gpu.module.bound == [first] and gpu.rooms == [2]


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
    with pytest.raises(ArgumentError, match="before the capture"):
        call(layers, weights)
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
        assert len(known) <= known.LEAST + len(weights)
    monkeypatch.undo()
    assert known.of({id(w) for w in weights}) == {stays}


def test_fewer_rows_use_what_was_compiled(gpu: Any):
    layers, weights = BoundLayers(KIND), weights_of()
    first = call(layers, weights, 8)
    assert call(layers, weights, 3) is first
    assert call(layers, weights, 9) is not first and gpu.rooms == [8, 16]


def test_calls_of_few_steps_have_layers_of_their_own(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(bound, "compiled", lambda spec, target: asked.append(spec.seq) or gpu.module)
    layers, weights, seen = BoundLayers(KIND, BoundLayers(KIND)), weights_of(), {}
    for steps in (1, 300, 1, 2, 3, 4, 7, 8, 9, 500):
        one = layers.take(weights, x_of(), (steps, 2))
        seen[steps] = one
        layers.give(one)
    assert asked == [1, 256, 2, 4, 8]
    assert seen[3] is seen[4] and seen[7] is seen[8] and seen[9] is seen[500] is seen[300]


def test_few_steps_that_are_rare_have_the_module_of_longer_ones(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    """If there is or will be one; their own is compiled once they are frequent, and serves them when it is there."""
    asked: list[background.Job] = []
    monkeypatch.setattr(background, "start", lambda spec, target: next(
        (job for job in asked if job.spec == spec), None) or asked.append(background.Job(spec, target)) or asked[-1])
    layers, weights = BoundLayers(KIND, BoundLayers(KIND)), weights_of()

    def take(steps: int) -> Any:
        with background.accepting():
            layers.give(one := layers.take(weights, x_of(), (steps, 2)))
        return one

    for steps in (300, 3):
        with pytest.raises(background.PendingError):
            take(steps)
    assert [job.spec.seq for job in asked] == [256]
    asked[0].outcome = gpu.module
    long = take(300)
    for _ in range(2, bound.OFTEN):
        assert take(3) is long and len(asked) == 1
        assert not layers.serves(x_of(), (3, 2)) and layers.serves(x_of(), (300, 2))
    assert take(3) is long and take(4) is long and [job.spec.seq for job in asked] == [256, 4]
    asked[1].outcome = NotingModule()
    assert take(3) is take(4) is not long and take(2) is long
    assert layers.serves(x_of(), (3, 2)) and len(asked) == 2


def test_few_steps_have_their_own_module_at_once_if_there_are_no_longer_ones(gpu: Any,
                                                                             monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "start", lambda spec, target: background.Job(spec, target, gpu.module))
    layers, weights = BoundLayers(KIND, BoundLayers(KIND)), weights_of()
    with background.accepting():
        for steps in (1, 300, 1):
            layers.give(layers.take(weights, x_of(), (steps, 2)))
    assert layers.serves(x_of(), (1, 2)) and layers.serves(x_of(), (300, 2))


def test_weights_elsewhere_are_refused(gpu: Any):
    with pytest.raises(DeviceError, match=r"weights\.device='cpu'.*cuda:1"), \
            BoundLayers(KIND).layer(weights_of(), x_of(device=torch.device("cuda:1")), ""):
        pass
    assert not gpu.module.bound


def test_what_no_schedule_serves_is_found_out_once(monkeypatch: pytest.MonkeyPatch):
    import ecornn.compiler

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
