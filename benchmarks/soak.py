"""Threads that load, bind, run and train layers of many shapes on busy cores, for as long as one says.

    python benchmarks/soak.py 600 --output build/soak.json

Each of ``--threads`` threads does one job after the other, at random: it calls a layer that all share, loads a module
file or binds weights to it and drops them, calls or trains a layer of PyTorch's, packed or with weights that are new,
or a copy of a model. Every result is compared with one in float64, of NumPy or torch.nn, that was calculated before.
``--busy`` other processes take whole cores meanwhile. A line every five seconds says how far it is.

Exits with 0 if no result was wrong, no thread raised or stood still, and memory is flat, in the last quarter of the
time against the quarter before the middle, by medians: the process has at most ``--growth`` MB more; malloc() has given
and not got back at most a quarter of that more, but for workspaces; and no layer keeps more of these than there are
threads, one for each call that ran at the same time as others. Memory is looked at every five seconds while no call is
under way, since each counts with what it needs itself, and after what was freed has gone back to the system.

All threads share one heap of malloc()'s. With a heap for each, as glibc has it, what is free in one is of no use to
others: the process has 100 MB more, and goes on growing for minutes, while what is in use is the same. Where the C
library does not share one only that must be flat.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from side_by_side import busy, options
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import ecornn
import ecornn.torch
from ecornn.runtime.memory import Pool
from ecornn.torch.kind import text_of

FORWARD, BACKWARD = 1e-5, 2e-5  # relative errors of float32
STILL = 120  # seconds in one call after which a thread is taken to hang
EVERY = 5  # seconds between looks at the memory
TORCH = [  # a layer, its sizes, what it is, and (T, B) of calls; the last one is what tests compile anyway
    ("LSTM", (24, 40), {"num_layers": 2}, [(18, 5), (7, 3), (2, 1)]),
    ("GRU", (16, 32), {"bidirectional": True}, [(18, 5), (7, 3), (2, 1)]),
    ("RNN", (7, 11), {}, [(6, 4), (13, 3), (2, 1)])]
COMPILED = {  # name: what ecornn.compile() is told, and sizes (T, B) that it is called with
    "lstm": ({"cell": "lstm", "hidden": 48, "input": 24, "batch": 4, "seq": 20}, [(20, 4), (1, 1), (33, 3)]),
    "wide lstm": ({"cell": "lstm", "hidden": 320, "input": 64, "batch": 8, "seq": 12}, [(12, 8), (5, 2)]),
    "gru, lengths": ({"cell": "gru", "hidden": 33, "input": 17, "batch": 6, "seq": 15, "lengths": True},
                     [(15, 6), (4, 5)]),
    "stack": ({"cell": "rnn_tanh", "hidden": 20, "input": 9, "batch": 3, "seq": 10, "layers": 2,
               "bidirectional": True}, [(10, 3), (21, 2)])}


@dataclass(frozen=True)
class Case:
    """One call: what it does, what must come of it, and how near."""

    name: str
    call: Callable[[], list[Any]]
    wanted: list[np.ndarray]
    limit: float = FORWARD


def error(found: list[Any], wanted: list[np.ndarray]) -> float:
    """The largest relative error of a result's arrays."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        values = np.asarray(one.detach() if isinstance(one, torch.Tensor) else one, np.float64)
        assert values.shape == other.shape
        value = float(np.linalg.norm(values - other) / max(np.linalg.norm(other), 1e-30))
        worst = max(worst, value if np.isfinite(value) else float("inf"))
    return worst


