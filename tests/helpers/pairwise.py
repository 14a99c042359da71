"""The cases that tests take: covering arrays of choices, in which every pair occurs; half of all; and seeds."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def pairwise(choices: Callable[[Row], Mapping[str, Sequence[Any]]], wanted: set[Pair]) -> list[Row]:
    """Rows in which all pairs of ``choices``, values by factor, occur that can; and those of ``wanted`` alone."""
    rows: list[Row] = []
    missing, order = set(wanted), {pair: sorted(map(str, pair)) for pair in wanted}
    while missing:
        row = dict(min(missing, key=order.__getitem__))
        while left := [name for name in choices(row) if name not in row]:
            allowed = choices(row)
            gain = {(name, value): sum(frozenset([(name, value), item]) in missing for item in row.items())
                    for name in left for value in allowed[name]}
            name, value = max(gain, key=gain.__getitem__)
            row[name] = value
        assert pairs_of(row) & missing
        missing -= pairs_of(row)
        rows.append(row)
    return rows


def halved(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of these values, half of them exhaustive, as squares of a chess board."""
    return [pytest.param(*(value for _, value in chosen), id="-".join(str(value) for _, value in chosen),
                         marks=[pytest.mark.exhaustive] * (sum(number for number, _ in chosen) % 2))
            for chosen in product(*map(enumerate, axes))]


def seeds(usual: range) -> range:
    """What exhaustive random tests draw: ``ECORNN_RANDOM=FIRST:END``, so that large runs can be split, or ``usual``."""
    asked = os.environ.get("ECORNN_RANDOM")
    return range(*map(int, asked.split(":"))) if asked else usual
