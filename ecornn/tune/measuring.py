"""Checking and timing built modules, in a process that may crash or be killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ecornn.errors import ScheduleError
from ecornn.tune.oracle import numpy_dtype, relative_error
from ecornn.tune.timing import Clock, Contestant, event_clock, race, wall_clock


class Measure(msgspec.Struct, frozen=True):
    """Module files to check and to time, taking turns.

    Attributes
    ----------
    paths : module files of one workload
    answers : the .npz of ``oracle.write``
    tolerance : allowed relative error
    seq : T to time
    seed : of the timed input
    bound : µs per step of the best so far; hopeless candidates are timed once; None: no bound
    """

    paths: tuple[str, ...]
    answers: str
    tolerance: float
    seq: int
    seed: int
    bound: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """One module's relative error and µs per step of each run."""

    check: float
    times: tuple[float, ...]


class Host:
    """Arrays in host memory, for CPU modules; wall clock."""

    clock: Clock = staticmethod(wall_clock)

    def __init__(self, dtype: str) -> None:
        self.dtype = numpy_dtype(dtype)

    def put(self, values: Any) -> Any:
        """The values as an array of the workload's dtype."""
        return np.ascontiguousarray(np.asarray(values).astype(self.dtype))

    def poison(self, shape: tuple[int, ...]) -> Any:
        """An array of NaN."""
        return np.full(shape, np.nan, np.float32).astype(self.dtype)

    def get(self, array: Any) -> Any:
        """Float64 values."""
        return np.asarray(array).astype(np.float64)


class Gpu:
    """torch tensors in device memory, for CUDA modules; events."""

    clock: Clock = staticmethod(event_clock)

    def __init__(self, dtype: str) -> None:
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)

    def put(self, values: Any) -> Any:
        """The values as a tensor of the workload's dtype."""
        return self.torch.from_numpy(np.asarray(values, np.float32).copy()).cuda().to(self.dtype)

    def poison(self, shape: tuple[int, ...]) -> Any:
        """A tensor of NaN."""
        return self.torch.full(shape, float("nan"), dtype=self.dtype, device="cuda")

    def get(self, array: Any) -> Any:
        """Float64 values, once the GPU is done."""
        return array.to(self.torch.float64).cpu().numpy()


def memory_for(manifest: Any) -> Host | Gpu:
    """Where a module's arrays live."""
    if manifest.device.kind == "llvm":
        return Host(manifest.workload.dtype)
    return Gpu(manifest.workload.dtype)


def ready(_: None) -> bool:
    """Imports what a measurement needs, and opens the GPU, before the clock runs."""
    import importlib.util

    import ecornn.runtime.loader

    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
    return ecornn.runtime.loader is not None


def check(layer: Any, memory: Host | Gpu, answers: Any) -> float:
    """The larger relative error of two runs over y and the final states; outputs start as NaN."""
    x = memory.put(answers["x"])
    first = [memory.put(answers[n]) for n in sorted(answers.files) if n.startswith("first_")]
    last = [answers[n] for n in sorted(answers.files) if n.startswith("last_")]
    worst = 0.0
    for _ in range(2):  # the second run finds the workspace as the first left it
        out = memory.poison(answers["y"].shape)
        y, states = layer(x, tuple(first), out=out)
        worst = max(worst, relative_error(memory.get(y), answers["y"]),
                    *(relative_error(memory.get(s), e) for s, e in zip(states, last, strict=True)))
    return worst


def measure(request: Measure) -> list[Measured]:
    """Checks each module, then times all.

    Raises :class:`~ecornn.errors.ScheduleError` where an output is wrong.
    """
    from ecornn.runtime.loader import load

    rng = np.random.default_rng(request.seed)
    contestants, errors = [], []
    with np.load(request.answers, allow_pickle=False) as answers:
        weights = {n[2:]: answers[n] for n in answers.files if n.startswith("w:")}
        for path in request.paths:
            module = load(Path(path))
            layer, memory = module.bind(weights), memory_for(module.manifest)
            error = check(layer, memory, answers)
            if not error <= request.tolerance:
                raise ScheduleError(f"wrong output: relative error {error:.2g}, "
                                    f"at most {request.tolerance:g} is allowed")
            errors.append(error)
            work = module.manifest.workload
            x = memory.put(rng.uniform(-1, 1, (request.seq, work.batch, work.input)))
            out = memory.poison((request.seq, work.batch, work.hidden))
            contestants.append(Contestant(partial(layer, x, out=out), memory.clock))
    bound = None if request.bound is None else request.bound * request.seq * 1e-6
    times = race(contestants, bound)
    return [Measured(error, tuple(t * 1e6 / request.seq for t in runs))
            for error, runs in zip(errors, times, strict=True)]
