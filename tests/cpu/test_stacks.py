"""Stacks, directions, lengths and resets: the reference, and modules for this CPU."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from cpu_sample import rows_that_fit
from exact import relative as error
from refusals import refused

import ecornn
from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.numpy_reference import STEPS, random_weights, reference
from ecornn.runtime import Module
from ecornn.workload import Stack

T, B, I, H = 7, 5, 6, 19
LIMIT = 1e-6
LENGTHS = [3, 7, 1, 0, 6]
CLASSES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}


def marks(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).random((T, B)) < 0.3


def problem(cell: str, stack: Stack, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    generator = np.random.default_rng(seed)
    shape = (B, H) if stack.count == 1 else (stack.count, B, H)
    state = tuple(generator.uniform(-1, 1, shape).astype(np.float32) for _ in range(STEPS[cell][1]))
    x = generator.standard_normal((T, B, I)).astype(np.float32)
    return x, random_weights(cell, I, H, seed, stack.layers, stack.directions), state


@cache
def module(cell: str, stack: Stack) -> Module:
    return ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, target="cpu", layers=stack.layers,
                          bidirectional=stack.bidirectional, lengths=stack.lengths, resets=stack.resets)


# -- the reference -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (1, True), (3, False), (2, True)])
@pytest.mark.parametrize("cell", list(CLASSES))
def test_the_reference_is_pytorchs(cell: str, layers: int, bidirectional: bool):
    import torch
    stack = Stack(layers, bidirectional)
    x, weights, state = problem(cell, stack)
    options = {"nonlinearity": cell[4:]} if cell.startswith("rnn") else {}
    layer = getattr(torch.nn, CLASSES[cell])(I, H, layers, bidirectional=bidirectional, **options).double()
    layer.load_state_dict({n: torch.from_numpy(w).double() for n, w in weights.items()})
    given = [torch.from_numpy(s.astype(np.float64)).reshape(stack.count, B, H) for s in state]
    lengths = [n or 2 for n in LENGTHS]
    for packed in (False, True):
        data = torch.from_numpy(x).double()
        if packed:
            data = torch.nn.utils.rnn.pack_padded_sequence(data, lengths, enforce_sorted=False)
        with torch.no_grad():
            y, last = layer(data, tuple(given) if len(given) > 1 else given[0])
        if packed:
            y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=T)
        found, states = reference(cell, x, weights, state, lengths=lengths if packed else None)
        assert error(found, y.numpy()) < 1e-13
        for one, other in zip(states, last if isinstance(last, tuple) else (last,), strict=True):
            assert error(one.reshape(stack.count, B, H), other.numpy()) < 1e-13


# -- modules ----------------------------------------------------------------------------------------------
WHOLE = Stack(2, True, True, True)
CASES = [("lstm", WHOLE), ("gru", Stack(3, False, True)), ("rnn_tanh", Stack(4, True)),
         ("gru_reset_before", Stack(2, True, True)), ("rnn_relu", Stack(1, True, False, True)),
         ("lstm", Stack(1, False, True, True))]


@pytest.mark.parametrize(("cell", "stack"), CASES, ids=str)
def test_modules_match_the_reference(cell: str, stack: Stack):
    x, weights, state = problem(cell, stack, seed=1)
    layer = module(cell, stack).bind(weights, threads=2)
    calls: list[dict[str, Any]] = [{}]
    calls += [{"lengths": LENGTHS}, {"lengths": np.array([2, 1, 2, 2, 0])}] if stack.lengths else []
    calls += [{"resets": marks()}] if stack.resets else []
    calls += [{"lengths": LENGTHS, "resets": marks(4)}] if stack.lengths and stack.resets else []
    for call, start in itertools.product(calls, (None, state)):
        wanted, last = reference(cell, x, weights, start, **call)
        given = x.copy()
        for b, n in enumerate(call.get("lengths", [])):
            given[n:, b] = np.nan  # nobody may look there
        out = np.full((T, B, stack.directions * H), np.nan, np.float32)
        y, after = layer(given, start, out=out, **call)
        assert y is out and error(y, wanted) < LIMIT
        for b, n in enumerate(call.get("lengths", [])):
            assert not y[n:, b].any()
        for found, expected in zip(after, last, strict=True):
            assert found.shape == expected.shape and error(found, expected) < LIMIT


def test_smaller_batches_other_lengths_and_thread_counts():
    _, weights, _ = problem("lstm", Stack(2, True, True))
    loaded = ecornn.compile("lstm", hidden=H, input=I, batch=9, seq=4, target="cpu", schedule="cpu_sequence",
                            config={"rows": rows_that_fit(4, 4), "columns": 4, "pairs": 0, "chunk": 2}, layers=2,
                            bidirectional=True, lengths=True)
    generator = np.random.default_rng(5)
    for steps, batch, threads in ((1, 1, 1), (5, 9, 3), (13, 4, 2)):
        x = generator.standard_normal((steps, batch, I)).astype(np.float32)
        state = tuple(generator.standard_normal((4, batch, H)).astype(np.float32) for _ in range(2))
        lengths = generator.integers(0, steps + 1, batch)
        y, after = loaded.bind(weights, threads=threads)(x, state, lengths=lengths)
        wanted, last = reference("lstm", x, weights, state, lengths=lengths)
        assert error(y, wanted) < LIMIT if wanted.any() else not y.any()
        assert all(error(a, b) < LIMIT for a, b in zip(after, last, strict=True))


def test_batch_first_and_what_lies_anyhow():
    x, weights, state = problem("lstm", WHOLE)
    layer = module("lstm", WHOLE).bind(weights)
    y, after = layer(x, state, lengths=LENGTHS)
    swapped, again = layer(np.ascontiguousarray(x.swapaxes(0, 1)), state, lengths=LENGTHS, batch_first=True)
    np.testing.assert_array_equal(swapped.swapaxes(0, 1), y)
    np.testing.assert_array_equal(again, after)
    strided = np.repeat(x, 2, axis=2)[:, :, ::2], tuple(np.asfortranarray(s) for s in state)
    np.testing.assert_array_equal(layer(*strided, lengths=np.array(LENGTHS, np.int64)[::1])[0], y)


def test_torch_tensors():
    import torch
    x, weights, state = problem("lstm", WHOLE)
    layer = module("lstm", WHOLE).bind(weights)
    wanted, last = layer(x, state, lengths=LENGTHS, resets=marks())
    y, after = layer(torch.from_numpy(x), tuple(map(torch.from_numpy, state)), lengths=torch.tensor(LENGTHS),
                     resets=torch.from_numpy(marks()))
    np.testing.assert_array_equal(y.numpy(), wanted)
    np.testing.assert_array_equal([s.numpy() for s in after], last)


def test_equal_layers_share_their_code():
    buffers = module("rnn_tanh", Stack(4, True)).manifest.buffers
    assert sum(b.role == "packed" and b.name.endswith("vectors") for b in buffers) == 8
    from ecornn.compiler import plan
    from ecornn.compose import compose

    planned = plan("rnn_tanh", hidden=H, input=I, layers=4, bidirectional=True, target="cpu")
    program = compose(planned.stack, planned.workload, planned.programs())
    assert len(program.calls) == 8 and len(program.functions) == 4
    assert len([b for b in program.buffers if b.name.startswith("between")]) == 2


@pytest.mark.parametrize(("call", "kind", "words"), [
    ({"lengths": [1, 2]}, ShapeError, "lengths.shape=(2,)"),
    ({"lengths": [1.0] * B}, DTypeError, "lengths.dtype='float64'"),
    ({"lengths": [T + 1] * B}, ArgumentError, f"from 0 to T={T}"),
    ({"lengths": [-1] * B}, ArgumentError, "from 0 to T"),
    ({"resets": np.zeros((B, T), bool)}, ShapeError, f"({T}, {B}): (T, B)"),
    ({"resets": np.zeros((T, B))}, DTypeError, "bool or uint8"),
    ({"state": (np.zeros((B, H), np.float32),) * 2}, ShapeError, "(L*D, B, H)"),
    ({"batch_first": True, "out": np.zeros((T, B, 2 * H), np.float32)}, ArgumentError, "batch_first")])
def test_bad_arguments_are_named(call: dict[str, Any], kind: type[Exception], words: str):
    x, weights, _ = problem("lstm", WHOLE)
    with pytest.raises(kind) as caught:
        module("lstm", WHOLE).bind(weights)(**({"x": x} | call))
    assert words in str(caught.value)


def test_a_module_without_lengths_says_how_to_have_them():
    x, weights, _ = problem("rnn_tanh", Stack(4, True))
    with pytest.raises(ArgumentError, match="compiled without lengths=True"):
        module("rnn_tanh", Stack(4, True)).bind(weights)(x, lengths=LENGTHS)


@pytest.mark.parametrize("bad", [{"layers": 0}, {"layers": True}, {"bidirectional": 1}, {"lengths": None}])
def test_bad_stacks_are_refused(bad: dict[str, Any]):
    refused(ArgumentError, next(iter(bad)), ecornn.compile, "lstm", hidden=H, target="cpu", **bad)


def test_the_reverse_direction_alone():
    x, weights, state = problem("gru", Stack(2, False, True, False, True))
    loaded = ecornn.compile("gru", hidden=H, input=I, batch=B, seq=T, target="cpu", layers=2, lengths=True,
                            reverse=True)
    y, after = loaded.bind(weights)(x, state, lengths=LENGTHS)
    for b, n in enumerate(LENGTHS):
        wanted, last = reference("gru", x[:n, b:b + 1][::-1], weights, [s[:, b:b + 1] for s in state])
        assert (not n or error(y[:n, b:b + 1], wanted[::-1]) < LIMIT) and error(after[0][:, b:b + 1], last[0]) < LIMIT
    refused(ArgumentError, "reverse", Stack, 1, True, reverse=True)
