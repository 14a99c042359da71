"""Random steps that are written in PyTorch: what :func:`ecornn.torch.cell` takes is the module's loop, values and
gradients through several steps; what it does not take is an error of ours.

    ECORNN_RANDOM=0:500 python -m pytest -m exhaustive -s tests/torch/test_random_torch_steps.py
"""

from __future__ import annotations

import collections
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import seeds
from random_torch_steps import CAPTURED, REFUSED, Drawn, draw

import ecornn
import ecornn.torch
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.errors import CellError
from ecornn.interpreter import interpret

T, B = 3, 2
LIMIT = 1e-5


@pytest.mark.parametrize("first", range(0, 16, 8))
@pytest.mark.filterwarnings("ignore")
def test_a_few(first: int, one_thread: None):
    found = collections.Counter(outcome(draw(seed)) for seed in range(first, first + 8))
    assert found["captured"] >= 6, found


@pytest.mark.parametrize("seed", [2, 16])
@pytest.mark.filterwarnings("ignore")
def test_two_as_layers(seed: int, one_thread: None):
    """Compiled, with states from zeros as from others."""
    drawn = draw(seed)
    assert drawn.wanted == CAPTURED
    as_a_layer(drawn, cell_of(drawn))


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
def test_many(one_thread: None):
    """Every twentieth as a compiled layer as well."""
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


def cell_of(drawn: Drawn) -> Any:
    """The cell; None where it is refused."""
    try:
        return ecornn.torch.cell(drawn.module, input_size=drawn.input, hidden_size=drawn.hidden, **drawn.options)
    except CellError as error:
        assert str(error), "an error says what is wrong"
        return None


def outcome(drawn: Drawn) -> str:
    """``captured`` or ``refused``; what is captured must be the module."""
    cell = cell_of(drawn)
    if cell is None:
        return "refused"
    assert drawn.wanted != REFUSED, f"seed {drawn.seed}: {drawn.words}"
    by_numpy(drawn, cell)
    return "captured"


def loop(drawn: Drawn, kind: torch.dtype) -> tuple[Any, ...]:
    """Inputs, and what the module makes of them step by step: the states after each step, and gradients; None where
    PyTorch has none."""
    module = draw(drawn.seed).module.to(kind)  # a pruned one cannot be copied
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


def by_numpy(drawn: Drawn, cell: Any) -> None:
    """By the interpreter of te graphs, and the adjoint of the analysis, through T steps."""
    limit = LIMIT
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
    what = f"seed {drawn.seed}: {drawn.words}"
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
    """As a compiled layer with the module's weights, in float32."""
    module, x, states, upstream, _, now, inner, outer = loop(drawn, torch.float64)
    layer = ecornn.torch.Recurrent(cell, drawn.input, drawn.hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict(cell.weights())
    rows = x.detach().float().requires_grad_()
    before = [torch.zeros(1, B, drawn.hidden)] * cell.shown + [s.detach().float()[None] for s in states]
    _, after = layer(rows, tuple(before) if len(before) > 1 else before[0])
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
