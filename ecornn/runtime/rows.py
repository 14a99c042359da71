"""Rows of x and of y as a caller has them: sequences beside x, several outputs and their gradients, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecornn.errors import ArgumentError, ShapeError
from ecornn.manifest import Manifest
from ecornn.outputs import by_output
from ecornn.runtime.arrays import Arrays

Widths = dict[str, tuple[int, ...]]  # of each sequence that was passed: the axes behind (T, B), as it has them


def rows_with(manifest: Manifest, arrays: Arrays, x: Any, inputs: Any) -> tuple[Any, Widths]:
    """``x`` (T, B, I), or batch first, with the module's sequences behind it in its rows, in a copy; and what was
    passed. Without ``inputs`` x itself, whose rows then have them already.

    Raises :class:`ArgumentError` and :class:`ShapeError` where ``inputs`` are not what the module's cell has."""
    names, (shape, *_) = manifest.inputs or (), arrays.facts(x)
    if inputs is None:
        if names and len(shape) == 3 and shape[2] == manifest.own_input:
            raise ArgumentError("inputs", None, f"arrays by name: {', '.join(names)}, beside x of {shape[2]} values; "
                                f"or x with them behind it in its rows, of {manifest.workload.input} values")
        return x, {}
    if not names:
        raise ArgumentError("inputs", type(inputs), f"None: the cell {manifest.workload.cell} has no inputs beside x")
    if not isinstance(inputs, Mapping) or {*inputs} != {*names}:
        got = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs)
        raise ArgumentError("inputs", got, f"arrays by name: {', '.join(names)}")
    if len(shape) != 3 or shape[2] != manifest.own_input:
        raise ShapeError("x.shape", shape, f"(T, B, {manifest.own_input}) beside inputs")
    kind, hidden, found, widths = arrays.facts(x)[1:], manifest.workload.hidden, [], Widths()
    for name in names:
        value = arrays.take(inputs[name], f"inputs[{name!r}]")
        own, *facts = arrays.facts(value)
        if own not in (shape[:2], (*shape[:2], 1), (*shape[:2], hidden)):
            raise ShapeError(f"inputs[{name!r}].shape", own, f"{(*shape[:2], hidden)}, a value for each hidden unit; "
                             f"or {(*shape[:2], 1)} or {shape[:2]}, one for all of them")
        if tuple(facts) != tuple(kind):
            raise ArgumentError(f"inputs[{name!r}]", " on ".join(facts), f"{' on '.join(kind)}, as x")
        widths[name] = own[2:]
        found.append(value if len(own) == 3 else value[..., None])
    return arrays.beside(x, found, hidden), widths


def parts_of(manifest: Manifest, rows: Any, widths: Widths) -> tuple[Any, dict[str, Any]]:
    """The gradient of x, and of each sequence that was passed, of the shape that it had, from that of whole rows."""
    if not widths:
        return rows, {}
    hidden, first, found = manifest.workload.hidden, manifest.own_input, {}
    for n, (name, axes) in enumerate(widths.items()):
        value = rows[..., first + n * hidden:first + (n + 1) * hidden]
        found[name] = value if axes == (hidden,) else value.sum(-1, keepdims=True) if axes else value.sum(-1)
    return rows[..., :first], found


def named(manifest: Manifest, rows: Any) -> Any:
    """y as a caller has it: the rows themselves; of a module with several outputs each of them, by name."""
    return by_output(rows, manifest.outputs, manifest.stack.directions) if manifest.outputs else rows


def rows_of(manifest: Manifest, arrays: Arrays, given: Any, steps: int, batch: int, like: Any) -> Any:
    """Gradients by name as one of rows of y; whoever is not named has zeros. Anything but a mapping is returned.

    Raises :class:`ArgumentError` and :class:`ShapeError` where a name or a shape is none of the outputs'."""
    if not isinstance(given, Mapping):
        return given
    names, hidden, directions = manifest.outputs or (), manifest.workload.hidden, manifest.stack.directions
    if strange := sorted({*map(str, given)} - {*names}):
        raise ArgumentError("dy", strange, f"gradients of {', '.join(names)}" if names else "an array: there is one "
                            "output")
    found, wanted, kind = {}, (steps, batch, directions * hidden), arrays.facts(like)[1:]
    for name in names:
        value = given.get(name)
        if value is None:
            found[name] = arrays.zeros(wanted, like, manifest.workload.dtype)[0]
            continue
        found[name] = arrays.take(value, f"dy[{name!r}]")
        shape, *facts = arrays.facts(found[name])
        if shape != wanted:
            raise ShapeError(f"dy[{name!r}].shape", shape, str(wanted))
        if tuple(facts) != tuple(kind):
            raise ArgumentError(f"dy[{name!r}]", " on ".join(facts), f"{' on '.join(kind)}, as x")
    first, *others = (found[name][..., d * hidden:(d + 1) * hidden] for d in range(directions) for name in names)
    return arrays.beside(first, others, hidden)
