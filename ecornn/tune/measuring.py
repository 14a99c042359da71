"""Checking and timing built modules, in a process that may crash or be killed."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from ecornn.errors import ScheduleError
from ecornn.schedules.hoisted import Hoisted
from ecornn.tune.arrays import Arrays, arrays_for, torch_sees_gpu
from ecornn.tune.oracle import relative_error
from ecornn.tune.record import Outcome, Times
from ecornn.tune.recurrence import Recurrence
from ecornn.tune.timing import FEWEST, Contestant, Run, race, settled

if TYPE_CHECKING:
    from ecornn.runtime.loader import Module

KEPT = 8  # workloads that take turns


class Measure(msgspec.Struct, frozen=True):
    """Module files to check and to time, taking turns.

    Attributes
    ----------
    paths : module files of one workload
    answers : the .npz of ``oracle.write``, or of ``adjoint_oracle.write``
    tolerance : allowed relative error
    seq : T to time
    seed : of the timed input
    bound : µs per step of the best so far; hopeless candidates are timed once; None: no bound
    fewest : samples of the others, at least
    limit : seconds that all this may take
    seconds : after which no more samples are taken than they all need; None: of times that do not settle many are
    """

    paths: tuple[str, ...]
    answers: str
    tolerance: float
    seq: int
    seed: int
    bound: float | None = None
    fewest: int = FEWEST
    limit: float = 60.0
    seconds: float | None = None


def ready(_: None) -> bool:
    """Imports what a measurement needs, and opens the GPU, before the clock runs."""
    import ecornn.runtime.loader

    if torch_sees_gpu():
        import torch

        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    return ecornn.runtime.loader is not None


# What all candidates of a workload share, kept from one to the next.
@lru_cache(maxsize=KEPT)
def answers_of(path: str) -> dict[str, Any]:
    """The arrays of ``oracle.write``."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@lru_cache(maxsize=KEPT)
def weights_of(path: str, memory: Any) -> dict[str, Any]:
    """The weights of ``oracle.write``, to bind."""
    return {n[2:]: memory.weight(values) for n, values in answers_of(path).items() if n.startswith("w:")}


@lru_cache(maxsize=KEPT)
def timed_input(memory: Any, seed: int, shape: tuple[int, ...]) -> Any:
    """Random x to time with."""
    # Float32 from the start: half the bytes of the default.
    return memory.put(np.random.default_rng(seed).random(shape, np.float32) * 2 - 1)


@lru_cache(maxsize=2)  # made again in a moment, and as large as what is kept of a training step
def timed_factors(path: str, memory: Any, layout: Hoisted, steps: int) -> Any:
    """What the recurrence of an adjoint reads of each step: that of the short one again and again."""
    x = answers_of(path)["x"]
    return memory.cycled(rows_of(x, layout), steps * x.shape[1])


def rows_of(x: Any, layout: Hoisted) -> Any:
    """(T, B, Q, H) as a recurrence reads it."""
    return layout.laid(x.reshape(-1, *x.shape[2:]))


def check(layer: Any, memory: Arrays, answers: dict[str, Any], x: Any = None) -> float:
    """The larger relative error of two runs over y and the final states; outputs start as NaN. ``x``: that of the
    answers as the layer reads it, if not as it is."""
    x = memory.put(answers["x"]) if x is None else x
    first = [memory.put(answers[n]) for n in sorted(answers) if n.startswith("first_")]
    last = [answers[n] for n in sorted(answers) if n.startswith("last_")]
    worst = 0.0
    for _ in range(2):  # the second run finds the workspace as the first left it
        out = memory.poison(answers["y"].shape)
        y, states = layer(x, tuple(first), out=out)
        made = memory.get(y)
        made = layer.values(made) if isinstance(layer, Recurrence) else made
        worst = max(worst, relative_error(made, answers["y"]),
                    *(relative_error(memory.get(s), e) for s, e in zip(states, last, strict=True)))
    return worst


def sequence(module: Module, memory: Arrays, weights: dict[str, Any], request: Measure,
             shape: tuple[int, ...]) -> tuple[float, Run]:
    """The error of a layer, and a run of it that is timed; ``shape`` of y then."""
    layer, answers = module.bind(weights), answers_of(request.answers)
    error = check(layer, memory, answers)
    x = timed_input(cast(Hashable, memory), request.seed, (request.seq, *answers["x"].shape[1:]))
    return error, partial(layer, x, out=memory.poison(shape))


def recurrence(module: Module, memory: Arrays, weights: dict[str, Any], request: Measure,
               shape: tuple[int, ...]) -> tuple[float, Run]:
    """As :func:`sequence`, of the recurrence of an adjoint."""
    answers = answers_of(request.answers)
    made = Recurrence(module, weights, answers["x"].shape[2])
    factors = arrays_for(module, made.layout.dtype)
    error = check(made, memory, answers, factors.put(rows_of(answers["x"], made.layout)))
    x = timed_factors(request.answers, cast(Hashable, factors), made.layout, request.seq)
    first = [memory.put(answers[n]) for n in sorted(answers) if n.startswith("first_")]
    return error, made.ready(x, first, memory.poison(shape))


def measure(request: Measure) -> list[Outcome]:
    """Checks each module, then times all.

    Raises :class:`~ecornn.errors.ScheduleError` where an output is wrong.
    """
    from ecornn.runtime.loader import load

    contestants, errors, answers = [], [], answers_of(request.answers)
    for path in request.paths:
        module = load(Path(path))
        memory = arrays_for(module)
        weights = weights_of(request.answers, cast(Hashable, memory))
        shape = request.seq, *answers["y"].shape[1:]
        if module.manifest.workload.backward:
            error, run = recurrence(module, memory, weights, request, shape)
        else:
            error, run = sequence(module, memory, weights, request, shape)
        if not error <= request.tolerance:
            raise ScheduleError(f"wrong output: relative error {error:.2g}, "
                                f"at most {request.tolerance:g} is allowed")
        errors.append(error)
        contestants.append(Contestant(run, memory.clock))
    bound = None if request.bound is None else request.bound * request.seq * 1e-6
    times = race(contestants, bound, fewest=request.fewest, seconds=request.seconds)
    return [Outcome(Times.of([t * 1e6 / request.seq for t in runs]), error, noisy=not settled(runs))
            for error, runs in zip(errors, times, strict=True)]
