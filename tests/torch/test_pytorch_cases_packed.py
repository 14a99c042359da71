"""What PyTorch tests of packed sequences (its nn/test_packed_sequence.py, and RNNs of them), of ecornn.torch's layers.

docs/PYTORCH_CASES.md lists these by intent, with what differs and why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_cases import BACKWARD, NAMES, B, H, I, T, close, double, error, flat, pair, states
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

import ecornn.torch
from ecornn.errors import DTypeError, ShapeError

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [3, 6, 1, 5]
LONGEST_FIRST = [6, 5, 3, 1]


@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("enforce_sorted", [False, True], ids=["any order", "sorted"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize("name", NAMES)
def test_pack_padded_sequence(name: str, batch_first: bool, enforce_sorted: bool, state: bool):
    """test_pack_padded_sequence through a layer: y packed as x is, last states in the order of the sequences."""
    theirs, ours = pair(name, batch_first=batch_first)
    lengths = LONGEST_FIRST if enforce_sorted else LENGTHS
    x = pack_padded_sequence(torch.randn(*((B, T) if batch_first else (T, B)), I), lengths, batch_first, enforce_sorted)
    hx = states(name, 1) if state else None
    with torch.no_grad():
        y, after = ours(x, hx)
        wanted = theirs(double(x), double(hx))
    close((y, after), wanted)
    assert isinstance(y, PackedSequence)
    for one, other in zip(y[1:], x[1:], strict=True):
        assert one is other or torch.equal(one, other)
    rows, found = pad_packed_sequence(y, batch_first)
    assert found.tolist() == lengths
    ends = [(rows if batch_first else rows.transpose(0, 1))[n, length - 1] for n, length in enumerate(lengths)]
    assert torch.equal(torch.stack(ends), flat(after)[0][0])


@pytest.mark.parametrize("padding", [0.0, float("nan"), 1e30])
@pytest.mark.parametrize("total", [T, T + 2])
def test_total_length_and_padding(total: int, padding: float):
    """test_total_length, test_pad_packed_sequence: what padding holds is nobody's."""
    theirs, ours = pair("GRU")
    x = torch.full((T, B, I), padding)
    for number, length in enumerate(LENGTHS):
        x[:length, number] = torch.randn(length, I)
    packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    with torch.no_grad():
        found = pad_packed_sequence(ours(packed)[0], total_length=total)[0]
        wanted = pad_packed_sequence(theirs(double(packed))[0], total_length=total)[0]
    assert found.shape == (total, B, H) and not found[T:].any()
    close(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_pack_sequence(name: str):
    """test_pack_sequence, test_unpack_sequence: each of a list of sequences as it is alone."""
    theirs, ours = pair(name)
    rows = [torch.randn(length, I) for length in LENGTHS]
    with torch.no_grad():
        found = unpack_sequence(ours(pack_sequence(rows, enforce_sorted=False))[0])
    for one, row in zip(found, rows, strict=True):
        close(one, theirs(row.double())[0].detach())


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_one_length(name: str):
    """Packed, these are the padded rows."""
    _, ours = pair(name)
    x = torch.randn(T, B, I)
    with torch.no_grad():
        y, after = ours(pack_padded_sequence(x, [T] * B))
        wanted = ours(x)
        close((y.data.view(T, B, H), after), wanted)


@pytest.mark.parametrize(("name", "bidirectional"), [("LSTM", True), ("GRU", False)])
def test_the_order_of_rows_does_not_matter(name: str, bidirectional: bool):
    """test_variable_sequence: shuffled sequences give shuffled results, and gradients."""
    _, ours = pair(name, bidirectional=bidirectional)
    x, order, made = torch.randn(T, B, I), torch.tensor([2, 0, 3, 1]), []
    for index in (torch.arange(B), order):
        leaf = x[:, index].clone().requires_grad_()
        y, after = ours(pack_padded_sequence(leaf, [LENGTHS[n] for n in index], enforce_sorted=False))
        rows = pad_packed_sequence(y, total_length=T)[0]
        loss = rows.square().sum() + sum(s.square().sum() for s in flat(after))
        grads = torch.autograd.grad(loss, [leaf, *ours.parameters()])
        back = torch.argsort(index)
        made.append([rows[:, back], *(s[:, back] for s in flat(after)), grads[0][:, back], *grads[1:]])
    close(made[1], made[0], 1e-5)


def test_gradients_of_padding_are_zero():
    _, ours = pair("GRU")
    x = torch.randn(T, B, I, requires_grad=True)
    ours(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))[0].data.square().sum().backward()
    for number, length in enumerate(LENGTHS):
        assert x.grad[:length, number].all() and not x.grad[length:, number].any()


