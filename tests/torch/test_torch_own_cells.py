"""Cells of one's own in PyTorch: ecornn.torch.Recurrent and its layers that train; and ``ecornn.torch.cell``."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch_pairs import B, H, I, T, alike, states, with_seed
from torch_step_parts import MGU, Clipped, Cubed, Joint, NormedLSTM, SlowGRU, counted, hooked, silent
from torch_values import BACKWARD, close

import ecornn
import ecornn.torch
from ecornn.cells.naming import received, spec_of
from ecornn.errors import ArgumentError, CellError, FallbackError
from ecornn.torch.kind import cell_of, kind_of, name_of, text_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Smoothed(ecornn.Cell):
    name = "smoothed"
    states = ("h", "slow")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden), "rate": (2, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> list[Any]:
        from tvm import te

        h, slow = states
        ih, hh, v = ecornn.product(x, p["weight_ih"], 0), ecornn.product(h, p["weight_hh"], 0), p["rate"]
        new = ecornn.pointwise(lambda b, j: te.tanh(ih[b, j] + hh[b, j] + v[0, j] * slow[b, j]), h)
        return [new, ecornn.pointwise(lambda b, j: slow[b, j] + te.sigmoid(v[1, j]) * (new[b, j] - slow[b, j]), h)]


class ByHand(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, hx: Any) -> Any:
        layer, ends = self.layer, [[], []]
        for number in range(layer.num_layers):
            rows = []
            for way, end in enumerate(("", "_reverse")[:1 + layer.bidirectional]):
                w, r, v = (getattr(layer, f"{name}_l{number}{end}") for name in ("weight_ih", "weight_hh", "rate"))
                place = number * (1 + layer.bidirectional) + way
                (h, slow), outputs = [s[place] for s in hx], [None] * len(x)
                for t in reversed(range(len(x))) if way else range(len(x)):
                    h = torch.tanh(x[t] @ w.T + h @ r.T + v[:H] * slow)
                    slow = slow + torch.sigmoid(v[H:]) * (h - slow)
                    outputs[t] = h
                rows.append(torch.stack(outputs))
                ends[0].append(h)
                ends[1].append(slow)
            x = torch.cat(rows, -1)
        return x, tuple(torch.stack(states) for states in ends)


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_a_cell_of_ones_own(layers: int, bidirectional: bool):
    ours = ecornn.torch.Recurrent(Smoothed(), I, H, layers, bidirectional=bidirectional)
    assert max(float(w.detach().abs().max()) for w in ours.parameters()) <= H ** -0.5
    theirs = copy.deepcopy(ours).double()
    assert list(theirs.state_dict())[:3] == ["weight_ih_l0", "weight_hh_l0", "rate_l0"]
    x, hx = torch.randn(T, B, I), states("LSTM", layers * (1 + bidirectional))
    alike(ByHand(theirs), ours, x, hx)
    if layers == 1:
        y = ours(x, hx)[0]
        with torch.no_grad():
            close(ours(x, hx)[0], y)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(ours, fullgraph=True, backend="aot_eager")(x, hx)[0], y)
        first = ecornn.torch.Recurrent(Smoothed(), I, H, batch_first=True)
        first.load_state_dict(ours.state_dict())
        assert torch.equal(first(x.transpose(0, 1), hx)[0].transpose(0, 1), y)
        with torch.autocast("cpu"), pytest.raises(FallbackError, match="PyTorch has no layer"):
            ours(x)


def test_built_in_cells_with_options_train_as_layers():
    """And their names are understood in any process, as those of cells whose class has a place in a module."""
    ours = ecornn.torch.Recurrent("lstm(clip=3)", I, H, num_layers=2, dropout=0.5)
    theirs = torch.nn.LSTM(I, H, 2, dropout=0.5)  # which clips nothing here
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(T, B, I)
    close(with_seed(ours, x, 5)[1], with_seed(theirs, x, 5)[1], 2 * BACKWARD)
    assert "lstm(clip=3), 7, 11, num_layers=2, dropout=0.5" in repr(ours).replace("3.0", "3")
    assert kind_of(text_of(ours)).cell is ours.cell
    name = name_of(Smoothed())
    assert name.startswith("smoothed@") and name.endswith(f"={__name__}:Smoothed")
    refused(ArgumentError, "make an ecornn", cell_of, "smoothed@00000000")
    refused(ArgumentError, "the cell that", cell_of, f"smoothed@00000000={__name__}:Smoothed")


def test_a_training_step_does_not_analyse_the_cell_again(monkeypatch: pytest.MonkeyPatch):
    """Its weights are new after each step; its identity, which takes longer than the step, is not."""
    layer = ecornn.torch.Recurrent(Smoothed(), I, H)
    optimizer, x, asked, before = torch.optim.SGD(layer.parameters(), 0.1), torch.randn(T, B, I), [], []
    identity = ecornn.Cell.identity
    for _ in range(3):
        before.append(len(asked))
        monkeypatch.setattr(ecornn.Cell, "identity", lambda cell: asked.append(cell) or identity(cell))
        optimizer.zero_grad()
        layer(x)[0].square().mean().backward()
        optimizer.step()
        monkeypatch.undo()
    assert len(asked) == before[1]


# -- steps that are written in PyTorch -------------------------------------------------------------
def test_a_cell_is_of_any_size_and_has_the_modules_names():
    cell = ecornn.torch.cell(MGU(I, H), name="mine")
    assert cell.name == "mine" and cell.states == ("h",)
    assert cell.parameters(5, 8) == {"x_weight": (2, 8, 5), "x_bias": (2, 8), "f_weight": (1, 8, 8),
                                     "n_weight": (1, 8, 8)}
    assert ecornn.torch.cell(MGU(4, 3), name="mine").identity().partition("@")[2] == cell.identity().partition("@")[2]
    joint = ecornn.torch.cell(Joint(I, H), input_size=I, hidden_size=H)
    weights, whole = joint.weights(layer=2), dict(joint.traced.step.named_parameters())["gates.0.weight"]
    torch.testing.assert_close(torch.cat([weights["gates_0_weight_0_l2"], weights["gates_0_weight_1_l2"]], 1), whole)
    assert ecornn.torch.cell(lambda x, h: torch.tanh(h), input_size=3, hidden_size=3).parameters(3, 3) == {}


def test_a_cell_can_be_tuned_where_it_is_made():
    """The tuner's processes read its pickle, also that of a module which only this function has."""
    class Local(MGU):
        pass

    cell = ecornn.torch.cell(Local(I, H))
    found = received(spec_of(cell))
    assert found is not cell and found.identity() == cell.identity() and copy.deepcopy(cell) is cell
    assert all(torch.equal(a, b) for a, b in zip(found.weights().values(), cell.weights().values(), strict=True))


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.hidden_size = I, H
        self.lin, self.odd = nn.Linear(H, H), nn.Linear(H, H + 1)
        self.low, self.scale, self.short = nn.Linear(H, 3), nn.Parameter(torch.ones(())), nn.Linear(I, H)


