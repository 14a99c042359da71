"""What the rows of the grid come to: means, rows below a bound, scaling, cliffs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from grid import CLIFF, GRID, LEAST, MOST, SCALING, TILES, Row
from grid import rows as every_row

DTYPES = ("float16", "bfloat16", "tf32", "tf32-both", "float32")
HIGH = 1.5  # times the floor that needs a reason


@dataclass(frozen=True)
class Group:
    """Rows of the grid in one data type."""

    dtype: str
    rows: list[dict]
    expected: int

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios to cuDNN."""
        return float(np.exp(np.mean(np.log([r["ratio"] for r in self.rows]))))

    @property
    def least(self) -> dict:
        return min(self.rows, key=lambda r: r["ratio"])

    @property
    def below(self) -> int:
        return sum(r["ratio"] < 1 for r in self.rows)


@dataclass(frozen=True)
class Point:
    """A batch size of the Persistent RNNs case."""

    B: int
    us: float
    cudnn_us: float
    tflops: float  # of the recurrent product
    share: float | None  # exchange floor over time


@dataclass(frozen=True)
class Pair:
    """A size off every tile, and the next tile up."""

    off: dict
    up: dict

    @property
    def cliff(self) -> float:
        return self.off["ecornn_us"] / self.up["ecornn_us"]

    @property
    def good(self) -> bool:
        return self.cliff <= CLIFF


@dataclass(frozen=True)
class Bound:
    """A row that must be fast enough."""

    row: dict
    most: float | None  # µs a step
    least: float | None  # ratio

    @property
    def good(self) -> bool:
        return (self.most is None or self.row["ecornn_us"] <= self.most) and (
            self.least is None or self.row["ratio"] >= self.least)


class Summary:
    """Measured rows by name; what was not measured, or failed, is left out everywhere and counted."""

    def __init__(self, rows: Iterable[Mapping]) -> None:
        order = {str(row): number for number, row in enumerate(every_row())}
        every = {row["name"]: dict(row) for row in sorted(rows, key=lambda r: order.get(r["name"], len(order)))}
        self.failed = [row for row in every.values() if "failed" in row]
        self.rows = {name: row for name, row in every.items() if "failed" not in row}

    def _of(self, row: Row) -> dict | None:
        return self.rows.get(str(row))

    def _measured(self, wanted: Iterable[Row]) -> list[dict]:
        return [found for row in wanted if (found := self._of(row))]

    def groups(self) -> list[Group]:
        """By data type, and both 16-bit ones together first."""
        found = []
        for name, dtypes in (("float16 and bfloat16", DTYPES[:2]), *((d, (d,)) for d in DTYPES)):
            wanted = [row for row in GRID if row.dtype in dtypes]
            if measured := self._measured(wanted):
                found.append(Group(name, measured, len(wanted)))
        return found

    def worst(self, count: int) -> list[dict]:
        """Rows of the grid with the least ratios, worst first."""
        return sorted(self._measured(GRID), key=lambda r: r["ratio"])[:count]

    def high(self) -> list[dict]:
        """Rows that take more than 1.5 times their floor, the furthest first."""
        return sorted((r for r in self.rows.values() if r.get("over_floor", 0) > HIGH), key=lambda r: -r["over_floor"])

    def scaling(self) -> list[Point]:
        return [Point(r["B"], r["ecornn_us"], r["cudnn_us"], 2e-6 * r["H"] ** 2 * r["B"] / r["ecornn_us"],
                      r["floor"]["exchange"] / r["ecornn_us"] if "floor" in r else None)
                for r in self._measured(SCALING)]

    def pairs(self) -> list[Pair]:
        return [Pair(a, b) for off, up in TILES if (a := self._of(off)) and (b := self._of(up))]

    def bounds(self) -> list[Bound]:
        return [Bound(found, MOST.get(row), LEAST.get(row)) for row in {**MOST, **LEAST} if (found := self._of(row))]
