"""PyTorch's tests of RNN, LSTM and GRU, of ecornn.torch's layers: docs/PYTORCH_CASES.md lists them, and differences."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from refusals import refused
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch_pairs import LENGTHS, B, H, I, T, alike, copied, gradients, load, of_both, primed, states
from torch_pairs import training_case as case
from torch_values import BACKWARD, close, double, error, flat, same

import ecornn.torch
from ecornn.errors import ArgumentError, DeviceError, FallbackError, ShapeError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:LSTM with projections")]
P, BAD = 3, 7 * 13  # a projection, and a size that fits nothing
DEEP = {"num_layers": 2, "bidirectional": True}


def both(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return tuple(getattr(where, name)(*args, **kwargs) for where in (torch.nn, ecornn.torch))


@pytest.mark.parametrize("wrong", ["input's batch", "state's batch", "input's size", "state's size", "state's layers"])
def test_rnn_args_check(name: str, wrong: str):
    """test_rnn_args_check, test_cudnn_forward_exception: a RuntimeError that names the argument and what fits."""
    shape, hidden = [T, B, I], [2, B, H]
    at, size = (shape if wrong.startswith("input") else hidden), {"batch": 1, "size": 2, "layers": 0}
    at[size[wrong.split()[1]]] = BAD
    x, good, bad = torch.randn(shape), torch.zeros(2, B, H), torch.zeros(hidden)
    given: list[Any] = [(bad, good), (good, bad)] if name == "LSTM" and bad.shape != good.shape else [(bad, bad)]
    for layer, some in itertools.product(both(name, I, H, 2), given):
        with pytest.raises(RuntimeError) as caught:
            layer(x, some if name == "LSTM" else some[0])
    assert isinstance(caught.value, ShapeError) and "expected" in str(caught.value)


@pytest.mark.parametrize(("h", "c"), [
    ((2, BAD, P), (2, BAD, H)), ((2, B, BAD), (2, B, BAD)), ((BAD, B, P), (BAD, B, H)), ((2, B, H), (2, B, H)),
    ((2, B, P), (2, B, P)), ((2, B, P), (BAD, B, H)), ((2, P), (2, H)), ((H, B, P), (2, B, H))])
def test_projections_lstm_args_check(h: tuple[int, ...], c: tuple[int, ...]):
    for layer in both("LSTM", I, H, 2, proj_size=P):
        with pytest.raises(RuntimeError):
            layer(torch.randn(T, B, I), (torch.zeros(h), torch.zeros(c)))


@pytest.mark.parametrize(("axes", "state"), [(1, None), (4, None), (3, 2), (2, 3)])
def test_numbers_of_axes(name: str, axes: int, state: int | None):
    x = torch.randn((2, T, B, I)[4 - axes:] if axes != 2 else (T, I))
    h = None if state is None else torch.zeros((1, H) if state == 2 else (1, 1, H))
    for layer in both(name, I, H):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            layer(x, (h, h) if name == "LSTM" and h is not None else h)
    assert isinstance(caught.value, ShapeError)


@pytest.mark.parametrize(("name", "hx"), [
    ("LSTM", torch.zeros(1, B, H)), ("LSTM", (torch.zeros(1, B, H),)), ("LSTM", (torch.zeros(1, B, H),) * 3),
    ("GRU", (torch.zeros(1, B, H),)), ("RNN", (torch.zeros(1, B, H), torch.zeros(1, B, H)))])
def test_states_of_another_kind(name: str, hx: Any):
    """A tuple where a tensor belongs, or too few: PyTorch raises what it comes across, ours an ArgumentError."""
    theirs, ours = both(name, I, H)
    with pytest.raises((RuntimeError, TypeError, AttributeError, IndexError)):
        theirs(torch.randn(T, B, I), hx)
    refused(ArgumentError, "expected a t", ours, torch.randn(T, B, I), hx)


def test_rnn_check_device(name: str):
    """test_rnn_check_device, with ``meta`` as the other device."""
    layer, x = getattr(ecornn.torch, name)(I, H), torch.randn(T, B, I)
    hx = states(name, 1)
    elsewhere = tuple(s.to("meta") for s in hx) if name == "LSTM" else hx.to("meta")
    refused(DeviceError, r"h_0\.device='meta'.*as the input's", layer, x, elsewhere)
    refused(FallbackError, "on meta", layer, x.to("meta"))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize(("name", "options"), [("LSTM", DEEP), ("GRU", {"num_layers": 2}),
                                               ("RNN", {"nonlinearity": "relu"}), ("RNN", {"nonlinearity": "tanh"}),
                                               ("LSTM", {"num_layers": 2, "proj_size": P})])
def test_rnn_against_another_implementation(name: str, options: dict[str, Any], batch_first: bool, bias: bool):
    """test_RNN_cpu_vs_cudnn_no_dropout: values and all gradients, from states, of another implementation's."""
    theirs, ours, x = case(name, bias=bias, batch_first=batch_first, **options)
    parts = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    alike(theirs, ours, x, states(name, parts, B, options.get("proj_size", H)))


