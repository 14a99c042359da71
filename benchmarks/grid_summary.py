"""The grid's rows summed up: means, rows below a bound, scaling, cliffs, floors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from measured_rows import mean

from ecornn.bench.grid import read_grid
from ecornn.floor import floor, measured

DTYPES = ("float16", "bfloat16", "tf32", "tf32-both", "float32")
HIGH = 1.5  # times the floor that needs a reason
CLIFF = 1.3  # how much longer a size off every tile may take than the next tile up
FILE = Path(__file__).parent / "grids" / "grid.toml"


@cache
def members(group: str) -> tuple[str, ...]:
    """The names of the layers of a group of the grid; without one of all layers."""
    grid = read_grid(FILE)
    return tuple(dict.fromkeys(layer.name for layer in (grid.members(group) if group else grid.expanded(FILE.name))))


def singles() -> list[str]:
    """The layers that geometric means are of, by data type."""
    found = [*members("layers"), *members("sizes")]
    return [name for dtype in DTYPES for name in dict.fromkeys(found) if name.split()[-1] == dtype]


@dataclass(frozen=True)
class Group:
    """Rows of the grid in one data type."""

    dtype: str
    rows: list[dict[str, Any]]
    expected: int

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios to cuDNN."""
        return mean(r["ratio"] for r in self.rows)

    @property
    def least(self) -> dict[str, Any]:
        return min(self.rows, key=lambda r: r["ratio"])

    @property
    def below(self) -> int:
        return sum(r["ratio"] < 1 for r in self.rows)


@dataclass(frozen=True)
class Pair:
    """A size off every tile, and the next tile up."""

    off: dict[str, Any]
    up: dict[str, Any]

    @property
    def cliff(self) -> float:
        return self.off["ecornn_us"] / self.up["ecornn_us"]


def with_floor(row: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """A row with what `ecornn/floor.py` says is its floor, where the constants of its GPU were measured."""
    device = measured(gpu)
    if device is None or "floor_us" in row or row.get("failed"):
        return dict(row)
    arithmetic = {"tf32": "float32", "tf32-both": "tf32"}.get(row["dtype"], row["dtype"])
    least = floor(device, row["cell"], row["B"], row["I"], row["H"], arithmetic)
    return dict(row) | {"floor_us": least.total, "over_floor": row["ecornn_us"] / least.total,
                        "floor": {"exchange": least.exchange}}


class Summary:
    """Measured rows by name; what was not measured, or failed, is left out everywhere and counted."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], gpu: str = "") -> None:
        order = {name: number for number, name in enumerate(members(""))}
        every = {row["name"]: with_floor(row, gpu) for row in
                 sorted(rows, key=lambda r: order.get(r["name"], len(order)))}
        self.failed = [row for row in every.values() if row.get("failed")]
        self.rows = {name: row for name, row in every.items() if not row.get("failed")}

    def measured(self, wanted: Iterable[str]) -> list[dict[str, Any]]:
        """The rows of these layers, as far as there are any."""
        return [self.rows[name] for name in wanted if name in self.rows]

    def groups(self) -> list[Group]:
        """By data type, and both 16-bit ones together first."""
        found = []
        for name, dtypes in (("float16 and bfloat16", DTYPES[:2]), *((d, (d,)) for d in DTYPES)):
            wanted = [layer for layer in singles() if layer.split()[-1] in dtypes]
            if rows := self.measured(wanted):
                found.append(Group(name, rows, len(wanted)))
        return found

    def worst(self, count: int) -> list[dict[str, Any]]:
        """Rows of the grid with the least ratios, worst first."""
        return sorted(self.measured(singles()), key=lambda r: r["ratio"])[:count]

    def high(self) -> list[dict[str, Any]]:
        """Rows that take more than 1.5 times their floor, the furthest first."""
        return sorted((r for r in self.rows.values() if r.get("over_floor", 0) > HIGH), key=lambda r: -r["over_floor"])

    def scaling(self) -> list[dict[str, Any]]:
        """The Persistent RNNs case, with TFLOP/s of the recurrent product, and the exchange floor over time."""
        return [r | {"tflops": 2e-6 * r["H"] ** 2 * r["B"] / r["ecornn_us"],
                     "share": r["floor"]["exchange"] / r["ecornn_us"] if "floor" in r else None}
                for r in self.measured(members("scaling"))]

    def pairs(self) -> list[Pair]:
        """Sizes off every tile beside the next tile up."""
        return [Pair(self.rows[off], self.rows[up]) for off, up in zip(members("off"), members("up"), strict=True)
                if off in self.rows and up in self.rows]
