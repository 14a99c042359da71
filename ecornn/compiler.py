"""``compile()``: a cell at one size -> best records or heuristic -> programs -> module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ecornn import temporary
from ecornn.boundary import public
from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.errors import ArgumentError
from ecornn.layer_spec import LayerSpec
from ecornn.targets import default_target, kind_of, resolve
from ecornn.workload import BATCH, SEQ, Overlap, Stack, Workload

if TYPE_CHECKING:
    from ecornn.build.generated import Generated
    from ecornn.manifest import Manifest
    from ecornn.program import Program
    from ecornn.runtime.loader import Module
    from ecornn.schedules.base import Task, Value
    from ecornn.tune.lookup import Found


@dataclass(frozen=True)
class LayerPlan:
    """A layer to be built: the sequences of the stack, each with the schedule chosen for it."""

    cell: Cell
    workload: Workload
    stack: Stack
    device: Device
    overlap: Overlap
    tasks: tuple[Task, ...]
    chosen: tuple[Found, ...]
    backward: tuple[Found | None, ...]  # for the recurrences of their adjoints, where these have one of their own

    @property
    def task(self) -> Task:
        """The first sequence; its device has as many multiprocessors as it may use."""
        return self.tasks[0]

    @property
    def found(self) -> Found:
        """The choice for all: the first sequence's schedule and configuration, and the provenance of each."""
        return replace(self.chosen[0], provenance="; ".join(f"{at}: {why}" if at else why for at, _, why in self.why()))

    def why(self) -> list[tuple[str, str, str]]:
        """(labels, schedule with its knobs, provenance) of each different choice; no labels if all are one."""
        labels = [part.label for part in self.stack.parts(self.workload)]
        return _told(labels, self.chosen, "") + _told(labels, self.backward, "backward")

    def programs(self) -> tuple[Program, ...]:
        """The sequences' programs; one object for sequences that are alike."""
        from ecornn.task import make_program

        programs: dict[object, Program] = {}
        for task, choice, inner in zip(self.tasks, self.chosen, self.backward, strict=True):
            if (key := (task.workload, task.traversal)) not in programs:
                backward = (inner.schedule, inner.config) if inner is not None else None
                programs[key] = make_program(choice.schedule, task, choice.config, backward, self.overlap)
        return tuple(programs[task.workload, task.traversal] for task in self.tasks)


def _told(labels: list[str], chosen: Iterable[Found | None], entry: str) -> list[tuple[str, str, str]]:
    """:meth:`LayerPlan.why` for the choices of one ``entry``, which is named if it is not the sequence itself."""
    labels_of: dict[tuple[str, str], list[str]] = {}
    for label, choice in zip(labels, chosen, strict=True):
        if choice is not None:
            text = " ".join((choice.schedule.name, *(f"{k}={v}" for k, v in choice.config.items())))
            labels_of.setdefault((text, choice.provenance), []).append(label)
    every = len(labels_of) == 1
    return [(" ".join(filter(None, (entry, "" if every else ", ".join(of)))), *key) for key, of in labels_of.items()]


def plan(cell: str | Cell, *, target: str | Device | None = None, schedule: str | None = None,
         config: Mapping[str, Value] | None = None, overlap: str = "auto", **properties: Any) -> LayerPlan:
    return plan_layer(LayerSpec(cell, **properties), target=target, schedule=schedule, config=config, overlap=overlap)


def device_of(target: str | Device | None) -> Device:
    """The device of a target; None: the GPU if there is one, else the CPU. Raises :class:`~ecornn.errors.ArgumentError`
    where it is none, :class:`~ecornn.errors.DeviceError` where it is not at hand."""
    if not isinstance(target, (str, Device, NoneType)):
        raise ArgumentError("target", target, "cuda, cpu, an architecture or a Device")
    return resolve(target if target is not None else default_target())


@contextlib.contextmanager
def host_code_for(target: str | Device | None) -> Iterator[None]:
    """Compiles the host code of a GPU's modules, unless the cache has it, while the caller imports TVM, checks a layer
    and plans it. Does nothing for a CPU, which TVM finds, and leaves errors of ``target`` to :func:`device_of`."""
    from ecornn.build.module import host_code_ahead

    target = default_target() if target is None else target
    kind = target.kind if isinstance(target, Device) else kind_of(str(target))
    with host_code_ahead(kind) if kind == "cuda" else contextlib.nullcontext():
        yield


