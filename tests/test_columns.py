"""Sequences laid end to end in columns: where they lie, calls of a layer with them, and packed sequences of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import runtime_sample as sample
from hypothesis import given, settings
from hypothesis import strategies as st

import ecornn
import ecornn.host_gpu
from ecornn.errors import ArgumentError, DTypeError, ScheduleError, ShapeError
from ecornn.runtime import Columns, Layer
from ecornn.tune.oracle import relative_error

H, I, BATCH = sample.H, sample.I, sample.BATCH
WEIGHTS = sample.weights()
LENGTHS = [3, 9, 1, 5, 5, 2, 9, 4, 1, 7]


@pytest.fixture(params=[sample.HOST, sample.GPU], ids=["cpu", "copies"])
def layer(request: Any, monkeypatch: Any) -> Layer:
    monkeypatch.setattr(ecornn.host_gpu, "detect", lambda index=0: sample.GPU)
    threads = 1 if request.param is sample.HOST else None
    return ecornn.load(sample.build(sample.with_sequences(request.param))).bind(WEIGHTS, threads=threads)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 12))
def test_every_step_has_a_place_of_its_own(lengths: list[int], width: int):
    columns = Columns.of(lengths, width)
    for s, n in enumerate(lengths):
        t, c = np.nonzero(columns.table == s)
        assert (t == columns.start[s] + np.arange(n)).all() and (c == columns.column[s]).all() and len(t) == n
        assert (columns.inside[t, c] == np.arange(n)).all()
    assert (columns.table >= 0).sum() == sum(lengths) and not columns.inside[columns.table < 0].any()
    assert len(columns.table) <= max(lengths) - 1 + sum(lengths) / width + 1
    again = Columns.given(columns.table)
    for name in ("table", "start", "column", "inside"):
        np.testing.assert_array_equal(getattr(again, name), getattr(columns, name))


def test_no_more_columns_than_sequences():
    assert Columns.of([4, 2], 8).table.shape == (4, 2)


@pytest.mark.parametrize(("lengths", "width", "error"), [
    ([3, 0], 2, ArgumentError), ([], 2, ShapeError), ([[1]], 1, ShapeError), ([1.5], 1, DTypeError),
    ([1], 0, ArgumentError)], ids=str)
def test_what_cannot_be_laid(lengths: Any, width: int, error: type[Exception]):
    with pytest.raises(error, match=r"lengths|width"):
        Columns.of(lengths, width)


@pytest.mark.parametrize(("table", "error"), [
    ([[0, 1], [0, 3]], ArgumentError),  # 2 is missing
    ([[0], [-1], [0]], ArgumentError),  # a gap
    ([[0, 0]], ArgumentError),  # two columns
    ([[0, 1], [1, -1]], ArgumentError),  # goes on in another column
    ([[-1]], ArgumentError), ([0, 1], ShapeError), ([[0.0]], DTypeError)], ids=str)
def test_tables_that_are_refused(layer: Layer, table: Any, error: type[Exception]):
    x = sample.inputs(*np.shape(np.atleast_2d(table)))
    runs = sample.stat(layer.module.path, "runs")
    with pytest.raises(error, match="sequences"):
        layer(x, sequences=table)
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
            wanted, last = sample.expected(rows[:n, s:s + 1], WEIGHTS, first)
            found = y[columns.start[s]:columns.start[s] + n, columns.column[s]]
            assert relative_error(found, wanted[:, 0]) <= 1e-6
            for one, other in zip(after, last, strict=True):
                assert relative_error(one[s], other[0]) <= 1e-6


def test_without_a_table_each_column_is_a_sequence(layer: Layer):
    x = sample.inputs()
    y, after = layer(x)
    wanted, last = sample.expected(x, WEIGHTS)
    for one, other in zip((y, *after), (wanted, *last), strict=True):
        assert relative_error(one, other) <= 1e-6


def test_states_are_by_sequence(layer: Layer):
    columns = Columns.of(LENGTHS, 2)
    with pytest.raises(ShapeError, match=rf"state\[0\].shape.*\({len(LENGTHS)}, {H}\)"):
        layer(sample.inputs(*columns.table.shape), [np.zeros((2, H), np.float32)] * 2, sequences=columns)


def test_modules_without_say_how_to_have_them():
    plain = ecornn.load(sample.build(sample.manifest())).bind(WEIGHTS)
    with pytest.raises(ArgumentError, match="sequences=True"):
        plain(sample.inputs(), sequences=Columns.of([6], 1))


def test_what_is_refused_to_compile():
    with pytest.raises(ArgumentError, match=r"sequences.*lengths"):
        ecornn.compile("lstm", hidden=8, sequences=True, lengths=True, target="cpu")
    with pytest.raises(ScheduleError, match="one sequence after the other"):
        ecornn.compile("lstm", hidden=8, sequences=True, target="cpu")
    with pytest.raises(ArgumentError, match=r"overlap.*sequences"):
        ecornn.compile("lstm", hidden=8, layers=2, sequences=True, target="sm_90a", overlap="wavefront")


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_of_pytorch(with_state: bool):
    torch = pytest.importorskip("torch")
    from ecornn.torch import packed

    layer = ecornn.load(sample.build(sample.with_sequences())).bind(WEIGHTS, threads=1)
    rows = [torch.randn(n, I) for n in LENGTHS]
    given = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    state = [torch.randn(len(LENGTHS), H) for _ in "hc"] if with_state else None
    y, *after = packed.call_layer(layer, given, state)
    made = torch.nn.utils.rnn.PackedSequence(y, given.batch_sizes, given.sorted_indices, given.unsorted_indices)
    found = torch.nn.utils.rnn.unpack_sequence(made)
    for place, s in enumerate(given.sorted_indices.tolist()):
        first = None if state is None else [v[place:place + 1].numpy() for v in state]
        wanted, last = sample.expected(rows[s][:, None].numpy(), WEIGHTS, first)
        assert relative_error(found[s], wanted[:, 0]) <= 1e-6
        for one, other in zip(after, last, strict=True):
            assert relative_error(one[place], other[0]) <= 1e-6


def test_padding_by_one_gather():
    """As PyTorch pads and packs; what it needs on the device is made with the first call."""
    torch = pytest.importorskip("torch")
    from ecornn.torch import packed

    rows = [torch.randn(n, I) for n in LENGTHS]
    given = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
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
    torch = pytest.importorskip("torch")
    from ecornn.runtime.torch_arrays import TorchArrays

    layer = ecornn.load(sample.build(sample.with_sequences())).bind(WEIGHTS, threads=1)
    columns, made, rows = Columns.of(LENGTHS, 2), [], TorchArrays.rows
    monkeypatch.setattr(TorchArrays, "rows", lambda self, *a: made.append(1) or rows(self, *a))
    x = torch.randn(*columns.table.shape, I)
    first, second = (layer(x, sequences=columns)[0] for _ in range(2))
    assert torch.equal(first, second) and len(made) == 1


@pytest.mark.parametrize(("lengths", "width"), [
    ([50] * 32, None), ([100, *range(1, 32)], 16), (list(range(1, 33)), 16), ([9] * 8, None), ([9, *[1] * 15], None),
    ([90] * 20 + [10] * 44, 32), ([90] * 40 + [10] * 24, None)],
    ids=str)
def test_how_many_columns_packed_sequences_take(lengths: list[int], width: int | None):
    pytest.importorskip("torch")
    from ecornn.torch import packed

    assert packed.columns_for(np.array(lengths)) == width
