"""A case measured: ours made ready, every side checked, and those that are right timed in turns. Layers of a grid in
processes of their own: some compile ahead, one measures and is replaced where it hangs or breaks the GPU for itself."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from ecornn import compiler
from ecornn.bench.expected import errors_of, expected, limits_of
from ecornn.bench.grid import Case, Layer, Own
from ecornn.bench.peers import installed, peer, usual
from ecornn.bench.results import OURS, Row, RowLog, append, shown
from ecornn.bench.turns import Ready, Side, Subject, Times, Weights, machine_of, ours, random_weights, uniform_weights
from ecornn.cells import BUILTIN, Cell, get
from ecornn.cells.naming import load_cell
from ecornn.errors import ArgumentError, EcornnError
from ecornn.host_cpu import physical_cores
from ecornn.quick_tvm import import_tvm
from ecornn.runtime.loader import Module, check_host, load
from ecornn.tune.pool import idle_workers
from ecornn.tune.timing import several
from ecornn.worker import Worker, WorkerError

GRAPH = 300  # steps of the calls that are timed as one, at most
HERE = __name__
COMPILING = 600.0  # seconds of the modules of a layer, at most


@dataclass(frozen=True)
class Plan:
    """How cases are measured."""

    against: tuple[str, ...] | None  # None: who is there
    seconds: float = 2.0  # of timing a side
    seed: int = 0  # of the weights and inputs
    told: Callable[[str], object] = lambda text: None  # called with what comes next
    own: Mapping[str, Own] = field(default_factory=dict)  # sides of ours beside ours
    calls: int = 1  # of a short sequence that are timed as one
    folder: Path | None = None  # where modules are, and are kept
    more: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # timed beside all sides, unchecked


def measure(case: Case, plan: Plan) -> Row:
    """Times a case. Raises what :func:`ecornn.compile` and ``ecornn.load`` raise; :class:`MissingPackageError` for a
    side that is not installed, :class:`ArgumentError` for what a module was not compiled for."""
    with tempfile.TemporaryDirectory(prefix="ecornn-") as temporary:
        folder = plan.folder or Path(temporary)
        module, cell, against = made(case, plan, folder / f"{OURS}.so")
        rng, manifest = np.random.default_rng(plan.seed), module.manifest
        subject = Subject(module, cell, case.seq or manifest.workload.seq, case.batch or manifest.workload.batch,
                          _threads(case, manifest.device.kind), case.training, machine_of(module, plan.seed))
        weights = (uniform_weights(module, rng) if cell is None else
                   random_weights(cell, subject.work, subject.stack, rng))
        whole = _whole(case, subject)
        row = Row(case=whole, command=shlex.join(whole.command(against)), device=manifest.device.name,
                  workload=subject.work, stack=subject.stack, seq=subject.steps, batch=subject.rows,
                  calls=max(1, min(plan.calls, GRAPH // subject.steps)), schedule=manifest.schedule,
                  config=manifest.config, provenance=manifest.provenance)
        sides = {OURS: ours(subject, weights)}
        others = {name: _own_side(name, own, case, subject, weights, rng, folder / f"{name}.so")
                  for name, own in plan.own.items()}
        for name, found in (others | {name: peer(name, subject, weights, rng) for name in against}).items():
            if isinstance(found, str):  # why there is none
                row.left_out[name] = found
                plan.told(f"leaving out {name}: {found}")
            else:
                sides[name] = found
        row.about = {name: side.about for name, side in sides.items()}
        ready = _checked(row, subject, sides, plan)
        ready |= {name: Ready(call, dict) for name, call in plan.more.items()}
        row.about |= dict.fromkeys(plan.more, "as it is called")
        row.errors |= dict.fromkeys(plan.more)
        if ready:
            plan.told(f"timing {', '.join(ready)}")
            times, row.disturbed = subject.machine.take_turns(ready, subject.refill, plan.seconds * len(ready))
            row.us_per_step = {name: Times.of(of, subject.steps * row.calls) for name, of in times.items()}
        if OURS in row.us_per_step:
            own_us = row.us_per_step[OURS].median
            row.ratios = {name: of.median / own_us for name, of in row.us_per_step.items() if name != OURS}
        return row


def _own_side(name: str, own: Own, case: Case, subject: Subject, weights: Weights, rng: np.random.Generator,
              out: Path) -> Side | str:
    """A side of ours beside ours: with the same weights where it is the same cell; or why there is none."""
    try:
        module = load(own.build(case, out))
        cell = subject.cell if own.cell is None else load_cell(own.cell)
    except EcornnError as error:
        return str(error)
    other = replace(subject, module=module, cell=cell)
    if other.work.input != subject.work.input:
        return f"its input size is {other.work.input}, not {subject.work.input}"
    if own.cell is not None and cell is not None:
        weights = random_weights(cell, other.work, other.stack, rng)
    found, config = ours(other, weights), module.manifest.config
    return replace(found, name=name, about=" ".join([found.about, *(f"{k}={v}" for k, v in config.items())]))


def made(case: Case, plan: Plan, out: Path) -> tuple[Module, Cell | None, tuple[str, ...]]:
    """The module, compiled to ``out`` if it is not there; its cell, if known; and whom it is compared with."""
    if case.module is not None:
        module = load(case.module)
        check_host(module.manifest.device, 0)
        return module, _cell_of(module, case), _against(plan, module.manifest.device.kind)
    layer = case.layer()
    plan.told(f"planning {layer.workload}")
    planned = compiler.plan_layer(layer, target=case.target)
    check_host(planned.device, 0)
    against = _against(plan, planned.device.kind)
    for of, text, why in planned.why():
        plan.told(f"schedule{f' of {of}' if of else ''}: {text} ({why})")
    if not out.exists():
        plan.told("compiling")
        compiler.build(planned, out)
    return load(out), planned.cell, against


def _threads(case: Case, kind: str) -> int | None:
    """The threads of every side, on a CPU."""
    if kind == "llvm":
        return case.threads or physical_cores(sorted(os.sched_getaffinity(0)))
    if case.threads is not None:
        raise ArgumentError("--threads", case.threads, "no such option for a GPU")
    return None


def _whole(case: Case, subject: Subject) -> Case:
    """The case with what it left open, so that its command does not depend on defaults, or on the machine."""
    open_: dict[str, Any] = {"seq": subject.steps, "batch": subject.rows, "threads": subject.threads}
    if case.module is None:
        open_ |= {"dtype": subject.work.dtype, "target": "cuda" if subject.kind == "cuda" else "cpu"}
    return structs.replace(case, **{name: value for name, value in open_.items() if getattr(case, name) is None})


def _against(plan: Plan, kind: str) -> tuple[str, ...]:
    if plan.against is None:
        found = usual(kind)
        if not found:
            plan.told("nothing to compare with: no PyTorch is installed that supports this device")
        return found
    installed(plan.against, kind)
    return plan.against


def _cell_of(module: Module, case: Case) -> Cell | None:
    """A module's cell: a built-in one, or the one that is named, if the module is of that."""
    name = module.manifest.workload.cell
    if case.cell is None:
        return get(name) if "@" not in name and name.partition("(")[0] in BUILTIN else None
    cell = load_cell(case.cell)
    if cell.identity() != name:
        raise ArgumentError("--cell", case.cell, f"the cell of {module.path}, {name}; this one is {cell.identity()}")
    return cell


