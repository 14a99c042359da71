"""What steps that are written in PyTorch compute as cells: random ones and some others, which are the module's loop,
values and gradients through several steps, or an error of ours; and each operator.

    ECORNN_RANDOM=0:500 python -m pytest -m exhaustive -s tests/torch/test_torch_traced_values.py"""

import collections
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch_step_parts as parts
from pairwise import seeds
from random_torch_steps import CAPTURED, REFUSED, Drawn, draw
from torch import nn
from torch.nn import functional as F

import ecornn
import ecornn.torch
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.errors import CellError
from ecornn.interpreter import interpret
from ecornn.torch import traced_step
from ecornn.torch.traced_graph import operator_name
from ecornn.torch.traced_operators import POINTWISE

T, B, I, H = 3, 2, 6, 7
LIMIT = 1e-5


@pytest.mark.parametrize("first", range(0, 16, 8))
@pytest.mark.filterwarnings("ignore")
def test_a_few(first: int, one_thread: None):
    found = collections.Counter(outcome(draw(seed)) for seed in range(first, first + 8))
    assert found["captured"] >= 6, found


@pytest.mark.parametrize("seed", [2, 16])
@pytest.mark.filterwarnings("ignore")
def test_two_as_layers(seed: int, one_thread: None):
    drawn = draw(seed)
    assert drawn.wanted == CAPTURED
    as_a_layer(drawn, cell_of(drawn))


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
def test_many(one_thread: None):
    found: collections.Counter[str] = collections.Counter()
    for seed in (chosen := seeds(range(60))):
        drawn = draw(seed)
        found[f"{drawn.wanted}: {outcome(drawn)}"] += 1
        if seed % 20 == 0 and drawn.wanted == CAPTURED:
            cell = cell_of(draw(seed))
            if cell is not None and cell.parameters(drawn.input, drawn.hidden):
                as_a_layer(drawn, cell)
                found["as layers"] += 1
    print(f"{len(chosen)} random steps of PyTorch: {dict(found)}")
    cells = found["captured: captured"] + found["captured: refused"]
    assert found["captured: captured"] >= 0.9 * cells


MODULES: dict[str, tuple[Callable[[int, int], nn.Module], dict[str, Any], int]] = {  # options, number of states
    "LSTMCell": (nn.LSTMCell, {}, 2), "GRUCell": (nn.GRUCell, {}, 1),
    "RNNCell": (lambda i, h: nn.RNNCell(i, h, bias=False, nonlinearity="relu"), {}, 1),
    "mgu": (parts.MGU, {}, 1), "norms": (parts.Norms, {"states": ("h", "c")}, 2),
    "bottleneck": (parts.Bottleneck, {}, 1), "joint": (parts.Joint, {}, 2)}


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_of_a_traced_step_is_the_modules_loop(name: str, one_thread: None):
    """By the te step in float64, and compiled with the module's own weights: values and gradients."""
    kind, options, count = MODULES[name]
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(I, H)
    drawn = Drawn(make(), options, CAPTURED, I, H, count, name in ("LSTMCell", "norms"), [name], make)
    by_numpy(drawn, cell_of(drawn), 1e-6)  # constants of a step are float32
    as_a_layer(drawn, cell_of(drawn))


@pytest.mark.parametrize("kind", [parts.MGU, parts.Bottleneck])
def test_gradients_reach_the_modules_weights(kind: type[nn.Module], one_thread: None):
    """Those of y, at each step."""
    module, h, loss = kind(I, H), torch.zeros(B, H).double(), 0
    cell = ecornn.torch.cell(module)
    layer = ecornn.torch.Recurrent(cell, I, H)
    layer.load_state_dict(cell.weights())
    x = torch.randn(T, B, I)
    layer(x)[0].square().sum().backward()
    module.double()
    for row in x.double():
        h = module(row, h)
        loss = loss + h.square().sum()
    loss.backward()
    for parameter in module.parameters():  # as weights are taken
        parameter.data = parameter.grad
    found, wanted = {n: p.grad for n, p in layer.named_parameters()}, cell.weights(module)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 2 * LIMIT * float(gradient.norm()), name


