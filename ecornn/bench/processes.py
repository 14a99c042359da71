"""Layers of a grid in processes of their own: some compile ahead, one measures and is replaced where it hangs or breaks
the GPU for itself."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from ecornn.bench.case import Case
from ecornn.bench.grid import Layer
from ecornn.bench.measure import Plan, failed, measure
from ecornn.bench.own import Own
from ecornn.bench.results import Row, append
from ecornn.bench.row_log import RowLog
from ecornn.bench.shown import shown
from ecornn.errors import EcornnError
from ecornn.worker import Worker, WorkerError

HERE = __name__
COMPILING = 600.0  # seconds of the modules of a layer, at most


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A layer, and how it is measured; modules are in ``folder``."""

    case: Case
    own: dict[str, Own]
    against: tuple[str, ...] | None
    seconds: float
    seed: int
    calls: int
    folder: str


def ready(_: None) -> bool:
    """Imports what takes long, before a process is asked for anything: that is no layer's time."""
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    return True


def compile_ahead(asked: Asked) -> int:
    """Builds a layer's modules; how many there are. What cannot be built the process that measures says."""
    made = 0
    for name, own in {"ecornn": Own(), **asked.own}.items():
        with contextlib.suppress(EcornnError):
            own.build(own.case(asked.case), Path(asked.folder) / f"{name}.so")
            made += 1
    return made


def measure_alone(asked: Asked) -> Row:
    """A layer's row, in this process."""
    return measure(asked.case, Plan(asked.against, asked.seconds, asked.seed, own=asked.own, calls=asked.calls,
                                    folder=Path(asked.folder)))


def compiled(layers: Sequence[Layer], plan: Plan, folder: Path, jobs: int) -> Iterator[tuple[Layer, Asked]]:
    """The layers in their order, each as soon as its modules are in its folder; ``jobs`` are compiled at a time."""
    every = [_asked(layer, plan, folder) for layer in layers]
    builders = [Worker(f"{HERE}:ready", gpu=True) for _ in range(jobs)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for builder in builders:
        idle.put(builder)

    def build(asked: Asked) -> None:
        worker = idle.get()
        try:
            with contextlib.suppress(WorkerError):  # the process that measures tries again, and says why
                worker.call(f"{HERE}:compile_ahead", asked, int, COMPILING)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(build, asked) for asked in every]
        for layer, asked, future in zip(layers, every, futures, strict=True):
            future.result()
            yield layer, asked
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in builders:
            worker.stop()


def measured(layers: Sequence[Layer], plan: Plan, folder: Path, jobs: int, longest: float) -> Iterator[Row]:
    """Rows in the order of the layers, ``jobs`` of which are compiled at a time; each may take ``longest`` seconds."""
    alone = Worker(f"{HERE}:ready", gpu=True)
    try:
        for layer, asked in compiled(layers, plan, folder, jobs):
            try:
                yield alone.call(f"{HERE}:measure_alone", asked, Row, longest)
            except WorkerError as error:
                alone.kill()  # after an error of the GPU nothing runs in its process any more
                yield failed(layer.case, plan, str(error))
    finally:
        alone.stop()


def measure_into(log: RowLog, layers: Sequence[Layer], plan: Plan, folder: Path, jobs: int, longest: float,
                 more: Callable[[Layer, Row], Mapping[str, Any]] = lambda layer, row: {}) -> bool:
    """Appends the rows that a file lacks, with what ``more`` says of each, and prints them; whether all of them were
    measured, and right."""
    left, good = [layer for layer in layers if not log.has(layer.name)], True
    for layer, row in zip(left, measured(left, plan, folder, jobs, longest), strict=True):
        row.name, row.group = layer.name, layer.group
        append(log, row, {} if row.failed else more(layer, row))
        good &= row.good
        print("\n".join(shown(row)), flush=True)
    return good


def _asked(layer: Layer, plan: Plan, folder: Path) -> Asked:
    own = folder / hashlib.sha256(layer.name.encode()).hexdigest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    return Asked(case=layer.case, own=layer.own, against=plan.against if layer.against is None else layer.against,
                 seconds=plan.seconds, seed=plan.seed, calls=plan.calls, folder=str(own))
