"""Compilers as processes: their messages, an end to those that hang, and several at the same time."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ecornn import temporary
from ecornn.errors import BuildError

ANSWER = 60.0  # seconds that a compiler has to say its version
LINES = 12  # of a message that are shown
WORK = 1200.0  # seconds for a file; the largest kernels take some

_thread = threading.local()  # `started`: those of the pools that the thread works for


def run(command: Sequence[str], seconds: float, folder: Path | None = None) -> tuple[int, str]:
    """Runs a command that reads nothing: exit status, and output, errors first. Raises :class:`BuildError` where it
    does not start or end within ``seconds``; then, as after any exception, its processes are ended, and what they leave
    lies in ``folder``."""
    environment, owners = None if folder is None else {**os.environ, "TMPDIR": str(folder)}, started()
    # no pipes, which stay open with any child
    with temporary.said(), tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder,
                                       env=environment)
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            for owner in owners:
                owner.add(process)
            status = _wait(process, seconds)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not end in {seconds:g} s and was stopped") from error
            raise
        finally:
            for owner in owners:
                owner.discard(process)
        said = b""
        for file in (errors, output):
            file.seek(0)
            said += file.read()
    return status, said.decode(errors="replace")


class Started:
    """The processes that the threads of a pool have started."""

    def __init__(self) -> None:
        self._lock, self._processes, self.ended = threading.Lock(), set[subprocess.Popen[bytes]](), False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Notes one that runs. Raises :class:`BuildError` once all have been ended."""
        with self._lock:
            self._processes.add(process)
        self.check()

    def check(self) -> None:
        if self.ended:
            raise BuildError("compiling was stopped")

    def discard(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.discard(process)

    def end(self) -> None:
        """Ends all processes, and those that they started; no more are started."""
        with self._lock:
            self.ended, running = True, [*self._processes]
        for process in running:
            _end(process)


def started() -> tuple[Started, ...]:
    """The processes of the pool that this thread works for, and of the pool of the thread that made that."""
    return getattr(_thread, "started", ())


def at_once() -> int:
    """Functions that are compiled at a time: one a core, a fourth of that in a process that others go before."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // 4) if os.nice(0) > 0 else cores


@contextlib.contextmanager
def at_the_same_time(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that compile; an exception, as Ctrl-C in the main thread, ends its compilers, begins none."""
    own, above = Started(), started()
    pool = ThreadPoolExecutor(threads, initializer=lambda: setattr(_thread, "started", (*above, own)))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        own.end()
        raise
    finally:
        pool.shutdown()


def first_lines(text: str) -> str:
    """The start of a compiler's message: what follows the first errors seldom helps."""
    lines = [line.rstrip("\0") for line in text.strip().splitlines()]
    more = [f"... {len(lines) - LINES} more lines"] * (len(lines) > LINES)
    return "\n".join([*lines[:LINES], *more])


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status as soon as there is one: Popen.wait with a timeout looks every 50 ms."""
    try:
        end = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # macOS; Linux before 5.3
        return process.wait(seconds)
    try:
        ended = select.poll()
        ended.register(end, select.POLLIN)
        if not ended.poll(1000 * seconds):
            raise subprocess.TimeoutExpired(process.args, seconds)
    finally:
        os.close(end)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
