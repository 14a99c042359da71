"""Timing layers: several at once, taking turns, so that a drifting clock is fair to all; and the arrays they run on."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

from ecornn.dtypes import ITEMSIZE
from ecornn.runtime.dlpack import CUDA, Block
from ecornn.runtime.loader import Module
from ecornn.runtime.memory import DeviceMemory
from ecornn.tune.oracle import numpy_dtype

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


@dataclass(frozen=True)
class Contestant:
    """Something to time: ``run`` is one sequence, ``clock`` times it in seconds."""

    run: Run
    clock: Clock


def wall_clock(run: Run) -> float:
    """Seconds of one synchronous run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def event_clock(run: Run) -> float:
    """Seconds of one run on torch's current CUDA stream, between events. Where the host may have been what took long,
    the time is that of a second run, all of which is asked for while the GPU still waits: the time is the GPU's alone,
    as in a CUDA graph."""
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
    """The 95% confidence interval of the median, from order statistics (the binomial's normal approximation), so
    whatever the distribution. Fewer than six times have no such interval: their least and greatest."""
    ordered, n = sorted(times), len(times)
    reach = 0.98 * n ** 0.5 if n >= 6 else n
    return ordered[max(0, int((n - 1) / 2 - reach))], ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))]


def interval(times: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of the median (:func:`bounds`), relative to the median; infinite
    for fewer than six times."""
    ordered, n = sorted(times), len(times)
    if n < 6:
        return math.inf
    low, high = bounds(ordered)
    middle = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
    return (high - low) / 2 / middle


def settled(times: Sequence[float]) -> bool:
    """True where the median of these times is known to ``TIGHT``: fewer than six must all lie within ``TIGHT`` of their
    middle."""
    if len(times) < 6:
        return max(times) - min(times) <= 2 * TIGHT * sorted(times)[len(times) // 2]
    return interval(times) <= TIGHT


def race(contestants: Sequence[Contestant], bound: float | None = None, fewest: int = FEWEST,
         seconds: float | None = None) -> list[list[float]]:
    """Seconds of one run, several samples of each contestant, after a warm-up, taking turns.

    Where the device does not hold still there are up to ``LONGER`` times as many samples; whether the median is known
    then is for :func:`settled` to say. A contestant whose warm-up takes longer than ``HOPELESS * bound`` seconds keeps
    that one time; one that is slower than ``BEHIND * bound`` in each of the ``fewest`` samples gets no more, and one
    whose samples agree gets no more than ``EARLY``, or ``fewest``. Once ``seconds`` are over, no more than ``FEWEST``
    of each are taken."""
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
        """An array of the values."""
        return np.ascontiguousarray(np.asarray(values).astype(self.dtype))

    def weight(self, values: Any) -> Any:
        """Float32 values where ``bind`` packs them fastest."""
        return values

    def poison(self, shape: tuple[int, ...]) -> Any:
        """An array of NaN."""
        return self.put(np.full(shape, np.nan, np.float32))

    def cycled(self, values: Any, length: int) -> Any:
        """An array of ``values`` again and again, ``length`` of them along the first axis."""
        values = np.asarray(values)
        return self.put(np.resize(values, (length, *values.shape[1:])))

    def get(self, array: Any) -> Any:
        """An array's values in float64, once the device is done."""
        return np.asarray(array).astype(np.float64)

    def clock(self, run: Run) -> float:
        """Seconds of ``run``."""
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
    """The module's own device memory, where there is no torch, timed by the wall clock around runs on the default
    stream and a synchronisation, which short runs share."""

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
    """True where torch is installed and can use a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


host_arrays, torch_arrays = cache(Arrays), cache(TorchArrays)


def arrays_for(module: Module, dtype: str | None = None) -> Arrays:
    """The arrays to run ``module`` on, of ``dtype`` or else its own; the same object for modules whose arrays are
    interchangeable."""
    dtype = dtype or module.manifest.workload.dtype
    if module.manifest.device.kind == "llvm":
        return host_arrays(dtype)
    return torch_arrays(dtype) if torch_sees_gpu() else DeviceArrays(dtype, module)
