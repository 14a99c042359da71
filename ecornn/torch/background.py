"""Compiling in the background: worker processes of low priority, and what they compile.

Where a call that :func:`accepts` that finds no module, :class:`PendingError` ends it before anything is computed, and
one is compiled for later calls.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator

from ecornn import module_cache
from ecornn.build import cache
from ecornn.errors import EcornnError, ScheduleError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module
from ecornn.torch.compiling import keep, outcomes
from ecornn.worker import Worker, WorkerError

LIMIT = 3600.0  # seconds of one compilation, which has only the time that others leave
IDLE = 20.0  # seconds without work after which a worker process ends
NICENESS = 10  # of worker processes: on a busy core they have a tenth of what a program has

_thread = threading.local()  # `accepts`: within accepting()
# held by a thread that imports and loads: a child that was forked meanwhile would wait for its import lock for ever
_loading = threading.Lock()
_told: list[str] = []
_ready: list[threading.Thread] = []


class PendingError(Exception):
    """The module for a call is not there: PyTorch's own layer has to compute it. ``job`` compiles the module; None:
    nobody does."""

    def __init__(self, job: Job | None) -> None:
        super().__init__("no module yet")
        self.job = job


class Job:
    """A layer that is compiled for calls to come.

    Attributes
    ----------
    outcome : the module, or the error that no schedule serves the layer
    error : the reason that neither could be found
    """

    def __init__(self, spec: LayerSpec, target: str, outcome: Module | ScheduleError | None = None) -> None:
        self.spec, self.target, self.outcome, self.error = spec, target, outcome, ""
        self._done, self._process = threading.Event(), os.getpid()
        if outcome is not None:
            self._done.set()

    @property
    def pending(self) -> bool:
        """True while somebody works for it. In a forked child nobody does what its parent has begun."""
        return not self._done.is_set() and self._process == os.getpid()

    def run(self, worker: Worker) -> None:
        """Compiles the layer in a worker process, and loads it here. Raises nothing: ``error`` says what went wrong."""
        try:
            with _loading:
                self.outcome = module_cache.found(self.spec, self.target)
            if self.outcome is None:
                _tell(self.spec)
                asked = module_cache.Asked.of(self.spec, self.target)
                entry = worker.call("ecornn.module_cache:compile_for_another", asked, str, LIMIT)
                with _loading:
                    self.outcome = module_cache.from_entry(entry)
            if self.outcome is None:
                self.error = f"nothing can be kept in {cache.folder()}, see ECORNN_CACHE"
        except WorkerError as error:
            kind, _, said = str(error).partition(": ")
            if kind == ScheduleError.__name__:
                self.outcome = ScheduleError(said)
            else:
                self.error = str(error)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        if self.outcome is not None:
            keep(self.spec, self.target, False, self.outcome)
        self._done.set()

    def wait(self, limit: float | None = None) -> bool:
        """Waits until it has ended, for ``limit`` seconds at most; tells whether it has."""
        return self._done.wait(limit)

    def module(self) -> Module:
        """The module.

        Raises :class:`ScheduleError` where no schedule serves the layer, :class:`PendingError` if there is none yet.
        """
        if self.outcome is None:
            raise PendingError(self)
        if isinstance(self.outcome, ScheduleError):
            raise self.outcome.with_traceback(None)
        return self.outcome


def _tell(spec: LayerSpec) -> None:
    """Says once in a process that it compiles, and what can be done about that."""
    if not _told:
        _told.append("said")
        logging.getLogger("ecornn").warning(
            "PyTorch's own layers run while theirs are compiled in the background, from %s on; "
            "ecornn.torch.prepare(model, *example) compiles ahead", spec.workload)


class Compilers:
    """Worker processes that compile layers, each for one thread of this process.

    ``processes``: their number; ``niceness``: how far they stand behind other programs. They are started when there is
    work, and end when there has been none for :data:`IDLE` seconds, or with this process.
    """

    def __init__(self, processes: int, niceness: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._workers = [Worker("ecornn.module_cache:ready", gpu=True, start_limit=LIMIT, niceness=niceness)
                         for _ in range(processes)]
        for number, worker in enumerate(self._workers):
            threading.Thread(target=self._serve, args=(worker,), name=f"ecornn-compiles-{number}", daemon=True).start()

    def submit(self, spec: LayerSpec, target: str) -> Job:
        """Has a layer compiled."""
        job = Job(spec, target)
        self._jobs.put(job)
        return job

    def _serve(self, worker: Worker) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)
            except queue.Empty:
                worker.kill()
                job = self._jobs.get()
            if job is None:
                return
            job.run(worker)

    def stop(self) -> None:
        """Ends all processes, also while they compile."""
        for worker in self._workers:
            self._jobs.put(None)
            worker.stop()

    def forget(self) -> None:
        """Lets go of the processes in a forked child, to which they do not belong."""
        for worker in self._workers:
            worker.disown()


def get_ready() -> None:
    """Does in a thread, once in a process, what the first call would otherwise take longer for."""
    def ready() -> None:
        with _loading, contextlib.suppress(ImportError, EcornnError):  # which the first call raises
            module_cache.get_ready()

    if not _ready:
        _ready.append(threading.Thread(target=ready, name="ecornn-gets-ready", daemon=True))
        _ready[0].start()


# -- those of this process ----------------------------------------------------------------------
_compilers: Compilers | None = None
_jobs: dict[tuple[LayerSpec, str], Job] = {}
_lock = threading.Lock()


def start(spec: LayerSpec, target: str) -> Job:
    """The job that compiles a layer, one for all modules of this process; it has ended if the layer is compiled."""
    global _compilers
    with _lock:
        if (known := outcomes.get((spec, target, False))) is not None:
            return Job(spec, target, known)
        job = _jobs.get((spec, target))
        if job is not None and (job.pending or job.error):
            return job
        if _compilers is None:
            _compilers = Compilers(max(1, min(4, len(os.sched_getaffinity(0)) // 4)), NICENESS)
        for key in [key for key, one in _jobs.items() if one.outcome is not None]:
            del _jobs[key]
        job = _jobs[spec, target] = _compilers.submit(spec, target)
        return job


def _forked() -> None:
    global _compilers, _lock
    _loading.release()
    if _compilers is not None:
        _compilers.forget()
    _compilers, _lock = None, threading.Lock()


@atexit.register
def _stop() -> None:
    if _compilers is not None:
        _compilers.stop()


os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_forked)


# -- calls --------------------------------------------------------------------------------------
def accepts() -> bool:
    """Tells whether the call that this thread makes has PyTorch's layer to go on with."""
    return getattr(_thread, "accepts", False)


@contextlib.contextmanager
def accepting() -> Iterator[None]:
    """Has the calls within the context accept that their module is not there, by :class:`PendingError`."""
    before, _thread.accepts = accepts(), True
    try:
        yield
    finally:
        _thread.accepts = before