FAULTS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "cumsum": (lambda m, x, h: torch.cumsum(m.lin(h), -1), "cumsum: a step cannot use this operator. It can"),
    "batch": (lambda m, x, h: m.lin(h).chunk(2)[0], "split_with_sizes: a part of the batch; a cell computes each row"),
    "mean": (lambda m, x, h: h - h.mean(0), "mean: a reduction over the batch; a cell computes each row"),
    "short": (lambda m, x, h: m.low(h), "the step returns a row of 3 values, less than H, with the shape (B, 3)"),
    "part": (lambda m, x, h: m.low(h).chunk(3, 1), "split_with_sizes: indices 0 to 1 of an axis of 3"),
    "rows": (lambda m, x, h: m.odd(h), "addmm: a product with 12 rows; expected a multiple of H = 11"),
    "columns": (lambda m, x, h: m.lin(h)[:, :3], "slice: indices 0 to 3 of an axis of 11"),
    "unit": (lambda m, x, h: m.lin(h)[:, 3], "a cell cannot read a single unit"),
    "branch": (lambda m, x, h: h if h.sum() > 0 else -h, "use torch.where instead of a branch"),
    "item": (lambda m, x, h: h * m.scale.item(), "depends on the values of a tensor"),
    "random": (lambda m, x, h: F.dropout(h, 0.5), "a step that draws random numbers cannot be a cell"),
    "number": (lambda m, x, h: m.lin(h).size(0), "the step returns [13]; expected only tensors"),
    "returned": (lambda m, x, h: (h, h * 2, h * 3), "returns 3 tensors for 1 state;"),
    "two values": (lambda m, x, h: m.lin(h) @ (h.T @ h), "a product of two values of the step"),
    "rows alike": (lambda m, x, h: h + m.scale * torch.arange(len(h))[:, None], "differs between rows of the batch"),
    "matrix of x": (lambda m, x, h: h + m.short(torch.tanh(x)), "tanh: it depends on x alone, and in")}