def _checked(row: Row, subject: Subject, sides: Mapping[str, Side], plan: Plan) -> dict[str, Ready]:
    """The sides whose results are right; the row has the others."""
    ready: dict[str, Ready] = {}
    for name, side in sides.items():
        plan.told(f"preparing {name}")
        try:
            if subject.training and (peak := subject.machine.peak(side.call)) is not None:
                row.peak_mib[name] = peak / 2**20
            ready[name] = subject.machine.ready(several(side.call, row.calls))
            ready[name].run()
        except Exception as error:  # whatever a library cannot do, the others are timed
            if name == OURS:
                raise
            row.left_out[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            plan.told(f"leaving out {name}: {row.left_out[name]}")
    sides = {name: side for name, side in sides.items() if name not in row.left_out}
    subject.refill()  # so that what a graph wrote when it was captured is nobody's result
    errors: dict[str, dict[str, float]] = {}
    answers: dict[int, Mapping[str, np.ndarray]] = {}
    for name, side in sides.items():
        if side.cell is None:
            plan.told(f"{name} is not checked, because the module file does not contain the step; give --cell")
            row.errors[name] = None
            continue
        if id(side.weights) not in answers:
            plan.told(f"computing the expected result of {name} in float64")
            answers[id(side.weights)] = expected(side.subject or subject, side.cell, side.weights)
        errors[name] = errors_of(subject, ready[name].results(), answers[id(side.weights)])
    for name, found in errors.items():
        limits = limits_of(subject, sides[name], errors, sides)
        worst = max(found, key=lambda result: found[result] / limits[result])
        row.errors[name], row.limits[name] = off, limit = found[worst], limits[worst]
        if not off <= limit:
            row.wrong[name] = f"{'gradient of ' * subject.training}{worst}: error {off:.2e}, allowed {limit:.2e}"
    get = subject.machine.arrays.get
    for name, side in sides.items():
        if side.subject is not None and name not in row.wrong:
            first = {result: get(value).copy() for result, value in ready[name].results().items()}
            if not all(np.array_equal(first[result], get(value), equal_nan=True)
                       for result, value in ready[name].results().items()):
                row.wrong[name] = "two runs with the same input differ"
    return {name: ready[name] for name in sides if name not in row.wrong}


def failed(case: Case, plan: Plan, why: str) -> Row:
    return Row(case=case, command=shlex.join(case.command(plan.against or ())), failed=why)


class Asked(msgspec.Struct, frozen=True):
    """A layer, and how it is measured; modules are in ``folder``."""

    layer: Layer
    seconds: float
    seed: int
    calls: int
    folder: str


def ready(_: None) -> bool:
    """Imports what takes long, before a process is asked for anything: that is no layer's time."""
    import_tvm()
    return True


def compile_ahead(asked: Asked) -> int:
    """Builds a layer's modules; how many there are. What cannot be built the process that measures says."""
    layer, count = asked.layer, 0
    for name, own in {OURS: Own(), **layer.own}.items():
        with contextlib.suppress(EcornnError):
            own.build(own.case(layer.case), Path(asked.folder) / f"{name}.so")
            count += 1
    return count


def measure_alone(asked: Asked) -> Row:
    layer = asked.layer
    return measure(layer.case, Plan(layer.against, asked.seconds, asked.seed, own=layer.own, calls=asked.calls,
                                    folder=Path(asked.folder)))


def compiled(layers: Sequence[Layer], plan: Plan, folder: Path, jobs: int) -> Iterator[tuple[Layer, Asked]]:
    """The layers in their order, each as soon as its modules are in its folder; ``jobs`` are compiled at a time."""
    every = []
    for layer in layers:
        own = folder / hashlib.sha256(layer.name.encode()).hexdigest()[:16]
        own.mkdir(parents=True, exist_ok=True)
        compared = structs.replace(layer, against=plan.against if layer.against is None else layer.against)
        every.append(Asked(compared, plan.seconds, plan.seed, plan.calls, str(own)))
    builders, idle = idle_workers(jobs, f"{HERE}:ready", True)

    def build(asked: Asked) -> None:
        worker = idle.get()
        try:
            with contextlib.suppress(WorkerError):  # the process that measures tries again, and says why
                worker.call(f"{HERE}:compile_ahead", asked, int, COMPILING)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(build, asked) for asked in every]
        for layer, asked, future in zip(layers, every, futures, strict=True):
            future.result()
            yield layer, asked
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in builders:
            worker.stop()


