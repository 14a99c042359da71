"""The declarations of a cell that the analysis needs, and their checks: name, states, shapes of parameters."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ecornn.analysis.lines import Lines
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.te import Tensor

NAME = r"[A-Za-z][A-Za-z0-9_]{0,63}"  # of a cell and of a state: also part of file names and of generated names
SHIFT = "ecornn.shift"  # attribute of an operation: a maximum that has no gradient, as that of a softmax
ALLOWED = "has letters, digits and underscores, 64 at most, and starts with a letter"

Shapes = dict[str, tuple[int, ...]]


class Source(Protocol):
    """The part of a cell that is analysed; :class:`ecornn.cells.Cell` says what each means."""

    name: str
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    unread: tuple[str, ...]
    output: str | tuple[str, ...]

    def parameters(self, input: int, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """One step on te tensors."""

    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs."""

    def returned_names(self) -> tuple[str, ...]:
        """Names of all that ``step`` returns, in order."""


def fault(cell: Source, text: str) -> CellError:
    """An error that names the cell."""
    return CellError(f"cell {cell.name!r}: {text}")


def check_names(cell: Source) -> None:
    """Raises :class:`CellError` where the cell's name or states cannot be used."""
    if not isinstance(cell.name, str) or not re.fullmatch(NAME, cell.name):
        raise fault(cell, f"a name {ALLOWED}")
    states = cell.states
    if not isinstance(states, (tuple, list)) or not states:
        raise fault(cell, f"states is {states!r}; expected a tuple of at least one name, such as ('h',)")
    for state in states:
        if not isinstance(state, str) or not re.fullmatch(NAME, state):
            raise fault(cell, f"state {state!r}: the name of a state {ALLOWED}")
    if len(set(states)) != len(states):
        raise fault(cell, f"states {states} are not all different")
    check_outputs(cell)
    if not isinstance(cell.inputs, (tuple, list)):
        raise fault(cell, f"inputs is {cell.inputs!r}; expected a tuple of names, such as ('dt',)")
    for name in cell.inputs:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise fault(cell, f"input {name!r}: the name of an input {ALLOWED}")
    if len({"x", *cell.inputs, *states}) != 1 + len(cell.inputs) + len(states):
        raise fault(cell, f"x, inputs {cell.inputs} and states {states} are not all different")
    if taken := {"x", *cell.inputs} & {*cell.output_names()}:
        raise fault(cell, f"output {min(taken)!r} has the name of x, or of an input")


def check_outputs(cell: Source) -> None:
    """Raises :class:`CellError` where the names of its outputs cannot be used."""
    given = cell.output
    if not isinstance(given, (str, tuple, list)) or not (isinstance(given, str) or given):
        raise fault(cell, f"output is {given!r}; expected a name, or a tuple of at least one name, such as ('h', "
                          "'gate')")
    for name in cell.output_names():
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise fault(cell, f"output {name!r}: the name of an output {ALLOWED}")
    if len(set(cell.output_names())) != len(cell.output_names()):
        raise fault(cell, f"outputs {cell.output_names()} are not all different")


def shapes_of(cell: Source, input: int, hidden: int, lines: Lines) -> Shapes:
    """The shapes of the cell's parameters. Raises :class:`CellError` where they are none, or parameters() raises."""
    try:
        given = cell.parameters(input, hidden)
    except CellError:
        raise
    except Exception as error:  # the user's own code raises what it likes
        raise lines.failed(cell.name, error, "parameters()") from error
    try:
        shapes = {n: tuple(s) for n, s in given.items()}
    except (AttributeError, TypeError) as error:
        raise fault(cell, f"parameters() must return names with shapes, such as {{'weight_hh': (1, H, H)}}: "
                          f"{error}") from error
    for name, shape in shapes.items():
        if not isinstance(name, str) or not name:
            raise fault(cell, f"parameter {name!r}: a name is a string")
        if name in cell.inputs:
            raise fault(cell, f"parameter {name!r} has the name of an input")
        if len(shape) not in (2, 3) or min(shape) < 1 or shape[1] > hidden or (
                shape[1] != hidden if len(shape) == 2 else shape[2] != input and shape[2] > hidden):
            raise fault(cell, f"parameter {name!r} has shape {shape}; expected (G, H={hidden}) or (G, H={hidden}, K) "
                              "with G >= 1 and K = I or H, H / heads of a product with heads, or less than H in place "
                              "of H or K of a narrow matrix")
    return shapes


def check_read(cell: Source, shapes: Shapes, read: Container[tuple[str, int]], lines: Lines) -> None:
    """Raises :class:`CellError` where the step does not read a parameter, or a gate of one; ``read``: each (parameter,
    gate) that it reads. ``Cell.unread`` are exempt."""
    for name, (count, *_) in shapes.items():
        missing = [gate for gate in range(count) if (name, gate) not in read]
        if missing and name not in cell.unread:
            gates = f"gate{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of " * (len(missing) < count)
            error = CellError(
                f"cell {cell.name!r}: step() does not read {gates}parameter {name!r}, of shape "
                f"{shapes[name]}; a parameter that is passed all the same is named in the cell's attribute unread")
            raise lines.declared(error, type(cell).parameters, name)


def returned_tensors(cell: Source, outputs: Any, shape: tuple[int, int], lines: Lines) -> dict[str, Tensor]:
    """The tensors that step() returned, by name. Raises :class:`CellError` where these are no tensors (B, H) of values,
    here of this ``shape``, or more or less than there are names."""
    tensors, names = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs], cell.returned_names()
    if len(tensors) != len(names):
        beside = names[len(cell.states):]
        error = fault(cell, f"step() returned {len(tensors)} tensors for {len(cell.states)} states "
                          f"{cell.states}" + (f" and {len(beside)} outputs {beside} behind them" if beside else ""))
        raise lines.declared(error, type(cell).step, names[-1])
    for name, tensor in zip(names, tensors, strict=True):
        what = f"cell {cell.name!r}: {'new state' if name in cell.states else 'output'} {name!r}"
        if not hasattr(tensor, "op"):
            raise lines.declared(CellError(f"{what} is no tensor: {tensor!r}"), type(cell).step, name)
        has = tuple(int(s) for s in tensor.shape)
        if has != shape:
            raise lines.located(CellError(f"{what} has shape {has}; expected (B, H), here {shape}"), tensor.op)
        if tensor.dtype == "bool":
            raise lines.located(CellError(f"{what} is a condition; expected a value, such as "
                                          "tirx.Select(condition, one, zero)"), tensor.op)
    return dict(zip(names, tensors, strict=True))
