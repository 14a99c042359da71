"""The processes of a tuning run that build and measure, which a candidate may take down; a task's candidates in them.

They start in the background as soon as there is a pool, and stay warm from one workload to the next."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock
from msgspec.structs import replace

from ecornn import temporary
from ecornn.errors import EcornnError, ServerError
from ecornn.schedules.base import Task
from ecornn.tune.building import Build
from ecornn.tune.record import Outcome, Trial, tolerance
from ecornn.tune.space import Candidate
from ecornn.tune.timing import FEWEST, Measure
from ecornn.worker import Worker, WorkerError

T = TypeVar("T")
LOSSES, REST, ABSENCE = 3, 2.0, 90.0  # of servers; seconds
BUILDERS = 16  # for each process that measures, at most; each holds TVM's compiler in memory, 400 MB
PREFIX, LOCK = "ecornn-tune-", "lock"  # of the folder of a run's temporary files
YOUNG = 60.0  # seconds since that folder last got a file: its owner may be about to take the lock
SINGLE = {"OMP_NUM_THREADS": "1"}  # BLAS starts a thread for each processor otherwise, in each of these processes
COMPARED = 7  # samples of each finalist, at least
SPARE = 1.25  # candidates for each builder, so that none waits while the next are chosen
OFTEN = 1.0  # seconds between two looks at whether the pool is still open
PATIENCE = 5.0  # seconds that work under way may take once nobody waits for it
Module = tuple[Path, str]  # a module file, and the digest of its code


class Closed(EcornnError):
    """The pool was closed while a run went on in another thread."""


@dataclass(frozen=True)
class Entries:
    """The functions that workers call, as "module:function"."""

    build_ready: str = "ecornn.tune.building:ready"
    build: str = "ecornn.tune.building:build"
    measure_ready: str = "ecornn.tune.timing:ready"
    measure: str = "ecornn.tune.timing:measure"
    propose_ready: str = "ecornn.tune.proposing:ready"


class Pool:
    """Worker processes with the threads that wait for them: ``builders`` (default: one a processor, at most 16 for each
    measurer), ``measurers``, several only where they measure elsewhere, and ``proposers`` for searches. ``local``:
    measurers run modules on this machine; ``quiet``: a build would disturb a measurement, as on a CPU; ``grace``:
    seconds that a measurement elsewhere may take beside its limit; ``poisoned``: one that fails leaves its process
    unusable, as on a GPU; ``environment``: more variables for the measurers."""

    def __init__(self, entries: Entries = Entries(), builders: int | None = None, measurers: int = 1,
                 proposers: int = 0, *, local: bool = True, quiet: bool = False, grace: float = 0.0,
                 poisoned: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self.entries, self.local, self.quiet = entries, local, quiet
        self.grace, self.poisoned = grace, poisoned
        self.absent: float | None = None  # since when none of the servers was free, if nothing was heard of any since
        self.closed = False
        self.at_work: dict[Worker, object] = {}  # and for whom
        self.lock = threading.Lock()
        self.folder = Scratch()  # whatever a process that is killed leaves behind is in here
        count, here = builders or min(BUILDERS * measurers, len(os.sched_getaffinity(0))), {"TMPDIR": self.folder.name}
        self.measurers, self.idle_measurers = idle_workers(measurers, entries.measure_ready, True,
                                                           {**here, **(environment or {})})
        self.builders, self.idle_builders = idle_workers(count, entries.build_ready, False, {**here, **SINGLE})
        self.proposers, self.idle_proposers = idle_workers(proposers, entries.propose_ready, False, {**here, **SINGLE})
        self.building = ThreadPoolExecutor(count, thread_name_prefix="build")
        self.measuring = ThreadPoolExecutor(measurers, thread_name_prefix="measure")
        self.workers = [*self.proposers, *self.builders, *self.measurers]
        for worker in self.workers:
            threading.Thread(target=self.warm, args=(worker,), daemon=True).start()

    @staticmethod
    def warm(worker: Worker) -> None:
        """Has a worker import what it needs, before its first call; that call reports what fails."""
        with contextlib.suppress(WorkerError):
            worker.wake()

    @contextlib.contextmanager
    def one_of(self, idle: queue.SimpleQueue[Worker], owner: object = None) -> Iterator[Worker]:
        """An idle worker, for as long as the context lasts; ``owner``: whom it works for, see :meth:`kill`."""
        worker = idle.get()
        try:
            with self.using(worker, owner):
                yield worker
        finally:
            idle.put(worker)

    @contextlib.contextmanager
    def using(self, worker: Worker, owner: object) -> Iterator[None]:
        with self.lock:
            self.at_work[worker] = owner
        try:
            yield
        finally:
            with self.lock:
                del self.at_work[worker]

    def measure(self, request: Any, kind: type[T], limit: float, owner: object = None) -> T:
        """Calls ``entries.measure`` in an idle measurer. A lost server costs another try, up to ``LOSSES``. Raises
        :class:`WorkerError` as ``Worker.call``, and :class:`ServerError` after ``ABSENCE`` seconds without a server."""
        losses = 0
        while True:
            worker, rest = self.idle_measurers.get(), 0.0
            try:
                with self.using(worker, owner):
                    measured = worker.call(self.entries.measure, request, kind, limit + self.grace)
                self.absent = None
                return measured
            except WorkerError as error:
                reason = str(error)
                if not reason.startswith("NoServer: "):
                    self.absent = None  # there was a server, whatever came of it
                if self.local or not (error.lost or reason.startswith(("NoServer: ", "LostServer: "))):
                    if not error.lost and self.poisoned:
                        worker.kill()  # an illegal access poisons the process's CUDA context
                    raise
                if reason.startswith("NoServer: "):
                    rest, now = REST, time.monotonic()
                    self.absent = since = self.absent or now
                    if now - since > ABSENCE:
                        raise ServerError(f"{reason.removeprefix('NoServer: ')}, for {ABSENCE:g} s; once there is one, "
                                          "the same command continues") from None
                else:
                    losses += 1
                    if losses == LOSSES:
                        raise WorkerError(f"the server was lost {LOSSES} times: {reason}", lost=False) from None
            finally:
                if rest:
                    timer = threading.Timer(rest, self.idle_measurers.put, [worker])
                    timer.daemon = True
                    timer.start()
                else:
                    self.idle_measurers.put(worker)

    def kill(self, owner: object, builders: bool) -> None:
        """Kills the processes that measure for ``owner``, and that build; the next call of each starts it again."""
        with self.lock:  # none of them begins something else meanwhile
            for worker in self.workers if builders else self.measurers:
                if self.at_work.get(worker) is owner:
                    worker.kill()

    def must_be_open(self) -> None:
        """Raises :class:`Closed` after :meth:`close`: what failed then says nothing of a candidate."""
        if self.closed:
            raise Closed("the worker processes were stopped")

    def close(self) -> None:
        """Stops every process, at once and for good, and removes their temporary files."""
        self.closed = True
        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(Worker.stop, self.workers))
        for executor in (self.building, self.measuring):
            executor.shutdown(cancel_futures=True)
        self.folder.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def idle_workers(count: int, ready: str, gpu: bool,
                 environment: Mapping[str, str] | None = None) -> tuple[list[Worker], queue.SimpleQueue[Worker]]:
    made, idle = [Worker(ready, gpu, environment) for _ in range(count)], queue.SimpleQueue[Worker]()
    for worker in made:
        idle.put(worker)
    return made, idle


class Scratch:
    """The temporary folder of a run, with a lock that its owner's death gives back: a later run removes it then."""

    def __init__(self) -> None:
        with temporary.said():
            self.sweep()
            self.folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.name = self.folder.name
        self.lock = FileLock(Path(self.name, LOCK), thread_local=False)  # whichever thread closes the pool
        with contextlib.suppress(OSError):  # without a lock nobody sweeps it
            self.lock.acquire(timeout=0)

    def cleanup(self) -> None:
        self.lock.release()
        self.folder.cleanup()

    @staticmethod
    def sweep() -> None:
        """Removes the folders of runs that were killed."""
        for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
            # OSError: of a run that lives (filelock's Timeout), another user's, or removed by another process.
            with contextlib.suppress(OSError):
                if (folder / LOCK).is_file() and time.time() - folder.stat().st_mtime > YOUNG:
                    with FileLock(folder / LOCK, timeout=0):
                        shutil.rmtree(folder, ignore_errors=True)


class ProcessEvaluator:
    """Evaluates the candidates of one task in the processes of a pool. ``cell``: a spec for ``received``; ``answer``
    writes the oracle's answers to a path, in a thread; ``limit``: seconds that a build, and a measurement, may take;
    ``seed``: of the timed inputs; ``earlier``: trials of this run, whose code is not measured again."""

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
        """Forgets the pending candidates. What is under way ends soon, but for builds that disturb no measurement."""
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
        """Starts to build and measure; what is slower than ``bound`` (µs per step) needs no exact time."""
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
        """Submits built modules for measuring, once there are answers; until then the processes are free for others."""
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
                    raise TimeoutError(f"no candidate finished within {seconds:g} s") from None
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
        """Measures the finalists taking turns, for about ``seconds``; if one fails then, each alone; [] if all do."""
        try:
            # Earlier sessions' candidates are built again; the others must not wait for builds that go on.
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
