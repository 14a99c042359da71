"""Tuning logs: files of JSON lines that are only appended to, or compressed; folders of them; and one run in a log.

Compressed files (``.jsonl.xz``, as those that ship, and ``.jsonl.gz``) are read wherever a log is; nothing is appended
to them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import logging
import lzma
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeGuard, TypeVar

import msgspec

from ecornn.device import Device
from ecornn.errors import RecordError
from ecornn.file_locks import held
from ecornn.schedules.base import AnySchedule
from ecornn.tune.record import AnyRecord, Choice, Finish, NewerRecord, Start, Trial, decode, encode
from ecornn.tune.timing import bounds
from ecornn.tuning_logs import SUFFIXES, shipped_folder, user_folder
from ecornn.workload import Workload

MEMORY = 128 << 20  # bytes that a decoder may ask for: twice what the best compression of xz needs
MAX_FILE = 64 << 20  # bytes
LIMIT = 60.0  # seconds to wait for a process that writes
TORN = "torn last line"
R = TypeVar("R", bound=AnyRecord, covariant=True)
RESERVED = 0.25  # of a time limit, at most: for the comparison after the search
_told: set[tuple[str, ...]] = set()


@dataclass(frozen=True)
class Placed(Generic[R]):
    """A record and the line of a file that it stands on, from 1."""

    path: Path
    number: int
    record: R

    @property
    def full_place(self) -> str:
        return f"{self.path}:{self.number}"

    @property
    def place(self) -> str:
        return f"{self.path.name}:{self.number}"


Line = Placed[AnyRecord]
TrialLine = Placed[Trial]


def is_trial(line: Line) -> TypeGuard[TrialLine]:
    return isinstance(line.record, Trial)


def require_plain(path: Path) -> None:
    """Raises :class:`RecordError` for the name of a compressed log."""
    if path.suffix in (".gz", ".xz"):
        raise RecordError(f"{path} is compressed, and ecornn appends only to plain files; name a .jsonl file")


def unpacked(data: bytes, path: Path, most: int) -> bytes:
    """The text of a file, cut off a byte behind ``most``: a small file may decompress to any size. The name of ``path``
    says how ``data`` is compressed. Raises :class:`RecordError` where it is damaged or cut off."""
    try:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                return file.read(most + 1)
        if path.suffix == ".xz":
            return _streams(data, most)
    except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    return data


def _streams(data: bytes, most: int) -> bytes:
    """The text of xz streams behind each other; lzma.open would let a file ask for any memory."""
    text = bytearray()
    while data and len(text) <= most:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
        text += stream.decompress(data, most + 1 - len(text))
        if not stream.eof and len(text) <= most:
            raise EOFError("compressed file ended before the end of the stream")
        data = stream.unused_data.lstrip(b"\0")  # padding between streams
    return bytes(text)


def packed(text: bytes, path: Path) -> bytes:
    """The content of a file of that name for a text; the same bytes for the same text."""
    if path.suffix == ".gz":
        return gzip.compress(text, 9, mtime=0)
    if path.suffix == ".xz":
        return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    return text


@dataclass
class Log:
    """The content of logs: ``lines`` that follow the format, ``problems`` of the others, a text each, and ``newer``,
    those of the others that a newer program wrote, as they are."""

    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    newer: list[bytes] = field(default_factory=list)

    def trials(self) -> list[Trial]:
        return [line.record for line in self.lines if isinstance(line.record, Trial)]

    def extend(self, other: Log) -> None:
        self.lines += other.lines
        self.problems += other.problems
        self.newer += other.newer


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of a log. Raises :class:`RecordError` where another process has held it for ``LIMIT`` seconds."""
    lock = f"{path.resolve()}.lock"  # the same one, whatever link leads to the log
    with held(lock, LIMIT, f"writing to {path} fails") as alone:
        if not alone:
            raise RecordError(f"another process has held {lock} for {LIMIT:.0f} s; it may be suspended. "
                              f"Resume or end it, or write to another log than {path}")
        yield


