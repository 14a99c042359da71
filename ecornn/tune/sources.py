"""Sources of logs, a file, a folder, an HTTPS address or a Git repository; and a branch of one, for one's own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

from ecornn.errors import ArgumentError, RecordError
from ecornn.temporary import PREFIX
from ecornn.tune.log import Log, decoded, read_all
from ecornn.tune.record import CONTROL

FOLDER = "tuning_logs"  # where a repository has its logs
WAIT = 30.0  # seconds without an answer, at most
LOOK = 0.5  # seconds between two looks at the size of a clone
PART = 4 << 20  # bytes between two words on a download
ADDRESS = re.compile(r"https://[^/\s]+/(?:[^?#\s]*/)?([^/?#\s]+\.jsonl(?:\.gz|\.xz)?)(?:[?#]\S*)?")
REPOSITORY = re.compile(r"(?:https|ssh|file)://\S+|[\w.-]+@[\w.-]+:\S+")
SOURCES = ("a log (.jsonl, .jsonl.xz, .jsonl.gz) or a folder of logs that exists, the https:// address of a log, or a "
           "Git repository (https://, ssh://, file:// or user@host:path)")


def fetched(source: str, most: int, sha256: str | None, told: Callable[[str], None]) -> Log:
    """The lines of a source, all of them there and whole. ``most``: bytes that it may have; ``sha256``: the digest of
    the file that it is, to be checked; ``told`` is called with what goes on. Raises :class:`ArgumentError` where it is
    none of ``SOURCES``, and :class:`RecordError` where it cannot be had, is larger or another file, or has a line that
    breaks the format; lines of a newer ecornn do not."""
    path, address = Path(source), ADDRESS.fullmatch(source)
    one = path.is_file() or address is not None
    if sha256 is not None and not (one and re.fullmatch("[0-9A-Fa-f]{64}", sha256)):
        raise ArgumentError("--sha256", sha256, "64 hexadecimal digits, of a SOURCE that is one file")
    if one:
        if address is not None:
            data = downloaded(source, most, told)
        else:
            with path.open("rb") as file:
                data = file.read(most + 1)
        if len(data) > most:
            raise too_large(source, most)
        if sha256 is not None and (digest := hashlib.sha256(data).hexdigest()) != sha256.lower():
            raise RecordError(f"SOURCE={source!r} has the SHA-256 {digest}, not --sha256={sha256}: it is another file "
                              "than the one that was named, so nothing is taken from it")
        log = decoded(data, path if address is None else Path(address[1]))
    elif path.is_dir():
        log = read_all([path, path / FOLDER])
    elif REPOSITORY.fullmatch(source):
        with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
            place = Path(name, "clone")
            clone(source, place, most, told)
            log = read_all([place, place / FOLDER])
    else:
        raise ArgumentError("SOURCE", source, SOURCES)
    if len(log.problems) > len(log.newer):
        raise RecordError(f"SOURCE={source!r} has {len(log.problems) - len(log.newer)} damaged lines, and nothing is "
                          f"taken: {'; '.join(log.problems[:3])}. `ecornn log import` takes the others of a file")
    if not log.lines:
        raise RecordError(f"SOURCE={source!r} has no records that this ecornn reads: they lie in files *.jsonl, "
                          f"*.jsonl.xz or *.jsonl.gz, of a folder in itself or in its {FOLDER}/")
    return log


def too_large(source: str, most: int) -> RecordError:
    return RecordError(f"SOURCE={source!r} has more than {most >> 20} MiB; --max-size allows more")


def downloaded(url: str, most: int, told: Callable[[str], None]) -> bytes:
    """The content of an https address, whole, or cut off behind ``most`` bytes. Python checks certificates; nothing
    leads away from https. Raises :class:`RecordError` where it cannot be had."""
    from urllib import error as errors
    from urllib import request

    opener = request.OpenerDirector()  # which has no handler of http, so that no redirect can lead there
    for handler in (request.ProxyHandler, request.HTTPSHandler, request.HTTPRedirectHandler, request.UnknownHandler,
                    request.HTTPErrorProcessor, request.HTTPDefaultErrorHandler):
        opener.add_handler(handler())
    data = bytearray()
    try:
        with opener.open(url, timeout=WAIT) as answer:
            size = int(answer.headers.get("Content-Length", -1))
            while len(data) <= most and (part := answer.read(PART)):
                data += part
                told(f"downloading, {len(data) >> 20} MiB so far")
        if len(data) <= most and size not in (-1, len(data)):
            raise OSError(f"it ended after {len(data)} of {size} bytes")
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, errors.HTTPError):
            error.close()  # it has the connection
        raise RecordError(f"cannot download SOURCE={url!r}: {error}; try again later, or download it yourself and name "
                          "the file") from error
    return bytes(data)


def git(wish: str, *arguments: str, text: str | None = None, look: Callable[[], None] = lambda: None) -> None:
    """Runs git to its end, with that text as input; ``look`` is called now and then. Raises :class:`RecordError` where
    it fails: that this ``wish`` cannot be, and why."""
    environment = os.environ | {"GIT_ALLOW_PROTOCOL": "file:https:ssh"}  # none of which others can listen to or change
    try:
        process = subprocess.Popen(["git", *arguments], stdin=subprocess.PIPE if text is not None else None, text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace", env=environment)
    except FileNotFoundError as error:
        raise RecordError(f"cannot {wish}: git is not installed; install it, or name a folder") from error
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, words = process.communicate(text, timeout=LOOK)
                    break
                text = None  # it has been handed over
                look()
        except BaseException:
            process.terminate()  # git removes what it has begun, and ends its own processes
            raise
    if process.returncode:
        said = CONTROL.sub(" ", words).strip() or f"exit code {process.returncode}"
        raise RecordError(f"cannot {wish}; git says: {said[-1000:]}")


def clone(url: str, place: Path, most: int, told: Callable[[str], None]) -> None:
    """Clones the latest commit of a repository, where links become files with their text. Raises :class:`RecordError`
    where git cannot, or the clone gets larger than ``most`` bytes."""
    def look() -> None:
        size = 0
        for folder, _, names in os.walk(place):
            for name in names:
                with contextlib.suppress(OSError):  # git moves files
                    size += Path(folder, name).lstat().st_size
        told(f"cloning, {size >> 20} MiB so far")
        if size > most:
            raise too_large(url, most)

    git(f"clone SOURCE={url!r}", "clone", "--quiet", "--depth=1", "--no-tags", "--config=core.symlinks=false", "--",
        url, str(place), look=look)
    look()


@contextlib.contextmanager
def on_branch(repository: Path, branch: str) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Gives a copy of the present commit of a Git repository, and a function that commits what is new in the copy's
    ``FOLDER``, with that message, as a new branch. What the repository has checked out stays as it is. Raises
    :class:`RecordError` where git refuses: there is no repository, or there is such a branch."""
    wish = f"make --branch={branch!r} in FOLDER={str(repository)!r}"
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        copy = Path(name, "copy")

        def commit(message: str) -> None:
            git(wish, "-C", str(copy), "add", "--", FOLDER)
            git(wish, "-C", str(copy), "commit", "--quiet", "--file=-", text=message)
            git(wish, "-C", str(copy), "branch", "--", branch)

        git(wish, "-C", str(repository), "worktree", "add", "--detach", str(copy))
        try:
            yield copy, commit
        finally:
            git(wish, "-C", str(repository), "worktree", "remove", "--force", str(copy))
