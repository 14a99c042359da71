"""The worker processes of a tuning run: builders, and measurers that a candidate may take down.

They start in the background as soon as there is a pool, and stay warm from one workload to the next.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from ecornn import temporary
from ecornn.errors import EcornnError, ServerError
from ecornn.worker import Worker, WorkerError

T = TypeVar("T")
LOSSES, REST, ABSENCE = 3, 2.0, 90.0  # of servers; seconds
BUILDERS = 16  # for each process that measures, at most; each holds TVM's compiler in memory, 400 MB
PREFIX, LOCK = "ecornn-tune-", "lock"  # of the folder of a run's temporary files
YOUNG = 60.0  # seconds since that folder last got a file: its owner may be about to take the lock
SINGLE = {"OMP_NUM_THREADS": "1"}  # BLAS starts a thread for each processor otherwise, in each of these processes


class Closed(EcornnError):
    """The pool was closed while a run went on in another thread."""


@dataclass(frozen=True)
class Entries:
    """The functions that workers call, as "module:function"."""

    build_ready: str = "ecornn.tune.building:ready"
    build: str = "ecornn.tune.building:build"
    measure_ready: str = "ecornn.tune.measuring:ready"
    measure: str = "ecornn.tune.measuring:measure"
    propose_ready: str = "ecornn.tune.proposing:ready"


class Pool:
    """Workers with the threads that wait for them.

    Parameters
    ----------
    entries : what the workers call
    builders : number of build processes; default: one for each processor, at most 16 for each measuring process
    measurers : number of measuring processes; more than one only where they measure elsewhere
    proposers : number of processes for searches, where several go on at a time; others are for this process
    local : whether the measuring processes run modules on this machine
    quiet : whether a build would disturb a measurement, as on a CPU
    grace : seconds that a measurement elsewhere may take beside its limit
    poisoned : whether a measurement that fails leaves its process unusable, as on a GPU
    environment : variables that the measuring processes see besides this process's own"""

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
        for worker in self.workers:
            threading.Thread(target=self.warm, args=(worker,), daemon=True).start()

    @property
    def workers(self) -> list[Worker]:
        """All worker processes."""
        return [*self.proposers, *self.builders, *self.measurers]

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
    def proposer(self) -> Iterator[Worker | None]:
        """A process for a search, for as long as the context lasts; None where none is idle."""
        worker = None
        with contextlib.suppress(queue.Empty):
            worker = self.idle_proposers.get_nowait()
        try:
            yield worker
        finally:
            if worker is not None:
                self.idle_proposers.put(worker)

    @contextlib.contextmanager
    def using(self, worker: Worker, owner: object) -> Iterator[None]:
        """Notes that ``worker`` works for ``owner``."""
        with self.lock:
            self.at_work[worker] = owner
        try:
            yield
        finally:
            with self.lock:
                del self.at_work[worker]

    def measure(self, request: Any, kind: type[T], limit: float, owner: object = None) -> T:
        """Calls ``entries.measure`` in an idle measuring process, decoded as ``kind``. A server elsewhere that goes
        away costs another try, up to ``LOSSES`` of them; while none is free, those that are measure the rest. Raises
        :class:`WorkerError` as ``Worker.call``, and :class:`ServerError` where there was no server for ``ABSENCE``
        seconds."""
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
                        raise ServerError(f"{reason.removeprefix('NoServer: ')}, for {ABSENCE:g} s; the same command "
                                          "goes on once there is one") from None
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
    """So many workers, and a queue that has all of them."""
    made, idle = [Worker(ready, gpu, environment) for _ in range(count)], queue.SimpleQueue[Worker]()
    for worker in made:
        idle.put(worker)
    return made, idle


class Scratch:
    """The temporary folder of a run. The operating system gives its lock back when the owner dies, so that a later run
    removes the folder of one that was killed."""

    def __init__(self) -> None:
        with temporary.said():
            self.sweep()
            self.folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.name = self.folder.name
        self.lock = FileLock(Path(self.name, LOCK), thread_local=False)  # whichever thread closes the pool
        with contextlib.suppress(OSError):  # without a lock nobody sweeps it
            self.lock.acquire(timeout=0)

    def cleanup(self) -> None:
        """Removes the folder with what is in it."""
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
