"""The sequences of a stack that run at the same time on a GPU, each on a share of its multiprocessors.

The last blocks gain a small layer's persistent kernel little, since most of its step is the trip of the state through
L2: two sequences on half a GPU each can be done before one after the other on all of it. Expected times of steps
decide. Directions need nothing of each other. Layers work on chunks of time, each a chunk behind the one before it: K
chunks through n layers take K + n - 1 times one; each chunk has its launches. Reverse layers have no chunks. A sequence
is planned for its share as if that were a GPU, so that all cooperative grids fit at once; records count if no more
multiprocessors measured them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING

from msgspec import structs

from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.program import chunk_steps
from ecornn.schedules.rates import GPURates, gpu_rates
from ecornn.workload import OVERLAPS, Overlap, Part, Stack, Workload

if TYPE_CHECKING:
    from ecornn.schedules.base import Task
    from ecornn.tune.lookup import Found

WISHES = ("auto", "none", *OVERLAPS)
WIDEST = 8  # layers at the same time
CHUNKS = 32  # of a wavefront, at most
GAIN = 0.9  # of the time one after the other: more is within the error of expectations, and records are for that


@dataclass(frozen=True)
class Arrangement:
    """The sequences of a stack, each with its task, on its share of the GPU, and the choice for it."""

    overlap: Overlap
    tasks: tuple[Task, ...]
    chosen: tuple[Found, ...]
    expected: float  # nanoseconds of a call of the length to expect; infinity where nobody can say


def arrange(cell: Cell, stack: Stack, whole: Workload, device: Device, wish: str,
            choose: Callable[[Task], Found], expect: Callable[[Task], float]) -> Arrangement:
    """The arrangement for ``wish``, one of :data:`WISHES`; ``auto``: the fastest expected. ``choose`` finds a task's
    schedule and configuration, ``expect`` the nanoseconds of its step. Raises :class:`ArgumentError` where the stack
    cannot be arranged so, :class:`ScheduleError` where nothing serves a share."""
    if wish not in WISHES:
        raise ArgumentError("overlap", wish, f"one of {', '.join(WISHES)}")
    if wish in OVERLAPS and (reason := impossible(wish, stack, device)):
        raise ArgumentError("overlap", wish, reason)
    arranger = _Arranger(cell, stack, whole, device, choose, expect)
    if wish == "none" or stack.count == 1 or device.kind != "cuda":
        return arranger.arrangement(Overlap(), timed=False)
    serial = None if wish in OVERLAPS else arranger.arrangement(Overlap())
    arranged, refused = [], None
    for overlap in arranger.overlaps([wish] if wish in OVERLAPS else OVERLAPS):
        try:
            arranged.append(arranger.arrangement(overlap))
        except (ScheduleError, ArgumentError) as error:  # also where a configuration was given
            refused = error
    best = min(arranged, key=lambda one: one.expected, default=None)
    if serial is None:
        if best is None:
            raise refused or ScheduleError(f"{device.name} has too few multiprocessors for parts that run at the same "
                                           "time")
        return arranger.explained(best, None)
    return arranger.explained(best, serial) if best and best.expected < GAIN * serial.expected else serial


def impossible(kind: str, stack: Stack, device: Device) -> str | None:
    """The arguments that would allow this kind of overlap, in words; None: it is possible."""
    if device.kind != "cuda":
        return "auto or none on a CPU, where all cores work on one sequence"
    if kind == "directions":
        return None if stack.bidirectional else "auto or none without bidirectional=True"
    reasons = {
        "auto or none with layers=1": stack.layers < 2,
        "auto, none or directions with bidirectional=True, since a layer needs the last steps of the one before "
        "it": stack.bidirectional,
        "auto, none or directions with training=True, since the backward pass has no wavefront": stack.keep is not None,
        "auto, none or directions with sequences=True, since a chunk of time may end within a "
        "sequence": stack.sequences,
        "auto or none with reverse=True": stack.reverse}
    return next((reason for reason, holds in reasons.items() if holds), None)


def wave_time(seq: int, chunks: int, layers: int, step: float, rates: GPURates) -> float:
    """Nanoseconds of ``layers`` layers as a wavefront, or of one alone; ``step``: of the slowest of them."""
    if layers == 1:
        return rates.sequence + seq * step
    steps = min(chunk_steps(seq, chunks, 1), seq)
    return (ceil(seq / steps) + layers - 1) * (rates.sequence + steps * step)


class _Arranger:
    def __init__(self, cell: Cell, stack: Stack, whole: Workload, device: Device, choose: Callable[[Task], Found],
                 expect: Callable[[Task], float]) -> None:
        self.cell, self.stack, self.whole, self.device = cell, stack, whole, device
        self.choose, self.expect, self.rates = choose, expect, gpu_rates(device)
        self.known: dict[object, tuple[Task, Found, float]] = {}

    def overlaps(self, kinds: list[str] | tuple[str, ...]) -> Iterator[Overlap]:
        for kind in kinds:
            if impossible(kind, self.stack, self.device) is None:
                layers = self.stack.layers
                widths = dict.fromkeys(-(-layers // n) for n in range(1, layers)) if kind == "wavefront" else (2,)
                yield from (Overlap(kind, width) for width in widths if 2 <= width <= min(WIDEST, self.device.cores))

    def arrangement(self, overlap: Overlap, timed: bool = True) -> Arrangement:
        """The stack arranged so. ``timed``: asks for expected times, too, which take longer to find than records."""
        device = structs.replace(self.device, cores=self.device.cores // overlap.width)
        tasks, chosen, times = zip(*(self._sequence(part, device, timed) for part in self.stack.parts(self.whole)),
                                   strict=True)
        if overlap.kind == "wavefront":
            overlap = self._in_chunks(overlap, max(times))
        return Arrangement(overlap, tasks, chosen, self._time(overlap, times))

    def _sequence(self, part: Part, device: Device, timed: bool) -> tuple[Task, Found, float]:
        from ecornn.task import make_task

        key = part.workload, part.traversal, device.cores
        if key not in self.known:
            task = make_task(self.cell, part.workload, device, part.traversal)
            self.known[key] = task, self.choose(task), self.expect(task) if timed else inf
        return self.known[key]

    def _time(self, overlap: Overlap, steps: Sequence[float]) -> float:
        """Nanoseconds of a call, from those of a step of each sequence."""
        each = [self.rates.sequence + self.whole.seq * step for step in steps]
        if overlap.kind == "directions":
            return sum(map(max, each[::2], each[1::2]))
        if overlap.kind == "wavefront":
            groups = (steps[n:n + overlap.width] for n in range(0, len(steps), overlap.width))
            return sum(wave_time(self.whole.seq, overlap.chunks, len(g), max(g), self.rates) for g in groups)
        return sum(each)

    def _in_chunks(self, overlap: Overlap, step: float) -> Overlap:
        """``overlap`` with the best number of chunks for the T to expect, none shorter than its launches."""
        seq, step = self.whole.seq, step if isfinite(step) else self.rates.step
        chunks = min(range(1, CHUNKS + 1), key=lambda n: wave_time(seq, n, overlap.width, step, self.rates))
        least = min(ceil(self.rates.sequence / step), chunk_steps(seq, chunks, 1))
        return structs.replace(overlap, chunks=ceil(seq / chunk_steps(seq, chunks, least)), least=least)

    def explained(self, made: Arrangement, serial: Arrangement | None) -> Arrangement:
        reasons = ["as requested"] if serial is None else []
        if isfinite(made.expected):
            reasons.append(f"about {made.expected / 1e3:.0f} µs expected for {self.whole.seq} steps")
        if serial is not None and isfinite(serial.expected):
            reasons.append(f"{serial.expected / 1e3:.0f} one after the other")
        cores = self.device.cores
        text = f"; on {cores // made.overlap.width} of {cores} multiprocessors, {made.overlap}: {', '.join(reasons)}"
        return replace(made, chosen=tuple(replace(one, provenance=one.provenance + text) for one in made.chosen))