def cell_of(drawn: Drawn) -> Any:
    try:
        return ecornn.torch.cell(drawn.module, input_size=drawn.input, hidden_size=drawn.hidden, **drawn.options)
    except CellError as error:
        assert str(error), "an error says what is wrong"
        return None


def outcome(drawn: Drawn) -> str:
    cell = cell_of(drawn)
    if cell is None:
        return "refused"
    assert drawn.wanted != REFUSED, f"{drawn.words}"
    by_numpy(drawn, cell)
    return "captured"


def loop(drawn: Drawn, kind: torch.dtype) -> tuple[Any, ...]:
    """The states after each step of the module, and gradients; None where PyTorch has none."""
    module = drawn.again().to(kind)
    for name, value in vars(module).items():  # tensors that are neither parameters nor buffers stay as they were
        if isinstance(value, torch.Tensor):
            setattr(module, name, value.to(kind))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, B, drawn.input, generator=generator).to(kind).requires_grad_()
    states = [torch.randn(B, drawn.hidden, generator=generator).to(kind).requires_grad_() for _ in range(drawn.states)]
    upstream = [torch.randn(B, drawn.hidden, generator=generator).to(kind) for _ in states]
    def run() -> tuple[Any, list[Any]]:
        now, y = [s * 1.0 for s in states], None
        for row in x * 1.0:
            made = module(row, tuple(now)) if drawn.together else module(row, *now)
            flat = torch.utils._pytree.tree_leaves(made)
            y, now = flat[0], flat[len(flat) - len(now):]
        return y, now

    try:
        y, now = run()
        names, parameters = zip(*[(n, p) for n, p in module.named_parameters() if p.requires_grad], strict=True) if any(
            p.requires_grad for p in module.parameters()) else ((), ())
        reached = [(s, g) for s, g in zip(now, upstream, strict=True) if s.requires_grad]
        found = torch.autograd.grad([s for s, _ in reached], [x, *states, *parameters], [g for _, g in reached],
                                    allow_unused=True)
    except RuntimeError:  # what is written to has none
        with torch.no_grad():
            return module, x, states, upstream, *run(), None, {}
    found = [torch.zeros_like(v) if g is None else g for v, g in zip((x, *states, *parameters), found, strict=True)]
    inner, outer = found[:1 + len(states)], found[1 + len(states):]
    return module, x, states, upstream, y, now, inner, dict(zip(names, outer, strict=True))


def near(found: Any, wanted: Any, limit: float, what: str, largest: float = 0.0) -> None:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted.detach().double().numpy())
    if not np.isfinite(wanted).all():
        return
    error = np.linalg.norm(found - wanted)
    assert error <= limit * max(np.linalg.norm(wanted), 1e-3 * largest, 1e-6), f"{what}: {error}"


