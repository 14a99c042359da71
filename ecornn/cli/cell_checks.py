"""The checks of ``ecornn check-cell``: a cell with every schedule and type, at a small size.

A CPU's modules are built and run, and held against the te step in NumPy float64 (``interpreter.py``); their gradients
against those that were derived, once these agree with differences of that step. A GPU's code is generated, not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import Backpropagated, carry_out
from ecornn.build.cuda import lower
from ecornn.cells import Cell
from ecornn.compiler import compile
from ecornn.device import Device
from ecornn.dtypes import SERVED
from ecornn.errors import BuildError, CellError, EcornnError, InternalError
from ecornn.interpreter import interpret
from ecornn.schedules import Config, Schedule
from ecornn.schedules.base import Task
from ecornn.task import adjoint_task, make_program, make_task
from ecornn.tune import adjoint_oracle, oracle
from ecornn.tune.choose import candidates, serving_or_raise
from ecornn.tune.record import GRADIENTS, tolerance
from ecornn.workload import Traversal, Workload

RIGHT, WRONG, YES, NO, FAILS = "right", "wrong", "yes", "no", "fails"
EXACT = 1e-12  # of gradients in float64
FAINT = 1e-6  # a gradient is held against the largest one's norm, times this, if it is smaller still


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of one check: ``right`` or ``wrong`` where code was run, else ``yes`` or ``no``; ``fails``: an error
    that says nothing of the cell, or none that ecornn raises on purpose; ``""``: not tried."""

    result: str
    error: float | None = None  # relative, of what was run
    limit: float | None = None  # the largest that is right
    why: str = ""  # of anything but a success


UNTRIED = Outcome("")


class Row(msgspec.Struct, frozen=True):
    """A schedule on a device, in one type: ``dtype`` as the table says it, such as ``float32, int8 weights``."""

    device: str
    schedule: str
    dtype: str
    forward: Outcome
    gradients: Outcome


class Report(msgspec.Struct, frozen=True):
    """The report on a cell: input, hidden, batch, steps are I, H, B and T that were tried."""

    cell: str
    input: int
    hidden: int
    batch: int
    steps: int
    analysis: Outcome  # of the step
    wide: Outcome  # of the step with I unlike H
    exchanges: int  # their number in a step
    derivative: Outcome  # whether gradients can be derived from the step, and agree with differences of the te step
    rows: tuple[Row, ...]  # one for each schedule and type

    @property
    def good(self) -> bool:
        """True where the step was analysed, and all that was tried is right or refused for a reason."""
        every = self.derivative, *(o for r in self.rows for o in (r.forward, r.gradients))
        return self.analysis.result == YES and all(o.result not in (WRONG, FAILS) for o in every)


def attempt(function: Callable[[], Outcome]) -> Outcome:
    """Returns its outcome; an :class:`EcornnError` is a no; a compiler that fails or is missing, ecornn's own fault and
    any other error are failures."""
    try:
        return function()
    except (InternalError, BuildError) as error:
        return Outcome(FAILS, why=str(error))
    except EcornnError as error:
        return Outcome(NO, why=str(error))
    except Exception as error:  # what schedules, TVM and compilers raise of a cell that they did not expect
        return Outcome(FAILS, why=f"{type(error).__name__}: {error}")


def check_cell(spec: str, cell: Cell, hidden: int, input: int | None, batch: int, devices: list[Device],
               told: Callable[[str], None] = lambda _: None) -> Report:
    """All checks; ``input`` None: another size than H if the cell takes one. ``told`` gets words on what comes next."""

    def analysed(size: int) -> Outcome:
        analyse(cell, cell.row_width(size, hidden), hidden)
        return Outcome(YES)

    other = input or hidden * 5 // 8 or 1
    wide = attempt(lambda: analysed(other))
    size = other if input or wide.result == YES else hidden
    analysis = wide if size != hidden else attempt(lambda: analysed(hidden))
    if analysis.result != YES:
        return Report(spec, size, hidden, batch, oracle.STEPS, analysis, wide, 0, UNTRIED, ())
    graph = analyse(cell, cell.row_width(size, hidden), hidden)
    checks = Checks(cell, size, hidden, batch)
    told("gradients of the te step")
    derivative = attempt(checks.derivative)
    rows = []
    for device in devices:
        told(device.name)
        rows += list(checks.on_cpu(device) if device.kind == "llvm" else checks.on_gpu(device))
    return Report(spec, size, hidden, batch, oracle.STEPS, analysis, wide, len(graph.phases), derivative, tuple(rows))


