"""Rows of results: what was measured of a case, in JSON and CSV, and read again."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from ecornn.bench.case import FIELDS, Case, case_of
from ecornn.bench.row_log import RowLog
from ecornn.bench.turns import Times
from ecornn.errors import ArgumentError
from ecornn.workload import Stack, Workload

SIDES = ("ecornn", "cudnn", "cudnn-tf32", "torch", "loop", "onnxruntime")
COLUMNS = ("median", "p20", "p80", "p95", "p99", "runs", "error")
OURS = "ecornn"


class Row(msgspec.Struct, kw_only=True):
    """What is known of a case.

    Attributes
    ----------
    command : reproduces the row
    schedule, config, provenance : of ours, and why these
    us_per_step : of each side that was timed, microseconds a step
    errors : of each side, relative in the Frobenius norm, the largest of its results; ``limits``: how large it may be;
        None where there is no reference
    wrong : sides whose results are wrong, which are not timed, and how; ``left_out``: sides that were asked for and do
        not compute such a layer, and why; ``about``: what a side is, as ``torch.nn.LSTM``
    ratios : how many times as long as ours each other side takes
    disturbed : rounds that were made again, since other processes used the processors
    failed : why nothing was measured
    earlier : medians of the row that this one reproduces
    calls : that were timed as one
    peak_mib : of each side, memory of a GPU that a training step takes at most, beside what is there before it
    name, group, at_most, at_least : of the layer in its grid, with its bounds
    """

    case: Case
    command: str
    device: str = ""
    workload: Workload | None = None
    stack: Stack | None = None
    seq: int = 0
    batch: int = 0
    schedule: str = ""
    config: dict[str, Any] = {}
    provenance: str = ""
    us_per_step: dict[str, Times] = {}
    errors: dict[str, float | None] = {}
    limits: dict[str, float] = {}
    wrong: dict[str, str] = {}
    left_out: dict[str, str] = {}
    about: dict[str, str] = {}
    ratios: dict[str, float] = {}
    disturbed: int = 0
    failed: str = ""
    earlier: dict[str, float] = {}
    calls: int = 1
    peak_mib: dict[str, float] = {}
    name: str = ""
    group: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def good(self) -> bool:
        """Whether ours was measured, and is right."""
        return not self.failed and OURS not in self.wrong


def environment(row: Row | None = None) -> dict[str, Any]:
    """This machine, and versions of libraries; with a row of a GPU also those of the GPU's."""
    import datetime
    import importlib.metadata
    import importlib.util
    import platform

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("ecornn", "apache-tvm", "numpy", "torch", "onnxruntime"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    from ecornn.host_gpu import driver_version

    if (driver := driver_version()) is not None:
        found["driver"] = driver
    if row is not None and row.case.target == "cuda" and importlib.util.find_spec("torch") is not None:
        import torch  # the rows may have been measured in another process

        found |= {"gpu": row.device, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found | {"time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def append(log: RowLog, row: Row, more: Mapping[str, Any] | None = None) -> None:
    """Adds a row to a file, behind where it was measured if the file's last rows are of elsewhere, or of before;
    ``more``: what else it says."""
    if log.fresh or (row.device and not log.environment.get("device")):
        log.begin(environment(row) | {"device": row.device, "command": shlex.join(["ecornn", *sys.argv[1:]])})
    log.add(row.name, msgspec.to_builtins(row) | dict(more or {}))


class CsvFile:
    """Rows are appended as they are made, so that what was done is kept however a run ends."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.writer = csv.DictWriter(file, [*FIELDS, "device", "schedule", "failed", "wrong",
                                            *(f"{side}_{column}" for side in SIDES for column in COLUMNS)])
        self.writer.writeheader()
        file.flush()

    def add(self, row: Row) -> None:
        """A line; a side's columns are empty where it was not timed."""
        values = msgspec.to_builtins(row.case) | {"device": row.device, "schedule": row.schedule,
                                                  "failed": row.failed, "wrong": " ".join(row.wrong)}
        for side in SIDES:
            times = msgspec.to_builtins(row.us_per_step[side]) if side in row.us_per_step else {}
            times["error"] = row.errors.get(side)
            values |= {f"{side}_{column}": times.get(column) for column in COLUMNS}
        self.writer.writerow(values)
        self.file.flush()


class Earlier(msgspec.Struct):
    """A row of a file: its case, the sides beside ours that it has, and its medians in microseconds a step."""

    case: Case
    against: tuple[str, ...]
    device: str
    schedule: str
    medians: dict[str, float]


def read_cases(path: Path) -> list[Case]:
    """The cases of a file: CSV with options' names in the first line, a JSON list of objects with these, or results of
    either kind. Raises :class:`ArgumentError` where it is none."""
    return [case_of(_case(values), f"{path}:{n}") for n, values in lines_of(path)]


def read_row(text: str) -> Earlier:
    """``FILE`` or ``FILE:N``: the N-th row of results, from 1; without N the only one. Raises :class:`ArgumentError`
    where there is none."""
    name, colon, number = text.rpartition(":")
    path, chosen = (Path(name), int(number)) if colon and number.isdecimal() else (Path(text), None)
    rows = list(lines_of(path))
    if not 1 <= (chosen or 1) <= len(rows) or (chosen is None and len(rows) > 1):
        raise ArgumentError("--reproduce", text, f"FILE:N with N from 1 to {len(rows)}")
    n, values = rows[(chosen or 1) - 1]
    medians = {s: float(v) for s in SIDES if (v := median_of(values, s)) not in ("", None)}
    against = tuple(s for s in SIDES if s in {*medians, *values.get("left_out", ())} and s != OURS)
    if not medians:
        raise ArgumentError("--reproduce", text, "a row of results, with the times of a side")
    return Earlier(case_of(_case(values), f"{path}:{n}"), against, values.get("device", ""),
                   values.get("schedule", ""), medians)


def median_of(values: dict[str, Any], side: str) -> Any:
    """Of a side in a line, microseconds a step; nothing, or an empty text, where it was not timed."""
    return values.get("us_per_step", {}).get(side, {}).get("median", values.get(f"{side}_median"))


def _case(values: dict[str, Any]) -> dict[str, Any]:
    """What a line says of its case."""
    if isinstance(values.get("case"), dict):
        return values["case"]
    results = "device" in values and "failed" in values  # a line of our own CSV has more
    return {name: value for name, value in values.items() if not results or name in FIELDS}


def lines_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, numbered from 1. Raises :class:`ArgumentError` where it has none."""
    if path.suffix == ".json":
        try:
            found = msgspec.json.decode(path.read_bytes())
        except msgspec.DecodeError as error:
            raise ArgumentError("file", str(path), f"JSON ({error})") from None
        rows = found if isinstance(found, list) else found.get("rows", [found]) if isinstance(found, dict) else []
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise ArgumentError("file", str(path), "a JSON list of layers, or results of ecornn bench --json")
    else:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(line for line in file if line.strip() and not line.startswith("#")))
        if not rows or any(None in row for row in rows):
            raise ArgumentError("file", str(path), f"a first line with names such as {','.join(FIELDS[:5])}, and a "
                                "layer on each of the others; or a file that ends in .json")
    yield from enumerate(rows, 1)

