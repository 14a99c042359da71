"""Checking layers and timing them in turns, so that a drifting clock is fair to all; arrays that they run on."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from ecornn.dtypes import ITEMSIZE
from ecornn.errors import ScheduleError
from ecornn.program import RUN, WORKSPACE
from ecornn.runtime import loader
from ecornn.runtime.dlpack import CUDA, Block
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.loader import Module
from ecornn.runtime.memory import DeviceMemory
from ecornn.runtime.memory import layout as laid_out
from ecornn.runtime.plan import SCALARS
from ecornn.runtime.weights import PackedWeights
from ecornn.schedules.hoisted import Hoisted
from ecornn.tune.oracle import numpy_dtype, relative_error
from ecornn.tune.record import Outcome, Times

T = TypeVar("T")
Run = Callable[[], Any]  # starts one sequence; on a GPU it may return before it is done
Clock = Callable[[Run], float]  # one run, seconds

SPAN = 0.3  # seconds of runs that each contestant gets
FEWEST, MOST = 3, 20  # samples, whatever SPAN says
SAMPLE = 2e-3  # seconds: shorter runs are timed several at once, back to back
HOPELESS = 2.0  # slower than the best so far by this factor: one run is enough
BEHIND = 1.15  # slower by this factor: the fewest samples are enough
EARLY = 7  # samples that will do where they agree to half of TIGHT
LONG = 0.05  # seconds: of a longer run, loading code and touching memory is a small part
TIGHT = 0.02  # half the width of the 95% interval of a median, relative to it, that will do
LONGER = 4  # times as many samples as planned, at most, where the interval is not tight
ASKED = 2.0  # times as long as the host takes to ask for a run: where less goes by, the host may be what took long
CYCLES = 4e9  # that a GPU waits for a second of the host's: twice as long, at 2 GHz
KEPT = 8  # workloads that take turns


@dataclass(frozen=True)
class Contestant:
    """Something to time: ``run`` is one sequence, ``clock`` times it in seconds."""

    run: Run
    clock: Clock


def wall_clock(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def event_clock(run: Run) -> float:
    """Seconds of one run on torch's current CUDA stream, between events; where the host may have been what took long,
    of a second run that is queued while the GPU waits: the GPU's alone, as in a CUDA graph."""
    taken, asked = between_events(run, 0)
    return taken if taken > ASKED * asked or asked > LONG else between_events(run, int(asked * CYCLES))[0]


def between_events(run: Run, wait: int) -> tuple[float, float]:
    """Seconds of a run, behind a kernel that waits so many cycles, and of the host until it has asked for all of it."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if wait:
        torch.cuda._sleep(wait)
    asked = time.perf_counter()
    begin.record()
    run()
    end.record()
    asked = time.perf_counter() - asked
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3, asked


def several(run: Callable[[], T], count: int) -> Callable[[], T]:
    """``count`` runs, back to back; the result of the last."""
    def runs() -> T:
        for _ in range(count - 1):
            run()
        return run()

    return run if count == 1 else runs


def bounds(times: Sequence[float]) -> tuple[float, float]:
    """The median's 95% confidence interval by order statistics; of fewer than six times the least and greatest."""
    ordered, n = sorted(times), len(times)
    reach = 0.98 * n ** 0.5 if n >= 6 else n
    return ordered[max(0, int((n - 1) / 2 - reach))], ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))]


def interval(times: Sequence[float]) -> float:
    """Half the width of the median's 95% confidence interval, relative to it; infinite for fewer than six times."""
    ordered, n = sorted(times), len(times)
    if n < 6:
        return math.inf
    low, high = bounds(ordered)
    middle = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
    return (high - low) / 2 / middle


