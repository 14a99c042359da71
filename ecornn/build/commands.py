"""Compilers as processes: their messages, and an end to those that hang."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ecornn import temporary
from ecornn.errors import BuildError

ANSWER = 60.0  # seconds that a compiler has to say its version
LINES = 12  # of a message that are shown
WORK = 1200.0  # seconds for a file; the largest kernels take some


def run(command: Sequence[str], seconds: float, folder: Path | None = None) -> tuple[int, str]:
    """Runs a command that reads nothing: the exit status, and its output, errors first.

    Raises :class:`BuildError` where it cannot be started or does not end within ``seconds``. It is ended then, with the
    processes that it started, as after any exception.
    """
    # no pipes, which stay open with any child
    with temporary.said(), tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder)
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            status = _wait(process, seconds)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not end in {seconds:g} s and was stopped") from error
            raise
        said = b""
        for file in (errors, output):
            file.seek(0)
            said += file.read()
    return status, said.decode(errors="replace")


def first_lines(text: str) -> str:
    """The start of a compiler's message: what follows the first errors seldom helps."""
    lines = [line.rstrip("\0") for line in text.strip().splitlines()]
    rest = len(lines) - LINES
    return "\n".join([*lines[:LINES], f"... {rest} more lines"] if rest > 0 else lines)


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
