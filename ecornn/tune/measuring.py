"""Checking and timing built modules, in a process that may crash or be killed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ecornn.errors import ScheduleError
from ecornn.program import RUN, WORKSPACE
from ecornn.runtime import loader
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.loader import Module
from ecornn.runtime.memory import layout as laid_out
from ecornn.runtime.plan import SCALARS
from ecornn.runtime.weights import PackedWeights
from ecornn.schedules.hoisted import Hoisted
from ecornn.tune.oracle import relative_error
from ecornn.tune.record import Outcome, Times
from ecornn.tune.timing import FEWEST, Arrays, Contestant, Run, arrays_for, race, settled, torch_sees_gpu

KEPT = 8  # workloads that take turns


class Measure(msgspec.Struct, frozen=True):
    """Module files to check and to time, taking turns."""

    paths: tuple[str, ...]  # module files of one workload
    answers: str  # the .npz of ``oracle.write``, or of ``adjoint_oracle.write``
    tolerance: float  # allowed relative error
    seq: int  # T to time
    seed: int  # of the timed input
    bound: float | None = None  # µs per step of the best so far; hopeless candidates are timed once; None: no bound
    fewest: int = FEWEST  # samples of the others, at least
    limit: float = 60.0  # seconds that all this may take
    seconds: float | None = None  # after which no more samples are taken than all need; None: many, until times settle


def ready(_: None) -> bool:
    """Imports what a measurement needs, and opens the GPU, before the clock runs."""
    if torch_sees_gpu():
        import torch

        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    return True


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
    """The values that the recurrence of an adjoint reads of each step: those of the short answers again and again."""
    x = answers_of(path)["x"]
    return memory.cycled(rows_of(x, layout), steps * x.shape[1])


def rows_of(x: Any, layout: Hoisted) -> Any:
    """``x`` (T, B, Q, H) in the layout of a recurrence."""
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
        outputs = memory.get(y)
        outputs = layer.values(outputs) if isinstance(layer, Recurrence) else outputs
        worst = max(worst, relative_error(outputs, answers["y"]),
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
    """The error of an adjoint's recurrence, and a run of it that is timed; ``shape`` of its outputs then."""
    answers = answers_of(request.answers)
    bound = Recurrence(module, weights, answers["x"].shape[2])
    factors = arrays_for(module, bound.layout.dtype)
    error = check(bound, memory, answers, factors.put(rows_of(answers["x"], bound.layout)))
    x = timed_factors(request.answers, cast(Hashable, factors), bound.layout, request.seq)
    first = [memory.put(answers[n]) for n in sorted(answers) if n.startswith("first_")]
    return error, bound.ready(x, first, memory.poison(shape))


def measure(request: Measure) -> list[Outcome]:
    """Checks each module, then times all. Raises :class:`~ecornn.errors.ScheduleError` where an output is wrong."""
    contestants, errors, answers = [], [], answers_of(request.answers)
    for path in request.paths:
        module = loader.load(Path(path))
        memory = arrays_for(module)
        weights = weights_of(request.answers, cast(Hashable, memory))
        shape = request.seq, *answers["y"].shape[1:]
        entry = recurrence if module.manifest.workload.backward else sequence
        error, run = entry(module, memory, weights, request, shape)
        if not error <= request.tolerance:
            raise ScheduleError(f"wrong output: relative error {error:.2g}, at most {request.tolerance:g} is allowed")
        errors.append(error)
        contestants.append(Contestant(run, memory.clock))
    bound = None if request.bound is None else request.bound * request.seq * 1e-6
    times = race(contestants, bound, fewest=request.fewest, seconds=request.seconds)
    return [Outcome(Times.of([t * 1e6 / request.seq for t in runs]), error, noisy=not settled(runs))
            for error, runs in zip(errors, times, strict=True)]


class Recurrence:
    """The recurrence of an adjoint alone: a module that is nothing else, bound to weights. It is called as a layer is,
    with hoisted values in place of x, as :attr:`layout` lays them out, and outputs in place of y. ``weights`` are the
    layer's, by PyTorch's names; ``hoisted`` is Q, the number of values that it reads of each step, row and unit."""

    def __init__(self, module: Module, weights: Mapping[str, Any], hoisted: int) -> None:
        manifest, self.library = module.manifest, module.library
        buffers = {b.name: b for b in manifest.buffers}
        self.taken = list(enumerate((buffers[name] for name in manifest.entries[RUN]), SCALARS))
        self.scratch = [(i, b) for i, b in self.taken if b.role == WORKSPACE]
        self.packed = PackedWeights(manifest, module.library, weights, 0, None)
        self.states, self.hidden = manifest.states, manifest.workload.hidden
        self.raised = manifest.workload.arithmetic == "tf32"
        dtype = buffers["hoisted"].dtype if hoisted else "float32"
        self.layout = Hoisted(dtype, hoisted, self.hidden)
        self.memory: Any = None

    def __call__(self, hoisted: Any, first: Sequence[Any], *, out: Any) -> tuple[Any, list[Any]]:
        """``out`` (T, B, O, H) and the states after the last step, from those before the first, (B, H) each."""
        last = [self.like(out, state.shape) for state in first]
        self.ready(hoisted, first, out, last)()
        return out, last

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """The values that ``outputs`` mean: with TF32 products they are stored ``raised``."""
        words = outputs.astype(np.float32).view(np.uint32)
        return (words - np.uint32(0x1000)).view(np.float32) if self.raised else outputs

    def like(self, array: Any, shape: tuple[int, ...]) -> Any:
        """A new array of the type and place of ``array``."""
        return arrays_of(array, "out").empty(shape, array, self.library)[0]

    def run(self, arguments: list[int], arrays: list[Any]) -> None:
        """One run; its ``arguments`` point into ``arrays``, which must live as long."""
        self.library.run(*arguments)

    def ready(self, hoisted: Any, first: Sequence[Any], out: Any, last: Sequence[Any] | None = None) -> Run:
        """A run with these arrays; see :meth:`__call__`."""
        arrays, (steps, batch) = arrays_of(out, "out"), out.shape[:2]
        last = [self.like(out, state.shape) for state in first] if last is None else last
        given = {"hoisted": hoisted, "outputs": out}
        given |= {f"{name}_in": state for name, state in zip(self.states, first, strict=True)}
        given |= {f"{name}_out": state for name, state in zip(self.states, last, strict=True)}
        places = {name: arrays_of(array, name).ready(array, name)[1] for name, array in given.items()}
        places |= self.packed.packed
        starts, total = laid_out([b.nbytes(steps) for _, b in self.scratch])
        if total and (self.memory is None or self.memory.nbytes < total):
            self.memory = arrays.workspace(total, out, self.library)
        arguments = [steps, batch, 0, arrays.queue(0)] + [0] * len(self.taken)
        for i, b in self.taken:
            if b.name in places:
                arguments[i] = places[b.name]
        for (i, _), start in zip(self.scratch, starts, strict=True):
            arguments[i] = self.memory.pointer + start
        return partial(self.run, arguments, [*given.values(), self.memory])