@pytest.mark.parametrize("enforce_sorted", [False, True], ids=["any order", "sorted"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize(("name", "bidirectional"), [("LSTM", True), ("GRU", False), ("RNN", False)])
def test_rnn_of_variable_lengths(name: str, bidirectional: bool, batch_first: bool, enforce_sorted: bool):
    """test_RNN_cpu_vs_cudnn_no_dropout, packed; test_variable_sequence; test_pack_padded_sequence through a layer."""
    theirs, ours, x = case(name, batch_first=batch_first, bidirectional=bidirectional)
    hx = states(name, 1 + bidirectional)
    lengths = torch.tensor(LENGTHS).sort(descending=True).values if enforce_sorted else LENGTHS
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted)
    class Packed(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, data: torch.Tensor, hx: Any) -> Any:
            return self.layer(PackedSequence(data, *packed[1:]), hx)

    (wanted, exact), (found, grads) = (gradients(Packed(layer), packed.data, hx) for layer in (theirs, ours))
    close(found, wanted)
    close(grads, exact, BACKWARD)
    y, after = found
    assert isinstance(y, PackedSequence)
    for one, other in zip(y[1:], packed[1:], strict=True):
        assert one is other or torch.equal(one, other)
    rows = x if batch_first else x.transpose(0, 1)
    padded, found_lengths = pad_packed_sequence(y, True)
    assert found_lengths.tolist() == [*lengths]
    for number, length in enumerate(lengths):
        assert torch.equal(padded[number, length - 1, :H], flat(after)[0][0, number])
        alone = theirs(rows[number, :length].double(), tuple(s[:, number].double() for s in hx) if name == "LSTM"
                       else hx[:, number].double())[0]
        assert error(padded[number, :length].detach(), alone.detach()) < 1e-5


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_rnn_with_dropout_against_another_implementation(p: float):
    """test_RNN_cpu_vs_cudnn_with_dropout: of none and of all, which need no random numbers."""
    alike(*case("GRU", num_layers=2, dropout=p))


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_rnn_change_dropout(train: bool):
    """test_RNN_change_dropout, test_RNN_dropout_state: the attribute counts at each call; two calls draw anew."""
    layer, x = ecornn.torch.GRU(I, H, 2).train(train), torch.randn(T, B, I)
    before = None
    with torch.no_grad():
        for p in (0, 0.5, 0, 0.7, 0.2, 1, 0.2, 0):
            layer.dropout = p
            other = copied(layer, "torch.save")
            other.flatten_parameters()
            one, two = layer(x)[0], other(x)[0]
            assert torch.equal(one, two) == (p in (0, 1) or not train)
            assert before is None or (train and p != 0) or not train or not torch.equal(one, before)
            assert train or before is None or error(one, before) < 1e-6
            before = one.double()


def test_dropout_of_one_layer_warns(name: str):
    for where in (torch.nn, ecornn.torch):
        with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
            getattr(where, name)(I, H, dropout=0.5)


@pytest.mark.parametrize("weight", ["weight_hh_l0", "weight_ih_l0", "weight_hr_l0"])
@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm")
def test_rnn_weight_norm(weight: str):
    """test_RNN_cudnn_weight_norm: the same values under weight norm and after it, and gradients of what it adds."""
    theirs, ours, x = case("LSTM", **({"num_layers": 2, "proj_size": P} if weight == "weight_hr_l0" else {}))
    wanted = theirs(x.double())
    for layer in (theirs, ours):
        torch.nn.utils.weight_norm(layer, weight)
    close(ours(x), wanted)
    close(gradients(ours, x)[1], gradients(theirs, x)[1], BACKWARD)
    torch.nn.utils.remove_weight_norm(ours, weight)
    close(ours(x), wanted)
    assert [*ours.state_dict()].count(weight) == 1


def test_partial_flat_weights(name: str):
    """test_partial_flat_weights: a weight that is away while the others move."""
    theirs, ours, x = case(name)
    with torch.no_grad():
        ours(x)
        weight = ours.weight_hh_l0
        del ours.weight_hh_l0
        assert not hasattr(ours, "weight_hh_l0")
        ours.double().float()
        ours.weight_hh_l0 = weight
        close(ours(x), theirs(x.double()))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_error_rnn_seq_len_zero(name: str, bidirectional: bool):
    for layer, grad in itertools.product(both(name, I, H, bidirectional=bidirectional), (False, True)):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError):
            layer(torch.ones(0, B, I))


@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
def test_rnn_batch_of_none(name: str, batch_first: bool):
    """test_RNN_input_size_zero: no sequences give no rows, and zero gradients."""
    theirs, layer = both(name, I, H, batch_first=batch_first)
    empty = torch.zeros((0, T, I) if batch_first else (T, 0, I))
    with torch.no_grad():
        same(layer(empty), theirs(empty))
    y = layer(empty)[0]
    assert y.shape == ((0, T, H) if batch_first else (T, 0, H))
    y.sum().backward()
    assert all(not w.grad.any() for w in layer.parameters())


