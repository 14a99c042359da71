"""Sequences laid end to end in columns: where they lie, calls of a layer with them, and packed sequences of PyTorch."""

import ctypes
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import runtime_sample as sample
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import ecornn
import ecornn.host_gpu
from ecornn.compiler import plan
from ecornn.compose import compose
from ecornn.errors import ArgumentError, DTypeError, ScheduleError, ShapeError
from ecornn.program import EARLIER, ENTRIES, LATER, PIECES_APART, Buffer
from ecornn.runtime import Columns, Layer
from ecornn.runtime.columns import steps_of
from ecornn.runtime.torch_arrays import TorchArrays
from ecornn.task import make_manifest
from ecornn.torch import packed
from ecornn.tune.oracle import relative_error
from ecornn.workload import Stack

H, I, BATCH = sample.H, sample.I, sample.BATCH
WEIGHTS = sample.weights()
LENGTHS = [3, 9, 1, 5, 5, 2, 9, 4, 1, 7]


@pytest.fixture(params=[sample.HOST, sample.GPU], ids=["cpu", "copies"])
def layer(request: Any, monkeypatch: Any) -> Layer:
    monkeypatch.setattr(ecornn.host_gpu, "detect", lambda index=0: sample.GPU)
    threads = 1 if request.param is sample.HOST else None
    return ecornn.load(sample.build(sample.with_sequences(request.param))).bind(WEIGHTS, threads=threads)


def check(y: Any, after: Any, x: np.ndarray, state: Any) -> None:
    wanted, last = sample.expected(x, WEIGHTS, state)
    for found, exact in zip((y, *after), (wanted[:, 0], *(v[0] for v in last)), strict=True):
        assert relative_error(found, exact) <= 1e-6


DRAWN = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(DRAWN, st.integers(1, 12))
def test_every_step_has_a_place_of_its_own(lengths: list[int], width: int):
    columns = Columns.of(lengths, width)
    for s, n in enumerate(lengths):
        t, c = np.nonzero(columns.table == s)
        assert (t == t[0] + np.arange(n)).all() and (c == c[0]).all() and len(t) == n
        assert (columns.inside[t, c] == np.arange(n)).all()
        assert (columns.of_sequence(s) == t * columns.table.shape[1] + c).all()
    assert (columns.table >= 0).sum() == sum(lengths) and not columns.inside[columns.table < 0].any()
    assert len(columns.table) <= max(lengths) - 1 + sum(lengths) / width + 1
    assert columns.table.shape[1] == min(width, len(lengths))
    assert not columns.wrapped.size and (columns.marked == columns.table).all()
    again = Columns.given(columns.table)
    for name in ("table", "places", "first", "wrapped", "marked", "inside"):
        np.testing.assert_array_equal(getattr(again, name), getattr(columns, name))


