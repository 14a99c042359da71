"""One line of a tuning log, as docs/TUNING_LOG_FORMAT.md specifies; and the tolerance within which a time counts.

Lines are data: decoded strictly (unknown fields, other types and absurd sizes are refused), never executed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ecornn.device import Device
from ecornn.dtypes import TABLE
from ecornn.errors import RecordError
from ecornn.workload import Workload

VERSION = 1
READS = f"this program reads versions up to {VERSION}"
MAX_LINE = 16 << 10  # bytes of one line with its newline

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Message = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Micro = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]  # µs
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Knob = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Knobs = Annotated[dict[Name, Knob | bool | Name], msgspec.Meta(max_length=64)]
Names = Annotated[dict[Name, Name], msgspec.Meta(max_length=32)]
UTC = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]
Reason = Literal["trials", "space", "time", "converged"]
Megahertz = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
TOLERANCE = {name: row.tolerance for name, row in TABLE.items()} | {"tf32": 6e-4}  # of outputs
GRADIENTS = {name: row.gradients for name, row in TABLE.items() if row.gradients} | {"tf32": 6e-4}  # of adjoints

# Rounding to bfloat16 is done before the reference here; that to integers is not. int21 is as exact as float32 has to
# be; int8 costs both sides of a product.
INTEGERS = {"int21": 1e-5, "int16": 1e-4, "int8": 3e-2}
LEAST = 1e-3  # µs of a step: some cycles, and no step has fewer


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one step, µs: every run's, in order, with the median and the 20th/80th percentile."""

    median: Micro
    p20: Micro
    p80: Micro
    runs: Annotated[tuple[Micro, ...], msgspec.Meta(min_length=1, max_length=256)]

    def __post_init__(self) -> None:
        if not self.p20 <= self.median <= self.p80:
            raise ValueError("times must satisfy p20 <= median <= p80")
        if self.p20 < min(self.runs) or max(self.runs) < self.p80:
            raise ValueError("p20 and p80 must lie within the runs")

    @classmethod
    def of(cls, runs: list[float]) -> Times:
        """The times of ``runs``, µs per step each."""
        median, p20, p80, *kept = (float(f"{time:.5g}") for time in (*np.percentile(runs, (50, 20, 80)), *runs[:256]))
        return cls(median, p20, p80, tuple(kept))


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest clocks of a device, MHz; 0 where unknown. ``memory`` is 0 on a CPU."""

    cores: Megahertz = 0
    memory: Megahertz = 0


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schedule: Name
    config: Knobs


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Fields of every kind of line. ``run`` names the run: a digest of what it searches, and its number in the file.
    ``time`` is UTC, ISO 8601."""

    v: int = VERSION
    run: Name
    time: UTC = msgspec.field(default_factory=lambda: now())


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """A run begins, or goes on: what is searched, for what, and with what."""

    workload: Workload
    device: Device
    schedules: Annotated[dict[Name, Count], msgspec.Meta(max_length=64)]  # name -> revision
    trials: Count
    seed: Count
    versions: Names
    clocks: Clocks | None = None


class Trial(Record, frozen=True, kw_only=True, tag="trial"):
    """One configuration, built and measured; or why it was not. ``stage``: ``search``, or ``final``, measured again in
    turns. ``check``: ||out - ref|| / ||ref|| against float64; ``source``: digest of the code; ``seconds``: the run's
    wall time so far; ``noisy``: the median is not known to ``timing.TIGHT``."""

    index: Count
    stage: Name
    workload: Workload
    device: Device
    schedule: Name
    revision: Count
    generation: Count
    config: Knobs
    versions: Names  # ecornn, tvm, tvm_ffi; driver and cuda on a GPU
    clocks: Clocks | None = None
    seed: Count
    seconds: Seconds
    times: Times | None = None
    check: Annotated[float, msgspec.Meta(ge=0)] | None = None
    source: Annotated[str, msgspec.Meta(max_length=64)] = ""
    error: Message | None = None
    noisy: bool = False

    def __post_init__(self) -> None:
        if self.stage not in ("search", "final"):
            raise ValueError(f"stage={self.stage!r}; expected 'search' or 'final'")
        if (self.times is None) == (self.error is None):
            raise ValueError("a trial has either times or an error")

    @property
    def choice(self) -> Choice:
        return Choice(self.schedule, self.config)


