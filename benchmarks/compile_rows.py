"""Modules of many layers, compiled in processes of their own, ahead of what uses them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ecornn.device import Device

if TYPE_CHECKING:
    from ecornn.compiler import LayerPlan


class Planned(Protocol):
    """What can be compiled ahead: a row of the grid, or one of the modules of a comparison."""

    @property
    def file(self) -> str:
        """The name of the module's file."""

    def plan(self, device: Device) -> LayerPlan:
        """What is built for a device."""


Item = TypeVar("Item", bound=Planned)


def file_of(row: Planned, folder: Path) -> Path:
    """Where the module of a row lies."""
    return folder / row.file


def compile_row(row: Planned, device: Device, out: Path) -> float:
    """Compiles a row; seconds."""
    from ecornn.tune.quick_tvm import import_tvm

    import_tvm()
    from ecornn.compiler import build

    begin = time.perf_counter()
    build(row.plan(device), out)
    return time.perf_counter() - begin


def _end_at_once() -> None:
    """Ctrl-C ends a worker without a word."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


@contextmanager
def compiling(rows: Iterable[Item], device: Device, folder: Path, jobs: int | None) -> Iterator[dict[Item, Future]]:
    """Futures of `compile_row`, in the order of rows, ``jobs`` at a time; what is not begun at the end is dropped."""
    pool = ProcessPoolExecutor(jobs or max(1, len(os.sched_getaffinity(0)) - 1),
                               mp_context=multiprocessing.get_context("spawn"), initializer=_end_at_once)
    made: dict[Path, Future] = {}
    found = {}
    try:
        for row in rows:
            out = file_of(row, folder)
            if out not in made:
                made[out] = pool.submit(compile_row, row, device, out)
            found[row] = made[out]
        yield found
    finally:
        pool.shutdown(cancel_futures=True)


def as_ready(futures: dict[Item, Future]) -> Iterator[tuple[Item, Future]]:
    """Every row once, as soon as it is compiled; of several, the first."""
    left = dict(futures)
    while left:
        wait(left.values(), return_when=FIRST_COMPLETED)
        row = next(row for row, future in left.items() if future.done())
        yield row, left.pop(row)
