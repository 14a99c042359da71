"""Rows of results: what was measured of a case; in JSON, CSV and words, and read again."""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import structs

from ecornn.bench.grid import FIELDS, Case, case_of
from ecornn.bench.turns import Times
from ecornn.errors import ArgumentError
from ecornn.host_gpu import driver_version
from ecornn.workload import Stack, Workload

SIDES = ("ecornn", "cudnn", "cudnn-tf32", "torch", "loop", "onnxruntime")
COLUMNS = ("median", "p20", "p80", "p95", "p99", "runs", "error")
OURS = "ecornn"
SETTLED = 1.2  # p80 / p20, up to which a ratio of medians is worth its digits


class RowLog:
    """Rows in a file, a line each: ``{"environment": ...}``, which holds for what follows, or ``{"row": ...}`` with a
    ``name``. A last line that was cut is measured again; any other line is an :class:`ArgumentError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment: dict[str, Any] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._end = 0
        self.fresh = True  # nothing was appended yet
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else [], 1):
            if not line.endswith(b"\n"):
                break
            self._end += len(line)
            try:
                entry: dict[str, Any] = msgspec.json.decode(line)
                if "environment" in entry:
                    self.environment = dict(entry["environment"])
                else:
                    self._rows[entry["row"]["name"]] = entry["row"]
            except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                raise ArgumentError("file", f"{path}:{number}", f"a line of results, not {line[:80]!r}") from None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The latest measurement of every row, in the order of the file."""
        return list(self._rows.values())

    def has(self, name: str) -> bool:
        """Tells whether a row was measured; one that failed was not."""
        return not self._rows.get(name, {"failed": True}).get("failed")

    def begin(self, environment: dict[str, Any]) -> None:
        """Appends where the rows to come are measured; refuses another device than the file's."""
        known, now = (of.get("gpu") or of.get("device") for of in (self.environment, environment))
        if known and now and known != now:
            raise ArgumentError("--output", str(self.path), f"a file with results of {now}; this one has results of "
                                f"{known}")
        self.environment, self.fresh = environment, False
        self._write({"environment": environment})

    def add(self, name: str, row: Any) -> dict[str, Any]:
        """Appends a row, and returns it as the file has it."""
        entry: dict[str, Any] = msgspec.to_builtins(row) | {"name": name}
        self._rows[name] = entry
        self._write({"row": entry})
        return entry

    def _write(self, entry: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = msgspec.json.encode(entry) + b"\n"
        with self.path.open("ab") as file:
            file.truncate(self._end)  # a line that was cut
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(line)


class Row(msgspec.Struct, kw_only=True):
    """The results of a case so far. Dictionaries are by side."""

    case: Case
    command: str  # reproduces the row
    device: str = ""
    workload: Workload | None = None
    stack: Stack | None = None
    seq: int = 0
    batch: int = 0
    schedule: str = ""  # of ours, as config
    config: dict[str, Any] = {}
    provenance: str = ""  # why these
    us_per_step: dict[str, Times] = {}  # where it was timed, microseconds a step
    errors: dict[str, float | None] = {}  # in the Frobenius norm, the largest of its results; None: no reference
    limits: dict[str, float] = {}  # how large that error may be
    wrong: dict[str, str] = {}  # results that are wrong, and how; these sides are not timed
    left_out: dict[str, str] = {}  # why a side that was asked for does not compute such a layer
    about: dict[str, str] = {}  # what it is, as torch.nn.LSTM
    ratios: dict[str, float] = {}  # how many times as long as ours it takes
    disturbed: int = 0  # rounds that were made again, since other processes used the processors
    failed: str = ""  # why nothing was measured
    earlier: dict[str, float] = {}  # medians of the row that this one reproduces
    calls: int = 1  # that were timed as one
    peak_mib: dict[str, float] = {}  # memory of a GPU that a training step takes at most, beside what is there before
    name: str = ""  # of the layer in its grid, as what follows: its group and bounds
    group: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def good(self) -> bool:
        return not self.failed and OURS not in self.wrong


def environment(row: Row | None = None) -> dict[str, Any]:
    """This machine, and versions of libraries; with a row of a GPU also those of the GPU's."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("ecornn", "apache-tvm", "numpy", "torch", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if (driver := driver_version()) is not None:
        found["driver"] = driver
    if row is not None and row.case.target == "cuda" and importlib.util.find_spec("torch") is not None:
        import torch  # the rows may have been measured in another process

        found |= {"gpu": row.device, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found | {"time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def append(log: RowLog, row: Row, more: Mapping[str, Any] | None = None) -> None:
    """Adds a row to a file, behind where it was measured if that is elsewhere; ``more``: what else it says."""
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
            times = msgspec.to_builtins(row.us_per_step.get(side, {})) | {"error": row.errors.get(side)}
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
    """The cases of a file: CSV, a JSON list, or results of either kind; :class:`ArgumentError` where it is none."""
    return [case_of(_case(values), f"{path}:{n}") for n, values in lines_of(path)]


def read_row(text: str) -> Earlier:
    """The row of results that ``FILE`` or ``FILE:N`` (from 1) names; an :class:`ArgumentError` where there is none."""
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
    return Earlier(case_of(_case(values), f"{path}:{n}"), against, values.get("device", ""), values.get("schedule", ""),
                   medians)


def median_of(values: dict[str, Any], side: str) -> Any:
    return values.get("us_per_step", {}).get(side, {}).get("median", values.get(f"{side}_median"))


def _case(values: dict[str, Any]) -> dict[str, Any]:
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


def shown(row: Row) -> list[str]:
    """The lines for people."""
    if row.failed:
        return [f"{' '.join(row.command.split()[2:])}: {row.failed}"]
    assert row.workload is not None and row.stack is not None
    words = [str(structs.replace(row.workload, seq=row.seq, batch=row.batch)),
             str(structs.replace(row.stack, keep=None)), "forward and backward" * row.case.training]
    lines = [f"{', '.join(filter(None, words))} on {row.device}, {row.schedule}"]
    for name in row.about:
        if name in row.wrong:
            lines.append(f"{name:11} not timed, its result is wrong: {row.wrong[name]}")
        if name not in row.us_per_step:
            continue
        t, error = row.us_per_step[name], row.errors[name]
        lines.append(f"{name:11} {t.median:10.4g} µs/step  p20 {t.p20:.4g}  p80 {t.p80:.4g}  p95 {t.p95:.4g}  "
                     f"p99 {t.p99:.4g}  {t.median * row.seq / 1e3:.4g} ms per call, {t.runs} runs, "
                     + (f"error {error:.1e}" if error is not None else "not checked"))
    if row.disturbed:
        lines.append(f"{row.disturbed} rounds were repeated, because other processes were using the CPU")
    lines += [f"{name} ({row.about[name]}) takes {compared(row, name)}" for name in row.ratios]
    lines += [f"{name} took {before:.4g} µs/step before, and takes {row.us_per_step[name].median / before:.2f} times "
              "as long now"
              for name, before in row.earlier.items() if name in row.us_per_step]
    return lines


def compared(row: Row, name: str) -> str:
    """How many times as long a side takes as ours: the ratio where the times of both settled, otherwise its range."""
    ours, other = row.us_per_step[OURS], row.us_per_step[name]
    if all(t.p80 <= SETTLED * t.p20 for t in (ours, other)):
        return f"{row.ratios[name]:.2f} times as long as ecornn"
    low, high = other.p20 / ours.p80, other.p80 / ours.p20
    return f"{low:.2f} to {high:.2f} times as long as ecornn; the timings were noisy"
