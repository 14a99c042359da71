"""A tuning log: a file of JSON lines that is only ever appended to, or such a file compressed; and folders of them.

Compressed files, ``.jsonl.xz`` (as those that ship) and ``.jsonl.gz``, are read wherever a log is, and written whole by
`ecornn log`; nothing is appended to them, so a search has a plain one.
"""

from __future__ import annotations

import contextlib
import gzip
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
from ecornn.tune.record import AnyRecord, NewerRecord, Trial, decode, encode
from ecornn.tuning_logs import SUFFIXES, shipped_folder, user_folder
from ecornn.workload import Workload

MEMORY = 128 << 20  # bytes that a decoder may ask for: twice what the best compression of xz needs
MAX_FILE = 64 << 20  # bytes
LIMIT = 60.0  # seconds to wait for a process that writes
TORN = "torn last line"
R = TypeVar("R", bound=AnyRecord, covariant=True)
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
    """Tells the lines of trials from those that say when a run started and ended."""
    return isinstance(line.record, Trial)


def is_compressed(path: Path) -> bool:
    """Tells compressed logs by the end of their names."""
    return path.suffix in (".gz", ".xz")


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
        """The trials, in order."""
        return [line.record for line in self.lines if isinstance(line.record, Trial)]

    def extend(self, other: Log) -> None:
        """Adds the content of another log."""
        self.lines += other.lines
        self.problems += other.problems
        self.newer += other.newer


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of a log. Raises :class:`RecordError` where another process has held it for ``LIMIT`` seconds."""
    lock = f"{path.resolve()}.lock"  # the same one, whatever link leads to the log
    with held(lock, LIMIT, f"nothing is written to {path}") as alone:
        if not alone:
            raise RecordError(f"another process has held {lock} for {LIMIT:.0f} s, and may be stopped: have "
                              f"it go on, or end it, or name another log than {path}")
        yield


def append(path: Path, *records: AnyRecord) -> None:
    """Appends records and returns once they are on the disk. Several processes may append to one file. Raises
    :class:`RecordError` where the file cannot be written or would exceed 64 MiB, where it is compressed, and where
    another process does not end writing."""
    if is_compressed(path):
        raise RecordError(f"{path} is compressed, so that nothing is appended to it; name a .jsonl")
    data = b"".join(encode(record) for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # or say why not: a lock that cannot be made is waited for
        with _alone(path):
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(file).st_size
                if size + len(data) + 1 > MAX_FILE:
                    raise RecordError(f"{path} has reached {MAX_FILE >> 20} MiB; start another log")
                if size and os.pread(file, 1, size - 1) != b"\n":
                    data = b"\n" + data  # a torn line, left by a crash, must not swallow this one
                while data:
                    data = data[os.write(file, data):]
                os.fsync(file)
            finally:
                os.close(file)
    except OSError as error:
        raise RecordError(f"cannot append to the tuning log {path}: {error}") from error


def rewrite(path: Path, change: Callable[[Log], Sequence[AnyRecord]]) -> None:
    """Replaces the records of a log by those that ``change`` returns for it, in one step: complete or not at all.
    Appends of other processes wait meanwhile. A file that does not exist is an empty log; lines that a newer program
    wrote (``newer`` of what ``change`` was given) stay. A file whose name ends with .gz or .xz is compressed. Raises
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
            data = unpacked(file.read(MAX_FILE + 1), path, MAX_FILE)
    except OSError as error:
        raise RecordError(f"cannot read the tuning log {path}: {error}") from error
    if len(data) > MAX_FILE:
        raise RecordError(f"{path} is larger than {MAX_FILE >> 20} MiB")
    return parse(data, path, hidden)


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


def log_path(workload: Workload, device: Device) -> Path:
    """The user's log for a workload: one file for each workload and device."""
    device_name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device.name} {device.arch}").strip("-").lower()
    cell, weights = workload.cell.replace("@", "-"), f"_w{workload.weights}" if workload.weights else ""
    precision = f"_{workload.precision}" if workload.precision else ""
    entry = "_backward" if workload.backward else ""
    return user_folder() / (f"{cell}_h{workload.hidden}_i{workload.input}_b{workload.batch}"
                            f"_t{workload.seq}_{workload.dtype}{weights}{precision}{entry}_{device_name}.jsonl")


@lru_cache(maxsize=4096)
def _read(path: Path, modified: int, size: int, hidden: int | None) -> Log:
    """The log at ``path`` when it was ``modified``, in ns: a session that tunes many workloads asks for it again."""
    return read(path, hidden)


def read_all(folders: list[Path] | None = None, hidden: int | None = None) -> Log:
    """The content of all logs, the user's first, as :func:`read` gives it. Files that cannot be read are among the
    problems."""
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
                    raise RecordError(f"{path} is no regular file")
                log.extend(_read(path, state.st_mtime_ns, state.st_size, hidden))
            except (OSError, RecordError) as error:
                log.problems.append(str(error))
    return log


def warn(log: Log) -> None:
    """Warns once of problems in a log. A last line that was cut off is no surprise."""
    strange = tuple(problem for problem in log.problems if not problem.endswith(TORN))
    if strange and strange not in _told:
        _told.add(strange)
        more = f", and {len(strange) - 1} more, which `ecornn doctor` lists" if len(strange) > 1 else ""
        logging.getLogger("ecornn").warning("tuning logs: %s%s", strange[0], more)
