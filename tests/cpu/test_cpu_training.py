"""The CPU's backward pass against a tape in float64: gradients in all combinations, of every cell, and tails.

Of all combinations a few are made each time, in which every pair of choices occurs: in float64 also against
differences, and twice, bit for bit. On a CPU rows of different lengths are ``lengths``, not columns."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import LIMITS, Layer, build, compare, reference
from exact import relative
from pairwise import Pair, Row, pairwise
from test_adjoint import ALL, OF_STEP, H, adjoint_of, width

from ecornn.cells import BUILTIN
from ecornn.schedules.cpu import training
from ecornn.workload import Traversal

T, B = 5, 3
FACTORS: Mapping[str, Sequence[Any]] = {
    "reverse": (False, True), "rows": ("whole", "lengths", "resets", "lengths and resets"), "keep": ("gates", "states"),
    "dtype": ("float32", "float64")}
NUMBERS = {"clip": 0.5, "clip_state": 0.3, "zoneout": 0.2, "zoneout_h": 0.1, "zoneout_c": 0.25, "heads": 2}
NAMES = {"gate": "hard_sigmoid", "new": "softsign", "out": "elu:0.8"}


def options_of(family: str) -> dict[str, tuple[Any, Any]]:
    others = {name: NUMBERS.get(name) or NAMES.get(name, True) for name in BUILTIN[family].OPTIONS}
    return {name: (usual, others[name]) for name, usual in BUILTIN[family].OPTIONS.items()}


def factors(row: Row) -> Mapping[str, Sequence[Any]]:
    families = [f for f in BUILTIN if all(name in FACTORS or value in options_of(f).get(name, ())
                                          for name, value in row.items() if name != "family")]
    if "family" not in row:
        return {"family": families, **FACTORS}
    return {"family": [row["family"]], **FACTORS, **options_of(row["family"])}


def every_pair() -> set[Pair]:
    found: set[Pair] = set()
    for family in BUILTIN:
        for (one, values), (other, others) in combinations(factors({"family": family}).items(), 2):
            found |= {frozenset([(one, a), (other, b)]) for a, b in product(values, others)}
    return found


def layer_of(row: Row) -> Layer:
    family = row["family"]
    return layer(type(BUILTIN[family])(**{name: row[name] for name in options_of(family)}).spec(), row)


def layer(cell: str, row: Row) -> Layer:
    traversal = Traversal(row["reverse"], lengths="lengths" in row["rows"], resets="resets" in row["rows"])
    return Layer(cell, width(cell), H, B, T, traversal, row["keep"], row["dtype"])


ROWS = pairwise(factors, every_pair())


@pytest.fixture
def in_chunks(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHUNK_ROWS", 2 * B)


def check(layer: Layer) -> None:
    call = layer.arguments(T, B)
    found, again = compare(layer, call), layer(call)
    assert all(np.array_equal(again[name], value) for name, value in found.items()), f"other bits of {layer}"
    if layer.dtype == "float64" and layer.name != "spiking":  # whose derivatives are not the slopes of its values
        differences(layer, found)


def differences(layer: Layer, found: Mapping[str, np.ndarray], step: float = 2e-6) -> None:
    call, way = layer.arguments(T, B), layer.arguments(T, B, seed=1)
    gradients = [found["dx"], *(found[f"d{n}_in"] for n in layer.cell.states),
                 *(found[f"gradient_{n}"] for n in call.parameters)]
    ways = [way.x, *way.states, *way.parameters.values()]
    def loss(by: float) -> float:
        made = layer(call.moved(way, by))
        last = [made[f"{n}_out"] for n in layer.cell.states]
        return float(sum((v * d).sum() for v, d in zip((made["y"], *last), (call.dy, *call.dstates), strict=True)))
    expected = sum((g * w).sum() for g, w in zip(gradients, ways, strict=True))
    size = sum(np.linalg.norm(g) * np.linalg.norm(w) for g, w in zip(gradients, ways, strict=True))
    assert abs((loss(step) - loss(-step)) / (2 * step) - expected) <= 1e-6 * size, f"slope of {layer}"


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("family", BUILTIN)
def test_every_pair_of_choices(family: str, tmp_path: Path):
    layers = [layer_of(row) for row in ROWS if row["family"] == family]
    build(tmp_path, *layers)
    for one in layers:
        check(one)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("cell", ALL)
def test_all_combinations(cell: str, tmp_path: Path):
    places = product(*(range(len(values)) for name, values in FACTORS.items() if name != "keep"))
    rows = [{"reverse": FACTORS["reverse"][r], "rows": FACTORS["rows"][n], "dtype": FACTORS["dtype"][d],
             "keep": FACTORS["keep"][(r + n + d) % 2]} for r, n, d in places]
    layers = [layer(cell, row) for row in rows]
    build(tmp_path, *layers)
    for one in layers:
        check(one)

GROUPS = 4  # a module for each


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("group", range(GROUPS))
def test_gradients_of_other_cells(group: int, tmp_path: Path):
    """Every other cell in reverse, every other two with states kept, every other four in float64."""
    layers = [Layer(name, width(name), H, B, T, Traversal(n % 2 == 1, lengths=True, resets=True),
                    FACTORS["keep"][n // 2 % 2], FACTORS["dtype"][n // 4 % 2])
              for n, name in enumerate(OF_STEP) if n % GROUPS == group]
    build(tmp_path, *layers)
    for layer in layers:
        compare(layer, layer.arguments(T, B))


@pytest.mark.usefixtures("in_chunks")
def test_both_ways(tmp_path: Path):
    """A cell whose adjoint is not rotated where sequences begin anew, since a parameter is added to the state."""
    name = next(n for n in ALL if adjoint_of(n).rotated and adjoint_of(n).finish.sums)
    layers = [Layer(name, width(name), H, B, T, Traversal(reverse, resets=resets))
              for reverse in (False, True) for resets in (False, True)]
    build(tmp_path, *layers)
    for layer in layers:
        compare(layer, layer.arguments(T, B))


@pytest.mark.parametrize("size", [
    (1, 1, 1, 1), (33, 101, 3, 6),
    *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (
        (5, 7, 2, 3), (16, 48, 5, 9), (70, 20, 17, 40)))], ids=str)
def test_tails(size: tuple[int, int, int, int], tmp_path: Path):
    input, hidden, batch, steps = size
    kinds = (("lstm", "float32"), ("gru", "float32"), ("rnn_tanh", "float32"), ("gru", "float64"))
    layers = [Layer(cell, input, hidden, batch, steps, dtype=dtype) for cell, dtype in kinds]
    build(tmp_path, *layers)
    for layer in layers:
        compare(layer, layer.arguments(steps, batch))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", LIMITS)
def test_other_lengths_smaller_batches_and_bits(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "CHUNK_ROWS", 20)
    layer = Layer("lstm", 24, 40, 5, 20, dtype=dtype)
    build(tmp_path, layer)
    for steps, batch in ((1, 1), (4, 5), (5, 3), (13, 4)):
        call = layer.arguments(steps, batch, seed=steps)
        found = {threads: layer(call, threads=threads) for threads in (1, 2, 3, 29)}
        for name, value in reference("lstm", call, False).items():
            assert relative(found[1][name], value) < LIMITS[dtype], name
        for name, value in found[1].items():
            assert all(np.array_equal(value, found[t][name]) for t in (2, 3, 29)), name