NO_LINE = ("number", "returned")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_taken_is_named_with_its_line(fault: str, monkeypatch: pytest.MonkeyPatch):
    step, message = FAULTS[fault]
    monkeypatch.setattr(Wrong, "forward", lambda self, x, h: step(self, x, h), raising=False)
    with pytest.raises(CellError) as caught:
        ecornn.torch.cell(Wrong())
    assert message in str(caught.value)
    if fault not in NO_LINE:
        assert caught.value.at is not None and caught.value.at[0] == __file__
        assert f'"{fault}": (lambda' in str(caught.value)


def test_missing_sizes_and_names_are_errors():
    sizes = {"input_size": 3, "hidden_size": 3}
    for step, options, words in ((nn.Linear(3, 3), {}, r"input_size=None.*an attribute of the module"),
                                 (3, {}, "step=3"), (MGU(I, H), {"states": "h"}, "states='h'"),
                                 (lambda x: x, sizes, "arguments after x"), (MGU(I, H), {"name": "1"}, "name='1'")):
        refused(ArgumentError, words, ecornn.torch.cell, step, **options)


# -- what a module does beside its forward's expressions ----------------------------------------
def one_step(cell: ecornn.Cell, x: torch.Tensor, *states: torch.Tensor) -> list[np.ndarray]:
    weights = ecornn.derive(cell, {n: w.detach().numpy() for n, w in cell.weights().items()}, x.shape[1],
                            states[0].shape[1])
    before = [np.zeros(tuple(states[0].shape))] * cell.shown + [s.numpy() for s in states]
    _, last = ecornn.reference(cell, x.numpy()[None], weights, before)
    return list(last[cell.shown:])


def same_step(module: nn.Module, *states: torch.Tensor, **options: Any) -> ecornn.Cell:
    cell = ecornn.torch.cell(module, **{"input_size": I, "hidden_size": H, **options})
    x = torch.randn(B, I, generator=torch.Generator().manual_seed(5))
    states = states or (torch.randn(B, H, generator=torch.Generator().manual_seed(6)),)
    with torch.no_grad():
        given = [s.clone() for s in states]  # which it may write to
        wanted = module(x, tuple(given)) if cell.traced.together else module(x, *given)
    for found, value in zip(one_step(cell, x, *states), wanted if isinstance(wanted, tuple) else [wanted], strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)  # the module rounds values near 1
    return cell


class Module(nn.Module):
    def __init__(self, forward: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self.lin, self.x, self.run = nn.Linear(H, H), nn.Linear(I, H), forward
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x, h):
        return self.run(self, self.x(x), h)


