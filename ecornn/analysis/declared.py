"""The declarations of a cell that the analysis needs, checked, and the line of a user's file that made each tensor."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ecornn.errors import CellError, source_line

if TYPE_CHECKING:
    from tvm.te import Operation, Tensor

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

    def parameters(self, input: int, hidden: int) -> Mapping[str, tuple[int, ...]]: ...

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]: ...

    def output_names(self) -> tuple[str, ...]: ...

    def returned_names(self) -> tuple[str, ...]: ...


def fault(cell: Source, text: str) -> CellError:
    return CellError(f"cell {cell.name!r}: {text}")


def check_names(cell: Source) -> None:
    """Raises :class:`CellError` where the names of the cell, its states, outputs or inputs cannot be used."""
    def check(kind: str, names: Sequence[str]) -> None:
        for name in names:
            if not isinstance(name, str) or not re.fullmatch(NAME, name):
                raise fault(cell, f"{kind.split()[-1]} {name!r}: the name of {kind} {ALLOWED}")

    if not isinstance(cell.name, str) or not re.fullmatch(NAME, cell.name):
        raise fault(cell, f"a name {ALLOWED}")
    states, output, inputs = cell.states, cell.output, cell.inputs
    if not isinstance(states, (tuple, list)) or not states:
        raise fault(cell, f"states is {states!r}; expected a tuple of at least one name, such as ('h',)")
    check("a state", states)
    if len(set(states)) != len(states):
        raise fault(cell, f"states {states} are not all different")
    if not isinstance(output, (str, tuple, list)) or not (isinstance(output, str) or output):
        raise fault(cell, f"output is {output!r}; expected a name, or a tuple of at least one name, such as ('h', "
                          "'gate')")
    outputs = cell.output_names()
    check("an output", outputs)
    if len(set(outputs)) != len(outputs):
        raise fault(cell, f"outputs {outputs} are not all different")
    if not isinstance(inputs, (tuple, list)):
        raise fault(cell, f"inputs is {inputs!r}; expected a tuple of names, such as ('dt',)")
    check("an input", inputs)
    if len({"x", *inputs, *states}) != 1 + len(inputs) + len(states):
        raise fault(cell, f"x, inputs {inputs} and states {states} are not all different")
    if taken := {"x", *inputs} & {*outputs}:
        raise fault(cell, f"output {min(taken)!r} has the name of x, or of an input")


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
                        "with G >= 1 and K = I or H. A product with heads has K = H / heads, and a narrow matrix "
                        "may have less than H in place of H or K")
    return shapes


def check_read(cell: Source, shapes: Shapes, read: Container[tuple[str, int]], lines: Lines) -> None:
    """Raises :class:`CellError` for a (parameter, gate) that is not in ``read``, but for ``Cell.unread``."""
    for name, (count, *_) in shapes.items():
        missing = [gate for gate in range(count) if (name, gate) not in read]
        if missing and name not in cell.unread:
            gates = f"gate{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of " * (len(missing) < count)
            raise lines.declared(fault(cell, f"step() does not read {gates}parameter {name!r}, of shape "
                                       f"{shapes[name]}; to pass it nevertheless, name it in the cell's "
                                       "attribute unread"), type(cell).parameters, name)


def returned_tensors(cell: Source, outputs: Any, shape: tuple[int, int], lines: Lines) -> dict[str, Tensor]:
    """The tensors that step() returned, by name. Raises :class:`CellError` where these are no tensors (B, H) of values,
    here of this ``shape``, or more or less than there are names."""
    tensors, names = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs], cell.returned_names()
    if len(tensors) != len(names):
        beside = names[len(cell.states):]
        error = fault(cell, f"step() returned {len(tensors)} tensors for {len(cell.states)} states "
                      f"{cell.states}" + (f" and {len(beside)} outputs {beside} after them" if beside else ""))
        raise lines.declared(error, type(cell).step, names[-1])
    returned = dict(zip(names, tensors, strict=True))
    for name, tensor in returned.items():
        what = f"{'new state' if name in cell.states else 'output'} {name!r}"
        if not hasattr(tensor, "op"):
            raise lines.declared(fault(cell, f"{what} is not a tensor: {tensor!r}"), type(cell).step, name)
        has = tuple(int(s) for s in tensor.shape)
        if has != shape:
            raise lines.located(fault(cell, f"{what} has shape {has}; expected (B, H), here {shape}"), tensor.op)
        if tensor.dtype == "bool":
            raise lines.located(fault(cell, f"{what} is a condition; expected a value, such as "
                                            "tirx.Select(condition, one, zero)"), tensor.op)
    return returned


OWN = str(Path(__file__).resolve().parent.parent)
FOREIGN = (".pxi", ".pyx", ".cc", ".h")  # what TVM's own code is named in traces, wherever it was built


class Lines:
    """Notes the caller of every function that makes tensors, such as ``te.compute``, while it is entered. Tensor
    expressions keep no trace of their source, so it is a profiler of this thread; beside another one it notes nothing:
    one of C, as ``cProfile``, could not be set again. Built-in cells are looked through as TVM is."""

    def __init__(self) -> None:
        import tvm
        import tvm_ffi
        from tvm import te

        # what te has besides compute() is refused, with its line
        self._makers = {f.__code__ for f in (te.compute, te.extern, te.scan)}
        self._tvm = tuple(str(Path(module.__file__ or OWN).parent) for module in (tvm, tvm_ffi))
        self._found: dict[Operation, tuple[str, int]] = {}  # operation -> file and line
        self._noting = False

    def __enter__(self) -> Lines:
        self._noting = sys.getprofile() is None
        if self._noting:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._noting:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and frame.f_code in self._makers and result is not None:
            caller = frame.f_back
            while caller is not None and not self._users(caller.f_code.co_filename):
                caller = caller.f_back
            tensor = result[0] if isinstance(result, (list, tuple)) else result
            if caller is not None and hasattr(tensor, "op"):
                self._found[tensor.op] = caller.f_code.co_filename, caller.f_lineno

    def _users(self, file: str) -> bool:
        return not (file.startswith((OWN, *self._tvm, "<frozen", "<unknown")) or file.endswith(FOREIGN))

    def located(self, error: CellError, op: Operation) -> CellError:
        """The error with the line of ``op``, unless it has one already or none is known."""
        return error if error.at is not None or op not in self._found else pointed(error, *self._found[op])

    def declared(self, error: CellError, function: Any, word: str) -> CellError:
        """The error with the line of a user's ``function`` that has the string ``word``, or with its first one."""
        code = getattr(function, "__code__", None)
        if code is None or not self._users(code.co_filename):
            return error
        numbers = sorted({line for *_, line in code.co_lines() if line is not None})
        quoted = re.compile(rf"""["']{re.escape(word)}["']""")
        with_word = (n for n in numbers if quoted.search(linecache.getline(code.co_filename, n)))
        return pointed(error, code.co_filename, next(with_word, code.co_firstlineno))

    def failed(self, cell: str, error: Exception, what: str = "step()") -> CellError:
        """The error for an exception of the cell's own code, with the last of the user's lines that was running."""
        return self.running(CellError(
            f"cell {cell!r}: {what} failed: {type(error).__name__}: {str(error).strip()}"), error)

    def running(self, own: CellError, error: Exception) -> CellError:
        """The error with the last of the user's lines that was running when ``error`` was raised, unless it has one."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if self._users(f.filename)]
        return own if own.at is not None or not frames else pointed(own, frames[-1].filename, frames[-1].lineno or 0)


def pointed(error: CellError, file: str, line: int) -> CellError:
    """The error with a place, its source line below."""
    return CellError(f"{error}\n  {source_line(file, line)}", (file, line))
