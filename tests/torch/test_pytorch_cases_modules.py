"""PyTorch's tests of every module and of packed sequences; docs/PYTORCH_CASES.md lists them, and what differs."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence
from torch_pairs import LENGTHS, B, H, I, T, alike, copied, gradients, of_both, pair, primed, states
from torch_pairs import training_case as case
from torch_values import BACKWARD, close, double, error, flat, same

import ecornn.torch
from ecornn.errors import DTypeError, ShapeError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("deep", [False, True], ids=["one layer", "two of two directions"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_forward_without_a_batch(name: str, bias: bool, batch_first: bool, deep: bool):
    """test_forward: one sequence is a batch of one."""
    options = {"num_layers": 2, "bidirectional": True} if deep else {}
    theirs, ours = pair(name, bias=bias, batch_first=batch_first, **options)
    primed(ours)
    x, parts = torch.randn(T, I), 4 if deep else 1
    for hx in (None, states(name, parts, 0)):
        with torch.no_grad():
            y, after = ours(x, hx)
            close((y, after), theirs(double(x), double(hx)))
            many = None if hx is None else tuple(s.unsqueeze(1) for s in flat(hx))
            some = ours(x.unsqueeze(0 if batch_first else 1), many if many is None or name == "LSTM" else many[0])
        close([t.squeeze() for t in flat((y, after))], [t.squeeze() for t in flat(some)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_factory_kwargs(name: str, dtype: torch.dtype):
    """test_factory_kwargs, test_device_ctx_init: parameters are made of the type and where they were asked for."""
    kind = getattr(ecornn.torch, name)
    assert {w.dtype for w in kind(I, H, 2, dtype=dtype).parameters()} == {dtype}
    assert {w.device.type for w in kind(I, H, device="meta").parameters()} == {"meta"}
    with torch.device("meta"):
        assert {w.device.type for w in kind(I, H).parameters()} == {"meta"}


def test_to_empty(name: str):
    """test_to_empty: a layer made on ``meta`` gets memory, and is a layer."""
    _, other, x = case(name)
    layer = getattr(ecornn.torch, name)(I, H, device="meta").to_empty(device="cpu")
    layer.load_state_dict(other.state_dict())
    same(layer(x), other(x))


def test_repr(name: str):
    for options in ({}, {"num_layers": 2, "bias": False, "batch_first": True, "dropout": 0.5, "bidirectional": True}):
        ours, theirs = (getattr(where, name)(I, H, **options) for where in (ecornn.torch, torch.nn))
        assert repr(ours) == f"Compiled{theirs!r}" == str(ours)


@pytest.mark.parametrize("how", ["state_dict", "torch.save", "pickle", "deepcopy"])
def test_save_load_and_pickle(name: str, how: str):
    """test_save_load, test_pickle: another layer that gives the same, and is not the same."""
    _, ours, x = case(name)
    wanted = ours(x)
    if how == "state_dict":
        other = getattr(ecornn.torch, name)(I, H)
        other.load_state_dict(copied(ours.state_dict(), "torch.save"))
    else:
        other = copied(ours, how)
    same(other(x), wanted)
    with torch.no_grad():
        other.weight_hh_l0.zero_()
    same(ours(x), wanted)
    assert not torch.equal(other(x)[0], wanted[0])


def gaps(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "interleaved":
        return torch.stack((torch.full_like(tensor, torch.nan), tensor), -1)[..., 1]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("how", ["interleaved", "transposed"])
def test_non_contiguous_tensors(name: str, how: str):
    """test_non_contiguous_tensors: of x, of states and of the gradients that come back."""
    _, ours, x = case(name)
    hx = states(name, 1)
    apart = tuple(gaps(s, how) for s in hx) if name == "LSTM" else gaps(hx, how)
    assert not gaps(x, how).is_contiguous()
    directions = [torch.randn(t.shape) for t in flat(ours(x, hx))]
    wanted, exact = gradients(ours, x, hx, directions)
    for given in itertools.product((x, gaps(x, how)), (hx, apart), (directions, [gaps(d, how) for d in directions])):
        same(gradients(ours, *given), (wanted, exact))


def test_grad_without_a_batch(name: str):
    theirs, ours, x = case(name)
    alike(theirs, primed(ours, trains=True), x[:, 0], states(name, 1, 0))


def test_gradgrad(name: str):
    """test_gradgrad"""
    theirs, ours, x = case(name)
    exact = x.double().requires_grad_()
    def first(layer: Any, x: Any) -> Any:
        return torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)[0]
    found, wanted = first(ours, x.requires_grad_()), first(theirs, exact)
    close(found, wanted, BACKWARD)
    found.square().sum().backward()
    wanted.square().sum().backward()
    close(x.grad, exact.grad, BACKWARD)


@pytest.mark.parametrize("swap", [False, True], ids=["set", "swap"])
def test_to(name: str, swap: bool):
    """test_to: parameters get another type, also by swapping tensors, which none may refer to weakly."""
    theirs, ours, x = case(name)
    with torch.no_grad():
        ours(x)
    ours(x)[0].sum().backward()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for layer in (ours, theirs):
            layer.bfloat16()
        assert {w.dtype for w in ours.parameters()} == {torch.bfloat16}
        ours.float()
        theirs.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    with torch.no_grad():
        close(ours(x), theirs(x.double()))
    alike(theirs, ours, x)


EVERY = "LSTM GRU RNN"


@pytest.mark.parametrize(("names", "options", "kind", "words"), [
    (EVERY, {"hidden_size": 0}, ValueError, "hidden_size must be greater than zero"),
    (EVERY, {"input_size": 0}, ValueError, "input_size must be greater than zero"),
    (EVERY, {"num_layers": 0}, ValueError, "num_layers must be greater than zero"),
    (EVERY, {"input_size": 7.0}, TypeError, "input_size should be of type int, got: float"),
    (EVERY, {"hidden_size": "11"}, TypeError, "hidden_size should be of type int, got: str"),
    (EVERY, {"bias": 0}, TypeError, "bias should be of type bool, got: int"),
    (EVERY, {"bias": "True"}, TypeError, "bias should be of type bool, got: str"),
    (EVERY, {"batch_first": 1}, TypeError, "batch_first should be of type bool, got: int"),
    (EVERY, {"dropout": 1.5}, ValueError, "dropout should be a number in range"),
    (EVERY, {"dropout": True}, ValueError, "dropout should be a number in range"),
    (EVERY, {"colour": 3}, TypeError, "unexpected keyword argument 'colour'"),
    ("GRU RNN", {"proj_size": 3}, ValueError, "proj_size argument is only supported for LSTM, not RNN or GRU"),
    *(("LSTM", {"proj_size": size}, ValueError, "proj_size") for size in (-1, H, H + 1)),
    *(("RNN", {"nonlinearity": word}, ValueError, "'tanh' or 'relu'") for word in ("garbage", ""))])
def test_construction_errors(names: str, options: dict[str, Any], kind: type[Exception], words: str):
    """test_errors, test_projections_errors_on_gru_and_rnn: ours says what PyTorch says."""
    for where, name in itertools.product((torch.nn, ecornn.torch), names.split()):
        with pytest.raises(kind, match=words):
            getattr(where, name)(**{"input_size": I, "hidden_size": H, **options})


# -- packed sequences ------------------------------------------------------------------------------
LONGEST_FIRST = [6, 5, 3, 1]


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


def test_pack_sequence(name: str):
    theirs, ours, _ = case(name)
    rows = [torch.randn(length, I) for length in LENGTHS]
    with torch.no_grad():
        found = unpack_sequence(ours(pack_sequence(rows, enforce_sorted=False))[0])
    for one, row in zip(found, rows, strict=True):
        close(one, theirs(row.double())[0].detach())


def test_sequences_of_one_length(name: str):
    _, ours, x = case(name)
    with torch.no_grad():
        y, after = ours(pack_padded_sequence(x, [T] * B))
        close((y.data.view(T, B, H), after), ours(x))


@pytest.mark.parametrize("name", ["GRU"])
@pytest.mark.parametrize("where", ["y", "state"])
@of_both()
def test_writes_to_results(layer: Any, x: torch.Tensor, where: str):
    y, after = layer(pack_padded_sequence(x, LONGEST_FIRST))
    (y.data if where == "y" else after).add_(1)
    (y.data.square().sum() + after.square().sum()).backward()
    return [w.grad for w in layer.parameters()]


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize(("sizes", "rows", "kind"), [
    ([2, 2, 1], 4, ShapeError), ([1, 2, 2], 5, ShapeError), ([2, 2, -1], 4, ShapeError), ([], 0, ShapeError),
    ([2, 3, 1], 6, ShapeError), ("int32", 5, DTypeError)])
def test_batch_sizes_that_fit_nothing(sizes: Any, rows: int, kind: type[Exception], grad: bool):
    """PyTorch raises what it comes across, ours names batch_sizes: rows were read from beyond the data."""
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
    theirs, ours, padded = case("GRU")
    ours.double().float()
    x = torch.randn(rows, I)
    with torch.set_grad_enabled(grad):
        ours(pack_padded_sequence(padded, LONGEST_FIRST))  # compiles for these
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
    _, ours, x = case("GRU")
    x = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    with torch.no_grad():
        close(ours(x.double().float()), ours(x))
        with pytest.raises(ValueError, match="as the weights'"):
            ours(x.double())
        assert ours(x.to("cpu"))[0].data.device.type == "cpu"
