"""``compile()``: a cell at one size -> best record or heuristic -> program -> module."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ecornn.cells import Cell
from ecornn.device import Device, resolve
from ecornn.workload import Workload, rounded

if TYPE_CHECKING:
    from ecornn.build.generated import Generated
    from ecornn.runtime.loader import Module
    from ecornn.schedules.base import Task, Value
    from ecornn.tune.lookup import Found


@dataclass(frozen=True)
class Plan:
    """What will be built: the cell's task and the schedule that was chosen, with its provenance."""

    cell: Cell
    task: Task
    found: Found


def plan(cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = 1, seq: int = 100,
         dtype: str = "float32", weights: str | None = None, target: str | Device | None = None,
         schedule: str | None = None, config: Mapping[str, Value] | None = None) -> Plan:
    """Analyses the cell and chooses schedule and configuration; arguments as :func:`compile`."""
    from ecornn.task import make_task
    from ecornn.tune.cell_spec import load_cell
    from ecornn.tune.choose import choose, default_target

    device = resolve(target if target is not None else default_target())
    found = load_cell(cell) if isinstance(cell, str) else cell
    work = Workload(found.identity(), hidden, hidden if input is None else input, batch, seq, dtype,
                    rounded(weights, dtype))
    task = make_task(found, work, device)
    return Plan(found, task, choose(task, schedule, config))


def build(planned: Plan, out: Path) -> Generated:
    """Writes the module file ``out``, complete or not at all; returns what was generated."""
    from ecornn.build.module import build_module
    from ecornn.task import make_manifest

    found = planned.found
    program = found.schedule.program(planned.task, found.config)
    manifest = make_manifest(planned.cell, planned.task, found.schedule, found.config, program,
                             found.provenance)
    return build_module(program, manifest, out)


def generate(planned: Plan) -> Generated:
    """The code alone, for whatever machine it is; nothing is linked."""
    from ecornn.build.module import generate as generate_code

    found = planned.found
    return generate_code(found.schedule.program(planned.task, found.config), planned.task.device)


def compile(cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = 1, seq: int = 100,
            dtype: str = "float32", weights: str | None = None, target: str | Device | None = None,
            schedule: str | None = None, config: Mapping[str, Value] | None = None,
            out: str | Path | None = None) -> Module:
    """Compiles one recurrent layer.

    Parameters
    ----------
    cell : a built-in cell's name (``lstm``, ``gru``, ``gru_reset_before``, ``rnn_tanh``,
        ``rnn_relu``), ``FILE.py:NAME`` of a cell, or a Cell
    hidden, input : H and I (default: H)
    batch : the largest B that the module must serve
    seq : the T to expect; the module serves every T >= 1
    dtype : ``float32``, ``float16`` or ``bfloat16``, of x, y, states and weights
    weights : what matrices of weights are rounded to, on a CPU: ``bfloat16`` (relative error about 2e-3) or
        ``int8`` (about 1e-2; needs VNNI; the operands are rounded too); default: ``dtype``
    target : ``cuda`` (the GPU at hand), ``cpu``, or an architecture such as ``sm_90a``, which needs
        no GPU; default: the GPU if there is one, else the CPU
    schedule, config : use this schedule, and these knobs, instead of the best tuning record
    out : where to keep the module file; default: a temporary file that lives as long as the module

    Raises :class:`~ecornn.errors.EcornnError` subclasses: ``ArgumentError`` for bad arguments,
    ``DeviceError`` where the target is not at hand, ``CellError`` for a cell that cannot be
    analysed, ``ScheduleError`` where no schedule serves the layer or the configuration cannot run,
    ``BuildError`` where a compiler is missing or fails.
    """
    from ecornn.runtime.loader import load

    planned = plan(cell, hidden=hidden, input=input, batch=batch, seq=seq, dtype=dtype, weights=weights,
                   target=target, schedule=schedule, config=config)
    if out is not None:
        build(planned, Path(out))
        return load(Path(out))
    folder = tempfile.mkdtemp(prefix="ecornn-")
    try:
        path = Path(folder, f"{planned.cell.name}.so")
        build(planned, path)
        module = load(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True)
    return module
