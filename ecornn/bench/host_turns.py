"""Sides that take turns on a CPU, which has other work, too: what `take_turns` is on a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ecornn.bench.turns import Run

LONG = 1.0  # seconds; longer runs are not preceded by one that is not timed
SAMPLE = 2e-3  # seconds that a side runs at least in its turn: shorter runs are made several times
MOST = 50  # times, at most
PAUSE = 0.005  # seconds in which no thread of this process must run before a side's turn
FOREIGN = 0.03  # seconds of other processes in a round that are too many, and share of its time
AGAIN = 4  # times as many rounds as asked for, at most, where others disturb them


def settle() -> None:
    """Waits until no thread of this process spins any more; ONNX Runtime's do for some 40 ms."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - before < PAUSE / 5:
            return


def foreign() -> float:
    """Seconds of processor time that other processes, and other machines on this host, have used so far."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def seconds_of(run: Run) -> float:
    """Of one run, by the clock on the wall."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class HostTurns:
    """Seconds of every run that counts, of each side the runs of each of its turns; and how many rounds were made
    again since other processes used the processors."""

    turns: dict[str, list[list[float]]]
    disturbed: int

    def runs(self, name: str) -> list[float]:
        """Each run by itself."""
        return [taken for turn in self.turns[name] for taken in turn]

    def means(self, name: str) -> list[float]:
        """Of each turn."""
        return [sum(turn) / len(turn) for turn in self.turns[name]]


def take_turns(sides: Mapping[str, Run], fresh: Callable[[], object], repeats: int, seconds: float = float("inf"),
               fewest: int = 3, clock: Callable[[Run], float] = seconds_of) -> HostTurns:
    """``repeats`` rounds, or as many as ``seconds`` allow, ``fewest`` at least.

    ``fresh`` makes the next round's input. In its turn a side waits until the threads of the one before have stopped
    spinning; then come as many runs that are not timed, which wake threads and bring weights back to the caches, as
    timed ones. A round in which other processes used the processors is made again, within ``seconds``, and up to
    ``AGAIN`` times as many in all.
    """
    counts, long = {}, {}
    for name, run in sides.items():
        clock(run)
        took = clock(run)
        counts[name], long[name] = max(1, min(MOST, int(SAMPLE / max(took, 1e-7)))), took > LONG
    turns: dict[str, list[list[float]]] = {name: [] for name in sides}
    made, kept, end = 0, 0, time.monotonic() + seconds
    while kept < repeats and (kept < fewest or time.monotonic() < end):
        start, before, round_ = time.perf_counter(), foreign(), {}
        fresh()
        for name, run in sides.items():
            settle()
            for _ in range(0 if long[name] else counts[name]):
                run()
            round_[name] = [clock(run) for _ in range(counts[name])]
        used, made = foreign() - before, made + 1
        if (used > max(FOREIGN, FOREIGN * (time.perf_counter() - start)) and made <= AGAIN * repeats
                and time.monotonic() < end):
            continue
        kept += 1
        for name, turn in round_.items():
            turns[name].append(turn)
    return HostTurns(turns, made - kept)