def test_subclasses_of_pytorchs_cells_have_their_own_forward():
    same_step(NormedLSTM(I, H), torch.randn(B, H), torch.randn(B, H), states=("h", "c"))
    same_step(SlowGRU(I, H))
    with pytest.raises(CellError, match=r"(?s)too many values.*name them: cell\(..., states=\('h', 'c'\)\)"):
        class Tuple(nn.Module):
            def forward(self, x, state):
                h, c = state
                return h, c
        ecornn.torch.cell(Tuple(), input_size=I, hidden_size=H)


def test_statements_in_place():
    def written(x, h):
        a = h * 1.0
        a.tanh_()
        return a
    cell = ecornn.torch.cell(written, input_size=2, hidden_size=2)
    (found,) = one_step(cell, torch.zeros(1, 2), torch.tensor([[2.0, -1.0]]))
    np.testing.assert_allclose(found, [[0.9640276, -0.7615942]], rtol=1e-6)
    same_step(Module(lambda m, x, h: h.mul_(0.5).add_(x)), torch.randn(B, H))


def test_hooks_and_parametrizations():
    module = Module(lambda m, x, h: torch.tanh(x + m.lin(h)))
    module.lin.register_forward_hook(lambda m, i, o: 10 * o)
    module.x.register_forward_pre_hook(lambda m, i: (i[0],))
    module.register_forward_hook(lambda m, i, o: o - 1)
    same_step(module)
    for wrapped in (nn.utils.parametrizations.weight_norm(nn.Linear(H, H)),
                    nn.utils.parametrizations.spectral_norm(nn.Linear(H, H)).eval(),
                    nn.utils.parametrizations.orthogonal(nn.Linear(H, H)),
                    prune.random_unstructured(nn.Linear(H, H), "weight", 0.4)):
        cell = same_step(Module(lambda m, x, h: torch.tanh(x + m.lin(h)), lin=wrapped))
        learned = {n.replace(".", "_"): p for n, p in (*wrapped.named_parameters(), *wrapped.named_buffers())}
        assert {n for n in cell.weights() if "lin" in n} == {f"lin_{n}_l0" for n in learned}


def test_buffers_and_frozen_parameters_do_not_train(one_thread: None):
    def step(m, x, h):
        return torch.lerp(torch.tanh(x + F.linear(h, m.lin.weight * m.mask, m.lin.bias)), h, m.tau) * (1 - m.leak)
    module = Module(step)
    module.register_buffer("mask", (torch.rand(H, H) > 0.5).float())
    module.register_buffer("tau", torch.rand(H))
    module.leak = nn.Parameter(torch.tensor(0.25), requires_grad=False)
    module.x.requires_grad_(False)
    cell = same_step(module)
    layer = ecornn.torch.Recurrent(cell, I, H)
    assert {n for n, _ in layer.named_buffers()} == {"mask_l0", "tau_l0"}
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == {"lin_weight_l0", "lin_bias_l0"}
    torch.testing.assert_close(layer.mask_l0, module.mask)  # what does not train begins as the module has it
    torch.testing.assert_close(layer.leak_l0.reshape(()), module.leak)
    layer.load_state_dict(cell.weights())
    fixed = {n: v.clone() for n, v in layer.state_dict().items() if not n.startswith("lin")}
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.1)
    x = torch.randn(T, B, I)
    layer(x)[0].square().sum().backward()
    optimizer.step()
    for name, value in fixed.items():
        assert torch.equal(layer.state_dict()[name], value), name
    assert not torch.equal(layer.lin_weight_l0, module.lin.weight)


def test_other_gradients_than_the_forwards_are_errors():
    for function, words in ((Clipped.apply, r"(?s)Clipped, a torch.autograd.Function, is not .*parts.py:\d+"),
                            (lambda h: silent(h) + h, "torch.no_grad drops a gradient"),
                            (hooked, "a tensor has a hook")):
        with pytest.raises(CellError, match=words):
            ecornn.torch.cell(Module(lambda m, x, h, f=function: x + f(m.lin(h))), input_size=I, hidden_size=H)
    same_step(Module(lambda m, x, h: x + Cubed.apply(m.lin(h))))


