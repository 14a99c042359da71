"""States by how they depend on their past: maps of random steps against the interpreter, and cells by name."""

import numpy as np
import pytest
from affine_steps import TWISTS, RandomAffine
from published import CELLS

from ecornn.analysis import StepGraph, analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.affine import MOST, Past, groups_of, maps_of
from ecornn.analysis.backpropagation import at, hoist, start, step
from ecornn.analysis.scalar import evaluate
from ecornn.cells import Cell
from ecornn.interpreter import interpret

STEPS, BATCH, INPUT, HIDDEN = 7, 3, 5, 4
PAST = {name: {s: group.past for group in groups_of(analyse(cell, HIDDEN, HIDDEN)) for s in group.states}
        for name, cell in CELLS.items() if not cell.inputs and name not in ("lmu",)}


def maps_in_time(graph: StepGraph, x: np.ndarray, parameters: dict[str, np.ndarray],
                 states: list[np.ndarray]) -> list[np.ndarray]:
    """The last states, by composing all steps' maps, one level behind the other: each on the states of those before."""
    weights, shape = {n: p.astype(float) for n, p in parameters.items()}, states[0].shape
    values = start(graph, weights)
    hoist(graph, weights, values, x, (len(x), *shape))
    first = dict(zip(graph.states, states, strict=True))
    before = {n: [first[n]] for n in first}  # of each step
    for level in maps_of(graph) or ():
        composed, added = np.eye(len(level.states))[:, :, None, None] * np.ones(shape), np.zeros(
            (len(level.states), *shape))
        for t in range(len(x)):
            now = at(values, t, values) | {graph.states[n]: before[n][t] if t < len(before[n]) else np.nan * first[n]
                                           for n in first}
            step(graph, weights, now, shape)
            for a in level.assigns:
                now[a.var] = evaluate(a.value, now)
            matrix, rest = np.zeros_like(composed), np.zeros_like(added)
            for n, new in enumerate(level.states):
                rest[n] = evaluate(level.rest[new], now) if new in level.rest else 0.0
                for o, old in enumerate(level.states):
                    if (new, old) in level.matrix:
                        matrix[n, o] = evaluate(level.matrix[new, old], now)
            composed, added = np.einsum("nkbj,kobj->nobj", matrix, composed), np.einsum(
                "nkbj,kbj->nbj", matrix, added) + rest
            assert all((composed[n, o] == 0).all() for n, new in enumerate(level.states)
                       for o, old in enumerate(level.states) if (new, old) not in level.entries)
            whole = np.einsum("nobj,obj->nbj", composed, np.stack([first[n] for n in level.states])) + added
            for n, new in enumerate(level.states):
                before[new].append(whole[n])
    return [before[n][-1] for n in graph.states]


def drawn(cell: Cell, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    parameters = {n: rng.uniform(-1, 1, s) for n, s in cell.parameters(INPUT, HIDDEN).items()}
    return (rng.standard_normal((STEPS, BATCH, INPUT)), parameters,
            [rng.standard_normal((BATCH, HIDDEN)) for _ in cell.states])


@pytest.mark.parametrize("seed", range(24))
def test_composed_maps_are_the_steps(seed: int):
    cell = RandomAffine(seed)
    graph, (x, parameters, states) = analyse(cell, INPUT, HIDDEN), drawn(cell, seed)
    assert {group.past for group in groups_of(graph)} == {Past.AFFINE}
    # a map for each level, or one for both where nothing of the second one's coefficients reads the first
    assert 1 <= len(maps_of(graph)) <= 2
    _, last = interpret(cell, x, parameters, states)
    for found, wanted in zip(maps_in_time(graph, x, parameters, states), last, strict=True):
        # float64: products of many maps are rounded otherwise than steps
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_states_of_a_second_level_wait_for_the_first():
    assert {len(maps_of(analyse(RandomAffine(seed), INPUT, HIDDEN))) for seed in range(24)} == {1, 2}


@pytest.mark.parametrize("twist", TWISTS)
def test_nonlinear_steps_are_not_called_affine(twist: str):
    for seed in range(6):
        graph = analyse(RandomAffine(seed, twist), INPUT, HIDDEN)
        past = {s: group.past for group in groups_of(graph) for s in group.states}
        assert past["a"] is Past.NONLINEAR and maps_of(graph) is None


@pytest.mark.parametrize("seed", range(6))
def test_no_group_depends_on_a_later_one(seed: int):
    cell = RandomAffine(seed)
    x, parameters, states = drawn(cell, seed)
    groups, place = groups_of(analyse(cell, INPUT, HIDDEN)), {n: k for k, n in enumerate(cell.states)}
    _, wanted = interpret(cell, x, parameters, states)
    for k in range(1, len(groups)):
        late = {place[n] for group in groups[k:] for n in group.states}
        _, found = interpret(cell, x, parameters, [s + (n in late) for n, s in enumerate(states)])
        assert all((found[n] == wanted[n]).all() != (n in late) for n in place.values())


AFFINE = {"qrnn": "c", "t_rnn": "h", "min_gru": "h", "min_lstm": "h", "hgrn": "h", "rg_lru": "h", "lru": "re im",
          "selective_ssm": "h", "mega_ema": "h", "rwkv4": "a d", "scrn": "s"}


def test_published_cells():
    found = {name: " ".join(s for s, past in states.items() if past is Past.AFFINE) for name, states in PAST.items()}
    assert AFFINE.items() <= found.items()
    for name, states in {"qrnn": "h", "sru": "h", "hgrn": "o", "selective_ssm": "y"}.items():
        assert PAST[name][states] is Past.UNREAD
    for name, states in {"sru": "c", "rwkv4": "m", "brc": "h", "indylstm": "hc", "unicornn": "yz"}.items():
        assert {PAST[name][s] for s in states} == {Past.NONLINEAR}
    for name, states in {"lstm_1997": ("h", "c"), "gru1": "h", "scrn": "h", "statistical_unit": ("m0", "m1")}.items():
        assert {PAST[name][s] for s in states} == {Past.COUPLED}


@pytest.mark.parametrize("name", [n for n, past in PAST.items() if Past.COUPLED not in past.values()])
def test_adjoints_are_affine_whatever_the_step_is(name: str):
    graph = adjoint(analyse(CELLS[name], HIDDEN, HIDDEN), HIDDEN).recurrence
    (found,) = maps_of(graph)
    assert set(found.states) == set(graph.states) and len(found.entries) <= MOST
