"""Tuning a layer from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ecornn.boundary import public
from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.tune.session import TIMEOUT, Result, Session
from ecornn.workload import BATCH, SEQ

if TYPE_CHECKING:
    from ecornn.tune.pool import Entries
    from ecornn.tune.remote import Tracker
    from ecornn.tune.space import ConfigSpace
    from ecornn.tune.tuner import Progress


@public
def tune(cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = BATCH, seq: int = SEQ,
         dtype: str | None = None, weights: str | None = None, precision: str | None = None, training: bool = False,
         target: str | Device | None = None, trials: int | None = None, timeout: float = TIMEOUT,
         time_limit: float | None = None, seed: int = 0, resume: bool = True, early_stop: bool = True,
         output: Path | None = None, schedule: str | None = None, tracker: Tracker | None = None,
         report: Callable[[Progress], None] = lambda _: None,
         begin: Callable[[ConfigSpace, int], None] = lambda *_: None,
         entries: Entries | None = None) -> Result:
    """Searches schedules and knobs for one layer; the records are used by ``ecornn.compile``.

    Parameters
    ----------
    cell : a built-in cell's name, ``FILE.py:NAME``, or a Cell whose class a process can import
    hidden, input, batch, seq : H, I (default: H), B and T
    dtype : default float32 on a CPU and bfloat16 on a GPU
    weights, precision : as for ``ecornn.compile``
    training : searches the recurrence of the backward pass, too, on a GPU: ``backward`` of the result. On a CPU that
        has no knobs. What ``forward`` of a module that trains does besides ``run``, a store more, needs no search
    target : ``cuda`` or ``cpu``; default: the GPU if there is one. A :class:`~ecornn.device.Device` with fewer
        multiprocessors than the GPU: for layers that share it with others, see ``overlap`` of ``ecornn.compile``
    trials : default 48 on a CPU and 128 on a GPU; with ``training`` of each of the two searches
    timeout : seconds that one build, and one measurement, may take
    time_limit : seconds for the whole run, earlier sessions included; None: no limit. With ``training`` half of them
        are for forward, at most, and the rest for backward
    seed : of the search and of the data
    resume : go on with the same run if the log has it, and return at once if it is finished
    early_stop : end before all trials are made, after 59 in a row that were not faster by 1%: at 95%
        confidence fewer than one in twenty further ones would be
    output : log file; default: one for this workload and device in the user's folder
    schedule : only this schedule
    tracker : measure on the servers that are registered there, not on this machine
    report, begin : called after each trial; and before the first, with what was resumed
    entries : functions of the worker processes, for tests

    Raises :class:`~ecornn.errors.EcornnError` subclasses: ``ArgumentError`` for bad arguments,
    ``DeviceError`` without the device, ``ScheduleError`` where no schedule serves the workload,
    ``RecordError`` where the log cannot be read or written, ``ServerError`` where no server behind the
    tracker measures any more.

    For many layers, a :class:`ecornn.tune.Session` keeps the worker processes between them.
    """
    with Session(target, timeout=timeout, seed=seed, tracker=tracker, entries=entries) as session:
        layer = session.layer(cell, hidden=hidden, input=input, batch=batch, seq=seq, dtype=dtype, weights=weights,
                              precision=precision, training=training)
        return session.tune_layer(layer, trials=trials, time_limit=time_limit, resume=resume, early_stop=early_stop,
                                  output=output, schedule=schedule, report=report, begin=begin)
