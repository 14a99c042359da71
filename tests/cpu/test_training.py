"""``Layer.forward`` and ``Layer.backward``: stacks against float64, what is kept, and what is refused."""

from typing import Any

import numpy as np
import pytest
from refusals import refused

import ecornn
from ecornn.compiler import plan
from ecornn.errors import ArgumentError, DTypeError, ModuleError, ScheduleError, ShapeError

pytestmark = pytest.mark.usefixtures("small_tiles")

T, B, I, H = 9, 4, 17, 33
LIMITS = {"float32": 2e-5, "float64": 1e-14}  # relative, of gradients


def weights_of(module: Any, seed: int = 0) -> dict[str, np.ndarray]:
    rng, dtype = np.random.default_rng(seed), module.manifest.workload.dtype
    return {p.name: (rng.uniform(-1, 1, p.shape) / H ** 0.5).astype(dtype) for p in module.manifest.parameters}


class Layer:
    def __init__(self, cell: str, batch: int = B + 1, **properties: Any) -> None:
        self.cell = cell
        self.module = ecornn.compile(cell, hidden=H, input=I, batch=batch, seq=T, target="cpu", training=True,
                                     **properties)
        self.weights = weights_of(self.module)
        self.bound = self.module.bind(self.weights)
        rng, stack, dtype = np.random.default_rng(1), self.module.manifest.stack, self.module.manifest.workload.dtype
        shape = (B, H) if stack.count == 1 else (stack.count, B, H)
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)
        self.x, self.dy = normal(T, B, I), normal(T, B, H * stack.directions)
        self.states = [normal(*shape) for _ in self.module.manifest.states]
        self.dstates = [normal(*shape) for _ in self.states]
        self.masks = {}
        if stack.lengths:
            self.masks["lengths"] = np.array([3, T, 0, 5])
        if stack.resets:
            self.masks["resets"] = rng.random((T, B)) < 0.3

    def run(self) -> Any:
        _, _, kept = self.bound.forward(self.x, self.states, **self.masks)
        return self.bound.backward(kept, self.dy, self.dstates)