def test_what_changes_between_calls_is_an_error():
    with pytest.raises(CellError, match="changes between calls"):
        ecornn.torch.cell(Module(lambda m, x, h: counted(m, h)), input_size=I, hidden_size=H)
    with pytest.raises(CellError, match=r"changes norm.running_mean, .* of its module in each call"):
        ecornn.torch.cell(Module(lambda m, x, h: m.norm(x + h), norm=nn.BatchNorm1d(H)), input_size=I, hidden_size=H)
    same_step(Module(lambda m, x, h: m.norm(x + h), norm=nn.BatchNorm1d(H)).eval())


def test_tied_weights_are_one_parameter():
    module = Module(lambda m, x, h: torch.tanh(x + m.lin(h)) + m.other(h))
    module.other = nn.Linear(H, H)
    module.other.weight = module.lin.weight
    cell = same_step(module)
    assert [n for n in cell.weights() if n.endswith("weight_l0")] == ["x_weight_l0", "lin_weight_l0"]
    both = Module(lambda m, x, h: torch.tanh(x + m.lin(h)) @ m.lin.weight)  # once as it is, and once transposed
    cell = same_step(both)
    assert {*cell.weights()} == {"x_weight_l0", "x_bias_l0", "lin_weight_l0", "lin_bias_l0"}
    assert cell.weights()["lin_weight_l0"].data_ptr() == both.lin.weight.data_ptr()


def _precisions() -> tuple[list[str], bool | None]:
    """PyTorch's settings, as it reads them where those around them are open and where they are not."""
    where = ("generic", "all"), ("cuda", "all"), ("cuda", "conv"), ("cuda", "rnn")
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    found, (generic, cuda) = [read(*one) for one in where], (read(*one) for one in where[:2])
    write(*where[0], "none")
    own = read(*where[1])
    write(*where[1], "none")
    found += [own, *(read(*one) for one in where[2:])]
    write(*where[0], generic)
    write(*where[1], own)
    assert read(*where[1]) == cuda
    try:
        return found, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return found, None


@pytest.mark.usefixtures("cudnn_settings")
@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("newer", [{}, {"rnn": "tf32", "conv": "ieee"}, {"rnn": "ieee", "conv": "ieee"},
                                   {"rnn": "none", "conv": "none"}, {"rnn": "none", "conv": "tf32", "cudnn": "ieee"},
                                   {"rnn": "none", "conv": "ieee", "generic": "tf32"}], ids=str)
def test_pytorchs_settings_are_as_before(older, newer):
    """Also those with which torch.export fails: where newer ones differ from each other, or from the older one."""
    backends = torch.backends
    where = {"generic": backends, "cudnn": backends.cudnn, "rnn": backends.cudnn.rnn, "conv": backends.cudnn.conv}
    backends.cudnn.allow_tf32 = older
    for name, value in newer.items():
        where[name].fp32_precision = value
    before = _precisions()
    same_step(Module(lambda m, x, h: torch.tanh(x + m.lin(h))))
    assert _precisions() == before
    both = {"rnn": "tf32", "conv": "tf32"} if older else {"rnn": "none", "conv": "none"}
    for name, value in both.items():
        where[name].fp32_precision = value
    if "generic" not in newer and "cudnn" not in newer:
        assert backends.cudnn.allow_tf32 is older


def test_plain_tensors_and_shared_spellings():
    tau = torch.tensor(0.3)
    same_step(Module(lambda m, x, h: (1 - tau) * h + tau * F.relu(x, inplace=True)))
    same_step(Module(lambda m, x, h: torch.cat([h, x], axis=1).chunk(2, dim=1)[1].subtract(h, alpha=2)))
    same_step(Module(lambda m, x, h: x.where(h > 0, m.levels), levels=torch.linspace(0, 1, H)))
    with pytest.raises(CellError, match=r"a parameter of shape \(11,\) that its module does not have"):
        outside = nn.Parameter(torch.rand(H))
        ecornn.torch.cell(Module(lambda m, x, h: x + h * outside), input_size=I, hidden_size=H)