@public
def plan_layer(layer: LayerSpec, *, target: str | Device | None = None, schedule: str | None = None,
               config: Mapping[str, Value] | None = None, overlap: str = "auto") -> LayerPlan:
    """Analyses the cell and chooses schedules and configurations; arguments as :func:`compile`."""
    from ecornn.quick_tvm import require_tvm

    require_tvm()  # nothing below is worth a message without it
    from ecornn.overlap import arrange
    from ecornn.task import adjoint_task, tunes_backward
    from ecornn.tune.choose import choose, serving_or_raise
    from ecornn.tune.log import Log, read_all, warn
    from ecornn.tune.record import Trial

    if not isinstance(schedule, (str, NoneType)):
        raise ArgumentError("schedule", schedule, "a schedule's name")
    if not isinstance(config, (Mapping, NoneType)):
        raise ArgumentError("config", config, "a dict of knobs and their values")
    device = device_of(target)
    log, stack = read_all(hidden=layer.workload.hidden), layer.stack
    warn(log)
    if layer.training:
        stack = structs.replace(stack, keep=kept_on(layer, device))

    def records(task: Task) -> Log:
        # records of more multiprocessors than a share has say little of the best for the share
        return log if task.device == device else Log([line for line in log.lines if isinstance(line.record, Trial)
                                                      and line.record.device.cores <= task.device.cores])

    def expected(task: Task) -> float:
        forward = serving_or_raise(task, schedule)[0].expected(task)
        if not tunes_backward(task):
            return forward
        inner = adjoint_task(task)
        return forward + serving_or_raise(inner)[0].expected(inner)

    # the directions of a layer share their records, but not every configuration serves both
    arranged = arrange(layer.loaded, stack, layer.workload, device, overlap,
                       lambda task: choose(task, schedule, config, records(task)), expected)
    backward: dict[object, Found] = {}
    for task in arranged.tasks:
        if tunes_backward(task) and (task.workload, task.traversal) not in backward:
            backward[task.workload, task.traversal] = choose(adjoint_task(task), None, None, records(task))
    return LayerPlan(layer.loaded, layer.workload, stack, device, arranged.overlap, arranged.tasks, arranged.chosen,
                     tuple(backward.get((task.workload, task.traversal)) for task in arranged.tasks))


def kept_on(layer: LayerSpec, device: Device) -> str:
    """The values that a layer that trains keeps on a device. Raises :class:`~ecornn.errors.ArgumentError` where it
    cannot keep those that it should."""
    from ecornn.schedules.keeping import usual_keep
    from ecornn.task import make_task

    first, count = layer.stack.parts(layer.workload)[0].traversal, layer.stack.count
    return layer.keep or usual_keep(make_task(layer.loaded, layer.workload, device, first), count)


def build(planned: LayerPlan, out: Path) -> Generated:
    """Writes the module file ``out``, complete or not at all; returns what was generated."""
    from ecornn.build.module import build_module

    return build_module(*_complete(planned), out)


def build_archive(planned: LayerPlan, out: Path, weights: Mapping[str, Any] | None = None) -> Path:
    """Writes the static library ``out`` of a layer for CPUs, its weights inside or not, and returns its header, see
    :func:`ecornn.build.module.build_archive`."""
    from ecornn.build.module import build_archive

    return build_archive(*_complete(planned), out, weights)


def generate(planned: LayerPlan) -> Generated:
    """The code alone, for any machine; nothing is linked."""
    from ecornn.build.module import generate as generate_code

    return generate_code(_complete(planned)[0], planned.device)


def _complete(planned: LayerPlan) -> tuple[Program, Manifest]:
    from ecornn.compose import compose
    from ecornn.task import make_manifest

    choice = planned.found
    program = compose(planned.stack, planned.workload, planned.programs(), planned.overlap)
    manifest = make_manifest(planned.cell, replace(planned.task, device=planned.device), choice.schedule, choice.config,
                             program, choice.provenance, planned.stack, planned.overlap)
    names = dict.fromkeys(f.schedule.name for f in planned.chosen)
    return program, structs.replace(manifest, schedule="+".join(names))