def append(path: Path, *records: AnyRecord) -> None:
    """Appends records and returns once they are on the disk; several processes may append to one file. Raises
    :class:`RecordError` where the file cannot be written, is compressed or locked for long, or would exceed 64 MiB."""
    require_plain(path)
    data = b"".join(encode(record) for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # or say why not: a lock that cannot be made is waited for
        with _alone(path), path.open("ab+") as file:
            size = os.fstat(file.fileno()).st_size
            if size + len(data) + 1 > MAX_FILE:
                raise RecordError(f"{path} has reached {MAX_FILE >> 20} MiB; start another log")
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data  # a torn line, left by a crash, must not swallow this one
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(f"cannot append to the tuning log {path}: {error}") from error


def rewrite(path: Path, change: Callable[[Log], Sequence[AnyRecord]]) -> None:
    """Replaces the records of a log by those that ``change`` returns for it, completely or not at all; a missing file
    is an empty log. Lines that a newer program wrote stay; .gz and .xz are compressed; appends wait meanwhile. Raises
    :class:`RecordError` where the file cannot be read or written or would exceed 64 MiB."""
    real = path.resolve()  # of a link, what it points at
    new = real.with_name(f".{real.name[:200]}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.touch()  # or say why not: a lock that cannot be made is waited for
        with _alone(path):
            before = read(path) if path.exists() else Log()
            data = b"".join([*(encode(r) for r in change(before)), *(line + b"\n" for line in before.newer)])
            if len(data) > MAX_FILE:
                raise RecordError(f"{path} would have {len(data) >> 20} MiB; at most {MAX_FILE >> 20} are allowed")
            with new.open("wb") as file:
                file.write(packed(data, real))
                file.flush()
                os.fsync(file.fileno())
            if real.exists():
                shutil.copymode(real, new)
            new.replace(real)
    except OSError as error:
        raise RecordError(f"cannot write the tuning log {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def read(path: Path, hidden: int | None = None) -> Log:
    """Every line of a log, or those alone that may be of layers of this H, which takes a tenth of the time. A line that
    breaks the format is reported in ``problems`` and skipped. Numbers of lines are those of the text where the file is
    compressed. Raises :class:`RecordError` where the file cannot be read, or is or decompresses to more than 64 MiB."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise RecordError(f"cannot read the tuning log {path}: {error}") from error
    return decoded(data, path, hidden)


def decoded(data: bytes, path: Path, hidden: int | None = None) -> Log:
    """The log of a file's content; the name of ``path`` says how it is compressed. See :func:`read`."""
    text = unpacked(data, path, MAX_FILE)
    if len(text) > MAX_FILE:
        raise RecordError(f"{path} is larger than {MAX_FILE >> 20} MiB")
    return parse(text, path, hidden)


def parse(data: bytes, path: Path, hidden: int | None = None) -> Log:
    """The log of a text; problems name ``path``. See :func:`read`."""
    log = Log()
    size = re.compile(rb'"hidden"\s*:\s*(?!%d\b)\d' % hidden) if hidden is not None else None
    rows = data[3 * data.startswith(b"\xef\xbb\xbf{"):].split(b"\n")  # some editors mark UTF-8
    for number, row in enumerate(rows, 1):
        text = row.strip()
        if not text or (size is not None and size.search(text)):
            continue
        if not text.startswith(b"{"):  # most lines of what is no log, and soon told
            log.problems.append(f"{path}:{number}: no JSON object")
            continue
        try:
            log.lines.append(Line(path, number, decode(row)))
        except RecordError as error:
            if isinstance(error, NewerRecord):
                log.newer.append(row)
            problem = str(error)
            if number == len(rows) and row.startswith(b"{"):  # no newline: its writer may have been stopped
                try:
                    msgspec.json.decode(row)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    problem = TORN
            log.problems.append(f"{path}:{number}: {problem}")
    return log


def slug(device: Device) -> str:
    """The name of a device in names of files."""
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{device.name} {device.arch}").strip("-").lower()


def log_path(workload: Workload, device: Device) -> Path:
    """The user's log for a workload: one file for each workload and device."""
    size = f"h{workload.hidden}_i{workload.input}_b{workload.batch}_t{workload.seq}"
    parts = [workload.cell.replace("@", "-"), size, workload.dtype, workload.weights and f"w{workload.weights}",
             workload.precision, "backward" * workload.backward, slug(device)]
    return user_folder() / f"{'_'.join(filter(None, parts))}.jsonl"


@lru_cache(maxsize=4096)
def _read(path: Path, modified: int, size: int, hidden: int | None) -> Log:
    """The log at ``path`` when it was ``modified``, in ns: a session that tunes many workloads asks for it again."""
    return read(path, hidden)


def read_all(folders: list[Path] | None = None, hidden: int | None = None) -> Log:
    """The content of all logs, the user's first, as of :func:`read`; what cannot be read is among the problems."""
    log = Log()
    for folder in folders if folders is not None else [user_folder(), shipped_folder()]:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIXES))  # noqa: PTH208
        except FileNotFoundError:
            continue
        except OSError as error:
            log.problems.append(f"the folder of tuning logs {folder} cannot be read: {error.strerror}")
            continue
        for path in (folder / name for name in names):
            try:
                state = path.stat()
                if not stat.S_ISREG(state.st_mode):  # a pipe is waited for, as a link to a terminal is
                    raise RecordError(f"{path} is not a regular file")
                log.extend(_read(path, state.st_mtime_ns, state.st_size, hidden))
            except (OSError, RecordError) as error:
                log.problems.append(str(error))
    return log


def warn(log: Log) -> None:
    """Warns once of problems in a log. A last line that was cut off is no surprise."""
    strange = tuple(problem for problem in log.problems if not problem.endswith(TORN))
    if strange and strange not in _told:
        _told.add(strange)
        more = f", and {len(strange) - 1} more problems (see `ecornn doctor`)" if len(strange) > 1 else ""
        logging.getLogger("ecornn").warning("skipped a part of the tuning logs: %s%s", strange[0], more)


def digest_of(workload: Workload, device: Device, schedules: Sequence[AnySchedule], seed: int,
              only: Sequence[Choice] | None = None) -> str:
    """A digest that is equal for runs that search the same; ``only``: a list of choices that is tried instead."""
    revisions = sorted((s.name, s.revision) for s in schedules)
    known = (workload, device.identity, revisions, seed, *(only or ()))
    return hashlib.sha256(msgspec.json.encode(known)).hexdigest()[:12]


@dataclass
class Journal:
    """The records of one run. ``run``: the digest of what is searched, and the number of the run in the file."""

    path: Path
    run: str
    trials: list[Trial] = field(default_factory=list)
    finish: Finish | None = None

    @classmethod
    def open(cls, path: Path, digest: str, resume: bool) -> Journal:
        """The latest run of that digest; a new one without ``resume``, or where no candidate of it ran: a compiler may
        be there now. Raises :class:`~ecornn.errors.RecordError` where the file is compressed, unreadable, or no log."""
        require_plain(path)  # before anything is built
        log = read(path) if path.exists() else Log()
        strange = [problem for problem in log.problems if not problem.endswith(TORN)]
        if strange and not log.lines and not log.newer:
            raise RecordError(f"{path} is not a tuning log, so that nothing can be added to it: {strange[0]}. Move it "
                              "away, or name another file (--output)")
        records = [line.record for line in log.lines]
        runs = (r.run.removeprefix(digest + "-") for r in records
                if isinstance(r, Start) and r.run.startswith(digest + "-"))
        number = max((int(run) for run in runs if run.isdecimal()), default=0)
        failed = any(isinstance(r, Finish) and r.run == f"{digest}-{number}" and r.best is None for r in records)
        if not resume or not number or failed:
            number += 1
        journal = cls(path, f"{digest}-{number}")
        for record in records:
            if record.run == journal.run:
                journal.take(record)
        return journal

    def curve(self) -> list[tuple[int, float, float]]:
        """(number, µs a step, the best until then) of each trial that ran."""
        points, best = [], float("inf")
        for number, trial in enumerate(self.search, 1):
            if trial.times is not None:
                best = min(best, trial.times.median)
                points.append((number, trial.times.median, best))
        return points

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps others, who would disturb times, from the run; :class:`~ecornn.errors.RecordError` where one has it."""
        from filelock import FileLock, Timeout

        real = self.path.resolve()  # of a link, what it points at
        place = real.with_name(f".{real.name[:150]}.{self.run.rpartition('-')[0]}.lock")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()  # or say why not
            lock = FileLock(place, timeout=0)
            lock.acquire()
        except Timeout:
            raise RecordError(f"another process is tuning this layer and writes {self.path}; wait for it or stop "
                              "it") from None
        except OSError as error:
            raise RecordError(f"cannot write to the folder of the tuning log {self.path}: {error}; set "
                              "ECORNN_TUNING_LOGS to another folder") from error
        try:
            yield
        finally:
            place.unlink(missing_ok=True)
            lock.release()

    def take(self, record: AnyRecord) -> None:
        if isinstance(record, Trial):
            self.trials.append(record)
        elif isinstance(record, Finish):
            self.finish = record

    def add(self, record: AnyRecord) -> None:
        append(self.path, record)
        self.take(record)

    def has(self, line: Line) -> bool:
        """True for a record of this run. Another file may have a run of the same name: someone else's same search."""
        return line.record.run == self.run and line.path.resolve() == self.path.resolve()

    @property
    def search(self) -> list[Trial]:
        return [t for t in self.trials if t.stage == "search"]

    @property
    def seconds(self) -> float:
        """Wall time that the run has taken so far, over all its sessions."""
        return max((t.seconds for t in self.trials), default=0.0)

    def finished(self, trials: int, time_limit: float | None, early_stop: bool = False) -> bool:
        """True where nothing is left to do; part of the time is reserved for the comparison, which may need less."""
        if self.finish is None:
            return False
        reason = self.finish.reason
        return (reason == "space" or (reason == "converged" and early_stop) or self.finish.trials >= trials or (
            reason == "time" and time_limit is not None and self.finish.seconds >= (1 - RESERVED) * time_limit))


@dataclass(frozen=True)
class Gain:
    """How many times as fast as the untuned default the best of a run is."""

    ratio: float  # of both medians
    low: float  # at 95% confidence for each of them
    high: float
    settled: bool  # both were known to a few percent, so that the ratio may be said


def gain_of(run: Journal) -> Gain | None:
    """The gain of a finished run, by the last times of best and default; None where one has none, or both are one."""
    if run.finish is None or run.finish.best == run.finish.default:
        return None
    best, default = (next(((t.times, t.noisy) for t in reversed(run.trials) if t.times is not None
                           and t.choice == choice), None) for choice in (run.finish.best, run.finish.default))
    if best is None or default is None:
        return None
    (best_low, best_high), (low, high) = bounds(best[0].runs), bounds(default[0].runs)
    return Gain(default[0].median / best[0].median, low / best_high, high / best_low, not (best[1] or default[1]))


def microseconds(us: float) -> str:
    """``0.8366 µs``, ``35,600 µs``: at least four digits, and no exponent."""
    return f"{us:,.0f} µs" if us >= 1000 else f"{us:.4g} µs"


def words(gain: Gain, default_us: float) -> str:
    if gain.settled:
        return f"{gain.ratio:.2f} times as fast as the untuned default ({microseconds(default_us)})"
    said = f"{gain.low:.2f} to {gain.high:.2f} times as fast as the untuned default; the timings were noisy"
    return said if gain.low > 1 else f"{said}, so the default may be as fast"
