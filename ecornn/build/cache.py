"""A cache on disk of the results of compilers, each entry by a hash of everything that it was made from.

``ECORNN_CACHE`` names its folder (default: the platform's), or is ``off``. An entry is a file, renamed when whole, that
begins with the hash of its content: what was cut off or changed is made again. Above ``CAP`` bytes the oldest go.
Entries are cubins, object files of host code, modules built while tuning, and those of ``module_cache.py``."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ecornn import temporary
from ecornn.build.commands import started
from ecornn.file_locks import held

VARIABLE = "ECORNN_CACHE"
OFF = "off"
CAP = 2 << 30  # bytes of all entries
ROOM = 0.8  # of CAP that is left full
EVERY = 64 << 20  # bytes that a process writes between two looks at the whole
DIGEST = 32  # bytes before an entry's content
LIMIT = 300.0  # seconds to wait for a process that makes the same entry: it may be stopped, and it may be made twice

_unchecked = EVERY  # bytes written since this process last looked


def folder() -> Path | None:
    """The folder of the entries; None: there is no cache."""
    chosen = os.environ.get(VARIABLE)
    if chosen == OFF:
        return None
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("ecornn", appauthor=False)) / "build"


def entry(kind: str, parts: Iterable[str | bytes], make: Callable[[], bytes]) -> bytes:
    """The result of ``make``, kept by ``parts``: every text that it depends on, versions of compilers, too. Processes
    that want the same entry wait for its maker, as long as :data:`LIMIT`; ``make`` may use entries of another ``kind``.
    A folder that cannot be written is no error: there is no cache then."""
    root = folder()
    if root is None:
        return make()
    name = _name(kind, parts)
    path = root / name[:2] / name

    def made() -> bool:
        for owner in started():
            owner.check()
        return read(path) is not None

    content = read(path)
    if content is None:
        with _alone(root, f"{kind}-{name[:3]}", made):
            content = read(path)
            if content is None:
                content = make()
                _write(root, path, content)
    return content


def keep(kind: str, parts: Iterable[str | bytes], content: bytes) -> None:
    """Keeps ``content`` as an entry, in place of what was kept by these parts."""
    root, name = folder(), _name(kind, parts)
    if root is not None and read(path := root / name[:2] / name) != content:
        _write(root, path, content)


def file_of(kind: str, parts: Iterable[str | bytes]) -> Path | None:
    """The file of an entry, for another process, which reads it by :func:`read`; None where there is none."""
    root, name = folder(), _name(kind, parts)
    path = root / name[:2] / name if root is not None else None
    return path if path is not None and path.is_file() else None


def _name(kind: str, parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read(path: Path) -> bytes | None:
    """The content of an entry's file; None where it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[DIGEST:]
    return content if hashlib.sha256(content).digest() == data[:DIGEST] else None


def _write(root: Path, path: Path, content: bytes) -> None:
    global _unchecked
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.replacing(path) as beside:
            beside.write_bytes(hashlib.sha256(content).digest() + content)
        _unchecked += len(content)
        if _unchecked >= EVERY:
            _unchecked = 0
            evict(root, CAP)


@contextlib.contextmanager
def _alone(root: Path, lock_name: str, made: Callable[[], bool]) -> Iterator[None]:
    """Keeps others from making the same entry until it is ``made``, or :data:`LIMIT` seconds: then several make it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nothing can be kept there
            (root / "locks").mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(root / "locks" / lock_name, LIMIT, "this process then compiles the same code "
                                     "itself", made))
        yield


def entries(root: Path) -> list[tuple[float, int, Path]]:
    """Time, size and path of every entry."""
    every = []
    for path in root.glob("??/*"):
        with contextlib.suppress(OSError):  # another process evicts too
            status = path.stat()
            every.append((status.st_mtime, status.st_size, path))
    return every


def evict(root: Path, cap: int) -> None:
    """Removes the oldest entries where all of them are larger than ``cap`` bytes."""
    every = sorted(entries(root))
    total = sum(size for _, size, _ in every)
    limit = cap if total <= cap else ROOM * cap
    for _, size, path in every:
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