def by_numpy(drawn: Drawn, cell: Any, limit: float = LIMIT) -> None:
    try:
        found = loop(drawn, torch.float64)
    except RuntimeError:  # constants of another type
        limit, found = 1e-4, loop(drawn, torch.float32)
    module, x, states, upstream, y, now, inner, outer = found
    with torch.no_grad():
        weights = {n: w.double().requires_grad_(w.is_floating_point()) for n, w in cell.weights(module).items()}
    derived = ecornn.derive(cell, weights, drawn.input, drawn.hidden)
    shapes = cell.parameters(drawn.input, drawn.hidden)
    names = {cell.parameter_name(name): name for name in shapes}
    given = {names[n]: torch.as_tensor(w).detach().numpy().reshape(shapes[names[n]]) for n, w in derived.items()}
    before = [np.zeros((B, drawn.hidden))] * cell.shown + [s.detach().double().numpy() for s in states]
    with np.errstate(all="ignore"):
        _, last = interpret(cell, x.detach().double().numpy(), given, before)
    what = f"{drawn.words}"
    if cell.shown:
        near(last[0], y, limit, f"{what}: y")
    for found, wanted in zip(last[cell.shown:], now, strict=True):
        near(found, wanted, limit, f"{what}: a state")
    if inner is None:
        return
    try:
        made = adjoint(analyse(cell, drawn.input, drawn.hidden), drawn.hidden)
    except (CellError, NotImplementedError):
        return  # it does not train, and says so
    dy = np.zeros((T, B, made.forward.written * drawn.hidden))
    dstates = [np.zeros((B, drawn.hidden))] * cell.shown + [g.double().numpy() for g in upstream]
    with np.errstate(all="ignore"):
        dx, dparameters, dfirst = backpropagate(made, x.detach().double().numpy(), given, before, dy, dstates)
    largest = max(float(g.norm()) for g in (*inner, *outer.values()))
    for found, wanted in zip((dx, *dfirst[cell.shown:]), inner, strict=True):
        near(found, wanted, 2 * limit, f"{what}: gradient of x or a state", largest)
    through = [(derived[n], torch.from_numpy(np.ascontiguousarray(dparameters[names[n]])).reshape(derived[n].shape))
               for n in derived if getattr(derived[n], "requires_grad", False)]
    found = torch.autograd.grad([v for v, _ in through], [*weights.values()], [g for _, g in through],
                                allow_unused=True) if through else []
    compare_weights(cell, module, outer, dict(zip(weights, found, strict=False)), 2 * limit, largest, what)


