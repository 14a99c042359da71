"""Compiling layers for all torch modules of a process: at the first call of their kind, or in the background.

Where a call that :func:`accepts` that finds no module, :class:`PendingError` ends it before anything is computed, and a
worker process of low priority compiles one for later calls.

float32 products on a GPU may be in TF32 where cuDNN's RNNs may, unless a layer says more. If PyTorch's settings differ,
the one nearest to an RNN wins, as with cuDNN: ``torch.backends.cudnn.rnn.fp32_precision``,
``torch.backends.cudnn.fp32_precision``, ``torch.backends.fp32_precision``; ``cudnn.allow_tf32`` sets the first."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from ecornn import module_cache
from ecornn.build import cache
from ecornn.dtypes import DTYPES, SERVED
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module
from ecornn.torch.kind import Kind
from ecornn.worker import IDLE, NICEST, Worker, WorkerError
from ecornn.workload import FEW, KEEPS

NAMES = {getattr(torch, name): name for name in DTYPES}
# as fp32_precision of torch.backends, which takes ten times as long; of PyTorch 2.9 and later
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
# A training step keeps these, by kind of device, at any T, which graphs leave open. PyTorch keeps about as much.
KEPT = {"cpu": "gates", "cuda": "gates"}
MOST = 256  # layers whose outcomes a process keeps


def checked_keep(keep: str | None) -> str | None:
    """``keep`` itself. Raises :class:`ArgumentError` for anything but None, ``states`` and ``gates``."""
    if keep not in (None, *KEEPS):
        raise ArgumentError("keep", keep, f"None, {' or '.join(KEEPS)}")
    return keep


def serves(place: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether layers of that data type are compiled for that kind of device."""
    return NAMES.get(dtype) in SERVED.get("llvm" if place.type == "cpu" else place.type, ())


# of a process: the layer, the kind of device, and whether it is right for infinite weights -> its module, or the error
# that no schedule serves it, which is as sure, and takes as long to find
outcomes: dict[tuple[LayerSpec, str, bool], Module | ScheduleError] = {}


def keep(layer: LayerSpec, target: str, infinite: bool, outcome: Module | ScheduleError) -> None:
    """Notes an outcome for all torch modules of the process, in place of the oldest if there are many."""
    while len(outcomes) >= MOST:
        outcomes.pop(next(iter(outcomes)), None)
    outcomes[layer, target, infinite] = outcome


def compiled(layer: LayerSpec, target: str, infinite: bool = False) -> Module:
    """The module of a layer; ``infinite``: right for such weights, too. Raises :class:`ScheduleError` without one."""
    known = outcomes.get((layer, target, infinite))
    if known is None:
        try:
            known = module_cache.compiled_layer(layer, target, {"pairs": 0, "project_pairs": 0} if infinite else None)
        except ScheduleError as error:
            known = error
        finally:
            # TVM leaves frames in cycles, and these hold all that called them: the graph of this training step, whose
            # streams would be those of a later step that a CUDA graph captures
            gc.collect()
        keep(layer, target, infinite, known)
    if isinstance(known, ScheduleError):
        raise known.with_traceback(None)
    return known


# -- the module for a call ----------------------------------------------------------------------
def few_steps(steps: int) -> int:
    """The T of a layer on a GPU for few ``steps``: 1, 2, 4 or 8, so that similar lengths share it; 0: for many."""
    return 1 << (steps - 1).bit_length() if steps <= FEW else 0


def about(steps: int) -> int:
    """The T, a power of 2 near the first call's ``steps``, of a layer for all calls, which other programs find."""
    return 1 << round(math.log2(steps)) if steps <= FEW else max(2 * FEW, 1 << round(math.log2(steps)))


def precision_of(kind: Kind, x: Any) -> str | None:
    """``tf32`` if products of a layer of this kind on x may be in TF32 by the settings of this moment, else None."""
    if x.is_cpu or x.dtype != torch.float32:
        return None
    return "tf32" if (allows_tf32("rnn") if kind.tf32 is None else kind.tf32) else None


def allows_tf32(kind: str) -> bool:
    """Tells whether float32 products on a GPU may be in TF32 by PyTorch's settings: cuDNN's of its ``rnn``, or those of
    a ``matmul``."""
    if _precision is not None:
        return bool(_precision("cuda", kind) == "tf32")
    # PyTorch before 2.9 has one setting for all of cuDNN
    return bool(torch.backends.cudnn.allow_tf32 if kind == "rnn" else torch.backends.cuda.matmul.allow_tf32)