@settings(max_examples=150, deadline=None)
@given(DRAWN, st.integers(1, 12), st.integers(2, 12))
def test_sequences_that_wrap_around(lengths: list[int], width: int, together: int):
    """In neighbouring columns of a group, far enough apart, and marked; never in more steps than whole ones."""
    columns = Columns.of(lengths, width, together)
    (steps, width), wrapped = columns.table.shape, 0
    for s, n in enumerate(lengths):
        t, c = np.divmod(columns.of_sequence(s), width)
        assert len(t) == n and (columns.table[t, c] == s).all() and (columns.inside[t, c] == np.arange(n)).all()
        cut = np.flatnonzero(np.diff(c)) + 1
        if not cut.size:
            assert (t == t[0] + np.arange(n)).all() and (columns.marked[t, c] == s).all()
            continue
        (r,), wrapped = cut, wrapped + 1
        assert (t[:r] == np.arange(r)).all() and (t[r:] == steps - n + np.arange(r, n)).all()
        assert t[r] - t[r - 1] > PIECES_APART and c[0] == c[-1] + 1 and c[0] // together == c[-1] // together
        assert c[-1] in columns.wrapped
        assert (columns.marked[t, c] == s + np.where(np.arange(n) < r, EARLIER, LATER)).all()
    assert wrapped == len(columns.wrapped) and (columns.table >= 0).sum() == sum(lengths)
    assert ((columns.marked < 0) == (columns.table < 0)).all()
    assert steps == steps_of(lengths, width, together) <= steps_of(lengths, width)
    if together >= width:
        assert steps <= max(max(lengths) + PIECES_APART, -(-sum(lengths) // width))


def test_columns_that_wrap_around_are_full():
    lengths = np.random.default_rng(0).integers(1, 301, 64)
    least = -(-int(lengths.sum()) // 32)
    assert max(300, least) <= steps_of(lengths, 32, 32) <= max(302, least)
    assert steps_of(lengths, 32, 32) < 0.97 * steps_of(lengths, 32)
    assert steps_of(lengths, 32, 32) <= steps_of(lengths, 32, 16) < steps_of(lengths, 32)


@pytest.mark.parametrize(("lengths", "width", "error"), [
    ([3, 0], 2, ArgumentError), ([], 2, ShapeError), ([[1]], 1, ShapeError), ([1.5], 1, DTypeError),
    ([1], 0, ArgumentError)], ids=str)
def test_what_cannot_be_laid(lengths: Any, width: int, error: type[Exception]):
    refused(error, r"lengths|width", Columns.of, lengths, width)


@pytest.mark.parametrize(("table", "error"), [
    ([[0, 1], [0, 3]], ArgumentError),  # 2 is missing
    ([[0], [-1], [0]], ArgumentError),  # a gap
    ([[0, 0]], ArgumentError),  # two columns
    ([[0, 1], [1, -1]], ArgumentError),  # goes on in another column
    ([[-1]], ArgumentError), ([0, 1], ShapeError), ([[0.0]], DTypeError)], ids=str)
def test_tables_that_are_refused(layer: Layer, table: Any, error: type[Exception]):
    x = sample.inputs(*np.shape(np.atleast_2d(table)))
    runs = sample.stat(layer.module.path, "runs")
    refused(error, "sequences", layer, x, sequences=table)
    assert sample.stat(layer.module.path, "runs") == runs


def test_a_table_of_another_shape(layer: Layer):
    with pytest.raises(ShapeError, match=r"sequences.shape"):
        layer(sample.inputs(3, 2), sequences=[[0, 1], [0, 1]])


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("width", [1, 3, BATCH])
def test_more_sequences_than_columns(layer: Layer, width: int, with_state: bool):
    rng, columns = np.random.default_rng(width), Columns.of(LENGTHS, width)
    rows = rng.standard_normal((max(LENGTHS), len(LENGTHS), I)).astype(np.float32)
    state = [rng.standard_normal((len(LENGTHS), H)).astype(np.float32) for _ in "hc"] if with_state else None
    x = rows[columns.inside, columns.table]
    x[columns.table < 0] = np.nan
    for sequences in (columns, columns.table, columns.table.tolist()):
        y, after = layer(x, state, sequences=sequences)
        assert not y[columns.table < 0].any()
        for s, n in enumerate(LENGTHS):
            first = None if state is None else [v[s:s + 1] for v in state]
            check(y.reshape(-1, H)[columns.of_sequence(s)], [v[s] for v in after], rows[:n, s:s + 1], first)


@pytest.mark.parametrize("together", [3, 4])
def test_a_layer_says_which_columns_may_share_a_sequence(together: int):
    """The sample reads the table as kernels do: a piece goes on from the state that the other one left."""
    said = msgspec.structs.replace(sample.with_sequences(), together=together)
    layer = ecornn.load(sample.build(said)).bind(WEIGHTS, threads=1)
    assert layer.together == together
    rng, columns = np.random.default_rng(0), Columns.of([11] * 4, 3, 3)
    assert len(columns.table) == 15 and columns.wrapped.tolist() == [0, 1]
    rows = rng.standard_normal((11, 4, I)).astype(np.float32)
    state = [rng.standard_normal((4, H)).astype(np.float32) for _ in "hc"]
    y, after = layer(rows[columns.inside, columns.table], state, sequences=columns)
    for s in range(4):
        check(y.reshape(-1, H)[columns.of_sequence(s)], [v[s] for v in after], rows[:, s:s + 1],
              [v[s:s + 1] for v in state])


def test_sequences_that_wrap_around_elsewhere_are_refused(layer: Layer):
    """A module that says nothing of it, such as one from before, has no columns that share."""
    columns, runs = Columns.of([11] * 4, 3, 3), sample.stat(layer.module.path, "runs")
    assert layer.together == 1
    with pytest.raises(ArgumentError, match=r"sequences=.*together=1"):
        layer(sample.inputs(*columns.table.shape), sequences=columns)
    assert sample.stat(layer.module.path, "runs") == runs


@pytest.mark.parametrize(("groups", "stack", "together"), [
    ([1], {}, 24), ([2], {}, 12), ([3], {}, 8), ([2, 2], {"bidirectional": True}, 12),
    ([1, 3], {"bidirectional": True}, 8), ([1, 1], {"bidirectional": True}, 24), ([2, 3], {"bidirectional": True}, 4)])
def test_groups_that_every_part_of_a_stack_has(groups: list[int], stack: dict[str, bool], together: int):
    config = {"units": 16, "warps": 2, "gate_warps": 2, "chains": 1, "registers": 100, "interleave": 0, "ahead": 100,
              "fences": "rare", "hoisted": "float32", "carrier": "l2", "math": "fast"}
    made = plan("lstm", hidden=64, batch=24, dtype="float16", target="sm_90a", sequences=True, schedule="persistent",
                overlap="none", **stack)
    programs = []
    for task, count in zip(made.tasks, groups, strict=True):
        assert made.found.schedule.check(task, {**config, "groups": count}) is None
        programs.append(made.found.schedule.program(task, made.found.schedule.plan(task, {**config, "groups": count})))
    program = compose(made.stack, made.workload, programs)
    manifest = make_manifest(made.cell, made.task, made.found.schedule, config, program, "", made.stack)
    assert manifest.together == together


def test_without_a_table_each_column_is_a_sequence(layer: Layer):
    y, after = layer(x := sample.inputs())
    for s in range(BATCH):
        check(y[:, s], [v[s] for v in after], x[:, s:s + 1], None)


def test_states_are_by_sequence(layer: Layer):
    columns = Columns.of(LENGTHS, 2)
    with pytest.raises(ShapeError, match=rf"state\[0\].shape.*\({len(LENGTHS)}, {H}\)"):
        layer(sample.inputs(*columns.table.shape), [np.zeros((2, H), np.float32)] * 2, sequences=columns)


def test_modules_without_say_how_to_have_them():
    plain = ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS)
    with pytest.raises(ArgumentError, match="sequences=True"):
        plain(sample.inputs(), sequences=Columns.of([6], 1))


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"lengths": True, "target": "cpu"}, ArgumentError, r"sequences.*lengths"),
    ({"target": "cpu"}, ScheduleError, "laid end to end in a column"),
    ({"layers": 2, "target": "sm_90a", "overlap": "wavefront"}, ArgumentError, r"overlap.*sequences")], ids=str)