def settled(times: Sequence[float]) -> bool:
    """True where the median of these times is known to ``TIGHT``; fewer than six must all lie within that of it."""
    if len(times) < 6:
        return max(times) - min(times) <= 2 * TIGHT * sorted(times)[len(times) // 2]
    return interval(times) <= TIGHT


def race(contestants: Sequence[Contestant], bound: float | None = None, fewest: int = FEWEST,
         seconds: float | None = None) -> list[list[float]]:
    """Seconds of one run, several samples of each contestant, in turns after a warm-up; more where they do not settle.
    One whose warm-up is ``HOPELESS`` beside ``bound`` seconds keeps that time. After ``seconds`` no more than
    ``FEWEST`` are taken."""
    def behind(of: Sequence[float]) -> bool:  # too slow for its exact time to matter
        return bound is not None and len(of) >= fewest and min(of) > BEHIND * bound

    def agree(of: Sequence[float]) -> bool:  # further samples would say nothing new
        return len(of) >= max(EARLY, fewest) and max(of) - min(of) <= TIGHT * min(of)

    end = math.inf if seconds is None else time.monotonic() + seconds
    times: list[list[float]] = []
    for one in contestants:
        warm = one.clock(one.run)
        times.append([warm if warm > LONG else one.clock(one.run)])
    racing = [i for i, t in enumerate(times) if bound is None or t[0] <= HOPELESS * bound]
    plans = {}  # contestant -> (samples, runs of one sample, those runs)
    for i in racing:
        first = max(times[i].pop(), 1e-7)
        count = max(1, min(100, int(SAMPLE / first)))
        samples = min(MOST, max(fewest, int(SPAN / (first * count))))
        plans[i] = samples, count, several(contestants[i].run, count)
    for number in range(LONGER * max((samples for samples, _, _ in plans.values()), default=0)):
        waiting = [i for i, (samples, _, _) in plans.items()
                   if not behind(times[i]) and number < LONGER * samples
                   and not (agree(times[i]) if number < samples else settled(times[i]))]
        if not waiting or (number >= FEWEST and time.monotonic() >= end):
            break
        for i in waiting:
            _, count, runs = plans[i]
            times[i].append(contestants[i].clock(runs) / count)
    return times


class Arrays:
    """Arrays of one workload's dtype, in one kind of memory: here NumPy's, for CPU modules, with the wall clock."""

    def __init__(self, dtype: str) -> None:
        self.dtype: Any = numpy_dtype(dtype)

    def put(self, values: Any) -> Any:
        return np.ascontiguousarray(np.asarray(values).astype(self.dtype))

    def weight(self, values: Any) -> Any:
        """Float32 values where ``bind`` packs them fastest."""
        return values

    def poison(self, shape: tuple[int, ...]) -> Any:
        return self.put(np.full(shape, np.nan, np.float32))

    def cycled(self, values: Any, length: int) -> Any:
        """An array of ``values`` again and again, ``length`` of them along the first axis."""
        values = np.asarray(values)
        return self.put(np.resize(values, (length, *values.shape[1:])))

    def get(self, array: Any) -> Any:
        """An array's values in float64, once the device is done."""
        return np.asarray(array).astype(np.float64)

    def clock(self, run: Run) -> float:
        return wall_clock(run)


class TorchArrays(Arrays):
    """Tensors of torch on the GPU, timed between CUDA events."""

    def __init__(self, dtype: str) -> None:
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)

    def put(self, values: Any) -> Any:
        return self.torch.from_numpy(np.array(values, np.float32)).cuda().to(self.dtype)

    def weight(self, values: Any) -> Any:
        return self.torch.from_numpy(values).cuda()

    def poison(self, shape: tuple[int, ...]) -> Any:
        return self.torch.full(shape, float("nan"), dtype=self.dtype, device="cuda")

    def cycled(self, values: Any, length: int) -> Any:
        once = self.put(values)
        return once.repeat(-(-length // len(once)), *(1 for _ in once.shape[1:]))[:length]

    def get(self, array: Any) -> Any:
        return array.to(self.torch.float64).cpu().numpy()

    def clock(self, run: Run) -> float:
        return event_clock(run)


class DeviceArrays(Arrays):
    """The module's own device memory, where there is no torch; the wall clock times runs and a synchronisation."""

    def __init__(self, dtype: str, module: Module) -> None:
        super().__init__(dtype)
        self.name, self.library = dtype, module.library

    def put(self, values: Any) -> Any:
        host = np.ascontiguousarray(np.asarray(values, np.float32).astype(self.dtype))
        memory = DeviceMemory(self.library, 0, max(host.nbytes, 1))
        self.library.copy(0, memory.pointer, host.ctypes.data, host.nbytes, 0)
        self.library.synchronize(0, 0)  # before the host's copy goes away
        return Block(memory, host.shape, self.name, (CUDA, 0))

    def get(self, array: Any) -> Any:
        host = np.empty(math.prod(array.shape) * ITEMSIZE[self.name], np.uint8)
        self.library.copy(0, host.ctypes.data, array.pointer, host.nbytes, 0)
        self.library.synchronize(0, 0)
        return host.view(self.dtype).reshape(array.shape).astype(np.float64)

    def clock(self, run: Run) -> float:
        return wall_clock(lambda: (run(), self.library.synchronize(0, 0)))


@cache
def torch_sees_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


host_arrays, torch_arrays = cache(Arrays), cache(TorchArrays)


def arrays_for(module: Module, dtype: str | None = None) -> Arrays:
    """The arrays to run ``module`` on, of ``dtype`` or its own; the same object where they are interchangeable."""
    dtype = dtype or module.manifest.workload.dtype
    if module.manifest.device.kind == "llvm":
        return host_arrays(dtype)
    return torch_arrays(dtype) if torch_sees_gpu() else DeviceArrays(dtype, module)


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


# All candidates of a workload share this; it is kept from one to the next.
@lru_cache(maxsize=KEPT)
def answers_of(path: str) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@lru_cache(maxsize=KEPT)
def weights_of(path: str, memory: Any) -> dict[str, Any]:
    return {n[2:]: memory.weight(values) for n, values in answers_of(path).items() if n.startswith("w:")}


@lru_cache(maxsize=KEPT)
def timed_input(memory: Any, seed: int, shape: tuple[int, ...]) -> Any:
    # Float32 from the start: half the bytes of the default.
    return memory.put(np.random.default_rng(seed).random(shape, np.float32) * 2 - 1)


@lru_cache(maxsize=2)  # made again in a moment, and as large as what is kept of a training step
def timed_factors(path: str, memory: Any, layout: Hoisted, steps: int) -> Any:
    """The values that the recurrence of an adjoint reads of each step: those of the short answers again and again."""
    x = answers_of(path)["x"]  # (T, B, Q, H)
    return memory.cycled(layout.laid(x.reshape(-1, *x.shape[2:])), steps * x.shape[1])


def check(layer: Any, memory: Arrays, answers: dict[str, Any], x: Any = None) -> float:
    """The larger relative error of two runs; outputs start as NaN. ``x``: the answers', as the layer reads it."""
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
    bound, x = Recurrence(module, weights, answers["x"].shape[2]), answers["x"]
    factors = arrays_for(module, bound.layout.dtype)
    error = check(bound, memory, answers, factors.put(bound.layout.laid(x.reshape(-1, *x.shape[2:]))))
    x = timed_factors(request.answers, cast(Hashable, factors), bound.layout, request.seq)
    first = [memory.put(answers[n]) for n in sorted(answers) if n.startswith("first_")]
    return error, bound.ready(x, first, memory.poison(shape))[0]


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
        run, last = self.ready(hoisted, first, out)
        run()
        return out, last

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """The values that ``outputs`` mean: with TF32 products they are stored ``raised``."""
        words = outputs.astype(np.float32).view(np.uint32)
        return (words - np.uint32(0x1000)).view(np.float32) if self.raised else outputs

    def run(self, arguments: list[int], arrays: list[Any]) -> None:
        """One run; its ``arguments`` point into ``arrays``, which must live as long."""
        self.library.run(*arguments)

    def ready(self, hoisted: Any, first: Sequence[Any], out: Any) -> tuple[Run, list[Any]]:
        """A run with these arrays, and where it leaves the last states; see :meth:`__call__`."""
        arrays, (steps, batch) = arrays_of(out, "out"), out.shape[:2]
        last = [arrays.empty(state.shape, out, self.library)[0] for state in first]
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
        return partial(self.run, arguments, [*given.values(), self.memory]), last