@pytest.mark.parametrize("where", ["y", "state"])
def test_writes_to_results(where: str):
    """In-place operations on packed y and on states, with gradients."""
    theirs, ours = pair("GRU")
    x, made = torch.randn(T, B, I), []
    for layer, given in ((theirs, x.double()), (ours, x)):
        y, after = layer(pack_padded_sequence(given, LONGEST_FIRST))
        (y.data if where == "y" else after).add_(1)
        (y.data.square().sum() + after.square().sum()).backward()
        made.append([w.grad for w in layer.parameters()])
    close(made[1], made[0], BACKWARD)


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize(("sizes", "rows", "kind"), [
    ([2, 2, 1], 4, ShapeError), ([1, 2, 2], 5, ShapeError), ([2, 2, -1], 4, ShapeError), ([], 0, ShapeError),
    ([2, 3, 1], 6, ShapeError), ("int32", 5, DTypeError)])
def test_batch_sizes_that_fit_nothing(sizes: Any, rows: int, kind: type[Exception], grad: bool):
    """A PackedSequence that is put together by hand: PyTorch raises what it comes across, ours names batch_sizes. One
    of them ended the process: its rows were read from beyond the data."""
    theirs, ours = (where.GRU(I, H) for where in (torch.nn, ecornn.torch))
    sizes = torch.tensor([2, 2, 1], dtype=torch.int32) if sizes == "int32" else torch.tensor(sizes, dtype=torch.int64)
    with torch.set_grad_enabled(grad):
        for layer in (theirs, ours):
            with pytest.raises((RuntimeError, IndexError)) as caught:
                layer(PackedSequence(torch.randn(rows, I), sizes))
    assert isinstance(caught.value, kind) and isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize(("sizes", "rows"), [([2, 2, 1], 7), ([2, 2, 0], 4), ([0], 0)])
def test_batch_sizes_that_are_unusual(sizes: list[int], rows: int, grad: bool):
    """More rows than sizes have, a step of no rows, and no sequence at all: as PyTorch takes them."""
    theirs, ours = pair("GRU")
    ours.double().float()
    x = torch.randn(rows, I)
    with torch.set_grad_enabled(grad):
        found = ours(pack_padded_sequence(torch.randn(T, B, I), LONGEST_FIRST))  # compiles for these
        found = ours(PackedSequence(x, torch.tensor(sizes)))
        wanted = theirs(PackedSequence(x.double(), torch.tensor(sizes)))
    assert len(found[0].data) == sum(sizes)
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert one.shape == other.shape and (not one.numel() or error(one.detach(), other.detach()) < 1e-5)


@pytest.mark.parametrize(("data", "hx", "words"), [
    ((5,), None, "input.shape"), ((5, I, 1), None, "input.shape"), ((5, I + 1), None, "input.shape"),
    ((5, I), (1, 3, H), r"h_0\.shape"), ((5, I), (1, H), r"h_0\.shape"), ((5, I), (1, 2, H + 1), r"h_0\.shape")])
def test_arguments_that_do_not_fit(data: tuple[int, ...], hx: tuple[int, ...] | None, words: str):
    """check_forward_args of packed sequences."""
    for layer in (torch.nn.GRU(I, H), ecornn.torch.GRU(I, H)):
        with pytest.raises(RuntimeError) as caught:
            layer(PackedSequence(torch.randn(data), torch.tensor([2, 2, 1])), None if hx is None else torch.zeros(hx))
    assert isinstance(caught.value, ShapeError)
    with pytest.raises(ShapeError, match=words):
        raise caught.value


def test_types_and_devices():
    """test_type_casts, test_to: a PackedSequence of another type is what PyTorch makes of it."""
    _, ours = pair("GRU")
    x = pack_padded_sequence(torch.randn(T, B, I), LENGTHS, enforce_sorted=False)
    with torch.no_grad():
        close(ours(x.double().float()), ours(x))
        with pytest.raises(ValueError, match="as the weights'"):
            ours(x.double())
        assert ours(x.to("cpu"))[0].data.device.type == "cpu"
