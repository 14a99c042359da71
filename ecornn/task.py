"""The tasks of schedules, from a cell and its sizes; programs of tasks, and their manifest."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from msgspec import structs

from ecornn.cells import Cell
from ecornn.compose import parameter_prefix
from ecornn.device import Device
from ecornn.manifest import Manifest, Parameter, versions
from ecornn.program import Program, leaves_out, packed_for_left_out
from ecornn.schedules.base import After, Config, Schedule, Task
from ecornn.workload import ALONE, SERIAL, SINGLE, Overlap, Stack, Traversal, Workload


def make_task(cell: Cell, workload: Workload, device: Device, traversal: Traversal = ALONE) -> Task:
    """Analyses ``cell`` at the workload's sizes; the recurrence of its adjoint where the workload is that. Raises
    :class:`~ecornn.errors.CellError` where the cell's step cannot be analysed, or differentiated."""
    from ecornn.analysis import analyse
    from ecornn.analysis.graph import stack_for

    with stack_for(workload.cell):
        task = Task(workload, analyse(cell, workload.input, workload.hidden), device, traversal)
        return adjoint_task(task) if workload.backward else read_out_task(task)


def read_out_task(task: Task) -> Task:
    """A task's loop, with the passes that can follow it; the task where values are kept for backward. On CPUs they need
    weights as they are, and of several rows no products of x, which are faster in the chunk's projection."""
    from ecornn.analysis.kept import read_out

    whole = task.traversal.keep is not None or task.workload.weights is not None
    parts = None if whole else read_out(task.graph)
    if parts is None or (task.device.kind == "llvm" and task.workload.batch > 1 and parts.after.hoisted_products):
        return task
    # the loop writes outputs of its own, whatever other direction there is
    return replace(task, graph=parts.loop, traversal=structs.replace(task.traversal, directions=1),
                   after=After(parts.after, task.traversal))


def adjoint_task(task: Task) -> Task:
    """The recurrence of a task's adjoint. Raises :class:`~ecornn.errors.CellError` where the cell has no derivative."""
    from ecornn.analysis.adjoint import adjoint
    from ecornn.analysis.graph import stack_for
    from ecornn.schedules.backward.assemble import recurrence_task

    with stack_for(task.workload.cell):
        return recurrence_task(task, adjoint(task.graph, task.workload.hidden, starts_anew=task.traversal.resets))


def tunes_backward(task: Task) -> bool:
    """True where the recurrence of a task's adjoint is a choice of its own: on a CPU it goes by the forward pass's."""
    return task.traversal.keep is not None and task.device.kind == "cuda"


def make_program(schedule: Schedule, task: Task, config: Config,
                 backward: tuple[Schedule, Config] | None = None, overlap: Overlap = SERIAL) -> Program:
    """The program of a configuration, with a backward pass where the task has one. ``backward`` carries out its
    recurrence, where that :func:`is a choice of its own <tunes_backward>`; ``overlap`` is the stack's. Raises
    :class:`~ecornn.errors.CellError` where the step has more operators behind one another than Python's stack has room
    for."""
    from ecornn.analysis.graph import stack_for

    with stack_for(task.workload.cell):
        program = schedule.program(task, schedule.plan(task, config))
        if task.after is not None and task.device.kind == "cuda":  # on a CPU it is within the program
            from ecornn.schedules.backward.passes import with_read_out

            return with_read_out(task, program)
        if not tunes_backward(task):
            return program
        from ecornn.schedules.training import with_backward

        assert backward is not None
        return with_backward(task, program, *backward, beside=overlap.kind == "directions")


def make_manifest(cell: Cell, task: Task, schedule: Schedule, config: Config, program: Program,
                  provenance: str, stack: Stack = SINGLE, overlap: Overlap = SERIAL) -> Manifest:
    """The manifest of a module; ``task`` is of the first part of the stack, on the whole device."""
    parameters, outputs, left_out = [], cell.output_names(), leaves_out(program)
    for part in stack.parts(task.workload):
        hidden = part.workload.hidden
        for key, (gates, rows, *rest) in cell.parameters(cell.own_input(part.workload.input, hidden), hidden).items():
            parameters.append(Parameter(  # the shape as PyTorch stores it: gates folded into the first axis
                cell.parameter_name(key, part.layer, part.second), parameter_prefix(stack, part) + key,
                (gates * rows, *rest), gates))
    return Manifest(
        workload=task.workload, device=task.device, schedule=schedule.name, config=dict(config),
        provenance=provenance, states=tuple(task.graph.states), output=outputs[0],
        parameters=tuple(parameters), buffers=program.buffers,
        entries={name: entry.takes for name, entry in program.entries.items()}, versions=versions(), stack=stack,
        overlap=overlap, together=program.together or task.workload.batch, inputs=tuple(cell.inputs) or msgspec.UNSET,
        optional=left_out or msgspec.UNSET,
        packed_for_optional=(left_out and packed_for_left_out(program)) or msgspec.UNSET,
        outputs=outputs if len(outputs) > 1 else msgspec.UNSET, dx_in=program.dx_in or msgspec.UNSET,
        in_place=dict(program.in_place) or msgspec.UNSET)