def measured(layers: Sequence[Layer], plan: Plan, folder: Path, jobs: int, longest: float) -> Iterator[Row]:
    """Rows in the order of the layers, ``jobs`` of which are compiled at a time; each may take ``longest`` seconds."""
    alone = Worker(f"{HERE}:ready", gpu=True)
    try:
        for layer, asked in compiled(layers, plan, folder, jobs):
            try:
                yield alone.call(f"{HERE}:measure_alone", asked, Row, longest)
            except WorkerError as error:
                alone.kill()  # after an error of the GPU nothing runs in its process any more
                yield failed(layer.case, plan, str(error))
    finally:
        alone.stop()


def measure_into(log: RowLog, layers: Sequence[Layer], plan: Plan, folder: Path, jobs: int, longest: float,
                 more: Callable[[Layer, Row], Mapping[str, Any]] = lambda layer, row: {}) -> bool:
    """Appends the rows that a file lacks, with what ``more`` says of each; True if all are there and right."""
    left, good = [layer for layer in layers if not log.has(layer.name)], True
    for layer, row in zip(left, measured(left, plan, folder, jobs, longest), strict=True):
        row.name, row.group = layer.name, layer.group
        append(log, row, {} if row.failed else more(layer, row))
        good &= row.good
        print("\n".join(shown(row)), flush=True)
    return good