def near(found: Any, wanted: Any) -> bool:
    return float(np.linalg.norm(found - wanted)) <= LIMITS[found.dtype.name] * float(np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def lstm() -> Layer:
    return Layer("lstm")


@pytest.mark.parametrize(("cell", "properties"), [
    pytest.param("gru", {"bidirectional": True}, marks=pytest.mark.exhaustive),
    ("lstm", {"layers": 3, "bidirectional": True, "lengths": True}),
    ("rnn_tanh", {"layers": 2, "resets": True, "reverse": True}),
    pytest.param("gru_reset_before", {"layers": 2, "dtype": "float64"}, marks=pytest.mark.exhaustive)])
def test_stacks(cell, properties):
    layer = Layer(cell, **properties)
    y, after, kept = layer.bound.forward(layer.x, layer.states, **layer.masks)
    again, last = layer.bound(layer.x, layer.states, **layer.masks)
    assert np.array_equal(y, again) and all(map(np.array_equal, after, last))
    found, masks = layer.bound.backward(kept, layer.dy, layer.dstates), dict(layer.masks)
    reverse = layer.module.manifest.stack.reverse
    flip = (lambda a: a[::-1]) if reverse else (lambda a: a)
    if reverse:  # a mark at step t starts a sequence there in x's time; backwards it begins behind its last step
        marks = np.zeros((T, B), bool)
        marks[1:] = masks["resets"][:0:-1]
        masks["resets"] = marks
    dx, dweights, dstates = ecornn.reference_gradients(cell, flip(layer.x), layer.weights, layer.states,
                                                       dy=flip(layer.dy), dstate=layer.dstates, **masks)
    assert near(found.x, flip(dx))
    assert {*found.weights} == {*dweights} and all(near(found.weights[n], g) for n, g in dweights.items())
    assert all(near(a, b.reshape(a.shape)) for a, b in zip(found.state, dstates, strict=True))
    assert all(g.dtype == layer.x.dtype and g.shape == layer.weights[n].shape for n, g in found.weights.items())


def test_zeros_are_what_is_left_out(lstm: Layer):
    zero = [np.zeros_like(s) for s in lstm.states]
    _, _, kept = lstm.bound.forward(lstm.x)
    found = lstm.bound.backward(kept, lstm.dy)
    _, _, kept = lstm.bound.forward(lstm.x, zero)
    wanted = lstm.bound.backward(kept, lstm.dy, zero)
    assert np.array_equal(found.x, wanted.x) and all(map(np.array_equal, found.state, wanted.state))
    _, _, kept = lstm.bound.forward(lstm.x)
    alone = lstm.bound.backward(kept, dstate=lstm.dstates)
    dx, _, _ = ecornn.reference_gradients("lstm", lstm.x, lstm.weights, zero, dy=np.zeros_like(lstm.dy),
                                          dstate=lstm.dstates)
    assert near(alone.x, dx)


def test_gradients_are_added_to_what_is_given(lstm: Layer):
    once, sums = lstm.run(), {n: np.full_like(w, 2.0) for n, w in lstm.weights.items()}
    _, _, kept = lstm.bound.forward(lstm.x, lstm.states)
    found = lstm.bound.backward(kept, lstm.dy, lstm.dstates, gradients=sums)
    for name, value in once.weights.items():
        assert found.weights[name] is sums[name]
        np.testing.assert_allclose(sums[name], value + 2.0, rtol=1e-6, atol=1e-6)


def test_gradients_of_first_states_that_nobody_wants(lstm: Layer):
    every = lstm.run()
    _, _, kept = lstm.bound.forward(lstm.x, lstm.states)
    found = lstm.bound.backward(kept, lstm.dy, lstm.dstates, want_state=False)
    assert found.state == () and np.array_equal(found.x, every.x)
    assert all(np.array_equal(found.weights[n], value) for n, value in every.weights.items())


def test_two_calls_at_the_same_time_do_not_mix(lstm: Layer):
    other = lstm.x[::-1].copy()
    _, _, first = lstm.bound.forward(lstm.x, lstm.states)
    _, _, second = lstm.bound.forward(other, lstm.states)
    found = lstm.bound.backward(second, lstm.dy), lstm.bound.backward(first, lstm.dy)
    for x, gradients in zip((other, lstm.x), found, strict=True):
        _, _, kept = lstm.bound.forward(x, lstm.states)
        assert np.array_equal(lstm.bound.backward(kept, lstm.dy).x, gradients.x)


@pytest.mark.parametrize(("cell", "keep", "values"), [pytest.param("lstm", "states", 1, marks=pytest.mark.exhaustive),
                                                      ("lstm", "gates", 5), ("gru", "states", 0),
                                                      ("gru", "gates", 5), ("rnn_tanh", "gates", 0)])
def test_what_is_kept_is_what_is_said(cell, keep, values):
    layer = Layer(cell, keep=keep)
    y, _, kept = layer.bound.forward(layer.x, layer.states)
    batch, most, room = layer.x.shape[1], layer.module.manifest.workload.batch, 256 * values
    assert kept.nbytes == layer.bound.kept_bytes(T, batch) and 0 <= kept.nbytes - 4 * values * batch * T * H <= room
    assert 0 <= layer.bound.kept_bytes(T) - 4 * values * most * T * H <= room
    assert layer.bound.kept_bytes(T) == layer.bound.kept_bytes(T, most) and kept.y[0] is y


def test_what_is_kept_where_it_is_left_open():
    def keep(target: str, **sizes: int) -> str | None:
        return plan("lstm", training=True, target=target, **sizes).stack.keep
    assert keep("cpu", hidden=800, batch=20, seq=300) == "gates"
    assert keep("cpu", hidden=256, batch=4, seq=100_000) == "states"
    assert keep("sm_90a", hidden=800, batch=20, seq=300) == "gates"
    assert keep("sm_90a", hidden=256, batch=4, seq=100_000, dtype="float32") == "states"
    assert plan("lstm", hidden=8, training=True, keep="gates", target="sm_90a").stack.keep == "gates"
    refused(ArgumentError, r"keep.*training=True", plan, "lstm", hidden=8, keep="states", target="cpu")
    refused(ArgumentError, r"keep.*states, gates", plan, "lstm", hidden=8, training=True, keep="all", target="cpu")


def test_what_is_kept_in_a_callers_memory(lstm: Layer):
    x, dy = lstm.x[:, :2].copy(), lstm.dy[:, :2].copy()
    size = lstm.bound.kept_bytes(T, 2)
    assert 20 * 2 * T * H <= size <= 20 * 2 * T * H + 5 * 256
    room = np.full(size + 64, 0x5A, np.uint8)
    y, _, kept = lstm.bound.forward(x, memory=room[:size])
    assert np.all(room[size:] == 0x5A)
    wanted = lstm.bound.backward(kept, dy)
    found = lstm.bound.backward(lstm.bound.kept_in(room[:size].copy(), x, y), dy)
    assert np.array_equal(found.x, wanted.x)
    assert all(np.array_equal(found.weights[n], w) for n, w in wanted.weights.items())
    for call in (lambda memory: lstm.bound.forward(x, memory=memory), lambda memory: lstm.bound.kept_in(memory, x, y)):
        for wrong in (room, room[:size].view(np.int8), np.zeros(2 * size, np.uint8)[::2]):
            refused(ArgumentError, "memory", call, wrong)
    refused(ShapeError, r"y\.shape", lstm.bound.kept_in, room[:size], x, y[1:])


def test_a_long_sequence_takes_no_more_workspace(lstm: Layer):
    assert lstm.bound.training_workspace_bytes(100_000) == lstm.bound.training_workspace_bytes(10)


def test_tensors(lstm: Layer):
    torch, wanted = pytest.importorskip("torch"), lstm.run()
    x, dy = torch.from_numpy(lstm.x), torch.from_numpy(lstm.dy)
    _, _, kept = lstm.bound.forward(x, [torch.from_numpy(s) for s in lstm.states])
    found = lstm.bound.backward(kept, dy, tuple(torch.from_numpy(s) for s in lstm.dstates))
    assert np.array_equal(found.x.numpy(), wanted.x)
    assert all(np.array_equal(found.weights[n].numpy(), g) for n, g in wanted.weights.items())


def test_what_does_not_fit_is_refused_before_anything_runs(lstm: Layer):
    forward, backward = lstm.bound.forward, lstm.bound.backward
    _, _, kept = forward(lstm.x, lstm.states)
    refused(ShapeError, r"dy.shape", backward, kept, lstm.dy[1:])
    refused(DTypeError, r"dy.dtype", backward, kept, lstm.dy.astype(np.float64))
    refused(ArgumentError, "dstate", backward, kept, lstm.dy, lstm.dstates[0])
    refused(ShapeError, r"dstate\[1\].shape", backward, kept, lstm.dy, [lstm.dstates[0], lstm.dstates[1][1:]])
    refused(ArgumentError, "gradients", backward, kept, lstm.dy, gradients={})
    with pytest.raises(DTypeError, match="float32"):
        backward(kept, lstm.dy, gradients={n: w.astype(np.float64) for n, w in lstm.weights.items()})
    refused(ArgumentError, "forward", backward, "kept", lstm.dy)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="that forward\\(\\) of this layer"):
        lstm.module.bind(lstm.weights).backward(kept, lstm.dy)
    backward(kept, lstm.dy)  # nothing of that has used it up
    refused(ArgumentError, "one backward", backward, kept, lstm.dy)


def test_modules_that_do_not_train_say_so():
    module = ecornn.compile("gru", hidden=8, target="cpu")
    layer = module.bind({p.name: np.zeros(p.shape, np.float32) for p in module.manifest.parameters})
    refused(ModuleError, "training=True", layer.forward, np.zeros((2, 1, 8), np.float32))
    with pytest.raises(ArgumentError, match="training"):
        ecornn.compile("gru", hidden=8, target="cpu", training="yes")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="float32 weights"):
        ecornn.compile("gru", hidden=8, target="cpu", training=True, weights="bfloat16")


def test_a_module_file_trains_after_loading(lstm: Layer, tmp_path):
    lstm.module.save(tmp_path / "lstm.so")
    layer = ecornn.load(tmp_path / "lstm.so").bind(lstm.weights)
    _, _, kept = layer.forward(lstm.x, lstm.states)
    assert np.array_equal(layer.backward(kept, lstm.dy, lstm.dstates).x, lstm.run().x)
