"""A tuning log: a file of JSON lines that is only ever appended to, or such a file compressed (compressed.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ecornn.errors import RecordError
from ecornn.file_locks import held
from ecornn.tune.compressed import is_compressed, packed, unpacked
from ecornn.tune.record import AnyRecord, NewerRecord, Trial, decode, encode

MAX_FILE = 64 << 20  # bytes
LIMIT = 60.0  # seconds to wait for a process that writes
TORN = "torn last line"
BRACE = ord("{")


@dataclass(frozen=True)
class Line:
    """A record and where it stands."""

    path: Path
    number: int
    record: AnyRecord

    @property
    def full_place(self) -> str:
        """``file:line`` with the file's folder."""
        return f"{self.path}:{self.number}"

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.path.name}:{self.number}"


@dataclass
class Log:
    """What was read: lines that follow the format, what is wrong with the others, and those of the others that a newer
    program wrote, as they are."""

    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    newer: list[bytes] = field(default_factory=list)

    def trials(self) -> list[Trial]:
        """The trials, in order."""
        return [line.record for line in self.lines if isinstance(line.record, Trial)]

    def extend(self, other: Log) -> None:
        """Takes over the lines and problems of another file."""
        self.lines += other.lines
        self.problems += other.problems
        self.newer += other.newer


def lock_of(path: Path) -> str:
    """The file whose lock a writer holds; one for a log, whatever link leads to it."""
    return f"{path.resolve()}.lock"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While this process writes to a log. Raises :class:`RecordError` where another one does for too long."""
    with held(lock_of(path), LIMIT, f"nothing is written to {path}") as alone:
        if not alone:
            raise RecordError(f"another process has held {lock_of(path)} for {LIMIT:.0f} s, and may be stopped: have "
                              f"it go on, or end it, or name another log than {path}")
        yield


def append(path: Path, record: AnyRecord) -> None:
    """Appends one record; as :func:`append_all`."""
    append_all(path, [record])


def append_all(path: Path, records: Sequence[AnyRecord]) -> None:
    """Appends records and returns once they are on the disk.

    Several processes may append to one file. Raises :class:`RecordError` where the file cannot
    be written or would exceed 64 MiB, where it is compressed, and where another process does not end writing.
    """
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
    """Makes a log hold what ``change`` makes of what it holds, in one step: complete or not at all.

    Appends of other processes wait meanwhile. A file that does not exist is an empty log; lines that a newer program
    wrote (``newer`` of what ``change`` was given) stay. Raises :class:`RecordError` where the file cannot be read or
    written or would exceed 64 MiB. A name that ends with .gz or .xz is a compressed file's.
    """
    real = path.resolve()  # of a link, what it points at
    made = real.with_name(f".{real.name[:200]}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.touch()  # or say why not: a lock that cannot be made is waited for
        with _alone(path):
            there = read(path) if path.exists() else Log()
            data = b"".join([*(encode(r) for r in change(there)), *(line + b"\n" for line in there.newer)])
            if len(data) > MAX_FILE:
                raise RecordError(f"{path} would have {len(data) >> 20} MiB; at most {MAX_FILE >> 20} are allowed")
            with made.open("wb") as file:
                file.write(packed(data, real))
                file.flush()
                os.fsync(file.fileno())
            if real.exists():
                shutil.copymode(real, made)
            made.replace(real)
    except OSError as error:
        raise RecordError(f"cannot write the tuning log {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)


def read(path: Path) -> Log:
    """Every line of a log. A line that breaks the format is reported in ``problems`` and skipped.

    Numbers of lines are those of the text where the file is compressed. Raises :class:`RecordError` where the file
    cannot be read, or is or decompresses to more than 64 MiB.
    """
    try:
        with path.open("rb") as file:
            data = unpacked(file.read(MAX_FILE + 1), path, MAX_FILE)
    except OSError as error:
        raise RecordError(f"cannot read the tuning log {path}: {error}") from error
    if len(data) > MAX_FILE:
        raise RecordError(f"{path} is larger than {MAX_FILE >> 20} MiB")
    return parse(data, path)


def cut_off(row: bytes) -> bool:
    """Whether a line without a newline is the beginning of one: its writer was stopped."""
    try:
        msgspec.json.decode(row)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return row.startswith(b"{")
    return False


def parse(data: bytes, path: Path) -> Log:
    """As :func:`read`, from bytes; ``path`` is what problems name."""
    log = Log()
    rows = data[3 * data.startswith(b"\xef\xbb\xbf{"):].split(b"\n")  # some editors mark UTF-8
    for number, row in enumerate(rows, 1):
        text = row.strip()
        if not text:
            continue
        if text[0] != BRACE:  # most lines of what is no log, and soon told
            log.problems.append(f"{path}:{number}: no JSON object")
            continue
        try:
            log.lines.append(Line(path, number, decode(row)))
        except RecordError as error:
            if isinstance(error, NewerRecord):
                log.newer.append(row)
            torn = number == len(rows) and cut_off(row)
            log.problems.append(f"{path}:{number}: " + (TORN if torn else str(error)))
    return log
