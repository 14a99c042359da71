"""Temporary files, and files that appear whole. Where these cannot be used a typed error names ``TMPDIR``."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ecornn.errors import BuildError, EcornnError

PREFIX = "ecornn-"
ROOM = 16 << 20  # bytes for a file that a compiler makes, many times as many as one has
T = TypeVar("T")


@contextlib.contextmanager
def said(kind: type[EcornnError] = BuildError) -> Iterator[None]:
    """Makes an OSError of temporary files one of this kind."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise kind(f"a temporary file cannot be written: {error}{limited()}") from error
        raise kind(f"temporary files cannot be used: {error}; set TMPDIR to a folder where files can be written and "
                   "libraries loaded from") from error


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder. Raises :class:`BuildError` where there can be none, for an OSError within, and where a file
    of :data:`ROOM` bytes could not be written: LLVM would end the process."""
    with said(), tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        if shutil.disk_usage(name).free < ROOM:
            raise BuildError(f"{Path(name).parent} has less than {ROOM >> 20} MiB left: make room, or set TMPDIR")
        if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < ROOM:
            raise BuildError(f"a compiler may write {ROOM >> 20} MiB{limited()}")
        yield Path(name)


def limited() -> str:
    """The advice where a limit of file sizes may be why something failed; empty where there is none."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return f"; files of this process may have at most {most} bytes: raise that limit (ulimit -f)" if most >= 0 else ""


def lasting(make: Callable[[Path], T], kind: type[EcornnError] = BuildError) -> T:
    """The result of ``make``, called with a folder that lives as long as the result. Raises ``kind`` where there can be
    no such folder."""
    with said(kind):
        name = tempfile.mkdtemp(prefix=PREFIX)
        try:
            result = make(Path(name))
        except BaseException:
            shutil.rmtree(name, ignore_errors=True)
            raise
    weakref.finalize(result, shutil.rmtree, name, ignore_errors=True)
    return result


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path in the same folder, for a file that takes the place of ``path`` in one step, complete or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def noexec(path: Path) -> str:
    """The advice where no library can be loaded from the folder of a file; empty where that is allowed."""
    with contextlib.suppress(OSError):
        if os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
            return (f"; {path.parent} is on a file system that is mounted noexec: set TMPDIR to a folder from which "
                    "libraries may be loaded, or keep the module in one")
    return ""