class Outcome(msgspec.Struct, frozen=True):
    """The result of one candidate: ``times``, or the ``error`` that it failed with. Fields are those of a trial."""

    times: Times | None = None
    check: float | None = None
    source: str = ""
    error: str | None = None
    noisy: bool = False

    @classmethod
    def of(cls, trial: Trial) -> Outcome:
        return cls(*(getattr(trial, name) for name in cls.__struct_fields__))


class Finish(Record, frozen=True, kw_only=True, tag="finish"):
    """The end of a run. ``reason``: all ``trials`` made, all of ``space`` tried, ``time`` is up, or ``converged``."""

    reason: Reason
    trials: Count
    seconds: Seconds
    best: Choice | None
    best_us: Micro | None
    default: Choice | None
    default_us: Micro | None

    def __post_init__(self) -> None:
        if (self.best is None) != (self.best_us is None) or (self.default is None and self.default_us is not None):
            raise ValueError("best and best_us come together, and default_us not without default")


class NewerRecord(RecordError):
    """A line that a newer program wrote: this one cannot read it, and must not lose it."""


AnyRecord = Start | Trial | Finish
# Of terminals, of lines, and of the direction of writing: shown as it is, such a name may look like anything.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
BACKSLASH, DELETE = b"\\\x7f"  # as numbers, which are found in a fifth of the time
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def encode(record: AnyRecord) -> bytes:
    """One line with its newline; :class:`RecordError` where it breaks the format's own limits."""
    line = msgspec.json.encode(record) + b"\n"
    decode(line)
    return line


def decode(line: bytes) -> AnyRecord:
    """The record of one line; :class:`RecordError` says what is wrong with it."""
    if len(line) > MAX_LINE:
        raise RecordError(f"line of {len(line)} bytes; at most {MAX_LINE} are allowed")
    try:
        record = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        newer = _newer(line)
        raise (NewerRecord(f"version {newer} of the format; {READS}") if newer else RecordError(str(error))) from error
    if not 1 <= record.v <= VERSION:
        raise (NewerRecord if record.v > VERSION else RecordError)(f"version {record.v} of the format; {READS}")
    try:
        datetime.fromisoformat(record.time[:-1])
    except ValueError as error:
        raise RecordError(f"time {record.time!r}: {error}") from error
    if BACKSLASH in line or DELETE in line or not line.isascii():  # no other line can have one
        for text in names(msgspec.to_builtins(record)):
            if CONTROL.search(text):
                raise RecordError(f"control character in {text!r}")
    # Written again, by `ecornn log merge` say, it has every field, and numbers in full.
    if len(line) > MAX_LINE // 4 and (size := len(msgspec.json.encode(record)) + 1) > MAX_LINE:
        raise RecordError(f"line that has {size} bytes when it is written again; at most {MAX_LINE} are allowed")
    return record


def names(value: Any) -> Iterator[str]:
    """The texts of a decoded line that may be shown, but messages: these have many lines."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "error":
                yield key
                yield from names(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from names(inner)


def first_line(message: str, most: int) -> str:
    """The beginning of an error, to be shown: without what a terminal would obey."""
    return CONTROL.sub("?", message.splitlines()[0][:most])


class _Head(msgspec.Struct):
    v: int  # which says which fields a line may have


def _newer(line: bytes) -> int | None:
    """The version of a line that a newer program wrote; None where no newer one did."""
    try:
        version = msgspec.json.decode(line, type=_Head).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return version if version > VERSION else None


def tolerance(work: Workload) -> float:
    """The largest relative error that an output may have, ||out - ref|| / ||ref||."""
    if work.backward:
        return GRADIENTS[work.arithmetic]
    return INTEGERS.get(work.weights or "", TOLERANCE[work.arithmetic])


def proven(trial: Trial) -> bool:
    """True for a trial with a time that a step can take, and a right output: what is wrong may be fast."""
    return (trial.times is not None and trial.times.median >= LEAST and trial.check is not None
            and trial.check <= tolerance(trial.workload))