def module_cases(folder: Path, draw: np.random.Generator, few: bool = False) -> Iterator[Case]:
    """Modules of ``ecornn.compile``: layers that are shared, with 1 and 2 threads; bound anew; and loaded anew."""
    for name, (given, sizes) in [*COMPILED.items()][:1 if few else None]:
        module = ecornn.compile(target="cpu", **given)
        file = folder / f"{name.split(',')[0].replace(' ', '_')}.so"
        module.save(file)
        weights = {p.name: draw.uniform(-0.3, 0.3, p.shape).astype(np.float32) for p in module.manifest.parameters}
        makers: list[tuple[str, Callable[[], Any]]] = [
            *(("shared", partial(lambda layer: layer, module.bind(weights, threads=threads))) for threads in (1, 2)),
            ("bound", partial(module.bind, weights)),
            ("loaded", lambda file=file, weights=weights: ecornn.load(file).bind(weights, threads=1))]
        for steps, batch in sizes:
            x = draw.standard_normal((steps, batch, given["input"])).astype(np.float32)
            masks = {"lengths": [1 + n * (steps - 1) // batch for n in range(batch)]} if "lengths" in given else {}
            y, state = ecornn.reference(given["cell"], x, weights, **masks)

            def run(make: Callable[[], Any], x: Any = x, masks: Any = masks) -> list[Any]:
                y, state = make()(x, **masks)
                return [y, *state]

            for job, make in makers:
                yield Case(f"{name}: {job}", partial(run, make), [y, *state])


def torch_cases(few: bool = False) -> Iterator[Case]:
    """Layers of ``ecornn.torch``, which all threads share: called, packed, with other weights, trained, copied."""
    for name, sizes, given, calls in TORCH[-1 if few else 0:]:
        theirs = getattr(torch.nn, name)(*sizes, **given).double()
        model = torch.nn.Sequential(copy.deepcopy(theirs).float())
        ecornn.torch.replace(model)
        for steps, batch in calls:
            yield from cases_of(name, theirs, model, torch.randn(steps, batch, sizes[0]))


def cases_of(name: str, theirs: torch.nn.Module, model: torch.nn.Sequential, x: torch.Tensor) -> Iterator[Case]:
    """The calls of one layer with one x."""
    ours, (steps, batch) = model[0], x.shape[:2]
    lengths = [max(1, steps * (n + 1) // batch) for n in range(batch)]
    packed, exact = (pack_padded_sequence(v, lengths, enforce_sorted=False) for v in (x, x.double()))
    half = {name: 0.5 * w.detach() for name, w in theirs.named_parameters()}

    def no_grad(call: Callable[[], Any]) -> Callable[[], list[torch.Tensor]]:
        return torch.no_grad()(lambda: flat(call()))

    def trained(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)[0]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]

    plain = no_grad(lambda: theirs(x.double()))
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "called": (no_grad(lambda: model(x)), plain),
        "packed": (no_grad(lambda: ours(packed)), no_grad(lambda: theirs(exact))),
        # functional_call() puts weights into a layer, where other threads would find them
        "other weights": (no_grad(lambda: torch.ops.ecornn.recurrent(
            x, [], None, [0.5 * w for w in ours.parameters()], text_of(ours))),
                          no_grad(lambda: functional_call(theirs, half, (x.double(),)))),
        "trained": (lambda: trained(ours, x), lambda: trained(theirs, x.double())),
        "copied": (no_grad(lambda: copy.deepcopy(model)(x)), plain)}
    for job, (mine, wanted) in pairs.items():
        yield Case(f"{name}: {job}", mine, [t.numpy() for t in wanted()], BACKWARD if job == "trained" else FORWARD)


def flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.nn.utils.rnn.PackedSequence):
        return [result.data]
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


class Heap(ctypes.Structure):
    """What mallinfo2() of malloc.h returns, in bytes, of the heaps of all threads."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "chunks", "small", "mappings", "mapped", "most",
                                                     "small_free", "in_use", "free", "releasable")]


def in_use() -> int | None:
    """Bytes that malloc() has given and not got back, after a collection; None with a C library that does not say."""
    gc.collect()
    if (ask := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return None
    ask.restype = Heap
    found = ask()
    return int(found.in_use + found.mapped)


def share_one_heap() -> bool:
    """Has all threads that begin later use one heap of malloc()'s. Each otherwise has one of its own, from which others
    get nothing: what a process has then grows as long as the peaks of its threads meet otherwise than before, though
    no more is in use. False with a C library that does not take it."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and bool(libc.mallopt(-8, 1))  # M_ARENA_MAX of malloc.h


def workspaces() -> tuple[int, int]:
    """Bytes that layers keep for their next calls, and the most pieces that one of them keeps: as many as its calls
    that ran at the same time."""
    kept = [pieces for pool in gc.get_objects() if type(pool) is Pool for pieces in pool.idle().values()]
    return sum(sum(pieces) for pieces in kept), max(map(len, kept), default=0)


def resident() -> float:
    """MB of this process that are in memory, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Memory(NamedTuple):
    """MB at one time."""

    process: float  # that are in memory, without what was freed
    given: float  # that malloc() has given and not got back, without ``workspaces``
    workspaces: float  # that layers keep for later calls
    pieces: int  # the most that one layer keeps

    @classmethod
    def now(cls) -> Memory:
        process, (kept, pieces) = resident(), workspaces()
        return cls(process, ((in_use() or kept) - kept) / 1e6, kept / 1e6, pieces)


class Soak:
    """The threads, and what they have seen."""

    def __init__(self, cases: list[Case], threads: int) -> None:
        self.cases, self.ending = cases, threading.Event()
        self.calls: collections.Counter[str] = collections.Counter()
        self.worst: dict[str, float] = {}
        self.faults: list[str] = []
        self.seen, self.doing, self.seconds = [time.monotonic()] * threads, [""] * threads, 0.0
        self._lock = threading.Lock()
        self._pausing, self._pause = threading.Event(), threading.Barrier(threads + 1)
        self._threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(threads)]

    def _work(self, number: int) -> None:
        order = random.Random(number)
        while not self.ending.is_set():
            if self._pausing.is_set():
                try:
                    self._pause.wait()  # until nobody works
                    self._pause.wait()  # until that was looked at
                except threading.BrokenBarrierError:  # one of them does not come
                    return
                self.seen[number] = time.monotonic()
            case = order.choice(self.cases)
            self.doing[number] = case.name
            try:
                value = error(case.call(), case.wanted)
                fault = "" if value <= case.limit else f"{case.name}: an error of {value:.3g}, {case.limit} is allowed"
            except Exception:  # whatever a case raises is a fault, and told as one; the thread must not die of it
                value, fault = 0.0, f"{case.name}: {traceback.format_exc(limit=-3)}"
            with self._lock:
                self.calls[case.name] += 1
                self.worst[case.name] = max(self.worst.get(case.name, 0.0), value)
                if fault:
                    self.faults.append(fault)
            self.seen[number] = time.monotonic()

    def run(self, seconds: float, each: int = 0) -> list[Memory]:
        """Memory every ``EVERY`` seconds, until ``each`` case was called so often, too; ends early where something is
        wrong or stands still."""
        begin, memory = time.monotonic(), list[Memory]()
        self.seen = [begin] * len(self.seen)
        for thread in self._threads:
            thread.start()
        while not self.faults and ((passed := time.monotonic() - begin) < seconds
                                   or any(self.calls[case.name] < each for case in self.cases)):
            time.sleep(min(EVERY, seconds - passed) if passed < seconds else EVERY)
            try:
                now = self._at_rest()
            except threading.BrokenBarrierError:
                kind = self.doing[self.seen.index(min(self.seen))]
                self.faults.append(f"a thread has stood still for {STILL} seconds in {kind}")
                faulthandler.dump_traceback(all_threads=True)
                break
            memory.append(now)
            print(f"{passed:6.0f} s  {self.calls.total():8d} calls  {now.process:7.1f} MB, {now.given:6.1f} given, "
                  f"{now.workspaces:5.1f} of workspaces  worst error {max(self.worst.values(), default=0):.1e}  "
                  f"{len(self.faults)} wrong", flush=True)
        self.seconds = time.monotonic() - begin
        self.ending.set()
        for thread in self._threads:
            thread.join(STILL)
        return memory

    def _at_rest(self) -> Memory:
        """Memory while all threads wait; ``BrokenBarrierError`` where one does not come to it."""
        self._pausing.set()
        self._pause.wait(STILL)
        self._pausing.clear()
        found = Memory.now()
        self._pause.wait()
        return found


def growth(memory: list[float]) -> float:
    """MB of the last quarter more than of the quarter before the middle, by their medians."""
    quarter = max(1, len(memory) // 4)
    return statistics.median(memory[-quarter:]) - statistics.median(memory[quarter:2 * quarter] or memory[:1])


def not_flat(memory: list[Memory], allowed: float, threads: int, one_heap: bool) -> list[str]:
    """What has grown, by more than ``allowed`` MB of the process, or a quarter of these of what is in use."""
    process, given = growth([m.process for m in memory]), growth([m.given for m in memory])
    pieces = max(m.pieces for m in memory)
    found = {f"memory has grown by {process:.1f} MB": one_heap and process > allowed,
             f"what malloc() has given has grown by {given:.1f} MB": given > allowed / 4,
             f"a layer keeps {pieces} workspaces": pieces > threads}
    return [words for words, so in found.items() if so]


def main() -> int:
    parser = options(__doc__, threads=(16, ""), busy=(len(os.sched_getaffinity(0)), "processes that take cores"),
                     growth=(4.0, "MB more that are still flat"),
                     each=(0, "calls of each kind at least, however long these take"))
    parser.add_argument("seconds", type=float, nargs="?", default=600)
    parser.add_argument("--few", action="store_true", help="of one module and one layer, which compile in seconds")
    arguments = parser.parse_args()
    faulthandler.enable()
    os.environ.setdefault("ECORNN_STRICT", "1")
    torch.manual_seed(0)
    one_heap = share_one_heap()
    with tempfile.TemporaryDirectory() as folder:
        cases = [*itertools.chain(module_cases(Path(folder), np.random.default_rng(0), arguments.few),
                                  torch_cases(arguments.few))]
        for case in cases:  # compiles what torch's layers need
            if (found := error(case.call(), case.wanted)) > case.limit:
                raise SystemExit(f"{case.name}: relative error {found:.2g}, above {case.limit:.2g}")
        print(f"{len(cases)} calls of {len({c.name for c in cases})} kinds, {arguments.threads} threads, "
              f"{arguments.busy} busy processes, {resident():.1f} MB", flush=True)
        with busy(arguments.busy):
            soak = Soak(cases, arguments.threads)
            memory = soak.run(arguments.seconds, each=arguments.each)
    soak.faults += not_flat(memory, arguments.growth, arguments.threads, one_heap) if memory else []
    for fault in soak.faults[:5]:
        print(fault)
    more = {name: growth([getattr(m, name) for m in memory]) for name in ("process", "given") if memory}
    found = {"seconds": round(soak.seconds), "threads": arguments.threads, "busy": arguments.busy,
             "calls": soak.calls.total(), "wrong": len(soak.faults), "faults": soak.faults[:5],
             "growth_mb": {name: round(value, 1) for name, value in more.items()},
             "kinds": {name: {"calls": count, "worst_error": float(f"{soak.worst[name]:.2g}")}
                       for name, count in sorted(soak.calls.items())}}
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{soak.calls.total()} calls, {len(soak.faults)} faults, "
          f"{', '.join(f'{name} {value:+.1f} MB' for name, value in more.items())}: "
          f"{'FAILED' if soak.faults else 'all right'}")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