# -- in the background --------------------------------------------------------------------------
LIMIT = 3600.0  # seconds of one compilation, which has only the time that others leave
REST = 20.0  # seconds without work after which a worker process ends
PAUSE = 0.2  # seconds until work in the background begins: it would share Python's global lock with a first call
NICENESS = IDLE  # of worker processes: with 19 programs on two busy cores take up to 1.3 times as long meanwhile
PATIENCE = 60.0  # seconds that a job may take so; where others leave nothing, its worker starts again with niceness 19

_thread = threading.local()  # `accepts`: within accepting()
# held by a thread that imports and loads: a child that was forked meanwhile would wait for its import lock for ever
_loading = threading.Lock()


class PendingError(Exception):
    """The module for a call is not there: PyTorch's own layer has to compute it. ``job`` compiles it; None: nobody."""

    def __init__(self, job: Job | None) -> None:
        super().__init__("no module yet")
        self.job = job


class Job:
    """A layer that is compiled for calls to come; ``error``: the reason that there is no ``outcome``."""

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
                module_cache.hint("compiling in the background, first %s; PyTorch's own layers run until then. "
                                  "To compile ahead, call ecornn.torch.prepare(model, *example)", self.spec)
                asked = module_cache.Asked.of(self.spec, self.target)
                entry = behind_others(worker, "ecornn.module_cache:compile_for_another", asked)
                with _loading:
                    self.outcome = module_cache.from_entry(entry)
            if self.outcome is None:
                self.error = f"the build cache {cache.folder()} cannot be written; set ECORNN_CACHE to another folder"
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
        """The module. Raises :class:`ScheduleError` if none can be, :class:`PendingError` if none is there yet."""
        if self.outcome is None:
            raise PendingError(self)
        if isinstance(self.outcome, ScheduleError):
            raise self.outcome.with_traceback(None)
        return self.outcome


def behind_others(worker: Worker, function: str, argument: Any) -> str:
    """The text that a function of a worker process returns. Raises :class:`~ecornn.worker.WorkerError`."""
    begin = time.monotonic()
    if worker.niceness >= IDLE:
        try:
            return worker.call(function, argument, str, PATIENCE)
        except WorkerError:
            if time.monotonic() < begin + PATIENCE:
                raise
            worker.niceness = NICEST
    return worker.call(function, argument, str, LIMIT)


class Compilers:
    """Worker processes that compile layers, ``niceness`` behind others, for :data:`REST` seconds without work."""

    def __init__(self, processes: int, niceness: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pause = PAUSE if niceness else 0.0
        self._workers = [Worker("ecornn.module_cache:ready", gpu=True, start_limit=LIMIT, niceness=niceness)
                         for _ in range(processes)]
        for number, worker in enumerate(self._workers):
            threading.Thread(target=self._serve, args=(worker,), name=f"ecornn-compiles-{number}", daemon=True).start()

    def submit(self, job: Any) -> None:
        """Has ``job.run(worker)`` called."""
        self._jobs.put(job)

    def _serve(self, worker: Worker) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=REST)
            except queue.Empty:
                worker.kill()
                job = self._jobs.get()
            if job is None:
                return
            time.sleep(self._pause)
            job.run(worker)

    def stop(self) -> None:
        for worker in self._workers:
            self._jobs.put(None)
            worker.stop()

    def forget(self) -> None:
        """Lets go of the processes in a forked child, to which they do not belong."""
        for worker in self._workers:
            worker.disown()


_compilers: Compilers | None = None  # of this process, as are the jobs
_jobs: dict[tuple[LayerSpec, str], Job] = {}
_lock = threading.Lock()


def start(spec: LayerSpec, target: str) -> Job:
    """The job that compiles a layer, one for all modules of this process; it has ended if the layer is compiled."""
    with _lock:
        if (known := outcomes.get((spec, target, False))) is not None:
            return Job(spec, target, known)
        job = _jobs.get((spec, target))
        if job is not None and (job.pending or job.error):
            return job
        for key in [key for key, one in _jobs.items() if one.outcome is not None]:
            del _jobs[key]
        job = _jobs[spec, target] = Job(spec, target)
        _pool().submit(job)
        return job


def in_background(job: Any) -> None:
    """Has ``job.run(worker)`` called, with a worker process of low priority, in a thread of its own."""
    with _lock:
        _pool().submit(job)


def _pool() -> Compilers:
    global _compilers
    if _compilers is None:
        _compilers = Compilers(max(1, min(4, len(os.sched_getaffinity(0)) // 4)), NICENESS)
    return _compilers


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