def test_what_is_refused_to_compile(options: dict[str, Any], kind: type[Exception], words: str):
    refused(kind, words, ecornn.compile, "lstm", hidden=8, sequences=True, **options)


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_of_pytorch(with_state: bool):
    layer = ecornn.load(sample.build(sample.with_sequences())).bind(WEIGHTS, threads=1)
    rows = [torch.randn(n, I) for n in LENGTHS]
    given = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    state = [torch.randn(len(LENGTHS), H) for _ in "hc"] if with_state else None
    layout = packed.laid(given.batch_sizes.numpy().tobytes(), layer.manifest.workload.batch, layer.together)
    def call(x: torch.Tensor, masks: dict[str, Any]) -> list[torch.Tensor]:
        y, last = layer(x, state, **masks)
        return [y, *last]
    y, *after = layout.call(given.data, call)
    made = torch.nn.utils.rnn.PackedSequence(y, given.batch_sizes, given.sorted_indices, given.unsorted_indices)
    found = torch.nn.utils.rnn.unpack_sequence(made)
    for place, s in enumerate(given.sorted_indices.tolist()):
        first = None if state is None else [v[place:place + 1].numpy() for v in state]
        check(found[s], [v[place] for v in after], rows[s][:, None].numpy(), first)


def test_padding_by_one_gather():
    given = torch.nn.utils.rnn.pack_sequence([torch.randn(n, I) for n in LENGTHS], enforce_sorted=False)
    wanted, lengths = torch.nn.utils.rnn.pad_packed_sequence(
        torch.nn.utils.rnn.PackedSequence(given.data, given.batch_sizes))
    layout, seen = packed.padded(given.batch_sizes.numpy().tobytes()), []
    def call(x: Any, masks: Any) -> list[Any]:
        assert torch.equal(masks["lengths"], lengths) and x.shape == wanted.shape
        inside = torch.arange(len(x))[:, None] < lengths
        assert torch.equal(x[inside], wanted[inside])
        seen.append(masks["lengths"].data_ptr())
        return [2 * x, x]

    for _ in range(2):
        y, x = layout.call(given.data, call)
        assert torch.equal(y, 2 * given.data) and x.shape == wanted.shape
    assert seen[0] == seen[1] and packed.padded(given.batch_sizes.clone().numpy().tobytes()) is layout


