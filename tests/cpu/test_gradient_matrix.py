"""Gradients on the CPU in all combinations: of every cell and option, with the direction, what a row's steps are, what
is kept and the data type; against a tape in float64, in float64 also against differences, and twice, bit for bit.

Of all combinations a few are made each time, in which every pair of choices occurs. Columns are not among them: on a
CPU rows of different lengths are ``lengths``. Other cells than the built-in ones are in test_cpu_training.py each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Layer, build, compare
from pairwise import Pair, Row, pairwise
from test_adjoint import ALL, H, width

from ecornn.cells import BUILTIN
from ecornn.schedules.cpu import training
from ecornn.workload import Traversal

pytestmark = pytest.mark.usefixtures("small_tiles")

T, B = 5, 3
FACTORS: Mapping[str, Sequence[Any]] = {
    "reverse": (False, True), "rows": ("whole", "lengths", "resets", "lengths and resets"), "keep": ("gates", "states"),
    "dtype": ("float32", "float64")}
NUMBERS = {"clip": 0.5, "clip_state": 0.3, "zoneout": 0.2, "zoneout_h": 0.1, "zoneout_c": 0.25, "heads": 2}
NAMES = {"gate": "hard_sigmoid", "new": "softsign", "out": "elu:0.8"}


def options_of(family: str) -> dict[str, tuple[Any, Any]]:
    """Each option of a cell: as usual, and another."""
    others = {name: NUMBERS.get(name) or NAMES.get(name, True) for name in BUILTIN[family].OPTIONS}
    return {name: (usual, others[name]) for name, usual in BUILTIN[family].OPTIONS.items()}


def factors(row: Row) -> Mapping[str, Sequence[Any]]:
    """What can be chosen for a row that has some choices."""
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


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    """Chunks of two steps."""
    monkeypatch.setattr(training, "CHUNK_ROWS", 2 * B)


def check(layer: Layer) -> None:
    call = layer.arguments(T, B)
    found, again = compare(layer, call), layer(call)
    assert all(np.array_equal(again[name], value) for name, value in found.items()), f"other bits of {layer}"
    if layer.dtype == "float64":
        differences(layer, found)


def differences(layer: Layer, found: Mapping[str, np.ndarray], step: float = 2e-6) -> None:
    """Slopes of the layer's own outputs along random directions, of each argument and of all."""
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


@pytest.mark.parametrize("family", BUILTIN)
def test_every_pair_of_choices(family: str, tmp_path: Path):
    layers = [layer_of(row) for row in ROWS if row["family"] == family]
    build(tmp_path, *layers)
    for one in layers:
        check(one)


def test_every_pair_is_among_them():
    from pairwise import pairs_of

    assert set().union(*map(pairs_of, ROWS)) >= every_pair()
    assert len(ROWS) < 45


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", ALL)
def test_all_combinations(cell: str, tmp_path: Path):
    """But for what is kept, which takes turns."""
    places = product(*(range(len(values)) for name, values in FACTORS.items() if name != "keep"))
    rows = [{"reverse": FACTORS["reverse"][r], "rows": FACTORS["rows"][n], "dtype": FACTORS["dtype"][d],
             "keep": FACTORS["keep"][(r + n + d) % 2]} for r, n, d in places]
    layers = [layer(cell, row) for row in rows]
    build(tmp_path, *layers)
    for one in layers:
        check(one)