@pytest.mark.parametrize("how", ["named", "positional"])
@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_rnn_nonlinearity(kind: str, how: str):
    """test_RNN_nonlinearity, test_RNN_nonlinearity_passed_as_arg"""
    theirs, ours = both("RNN", I, H, 1, kind) if how == "positional" else both("RNN", I, H, nonlinearity=kind)
    assert ours.nonlinearity == theirs.nonlinearity == kind and ours.mode == theirs.mode == f"RNN_{kind.upper()}"
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        close(ours(x := torch.randn(T, B, I)), theirs.double()(x.double()))


def test_weights_that_move(name: str):
    """test_cudnn_weight_format: a weight gets other memory, which stays its own."""
    theirs, ours, x = case(name)
    alike(theirs, ours, x)
    memory = ours.weight_hh_l0.detach().clone()
    with torch.no_grad():
        ours.weight_hh_l0.set_(memory)
    alike(theirs, ours, x)
    memory.fill_(0.01)
    assert torch.equal(memory, ours.weight_hh_l0)
    with torch.no_grad():
        theirs.weight_hh_l0.fill_(0.01)
        close(ours(x), theirs(x.double()), 1e-5)
    alike(theirs, ours, x)


@pytest.mark.parametrize("name", ["LSTM"])
@of_both(**DEEP)
def test_weight_tying(layer: Any, x: torch.Tensor):
    """test_cudnn_weight_tying: one parameter in two places gets both gradients, and steps of both."""
    layer.bias_ih_l0_reverse = layer.bias_ih_l0
    layer.weight_hh_l1 = layer.weight_hh_l0
    assert len([*layer.parameters()]) == 14
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x)[0].square().sum().backward()
    grads = [w.grad.clone() for w in layer.parameters()]
    optimizer.step()
    return [*grads, *flat(layer(x))]


def test_state_dicts(name: str):
    """test_load_state_dict of a layer: names, strictness, sizes, and ``all_weights``."""
    theirs, ours = both(name, I, H, **DEEP)
    assert [*ours.state_dict()] == [*theirs.state_dict()] == [n for n, _ in ours.named_parameters()]
    assert [[w.shape for w in part] for part in ours.all_weights] == [[w.shape for w in p] for p in theirs.all_weights]
    found = dict(theirs.state_dict())
    del found["weight_hh_l1"]
    found["more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\).*"weight_hh_l1".*Unexpected key\(s\).*"more"'):
        ours.load_state_dict(found)
    result = ours.load_state_dict(found, strict=False)
    assert result.missing_keys == ["weight_hh_l1"] and result.unexpected_keys == ["more"]
    with pytest.raises(RuntimeError, match="size mismatch for weight_ih_l0"):
        ours.load_state_dict({**theirs.state_dict(), "weight_ih_l0": torch.zeros(3, 3)})


def test_parameters_again(name: str):
    """reset_parameters, apply, requires_grad_, zero_grad, share_memory and flatten_parameters of a called layer."""
    theirs, ours, x = case(name)
    alike(theirs, ours, x)
    for change in (lambda m: m.reset_parameters(), lambda m: m.flatten_parameters(),
                   lambda m: m.apply(lambda part: [torch.nn.init.orthogonal_(w) for w in part.parameters()
                                                   if w.dim() == 2]),
                   lambda m: m.share_memory()):
        change(ours)
        load(theirs, ours)
        alike(theirs, ours, x)
    ours(x)[0].sum().backward()
    ours.zero_grad()
    assert all(w.grad is None for w in ours.parameters()) and not ours.requires_grad_(False)(x)[0].requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_values_that_are_no_numbers(name: str, value: float):
    """NaN and what is too large go where they go in PyTorch, rows beside them stay clean, also in gradients."""
    theirs, ours, x = case(name)
    theirs.float()
    x[2, 1, 3] = value
    wanted, exact = gradients(theirs, x)
    found, made = gradients(ours, x)
    for one, other in zip((*flat(found), *made[:1]), (*flat(wanted), *exact[:1]), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert error(one.detach().nan_to_num(), other.detach().double().nan_to_num()) < 1e-5


def test_calls_by_name_and_fewer_rows(name: str):
    """``input=`` and ``hx=``; then other T and B, one step and one row."""
    theirs, ours, _ = case(name)
    primed(ours, trains=True)
    for steps, batch in ((T, B), (1, B), (2 * T, 1), (T + 1, 3)):
        x, hx = torch.randn(steps, batch, I), states(name, 1, batch)
        alike(theirs, ours, x, hx)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(ours(input=x, hx=hx), theirs(input=x.double(), hx=double(hx)))