def test_a_table_is_copied_once(monkeypatch: Any):
    layer = ecornn.load(sample.build(sample.with_sequences())).bind(WEIGHTS, threads=1)
    columns, made, rows = Columns.of(LENGTHS, 2), [], TorchArrays.rows
    monkeypatch.setattr(TorchArrays, "rows", lambda self, *a: made.append(1) or rows(self, *a))
    x = torch.randn(*columns.table.shape, I)
    first, second = (layer(x, sequences=columns)[0] for _ in range(2))
    assert torch.equal(first, second) and len(made) == 1


@pytest.mark.parametrize(("lengths", "width"), [
    ([50] * 32, None), ([100, *range(1, 32)], 16), (list(range(1, 33)), 16), ([9] * 8, None), ([9, *[1] * 15], None),
    ([90] * 20 + [10] * 44, 32), ([90] * 40 + [10] * 24, 32), ([90] * 56 + [10] * 8, None)], ids=str)
def test_how_many_columns_packed_sequences_take(lengths: list[int], width: int | None):
    assert packed.columns_for(np.array(lengths)) == width


def test_a_training_step_has_states_by_sequence():
    said, states = sample.with_sequences(), ("state_in", "state_out", "dstate_out", "dstate_in")
    gradients = [Buffer.of("gradient", "float32", key) for key in ("W", "b")]
    made = [*(Buffer.of(tensor, "float32", s) for tensor in states for s in "hc"),
            *(Buffer.of(t, "float32") for t in ("x", "y", "sequences", "dy", "dx")), *gradients]
    buffers = {b.name: b for b in (*said.buffers, *made)}
    entries = {name: tuple(n for n, b in buffers.items() if b.tensor in of) for name, of in ENTRIES.items()}
    said = msgspec.structs.replace(said, together=3, buffers=tuple(buffers.values()), entries={
        **entries, "run": said.entries["run"]}, stack=Stack(sequences=True, keep="states"))
    layer = ecornn.load(sample.build(said)).bind(WEIGHTS, threads=1)
    columns, rng, calls = Columns.of([11] * 4, 3, 3), np.random.default_rng(0), dict[str, dict[str, Any]]()
    steps, width = columns.table.shape
    def array(pointer: int, kind: Any, *shape: int) -> Any:
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), shape)

    def entry(name: str) -> Any:
        def call(T: int, B: int, device: int, queue: int, *pointers: int) -> None:
            given = dict(zip(entries[name], pointers, strict=True))
            assert (steps, width) == (T, B)
            assert np.array_equal(array(given["sequences"], ctypes.c_int32, T, B), columns.marked)
            calls[name] = {n: array(at, ctypes.c_float, 4, H) for n, at in given.items()
                           if buffers[n].state in ("h", "c")}
            for n, value in calls[name].items():
                if buffers[n].role == "made":
                    value[:] = np.arange(4 * H).reshape(4, H) + len(n)
        return call

    layer.library = dataclasses.replace(layer.library, forward=entry("forward"), backward=entry("backward"))
    x, dy = (rng.standard_normal((steps, width, n)).astype(np.float32) for n in (I, H))
    first, last = ([rng.standard_normal((4, H)).astype(np.float32) for _ in "hc"] for _ in range(2))
    _, after, kept = layer.forward(x, first, sequences=columns)
    found = layer.backward(kept, dy, last)
    for s, name in enumerate("hc"):
        assert np.array_equal(calls["forward"][f"{name}_in"], first[s])
        assert np.array_equal(calls["backward"][f"{name}_in"], first[s])
        assert np.array_equal(calls["backward"][f"d{name}_out"], last[s])
        assert np.array_equal(after[s], np.arange(4 * H).reshape(4, H) + len("h_out"))
        assert np.array_equal(found.state[s], np.arange(4 * H).reshape(4, H) + len("dh_in"))
    with pytest.raises(ShapeError, match=rf"dstate\[0\].*\(4, {H}\)"):
        layer.backward(layer.forward(x, sequences=columns)[2], dy, [v[:3] for v in last])
    with pytest.raises(ArgumentError, match=r"sequences=.*together=3"):
        columns = Columns.of([11] * 5, 4, 4)
        layer.forward(np.zeros((*columns.table.shape, I), np.float32), sequences=columns)