class Checks:
    """The checks of one cell at one size."""

    def __init__(self, cell: Cell, input: int, hidden: int, batch: int) -> None:
        self.cell, self.input, self.hidden, self.batch = cell, input, hidden, batch
        self.identity, self.width, self.derivable = cell.identity(), cell.row_width(input, hidden), False

    def work(self, dtype: str, weights: str | None = None, precision: str | None = None) -> Workload:
        return Workload(self.identity, self.hidden, self.width, self.batch, oracle.STEPS, dtype, weights, precision)

    def inputs(self, work: Workload) -> tuple[oracle.Inputs, adjoint_oracle.Upstream]:
        """Random inputs, and gradients of y and of the last states."""
        rng = np.random.default_rng(0)
        given = oracle.draw(self.cell, work, rng)
        shape, width = (work.batch, work.hidden), len(self.cell.output_names()) * work.hidden
        dy, *dstates = (oracle.rounded(rng.uniform(-1, 1, s), work.dtype)
                        for s in ((oracle.STEPS, work.batch, width), *(shape for _ in self.cell.states)))
        return given, (dy, dstates)

    def derived(self, given: oracle.Inputs, upstream: adjoint_oracle.Upstream) -> Backpropagated:
        backward = adjoint(analyse(self.cell, self.width, self.hidden), self.hidden)
        return carry_out(backward, given.x, given.shaped, given.states, *upstream)

    def derivative(self) -> Outcome:
        """Compares derived gradients with differences of the te step."""
        given, upstream = self.inputs(self.work("float32"))
        gradients = self.derived(given, upstream)
        self.derivable = True
        if fault := adjoint_oracle.disagreement(self.cell, given, upstream, gradients, np.random.default_rng(1)):
            return Outcome(WRONG, why=f"the derived gradient {fault} differs from finite differences of the te step")
        return Outcome(RIGHT)

    def on_cpu(self, device: Device) -> Iterator[Row]:
        """A row for each schedule and type, built and run."""
        for schedule in candidates(device):
            for dtype, weights in (*((d, None) for d in SERVED["llvm"]), *(("float32", w) for w in schedule.weights)):
                forward, gradients = self.run_one(device, schedule, dtype, weights)
                yield Row("cpu", schedule.name, f"{weights} weights" if weights else dtype, forward, gradients)

    def run_one(self, device: Device, schedule: Schedule, dtype: str, weights: str | None) -> tuple[Outcome, Outcome]:
        """The outcomes of forward and of gradients."""
        training, work = weights is None and self.derivable, self.work(dtype, weights)
        given, upstream = self.inputs(work)
        layer: Any = None
        untrained: Exception | None = None  # why there is no module that trains

        def compiled(trains: bool) -> Any:
            return compile(self.cell, hidden=self.hidden, input=self.input, batch=self.batch, seq=oracle.STEPS,
                           dtype=dtype, weights=weights, training=trains, target=device, schedule=schedule.name)

        def forward() -> Outcome:
            nonlocal layer, untrained
            try:
                module = compiled(training)
            except Exception as error:  # of the backward pass, where there is a module without one
                untrained, module = error, compiled(False)
            layer = module.bind({n: w.astype(dtype) for n, w in given.flat.items()})
            layer.whole_rows = True
            y, state = layer(given.x.astype(dtype), [s.astype(dtype) for s in given.states])
            wanted, last = interpret(self.cell, given.x, given.shaped, given.states)
            return compared(zip((y, *state), (wanted, *last), strict=True), tolerance(work))

        def gradients() -> Outcome:
            if layer is None:
                return UNTRIED
            if untrained is not None:
                raise untrained
            wanted = self.derived(given, upstream)
            _, _, values = layer.forward(given.x.astype(dtype), [s.astype(dtype) for s in given.states])
            got = layer.backward(values, upstream[0].astype(dtype), [d.astype(dtype) for d in upstream[1]])
            own = [(got.weights[self.cell.parameter_name(n)], w) for n, w in wanted.parameters.items()]
            pairs = [(got.x, wanted.dx), *((g, w.reshape(g.shape)) for g, w in own),
                     *zip(got.state, wanted.states, strict=True)]
            least = FAINT * max(oracle.norm(w) for _, w in pairs)
            return compared(pairs, EXACT if dtype == "float64" else GRADIENTS[dtype], least)

        return attempt(forward), attempt(gradients) if training else UNTRIED

    def on_gpu(self, device: Device) -> Iterator[Row]:
        """A row for each schedule and type, whose code is generated."""

        def training(schedule: Schedule, forward: Task) -> Outcome:
            """A training step whose recurrence this schedule carries out; the layer may have another one."""
            task = make_task(self.cell, forward.workload, forward.device, Traversal(keep="states"))
            return generated(serving_or_raise(task)[0], task, (schedule, adjoint_task(task)))

        for schedule in candidates(device):
            for dtype, precision in (("float32", None), ("float32", "tf32"), *((d, None) for d in SERVED["cuda"][1:])):
                task = make_task(self.cell, self.work(dtype, None, precision), device)
                yield Row(device.arch, schedule.name, precision or dtype, attempt(partial(generated, schedule, task)),
                          attempt(partial(training, schedule, task)) if self.derivable else UNTRIED)


def generated(schedule: Schedule, task: Task, backward: tuple[Schedule, Task] | None = None) -> Outcome:
    """The CUDA code of a layer, by the schedule's default; ``backward``: with that of its gradients."""
    chosen: list[tuple[Schedule, Config]] = []
    for one, of in filter(None, ((schedule, task), backward)):
        why = one.serves(of)
        config = {} if why else one.default(of)
        if why := why or one.check(of, config):
            return Outcome(NO, why=why)
        chosen.append((one, config))
    first, config = chosen[0]
    lower(make_program(first, task, config, chosen[1] if backward else None), task.device.arch)
    return Outcome(YES)


def compared(pairs: Any, limit: float, least: float = 0.0) -> Outcome:
    """The outcome for pairs of result and wanted value: the largest error, relative to a norm of ``least`` or more."""
    worst = 0.0
    for result, wanted in pairs:
        if not np.isfinite(wanted).all():
            raise CellError("with random states the te step gives values that are not finite in float64. If a state "
                            "is never below 0, name it in the cell's attribute `nonnegative`")
        worst = max(worst, oracle.relative_error(result, wanted, max(least, 1e-30)))
    if worst <= limit:
        return Outcome(RIGHT, worst, limit)
    return Outcome(WRONG, worst, limit, f"relative error {worst:.1e}, limit {limit:.1e}")
