"""What a candidate costs: builds in a pool of processes, measures in one that can be killed."""

from __future__ import annotations

import itertools
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ecornn.schedules.base import Task
from ecornn.tune.building import Build, Built
from ecornn.tune.measuring import Measure, Measured
from ecornn.tune.oracle import tolerance
from ecornn.tune.process import Worker, WorkerError
from ecornn.tune.record import Times
from ecornn.tune.space import Candidate
from ecornn.tune.timing import FEWEST

COMPARED = 7  # samples of each finalist, at least


@dataclass(frozen=True)
class Outcome:
    """What came of one candidate: ``times``, or the ``error`` that it failed with."""

    times: Times | None = None
    check: float | None = None
    source: str = ""
    error: str | None = None


class Evaluator(Protocol):
    """What the tuner needs to know of builds and measurements."""

    def evaluate(self, batch: Sequence[Candidate],
                 bound: float | None) -> Iterator[tuple[Candidate, Outcome]]:
        """Builds and measures each, in the order in which they are done. ``bound``: the best so
        far, µs per step; slower candidates need no exact time."""

    def compare(self, finalists: Sequence[Candidate]) -> list[Outcome]:
        """Measures the finalists taking turns; [] where that fails."""


@dataclass(frozen=True)
class Entries:
    """The functions that workers call, as "module:function"."""

    build_ready: str = "ecornn.tune.building:ready"
    build: str = "ecornn.tune.building:build"
    measure_ready: str = "ecornn.tune.measuring:ready"
    measure: str = "ecornn.tune.measuring:measure"


class ProcessEvaluator:
    """Evaluates in worker processes.

    Parameters
    ----------
    task, cell : what is tuned; ``cell`` is a spec for ``load_cell``
    answer : writes the inputs and expected outputs (``oracle.write``) to the path it is given
    builders : number of build processes
    limit : seconds that a build, and a measurement, may take
    seed : of the timed inputs
    """

    def __init__(self, task: Task, cell: str, answer: Callable[[Path], None], *, builders: int,
                 limit: float, seed: int, entries: Entries = Entries()) -> None:
        self.task, self.cell, self.limit, self.seed, self.entries = task, cell, limit, seed, entries
        self.folder = tempfile.TemporaryDirectory(prefix="ecornn-tune-")
        self.answers = Path(self.folder.name, "answers.npz")
        answer(self.answers)
        self.measurer = Worker(entries.measure_ready, gpu=True)
        self.workers = [Worker(entries.build_ready, gpu=False) for _ in range(builders)]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(builders, thread_name_prefix="build")
        self.modules: dict[Candidate, tuple[Path, Built]] = {}
        self.numbers = itertools.count()
        self.known: dict[str, Outcome] = {}  # digest of the code -> what it cost

    def __enter__(self) -> ProcessEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops every process, at once, and removes the modules."""
        for worker in (*self.workers, self.measurer):
            worker.stop()
        self.threads.shutdown(cancel_futures=True)
        self.folder.cleanup()

    def build(self, candidate: Candidate) -> tuple[Path, Built]:
        """The candidate's module file; :class:`WorkerError` where it cannot be built in time."""
        if candidate not in self.modules:
            path = Path(self.folder.name, f"{next(self.numbers)}.so")
            request = Build(self.cell, self.task.workload, self.task.device, candidate.schedule,
                            candidate.config, str(path))
            worker = self.idle.get()
            try:
                built = worker.call(self.entries.build, request, Built, self.limit)
            finally:
                self.idle.put(worker)
            self.modules[candidate] = path, built
        return self.modules[candidate]

    def evaluate(self, batch: Sequence[Candidate],
                 bound: float | None) -> Iterator[tuple[Candidate, Outcome]]:
        """See :class:`Evaluator`. On a CPU nothing is built while something is measured."""
        futures: dict[Future[tuple[Path, Built]], Candidate] = {
            self.threads.submit(self.build, c): c for c in batch}
        done: Iterator[Future[tuple[Path, Built]]] = as_completed(futures)
        if self.task.device.kind == "llvm":
            done = iter(list(done))
        for future in done:
            outcome = self.outcome(future, bound)
            if outcome.times is not None:
                bound = min(bound or outcome.times.median, outcome.times.median)
            yield futures[future], outcome

    def outcome(self, future: Future[tuple[Path, Built]], bound: float | None) -> Outcome:
        """Measures a finished build, unless the same code was measured before."""
        try:
            path, built = future.result()
        except WorkerError as error:
            return Outcome(error=f"build: {error}"[:2000])
        if built.digest not in self.known:
            try:
                (one,) = self.measure([path], bound)
                self.known[built.digest] = Outcome(Times.of(list(one.times)), one.check, built.digest)
            except WorkerError as error:
                self.known[built.digest] = Outcome(source=built.digest, error=f"run: {error}"[:2000])
        return self.known[built.digest]

    def measure(self, paths: Sequence[Path], bound: float | None,
                fewest: int = FEWEST) -> list[Measured]:
        """Checks and times modules in the measuring process."""
        work = self.task.workload
        request = Measure(tuple(map(str, paths)), str(self.answers), tolerance(work),
                          work.seq, self.seed, bound, fewest)
        try:
            return self.measurer.call(self.entries.measure, request, list[Measured],
                                      self.limit * len(paths))
        except WorkerError as error:
            if not error.lost and self.task.device.kind == "cuda":
                self.measurer.kill()  # an illegal access poisons the process's CUDA context
            raise

    def compare(self, finalists: Sequence[Candidate]) -> list[Outcome]:
        """See :class:`Evaluator`."""
        try:
            built = list(self.threads.map(self.build, finalists))
            measured = self.measure([path for path, _ in built], None, COMPARED)
        except WorkerError:
            return []
        return [Outcome(Times.of(list(one.times)), one.check, b.digest)
                for (_, b), one in zip(built, measured, strict=True)]
