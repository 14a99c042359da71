"""Building and measuring candidates in the processes of a pool, several at a time."""

from __future__ import annotations

import itertools
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ecornn.schedules.base import Task
from ecornn.tune.building import Build
from ecornn.tune.measuring import Measure
from ecornn.tune.pool import Pool
from ecornn.tune.record import Outcome, Trial, tolerance
from ecornn.tune.space import Candidate
from ecornn.tune.timing import FEWEST
from ecornn.worker import WorkerError

COMPARED = 7  # samples of each finalist, at least
SPARE = 1.25  # candidates for each builder, so that none waits while the next are chosen
OFTEN = 1.0  # seconds between two looks at whether the pool is still open
PATIENCE = 5.0  # seconds that work under way may take once nobody waits for it
Module = tuple[Path, str]  # a module file, and the digest of its code


class ProcessEvaluator:
    """Evaluates the candidates of one task in the processes of a pool.

    Parameters
    ----------
    task, cell : the task, and its cell as a spec for ``load_cell``
    answer : writes the inputs and expected outputs (``proposing.answers``) to the path it is given; called
        in a thread, so that builds need not wait for it
    pool : the processes; they outlive the evaluator
    limit : seconds that a build, and a measurement, may take
    seed : of the timed inputs
    earlier : trials of this run that the log has; code that they ran is not measured again"""

    def __init__(self, task: Task, cell: str, answer: Callable[[Path], object], pool: Pool, *, limit: float,
                 seed: int, earlier: Sequence[Trial] = ()) -> None:
        self.task, self.cell, self.pool, self.limit, self.seed = task, cell, pool, limit, seed
        self.folder = tempfile.TemporaryDirectory(dir=pool.folder.name, ignore_cleanup_errors=True)
        self.answers = Path(self.folder.name, "answers.npz")
        self.oracle = ThreadPoolExecutor(1, thread_name_prefix="oracle")
        self.answered = self.oracle.submit(answer, self.answers)
        self.pending = 0  # candidates that were submitted and whose outcome was not yet asked for
        # With no more than this many pending, processes may soon have nothing to do.
        self.spare = 0 if pool.quiet else math.ceil(SPARE * len(pool.builders))
        self.bound: float | None = None
        self.modules: dict[Candidate, Module] = {}
        self.numbers = itertools.count()
        self.known = {t.source: Outcome.of(t) for t in earlier if t.source}  # by the digest of the code
        self.lock = threading.Lock()
        self.builds: set[Future[Module]] = set()  # under way
        self.measures: set[Future[None]] = set()
        self.built: list[tuple[Candidate, Future[Module]]] = []  # waiting until nothing is built
        self.done: queue.SimpleQueue[tuple[Candidate, Outcome | BaseException]] = queue.SimpleQueue()
        self.answered.add_done_callback(lambda _: self.release())

    def __enter__(self) -> ProcessEvaluator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Gives up what is pending, and removes the modules."""
        if kind is KeyboardInterrupt:  # not even for what a process does before a candidate is built
            self.pool.close()
        self.drop()
        self.oracle.shutdown(cancel_futures=True)
        self.folder.cleanup()

    def drop(self) -> None:
        """Forgets the pending candidates. What is under way ends soon, or its processes do; only builds that disturb no
        measurement go on, for the cache."""
        with self.lock:
            builds, measures = self.builds, self.measures
            self.builds, self.measures, self.built = set(), set(), []
        running: list[Future[Any]] = [future for future in measures if not future.cancel()]
        running += [future for future in builds if not future.cancel() and self.pool.quiet]
        while wait(running, PATIENCE).not_done:  # again for what waited until now for a process
            self.pool.kill(self, builders=self.pool.quiet)
        self.done, self.pending = queue.SimpleQueue(), 0

    @property
    def idle(self) -> int:
        """The number of processes that have nothing to build now; 0 where builds would disturb measurements."""
        return 0 if self.pool.quiet else self.pool.idle_builders.qsize()

    def submit(self, batch: Sequence[Candidate], bound: float | None) -> None:
        """Starts to build and measure candidates; where builds disturb measurements the batch is built first.
        Candidates that are slower than ``bound``, the best so far in µs per step, need no exact time."""
        self.bound = bound if self.bound is None else min(self.bound, bound or self.bound)
        self.pending += len(batch)
        with self.lock:
            futures = [(c, self.pool.building.submit(self.build, c)) for c in batch]
            self.builds.update(future for _, future in futures)
        for candidate, future in futures:
            future.add_done_callback(partial(self.pass_on, candidate))

    def pass_on(self, candidate: Candidate, future: Future[Module]) -> None:
        """Called when a build is done, or was given up."""
        with self.lock:
            if future not in self.builds:
                return
            self.builds.remove(future)
            self.built.append((candidate, future))
        self.release()

    def release(self) -> None:
        """Submits built modules for measuring, once there are answers to compare theirs with. Until then the measuring
        processes are free for other workloads."""
        with self.lock:
            if self.pool.closed or not self.answered.done() or (self.pool.quiet and self.builds):
                return
            built, self.built = self.built, []
            self.measures.update(self.pool.measuring.submit(self.finish, *one) for one in built)

    def finish(self, candidate: Candidate, future: Future[Module]) -> None:
        """Measures a module; whatever goes wrong is for :meth:`next` to say."""
        try:
            outcome = self.outcome(future)
            if outcome.times is not None:
                self.bound = min(self.bound or outcome.times.median, outcome.times.median)
            self.done.put((candidate, outcome))
        except BaseException as error:
            self.done.put((candidate, error))

    def next(self, seconds: float | None = None) -> tuple[Candidate, Outcome]:
        """Waits for the next candidate that is done; one must be pending. Raises ``TimeoutError`` where that takes
        longer than ``seconds``, and :class:`~ecornn.tune.pool.Closed` where the pool was closed meanwhile."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            try:
                candidate, outcome = self.done.get(timeout=min(OFTEN, max(end - time.monotonic(), 0)))
                break
            except queue.Empty:
                self.pool.must_be_open()  # or nothing will ever be done
                if time.monotonic() >= end:
                    raise TimeoutError(f"no candidate was done within {seconds:g} s") from None
        self.pending -= 1
        if isinstance(outcome, BaseException):
            raise outcome
        return candidate, outcome

    def build(self, candidate: Candidate) -> Module:
        """The module file of a candidate. Raises :class:`WorkerError` where it cannot be built in time."""
        if candidate not in self.modules:
            path = Path(self.folder.name, f"{next(self.numbers)}.so")
            request = Build(self.cell, self.task.workload, self.task.device, candidate.schedule, candidate.config,
                            str(path))
            with self.pool.one_of(self.pool.idle_builders, self) as worker:
                source = worker.call(self.pool.entries.build, request, str, self.limit)
            self.modules[candidate] = path, source
        return self.modules[candidate]

    def outcome(self, future: Future[Module]) -> Outcome:
        """Measures a finished build, unless the same code was measured before."""
        try:
            path, source = future.result()
        except WorkerError as error:
            self.pool.must_be_open()
            return Outcome(error=f"build: {error}"[:2000])
        if source not in self.known:
            self.known[source] = self.alone(path, source, self.bound, FEWEST)
        return self.known[source]

    def alone(self, path: Path, source: str, bound: float | None, fewest: int) -> Outcome:
        """Measures one module."""
        try:
            (one,) = self.measure([path], bound, fewest)
            return replace(one, source=source)
        except WorkerError as error:
            self.pool.must_be_open()
            return Outcome(source=source, error=f"run: {error}"[:2000])

    def measure(self, paths: Sequence[Path], bound: float | None, fewest: int,
                seconds: float | None = None) -> list[Outcome]:
        """Checks and times modules in a measuring process."""
        self.answered.result()
        work, limit = self.task.workload, self.limit * len(paths)
        request = Measure(tuple(map(str, paths)), str(self.answers), tolerance(work), work.seq, self.seed, bound,
                          fewest, limit, seconds)
        return self.pool.measure(request, list[Outcome], limit, self)

    def compare(self, finalists: Sequence[Candidate], seconds: float | None = None) -> list[Outcome]:
        """Measures the finalists taking turns; where one of them fails then, each alone. [] where nothing can be said
        of any. Times are taken for about ``seconds`` at most."""
        try:
            # Those of an earlier session are built again; the others must not wait for builds that go on.
            list(self.pool.building.map(self.build, [c for c in finalists if c not in self.modules]))
        except WorkerError:
            self.pool.must_be_open()
            return []
        built = [self.modules[c] for c in finalists]
        try:
            measured = self.measure([path for path, _ in built], None, COMPARED, seconds)
        except WorkerError:
            self.pool.must_be_open()
            alone = [self.alone(*one, None, COMPARED) for one in built]
            return alone if any(one.times for one in alone) else []
        return [replace(one, source=source) for (_, source), one in zip(built, measured, strict=True)]
