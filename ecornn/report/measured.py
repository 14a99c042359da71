"""Results beside the layers of a log: times of other libraries, and of the stages of a step. Results are files of
``ecornn bench --json`` or ``--csv``, or JSON lines of ``benchmarks/``, of which those of ``why_above_floor.py`` have
stages, measured by leaving them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ecornn.bench.results import OURS, SIDES, lines_of, median_of
from ecornn.errors import ArgumentError
from ecornn.schedules.base import Config
from ecornn.tune.record import Trial
from ecornn.workload import Workload

PEERS = tuple(side for side in SIDES if side not in (OURS, "cudnn-tf32"))
STAGES = {"gate math": "gates", "projection": "product of x"}  # as estimates name them
# Of a row of the grid: in `tf32` the library rounds its factors alone, which is not the same layer.
KINDS: dict[str, tuple[str, str | None]] = {"tf32-both": ("float32", "tf32")} | {
    name: (name, None) for name in ("float32", "float16", "bfloat16")}


@dataclass
class Beside:
    """The results of one layer on one device, µs a step."""

    peers: dict[str, float] = field(default_factory=dict)  # of other libraries
    stages: dict[str, float] = field(default_factory=dict)  # measured with this schedule and configuration
    schedule: str = ""
    config: Config = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """All results of files, by device and layer; ``files``: their names."""

    rows: Mapping[tuple[object, ...], Beside]
    files: tuple[str, ...] = ()

    def peers(self, trial: Trial) -> dict[str, float]:
        """Other libraries' µs a step in the trial's layer on its device, the fastest first."""
        peers = self.rows.get(key(trial.workload, trial.device.name), Beside()).peers
        return dict(sorted(peers.items(), key=lambda one: one[1]))

    def stages(self, trial: Trial) -> dict[str, float]:
        """µs of the stages of a step, where they were measured with this very configuration."""
        row = self.rows.get(key(trial.workload, trial.device.name), Beside())
        return row.stages if (row.schedule, row.config) == (trial.schedule, trial.config) else {}


NOTHING = Measured({})


def key(work: Workload, device: str) -> tuple[object, ...]:
    """The device and the properties of a layer that results must share with a trial."""
    return (device, work.cell, work.hidden, work.input, work.batch, work.seq, work.dtype, work.precision, work.weights,
            str(work.entry))


def measured(paths: Iterable[Path]) -> Measured:
    """The results of files, the last of a layer; :class:`~ecornn.errors.ArgumentError` for a file without any."""
    rows: dict[tuple[object, ...], Beside] = {}
    paths = tuple(paths)
    for path in paths:
        results = list(_grid(path) if path.suffix == ".jsonl" else
                       (found for _, values in lines_of(path) for found in _of(values)))
        if not results:
            raise ArgumentError("--results", str(path), "results of `ecornn bench --json` or --csv, or JSON lines of "
                                "benchmarks/, with times of single layers")
        for name, one in results:
            known = rows.setdefault(name, Beside())
            known.peers |= one.peers
            if one.stages:
                known.stages, known.schedule, known.config = one.stages, one.schedule, one.config
    return Measured(rows, tuple(path.name for path in paths))


def _of(values: dict[str, Any]) -> Iterator[tuple[tuple[object, ...], Beside]]:
    """A row of ``ecornn bench``; nothing where it is none, or not one sequence, forward."""
    case = values.get("case", values)
    try:
        if values.get("workload"):
            work = msgspec.convert(values["workload"], Workload)
        else:
            work = Workload(case["cell"], int(case["hidden"]), int(case["input"] or case["hidden"]),
                            int(case["batch"]), int(case["seq"]), case["dtype"],
                            precision=case.get("precision") or None, weights=case.get("weights") or None)
        several = int(case.get("layers") or 1) > 1
    except (KeyError, ValueError, TypeError, msgspec.ValidationError):  # not a row of results
        return
    if several or any(str(case.get(name)) == "True" for name in ("training", "bidirectional")):  # CSV has words
        return
    times = {side: float(us) for side in PEERS if (us := median_of(values, side)) not in ("", None)}
    stages = stages_of(values) if isinstance(values.get("stages"), dict) else {}
    if times or stages:
        work = msgspec.structs.replace(work, seq=int(values.get("seq") or work.seq),
                                       batch=int(values.get("batch") or work.batch))
        yield key(work, values.get("device", "")), (
            Beside(times, stages, values["schedule"], dict(values["config"])) if stages else Beside(times))


def stages_of(row: dict[str, Any]) -> dict[str, float]:
    """µs a step of stages, by the names that estimates have."""
    return {STAGES.get(name, name): max(0.0, us) for name, us in row.get("stages", {}).items()}


def _grid(path: Path) -> Iterator[tuple[tuple[object, ...], Beside]]:
    """Rows of the logs that ``ecornn bench --output`` and ``benchmarks/`` append to."""
    device = ""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry: dict[str, Any] = msgspec.json.decode(line)
            device = entry.get("environment", {}).get("gpu", device)
            row = entry.get("row", {})
            if "case" in row:
                yield from _of(row)
                continue
            kind = KINDS.get(row.get("dtype"))
        except (msgspec.DecodeError, AttributeError):
            raise ArgumentError("--results", f"{path}:{number}", "a line of results") from None
        if kind is None or not {"cell", "T", "B", "I", "H"} <= set(row):
            continue
        work = Workload(row["cell"], row["H"], row["I"], row["B"], row["T"], kind[0], precision=kind[1])
        times = {side: row[f"{side}_us"] for side in PEERS if row.get(f"{side}_us")}
        yield key(work, device), Beside(times, stages_of(row), row.get("schedule", ""), dict(row.get("config", {})))
