"""A process that measures rows one after the other, started anew where one hangs or breaks the GPU for it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grid import Row

STARTING = 60.0  # seconds, at most
Answer = tuple[dict, bool]  # what there is to say, and whether the process can go on


@dataclass(frozen=True)
class Limits:
    """Of one row."""

    repeats: int
    seconds: float  # of timing
    longest: float  # seconds of all


class MeasuringProcess:
    """`measure` asks the process; `environment` says where it runs."""

    def __init__(self, limits: Limits, serve: Callable[[Connection, Limits], None] | None = None) -> None:
        self.limits, self._serve = limits, serve or serve_gpu
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=self._serve, args=(other, self.limits), daemon=True)
        self._process.start()
        other.close()
        self._begun: dict | None = None

    def environment(self) -> dict:
        """Waits until the process has a GPU; raises RuntimeError where it gets none."""
        if self._begun is None:
            self._begun, good = self._answer(STARTING)
            if not good:
                raise RuntimeError(self._begun["failed"])
        return self._begun

    @property
    def gpu(self) -> str:
        """The product's name."""
        return str(self.environment()["gpu"])

    def measure(self, *asked: Any) -> dict:
        """The times of what is asked for, such as a row and its file, or ``failed``."""
        self.environment()
        self._pipe.send(asked)
        found, good = self._answer(self.limits.longest)
        if not good:
            self.close()
            self._start()
        return found

    def _answer(self, longest: float) -> Answer:
        try:
            if self._pipe.poll(longest):
                return self._pipe.recv()
            return {"failed": f"nothing after {longest:.0f} s"}, False
        except (EOFError, OSError):
            self._process.join(1)
            return {"failed": f"the process ended with {self._process.exitcode}"}, False

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def compare_row(row: Row, file: Path, limits: Limits) -> dict:
    """A row of the grid against cuDNN."""
    from side_by_side import compare

    import ecornn

    return compare(row.cell, (row.T, row.B, row.I, row.H), row.kind, ecornn.load(file),
                   tf32=row.dtype.startswith("tf32"), repeats=limits.repeats, seconds=limits.seconds)


def serve_gpu(pipe: Connection, limits: Limits, one: Callable[..., dict] = compare_row) -> None:
    """Answers with ``one(*asked, limits)`` until the other end is closed."""
    try:
        import torch
        from side_by_side import environment

        found = environment()
    except Exception as error:
        pipe.send(({"failed": f"{type(error).__name__}: {error}"}, False))
        return
    pipe.send((found, True))
    try:
        while True:
            asked = pipe.recv()
            torch.manual_seed(0)
            try:
                found = one(*asked, limits)
            except Exception as error:  # whatever a row does, the others are measured
                found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            pipe.send((found, _works(torch)))
    except (EOFError, KeyboardInterrupt):
        return


def _works(torch) -> bool:
    """Whether the GPU still runs what this process asks of it; after an invalid access it does not."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
