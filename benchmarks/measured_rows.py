"""Rows of files of results, of ``ecornn bench --output`` and of programs here, in one form; and those of
grids/grid.toml summed up: means, rows below a bound, scaling, cliffs, floors.

A row is a dict: ``name``, ``group``, ``cell``, ``T``, ``B``, ``I``, ``H``, ``dtype``, ``sides`` (ours, ``ecornn``,
first), of each side ``SIDE_us``, ``SIDE_p20`` and ``SIDE_p80`` in microseconds a step, ``ratio``, how many times as
long the fastest library takes as ours, and what else the file says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ecornn.bench.grid import Grid, Layer, read_grid
from ecornn.bench.results import RowLog
from ecornn.device import Device
from ecornn.floor import Floor, floor, measured

LIBRARIES = ("cudnn", "cudnn-tf32", "torch", "onnxruntime")
DTYPES = ("float16", "bfloat16", "tf32", "tf32-both", "float32")
HIGH = 1.5  # times the floor that needs a reason
CLIFF = 1.3  # how much longer a size off every tile may take than the next tile up
FILE = Path(__file__).parent / "grids" / "grid.toml"
Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """A file: where it was measured, its rows, and the grid whose layers they are, if there is one of that name."""

    path: Path
    environment: Mapping[str, Any]
    rows: list[Row]
    grid: Grid | None

    @property
    def good(self) -> list[Row]:
        """Rows that were measured."""
        return [row for row in self.rows if not row.get("failed")]

    @property
    def source(self) -> str:
        """The origin of the figures."""
        env = self.environment
        if "gpu" in env:
            where = f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} through PyTorch {env['torch']}"
            how = "in CUDA graphs, interleaved"
        else:
            where = f"{env.get('cpu', env.get('device'))}, PyTorch {env.get('torch')}, ONNX Runtime " \
                    f"{env.get('onnxruntime')}"
            how = "interleaved, as many threads on every side"
        command = env.get("command", "make bench") if self.grid is None else (
            f"python benchmarks/run_all.py {name_of(self.path)}")
        return (f"µs a step, median [p20, p80], and times ours; {where}; whole passes {how}, outputs checked against "
                f"float64. Data: `{self.path.as_posix()}`; `{command}`.")


def name_of(path: Path) -> str:
    """The grid of a file of results: ``h100_classes.jsonl`` has the rows of ``classes``."""
    return {"h100": "layers", "cpu_skylake": "cpu"}.get(path.stem, path.stem.partition("_")[2] or path.stem)


def read(path: Path) -> Results:
    """A file of results. Raises :class:`~ecornn.errors.ArgumentError` where it is none."""
    log: Any = RowLog(path) if path.suffix == ".jsonl" else SimpleNamespace(
        **{"environment": {}} | json.loads(path.read_text()))
    toml = Path(__file__).parent / "grids" / f"{name_of(path)}.toml"
    return Results(path, log.environment,
                   [of_bench(row) if isinstance(row.get("case"), dict) else row for row in log.rows],
                   read_grid(toml) if toml.exists() else None)


def of_bench(row: Row) -> Row:
    """A row of ``ecornn bench``."""
    case, work = row["case"], row.get("workload") or {}
    found = {name: value for name, value in row.items() if name not in ("case", "workload", "us_per_step")} | {
        "cell": (case.get("cell") or work.get("cell", "")).rpartition(":")[2], "T": row["seq"], "B": row["batch"],
        "I": work.get("input", 0), "H": work.get("hidden", 0), "dtype": case.get("dtype", ""),
        "layers": case.get("layers", 1), "bidirectional": case.get("bidirectional", False), "keep": case.get("keep"),
        "sides": list(row.get("us_per_step", {})), "missing": row.get("left_out", {}) | row.get("wrong", {})}
    if work.get("precision") == "tf32":
        found["dtype"] = "tf32-both"
    elif "cudnn-tf32" in found["sides"]:
        found["dtype"] = "tf32"
        found["sides"] = ["cudnn" if side == "cudnn-tf32" else side for side in found["sides"]]
    for side, times in row.get("us_per_step", {}).items():
        name = side.removesuffix("-tf32")
        found |= {f"{name}_us": times["median"], f"{name}_p20": times["p20"], f"{name}_p80": times["p80"]}
    found |= {f"{side}_mib": value for side, value in row.get("peak_mib", {}).items()}
    libraries = [side for side in LIBRARIES if f"{side}_us" in found] or ["loop"]
    fastest = min((found[f"{side}_us"] for side in libraries if f"{side}_us" in found), default=None)
    return found | {"ratio": fastest / found["ecornn_us"]} if fastest and found.get("ecornn_us") else found


def size(row: Row) -> str:
    """T x B x I x H."""
    return "x".join(str(row.get(name)) for name in ("T", "B", "I", "H"))


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process that has done nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    return float(np.exp(np.mean(np.log(list(values)))))


@cache
def members(group: str) -> tuple[str, ...]:
    """The names of the layers of a group of the grid; without one of all layers."""
    grid = read_grid(FILE)
    return tuple(dict.fromkeys(layer.name for layer in (grid.members(group) if group else grid.expanded(FILE.name))))


def singles() -> list[str]:
    """The layers that geometric means are of, by data type."""
    found = [*members("layers"), *members("sizes")]
    return [name for dtype in DTYPES for name in dict.fromkeys(found) if name.split()[-1] == dtype]


def modules() -> list[Layer]:
    """The layers of the grid, each module once: rows in which only cuDNN rounds have that of float32."""
    return [row for row in read_grid(FILE).expanded(FILE.name) if row.name.split()[-1] != "tf32"]


def single_modules() -> list[Layer]:
    """The modules of the grid over which geometric means are taken."""
    return [row for row in modules() if row.name in singles()]


def described(one: Layer) -> Row:
    """A layer of the grid, as a row has it."""
    case = one.case
    return {"cell": case.cell, "T": case.seq, "B": case.batch, "I": case.input, "H": case.hidden,
            "dtype": one.name.split()[-1]}


class Group(NamedTuple):
    """Rows of the grid in one data type, of so many that are ``expected``: the geometric mean of their ratios to cuDNN,
    the row with the least, and how many are ``below`` 1."""

    dtype: str
    rows: list[Row]
    expected: int
    mean: float
    least: Row
    below: int


class Pair(NamedTuple):
    """A size off every tile, the next tile up, and how many times as long the first takes."""

    off: Row
    up: Row
    cliff: float


def arithmetic_of(row: Mapping[str, Any]) -> str:
    """The type that our products round their factors to."""
    return {"tf32": "float32", "tf32-both": "tf32"}.get(row["dtype"], row["dtype"])


def floor_of(row: Mapping[str, Any], gpu: Device) -> Floor:
    return floor(gpu, row["cell"], row["B"], row["I"], row["H"], arithmetic_of(row))


def with_floor(row: Mapping[str, Any], gpu: str) -> Row:
    """A row with what `ecornn/floor.py` says is its floor, where the constants of its GPU were measured."""
    device = measured(gpu)
    if device is None or "floor_us" in row or row.get("failed"):
        return dict(row)
    least = floor_of(row, device)
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

    def measured(self, wanted: Iterable[str]) -> list[Row]:
        """The rows of these layers, as far as there are any."""
        return [self.rows[name] for name in wanted if name in self.rows]

    def groups(self) -> list[Group]:
        """By data type, and both 16-bit ones together first."""
        found = []
        for name, dtypes in (("float16 and bfloat16", DTYPES[:2]), *((d, (d,)) for d in DTYPES)):
            wanted = [layer for layer in singles() if layer.split()[-1] in dtypes]
            if rows := self.measured(wanted):
                ratios = [r["ratio"] for r in rows]
                found.append(Group(name, rows, len(wanted), mean(ratios), min(rows, key=lambda r: r["ratio"]),
                                   sum(ratio < 1 for ratio in ratios)))
        return found

    def worst(self, count: int) -> list[Row]:
        """Rows of the grid with the least ratios, worst first."""
        return sorted(self.measured(singles()), key=lambda r: r["ratio"])[:count]

    def high(self) -> list[Row]:
        """Rows that take more than 1.5 times their floor, the furthest first."""
        return sorted((r for r in self.rows.values() if r.get("over_floor", 0) > HIGH), key=lambda r: -r["over_floor"])

    def scaling(self) -> list[Row]:
        """The Persistent RNNs case, with TFLOP/s of the recurrent product, and the exchange floor over time."""
        return [r | {"tflops": 2e-6 * r["H"] ** 2 * r["B"] / r["ecornn_us"],
                     "share": r["floor"]["exchange"] / r["ecornn_us"] if "floor" in r else None}
                for r in self.measured(members("scaling"))]

    def pairs(self) -> list[Pair]:
        """Sizes off every tile beside the next tile up."""
        found = [self.measured(pair) for pair in zip(members("off"), members("up"), strict=True)]
        return [Pair(*pair, pair[0]["ecornn_us"] / pair[1]["ecornn_us"]) for pair in found if len(pair) == 2]