@public
def compile(cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = BATCH, seq: int = SEQ,
            dtype: str = "float32", weights: str | None = None, precision: str | None = None, layers: int = 1,
            bidirectional: bool = False, lengths: bool = False, resets: bool = False, reverse: bool = False,
            sequences: bool = False, training: bool = False, keep: str | None = None,
            target: str | Device | None = None, schedule: str | None = None,
            config: Mapping[str, Value] | None = None, overlap: str = "auto", out: str | Path | None = None) -> Module:
    """Compiles a recurrent layer, or a stack of them.

    Parameters
    ----------
    cell : a built-in cell's name (``lstm``, ``gru``, ``gru_reset_before``, ``rnn_tanh``, ``rnn_relu``, ``indrnn``,
        ``slstm``), also with options, as ``lstm(clip=3)``; ``FILE.py:NAME`` of a cell, or a Cell
    hidden, input : H and I (default: H)
    batch : the largest B that the module must serve
    seq : the T to expect; the module serves every T >= 1
    dtype : of x, y, states and weights: ``float32``; on a GPU also ``float16`` or ``bfloat16``; on a CPU also
        ``float64``, in which all is computed
    weights : what matrices of weights are rounded to, on a CPU: ``int21`` (relative error about 1e-6) or ``int16``
        (2e-5), multiples of a step for each row; ``bfloat16`` (2e-3); or ``int8`` (1e-2; needs VNNI; the operands are
        rounded too). On a GPU, recurrent matrices of float16 and bfloat16 layers that do not train: ``int8`` (1e-3),
        half the bytes on the chip. Default: ``dtype``
    precision : of float32 on a GPU: ``exact`` (relative error about 1e-6, the default), or ``tf32``, as PyTorch's
        ``allow_tf32``: factors of products have 10 bits of mantissa (3e-4 to 5e-4), with a third of the work
    layers : L; y of one layer is x of the next. Each is compiled with the best record of its own size
    bidirectional : every layer goes both ways; y is then (T, B, 2 H), forward first
    reverse : goes from the end of each row to its start, and not the other way
    lengths : calls may give the length of each row, see :meth:`Layer.__call__`
    resets : calls may give a mask of the steps at which a row's state starts anew
    sequences : calls may lay many sequences end to end in the columns of the batch, which then has few that are idle
        (GPU, not with lengths or resets), see :meth:`Layer.__call__` and :class:`Columns`
    training : the module has :meth:`Layer.forward` and :meth:`Layer.backward` besides, which give gradients (on CPUs
        with weights of ``dtype``)
    keep : what forward keeps for backward: ``states``, or ``gates``, with which backward multiplies a third less;
        default: ``gates`` where they take 1 GiB at most at this B and T, else ``states``.
        :meth:`Layer.kept_bytes` says how much it is
    target : ``cuda`` (the GPU at hand), ``cpu``, an architecture such as ``sm_90a`` or a product such as ``rtx-4090``,
        which need no GPU; default: the GPU if there is one, else the CPU
    schedule, config : use this schedule, and these knobs, instead of the best tuning record; not of the backward pass,
        whose recurrence has records of its own
    overlap : what of a stack runs at the same time on a GPU, each sequence on a share of it: ``none``;
        ``directions``, the two of a layer side by side; ``wavefront``, several layers, each working on a
        chunk of time behind the one before it (forward only); default: ``auto``, what is expected to be fastest
    out : where to keep the module file; default: a temporary file that lives as long as the module

    Raises :class:`~ecornn.errors.EcornnError` subclasses: ``ArgumentError`` for bad arguments,
    ``DeviceError`` where the target is not at hand, ``CellError`` for a cell that cannot be
    analysed, ``ScheduleError`` where no schedule serves the layer or the configuration cannot run,
    ``BuildError`` where a compiler is missing or fails."""
    with host_code_for(target):  # a user's own cell imports TVM
        layer = LayerSpec(cell, hidden, input, batch, seq, dtype, weights, precision,
                          layers, bidirectional, lengths, resets, reverse, sequences, training, keep)
        return compile_layer(layer, target=target, schedule=schedule, config=config, overlap=overlap, out=out)


@public
def compile_layer(layer: LayerSpec, *, target: str | Device | None = None, schedule: str | None = None,
                  config: Mapping[str, Value] | None = None, overlap: str = "auto",
                  out: str | Path | None = None) -> Module:
    """Compiles a layer as :func:`compile` does, and raises the same."""
    from ecornn.quick_tvm import require_tvm

    require_tvm()

    def built(file: Path) -> Module:
        from ecornn.runtime.loader import load

        build(planned, file)
        return load(file)

    with host_code_for(target):
        planned = plan_layer(layer, target=device_of(target), schedule=schedule, config=config, overlap=overlap)
        if out is not None:
            return built(Path(out))
        return temporary.lasting(lambda folder: built(folder / f"{planned.cell.name}.so"))
