"""Compiling in the background: PyTorch's own layer computes a call until the module for it is there.

:func:`meanwhile` makes a call. Where that finds no module, a worker process of low priority compiles one, and
:class:`PendingError` ends the attempt before anything is computed: PyTorch's layer does it, forward and backward. The
first call once the module is there has the compiled layer. Where :func:`waits` says so a call waits for its module.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ecornn import module_cache, module_folders
from ecornn.build import cache
from ecornn.errors import ScheduleError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module
from ecornn.torch.compiling import keep, outcomes
from ecornn.worker import MARK, Worker, WorkerError

T = TypeVar("T")
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
VARIABLE = "ECORNN_WAIT"
OFF = "", "0"
LIMIT = 3600.0  # seconds of one compilation, which has only the time that others leave
IDLE = 20.0  # seconds without work after which a worker process ends
NICENESS = 10  # of worker processes: on a busy core they have a tenth of what a program has
MOST = 64  # kinds of calls that an engine notes as pending

_thread = threading.local()  # `accepts`: within meanwhile()
# held by a thread that imports and loads: a child that was forked meanwhile would wait for its import lock for ever
_loading = threading.Lock()
_told: list[str] = []


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
            asked = module_cache.Asked.of(self.spec, self.target)
            with _loading:
                self.outcome = module_folders.find(self.spec, self.target)
            if self.outcome is None:
                # a look at the cache takes a tenth of a second of Python's time, which the calls here would not have
                entry = worker.call("ecornn.module_cache:find_for_another", asked, str, LIMIT)
                if not entry:
                    _tell(self.spec)
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


def waits(module: Any) -> bool:
    """Tells whether a call of a layer waits until its module is compiled: PyTorch has no such layer, the user wants it
    so (``module.wait``, ``ECORNN_WAIT``, ``ECORNN_STRICT``, deterministic algorithms), a transform of torch.func has to
    see the operator, hooks of saved tensors may be those of a checkpoint, which computes the call again and expects
    the same tensors, or no cache can hand a module from one process to another."""
    if torch.compiler.is_compiling():  # also where a graph is broken around the call, and this function has its own
        return True
    set_to = os.environ.get
    return bool(
        module.TORCH is None or module.wait or torch.are_deterministic_algorithms_enabled() or _hooks(True) is not None
        or torch._C._functorch.maybe_current_level() is not None or set_to(cache.VARIABLE) == cache.OFF
        or set_to(VARIABLE, "0") not in OFF or set_to("ECORNN_STRICT", "0") not in OFF or set_to(MARK) is not None)


def meanwhile(engine: Any, kind: tuple[Any, ...], compiled: Callable[[], T], by_torch: Callable[[str], T]) -> T:
    """The results of ``compiled()``, or of PyTorch's layer where the module of that is pending.

    ``kind``: what the modules of a call depend on, so that later calls of this kind need not look for them. If there
    will be none, ``by_torch`` is given the reason once, of which it warns.
    """
    if kind in engine.refused:
        return by_torch("")
    job = engine.pending.get(kind)
    if job is not None and job.pending:
        return by_torch("")
    try:
        with _accepting():
            return compiled()
    except PendingError as pending:
        job, why = pending.job, ""
    except ScheduleError as error:
        job, why = None, f"no compiled layer serves this: {error}"
    if job is None and not why:
        return by_torch("a CUDA graph captures this call, and no module was compiled for it before; "
                        "ecornn.torch.prepare(model, *example) compiles ahead")
    if job is not None and job.error:
        why = f"{job.spec.workload} could not be compiled: {job.error}"
    if why:
        engine.refused.add(kind)
        return by_torch(why)
    if len(engine.pending) >= MOST:
        engine.pending.clear()
    engine.pending[kind] = job
    return by_torch("")


@contextlib.contextmanager
def _accepting() -> Iterator[None]:
    before, _thread.accepts = accepts(), True
    try:
        yield
    finally:
        _thread.accepts = before