def compare_weights(cell: Any, module: Any, wanted: dict[str, Any], found: dict[str, Any], limit: float, largest: float,
                    what: str) -> None:
    """Gradients by the cell's names, with those by the module's: these take the place of its parameters for that."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False).copy_(wanted[name] if name in wanted else torch.zeros_like(parameter))
    trained = {n for n, one in (*((n, s.learned) for n, s in cell.read.direct.items()), *cell.read.originals.items())
               if one.kind == "parameter" and one.name in wanted}
    for name, gradient in cell.weights(module).items():
        if name.removesuffix("_l0") in trained:
            got = found.get(name)
            near(np.zeros(gradient.shape) if got is None else got.detach().double().numpy(), gradient, limit,
                 f"{what}: gradient of {name}", largest)


def as_a_layer(drawn: Drawn, cell: Any) -> None:
    module, x, states, upstream, y, now, inner, outer = loop(drawn, torch.float64)
    layer = ecornn.torch.Recurrent(cell, drawn.input, drawn.hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict(cell.weights())
    rows = x.detach().float().requires_grad_()
    before = [torch.zeros(1, B, drawn.hidden)] * cell.shown + [s.detach().float()[None] for s in states]
    shown, after = layer(rows, tuple(before) if len(before) > 1 else before[0])
    near(shown.detach().numpy()[-1], y, LIMIT, f"{drawn.words}: y")
    after = list(after)[cell.shown:] if isinstance(after, tuple) else [after]
    for found, wanted in zip(after, now, strict=True):
        near(found.detach().numpy()[0], wanted, LIMIT, f"{drawn.words}: a state")
    if inner is None:
        return
    torch.autograd.backward(after, [g.float()[None] for g in upstream])
    largest = max(float(g.norm()) for g in (*inner, *outer.values()))
    near(rows.grad.numpy(), inner[0], 2 * LIMIT, f"{drawn.words}: gradient of x", largest)
    compare_weights(cell, module, outer, {n: p.grad for n, p in layer.named_parameters() if p.grad is not None},
                    2 * LIMIT, largest, str(drawn.words))


# -- each operator --------------------------------------------------------------------------------
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {  # of x and h, both in (0.05, 0.95)
    "add": lambda x, h: torch.add(x, h, alpha=2), "sub": lambda x, h: torch.subtract(1 - h, x, alpha=3),
    "mul": lambda x, h: 3.0 * h.multiply(x), "div": lambda x, h: torch.div(h, x) + 1 / (x + h),
    "div, rounded": lambda x, h: torch.div(9 * h, x, rounding_mode="floor") + (9 * h - 9 * x) // 1,
    "div, truncated": lambda x, h: torch.divide(9 * h - 9 * x, 2, rounding_mode="trunc") + h, "neg": lambda x, h: -h,
    "pow": lambda x, h: (x - h) ** 3 + h ** 0.5 + x ** -2 + h ** 1.7 + 2 ** h + x ** h,
    "square": lambda x, h: h.square(),
    "reciprocal": lambda x, h: torch.reciprocal(h), "lerp": lambda x, h: torch.lerp(x, h, 0.3) + torch.lerp(x, h, x),
    "maximum": lambda x, h: torch.maximum(x, h), "minimum": lambda x, h: torch.minimum(x, h),
    "where": lambda x, h: torch.where(x < h, x, 2.0) + h.where(x > 0.5, x), "lt": lambda x, h: h * (x < 0.5),
    "le": lambda x, h: torch.where(x <= h, 1.0, h), "gt": lambda x, h: (x > h).float() * h,
    "ge": lambda x, h: torch.where(x >= h, 1.0, h), "eq": lambda x, h: torch.where(h.floor() == 0, x, h),
    "ne": lambda x, h: torch.where((x - h).sign() != 1, x, h), "and": lambda x, h: torch.where(
        (x > 0.3) & (h > 0.3) | torch.logical_and(x > 0.8, h < 0.1), x, h),
    "or": lambda x, h: torch.where((x > 0.7) | (h > 0.7) | torch.logical_or(x < 0.1, h < 0.1), x, h),
    "not": lambda x, h: torch.where(~(x > 0.7), x, h) + h.masked_fill((h > 0.4).logical_not(), 0.2),
    "xor": lambda x, h: torch.where((x > 0.5) ^ (h > 0.5), x, h) * torch.logical_xor(x > 0.3, h > 0.2).to(h.dtype),
    **{n: (lambda x, h, n=n: getattr(torch, n)(h - 0.5)) for n in (
        "sigmoid", "tanh", "exp", "abs", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "atanh",
        "erf", "erfc", "expm1", "floor", "ceil", "relu", "sign")},
    **{n: (lambda x, h, n=n: getattr(torch, n)(9 * h - 4)) for n in ("trunc", "round", "frac", "sinc")},
    **{n: (lambda x, h, n=n: getattr(torch, n)(h)) for n in (
        "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "logit")},
    "acosh": lambda x, h: torch.acosh(1 + h), "silu": lambda x, h: F.silu(h),
    "logsigmoid": lambda x, h: F.logsigmoid(8 * x - 4) + h, "softsign": lambda x, h: F.softsign(x - h),
    "hardsigmoid": lambda x, h: F.hardsigmoid(9 * x - 4 - h), "hardswish": lambda x, h: F.hardswish(9 * x - 4 - h),
    "clamp": lambda x, h: (x - h).clamp(-0.2, 0.1) + torch.clip(h, min=0.4) + h.clamp_max(
        0.3) + h.clamp(x, 0 * x + 0.9),
    "softplus": lambda x, h: F.softplus(40 * x - 20 * h, beta=2) + F.softplus(9 * h, threshold=1),
    "mish": lambda x, h: F.mish(9 * x - 4 * h), "elu": lambda x, h: F.elu(x - h, alpha=0.7) + F.celu(x - h, 0.6),
    "selu": lambda x, h: F.selu(x - h), "leakyrelu": lambda x, h: F.leaky_relu(x - h, 0.2),
    "hardtanh": lambda x, h: F.hardtanh(3 * x - 3 * h) + F.relu6(9 * x - h),
    "gelu": lambda x, h: F.gelu(4 * x - 3 * h) + F.gelu(4 * x - 3 * h, approximate="tanh"),
    "shrink": lambda x, h: F.softshrink(x - h, 0.1) + F.hardshrink(x - h, 0.1) + F.tanhshrink(h),
    "threshold": lambda x, h: F.threshold(h, 0.4, 0.1),
    "remainder": lambda x, h: torch.remainder(x - h, 0.3) + (x - h) % x, "fmod": lambda x, h: torch.fmod(x - h, 0.3),
    "atan2": lambda x, h: torch.atan2(x - h, h), "hypot": lambda x, h: torch.hypot(x, h),
    "addcmul": lambda x, h: torch.addcmul(x, h, h, value=0.5) + torch.addcdiv(h, x, h, value=-2),
    "same": lambda x, h: (h * x).contiguous().clone() + torch.zeros_like(h) + h.new_ones(h.shape),
    "softmax": lambda x, h: h.softmax(-1) + F.log_softmax(h - x, dim=1) + F.softmin(h, dim=1),
    "logsumexp": lambda x, h: h - h.logsumexp(-1, keepdim=True), "sum": lambda x, h: h * h.sum(1, keepdim=True),
    "mean": lambda x, h: h - h.mean(-1, keepdim=True), "amax": lambda x, h: h / h.amax(1, True) + h.amin(1)[:, None],
    "var": lambda x, h: h * h.var(1, keepdim=True) + h * h.var(1, unbiased=False, keepdim=True),
    "std": lambda x, h: h / h.std(-1, keepdim=True), "norm": lambda x, h: F.normalize(h) + h / h.norm(1, -1, True),
    "layer_norm": lambda x, h: F.layer_norm(h, (16,)) + F.rms_norm(h - x, (16,), eps=1e-5),
    "group_norm": lambda x, h: F.group_norm(h, 4), "glu": lambda x, h: F.glu(torch.cat([h, x - h], axis=1)),
    "einsum": lambda x, h: torch.einsum("bi,bi->b", h, h - x)[:, None] * h,
    "stack": lambda x, h: torch.stack([h, x, h * x], 1).amax(1),
    "gates": lambda x, h: (torch.stack([h, x - h], 0).softmax(0) * torch.stack([x, h])).sum(0),
    "views": lambda x, h: torch.cat([h, h * x], -1).view(-1, 2, 16).transpose(0, 1)[1].unsqueeze(1).squeeze(1),
    "detach": lambda x, h: x + h.detach() * h,
    "expand": lambda x, h: h * h.mean(1, keepdim=True).expand(-1, 16) + h.sum(1, True).expand_as(h),
}


def cell_of_operators(names: Sequence[str]) -> ecornn.Cell:
    def step(x, *states):
        return tuple(OPERATORS[name](x, h) for name, h in zip(names, states, strict=True))
    return ecornn.torch.cell(step, input_size=16, hidden_size=16, states=[f"h{n}" for n in range(len(names))])


def test_operators_are_pytorchs(monkeypatch: pytest.MonkeyPatch):
    tried: set[str] = set()
    monkeypatch.setattr(traced_step, "operator_name", lambda n: tried.add(operator_name(n)) or operator_name(n))
    generator, every = torch.Generator().manual_seed(3), list(OPERATORS)
    for first in range(0, len(every), 12):
        names = every[first:first + 12]
        x, *states = (0.05 + 0.9 * torch.rand(1, 4, 16, generator=generator, dtype=torch.float64)
                      for _ in range(1 + len(names)))
        cell = cell_of_operators(names)
        _, last = ecornn.reference(cell, x.numpy(), ecornn.derive(cell, {}, 16, 16), [h[0].numpy() for h in states])
        # numbers of a step are float32: a part in 1.7e7 of values near 1, also where terms cancel
        for name, found, h in zip(names, last, states, strict=True):
            np.testing.assert_allclose(found, OPERATORS[name](x[0], h[0]), rtol=1e-6, atol=1e-7, err_msg=name)
    assert POINTWISE.keys() <= tried | {"rsub", "sgn"}  # spellings of other versions of PyTorch
