"""Calls a module on arrays of any framework, sequences beside x and several outputs by name among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from ecornn.boundary import public, refuse_untyped, shown
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ecornn.manifest import Manifest
from ecornn.program import RUN
from ecornn.runtime.arrays import Arrays, Placed, Shape
from ecornn.runtime.columns import place_lengths, place_resets, place_sequences
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.library import Library
from ecornn.runtime.memory import DeviceMemory, Pool, layout
from ecornn.runtime.plan import MASKS, AddressedCall, Order, entry_plan
from ecornn.runtime.weights import PackedWeights
from ecornn.workload import by_output

UNFIT = "a strided, misaligned or read-only array", "contiguous, writable memory, aligned to 16 bytes"
_COPIES = "copies"  # key of the device memory for host arrays
Widths = dict[str, tuple[int, ...]]  # of each sequence that was passed: the axes behind (T, B), as it has them


class Caller:
    """Packed weights and what every call needs, made once of what :class:`PackedWeights` are made of."""

    def __init__(self, manifest: Manifest, library: Library, weights: Mapping[str, Any], device: int,
                 threads: int | None) -> None:
        self.manifest, self.device, self.threads, self.together = manifest, device, threads, manifest.together
        self.library, self._run, self.workspaces = library, library.run, Pool()
        plan, work, stack = entry_plan(manifest, RUN), manifest.workload, manifest.stack
        self._weights = packed = PackedWeights(manifest, library, weights, device, threads)
        self.packed, self.repack_at, self.repack_here = packed.packed, packed.repack_at, packed.repack_here
        self.pack_call = packed.pack_call
        self._scratch = lru_cache(maxsize=64)(plan.offsets)
        self._batch, self._input, self._hidden, self._dtype = work.batch, work.input, work.hidden, work.dtype
        self._stack, self._count, self._longest, self.width = stack, stack.count, manifest.longest, manifest.y_width
        self.whole_rows = not manifest.outputs  # y is given as it lies in memory, not by output
        self._on_cpu, self._place = threads is not None, f"cuda:{device}" if threads is None else "cpu"
        self._names, self._inputs = manifest.states, manifest.inputs or ()
        self._addressed: dict[tuple[Any, ...], AddressedCall] = {}
        self._orders = [Order(plan, manifest, self.packed, device, zeros) for zeros in (packed.zeros, None)]
        self._masked = any(getattr(stack, name) for name in MASKS)

    def __call__(self, x: Any, state: Sequence[Any] | None = None, *, lengths: Any = None, resets: Any = None,
                 sequences: Any = None, inputs: Mapping[str, Any] | None = None, batch_first: bool = False,
                 out: Any = None) -> tuple[Any, tuple[Any, ...]]:
        """Runs the sequence ``x``, from zero states or from ``state``.

        Parameters
        ----------
        x : (T, B, I), T >= 1, 1 <= B <= the compiled batch, of the module's data type
        state : one array for each state of the cell, as an earlier call returned them: (B, H), or
            (L*D, B, H) in PyTorch's order for L layers in D directions where L*D > 1
        lengths : (B,) integers from 0 to T; row b is ``x[:lengths[b], b]``, in any order of lengths. y
            is zero beyond, and the states are those of the row's last step. A list or an array of the
            host: the layer stops after the longest row. A CUDA tensor is not waited for
        resets : (T, B) bool or uint8; where it is set a new sequence starts, from states of zeros
        sequences : (T, B) integers of the host, or :class:`~ecornn.Columns`: column b of x works on sequence
            ``sequences[t, b]`` at step t, or on none where that is -1. Each of the numbers 0 to S-1 has steps of one
            column that follow each other; Columns may also wrap sequences around, within ``together`` columns. A CUDA
            graph reads a copy that Columns keep: call once before it, and keep them as long. The states, before and
            after, are then (S, H), or (L*D, S, H); y is zero where there is no sequence. Default: each column is one
        inputs : for a cell with sequences beside x, arrays by name: (T, B, H), or (T, B, 1) or (T, B), one value for
            all units. They are copied behind x in its rows; x may have them there already, H values each, in the
            cell's order. Their steps are those of x, also in reverse
        batch_first : x is (B, T, I), inputs alike, and y (B, T, D*H) is a view of time-first memory; the states stay
        out : memory for y, time first, contiguous, aligned to 16 bytes, apart from x and the states

        All arrays are of one framework and on the module's device; NumPy arrays also serve CUDA modules,
        by way of copies. Inputs that are not contiguous, or not aligned to 16 bytes, are copied.

        Returns
        -------
        y : (T, B, D*H), the output of each step; ``out`` if it was given. For a cell with several outputs a dict of
            these, by name; but ``out`` itself, which has rows of all, (T, B, D*O*H), if it was given
        state : the states after the last step, of the shape of ``state``

        Torch CUDA tensors run on torch's current stream, without waiting for it; NumPy arrays on CUDA wait.

        Raises
        ------
        ShapeError, DTypeError, DeviceError : an array does not fit; nothing has run then
        ArgumentError : an argument is no array, or of another framework than x; ``lengths``, ``resets`` or
            ``sequences`` for a module that was compiled without them; or Columns that wrap around elsewhere"""
        try:
            arrays = arrays_of(x, "x")
            x = arrays.take(x, "x")
            if self._inputs or inputs is not None:
                x, _ = rows_with(self.manifest, arrays, x, inputs)
            if batch_first:
                if out is not None:
                    raise ArgumentError("out", type(out), "None with batch_first=True")
                x = arrays.swapped(x)
            steps, batch = self._check_x(arrays, x)
            x, x_at = arrays.ready(x, "x")
            masks: list[Placed] = []
            active, rows = steps, batch
            if self._masked or not (lengths is None and resets is None and sequences is None):
                masks, active, rows = self._masks(arrays, x, steps, batch, lengths, resets, sequences)
            states = None if state is None else self._check_state(arrays, state, rows)
            library = self.library
            if out is None:
                y, y_at = arrays.empty((steps, batch, self.width), x, library)
            else:
                y, y_at = self._check_out(arrays, out, (steps, batch, self.width), [(x, x_at), *(states or ())])
            if active < steps and not arrays.clear(y, active):
                active = steps
            shape = self.state_shape(rows)
            after = [arrays.empty(shape, x, library) for _ in self._names]
            read, outputs = [(x, x_at), *(states or ()), *masks], [(y, y_at), *after]
            if arrays.staged and not self._on_cpu:
                self._by_copies(active, batch, rows, states is not None, read, outputs)
            else:
                queue: int = self.threads or arrays.queue(self.device)
                self._launch(arrays, x, queue, (active, batch, rows), states is not None,
                             [at for _, at in read + outputs])
            result = arrays.give(y) if out is None else out
            if batch_first:
                result = arrays.swapped(result)
            if not self.whole_rows and out is None:
                result = named(self.manifest, result)
            return result, tuple([arrays.give(s) for s, _ in after])
        except Exception as error:
            refuse_untyped(error, lambda: f"a call of {self!r} with x={shown(x)}")
            raise

    def state_shape(self, batch: int) -> Shape:
        """The shape of each state of a call: (B, H), or (L*D, B, H)."""
        return (batch, self._hidden) if self._count == 1 else (self._count, batch, self._hidden)

    def zero_state(self, batch: int) -> Placed:
        return None, self._weights.zeros(prod(self.state_shape(batch)) * self.manifest.workload.itemsize)

    def _masks(self, arrays: Arrays, x: Any, steps: int, batch: int, lengths: Any,
               resets: Any, sequences: Any) -> tuple[list[Placed], int, int]:
        """The arrays that a module reads beside x and states, the steps worth running, and the rows of states."""
        stack, found, active, rows = self._stack, [], steps, batch
        for name, value in zip(MASKS, (lengths, resets, sequences), strict=True):
            if value is not None and not getattr(stack, name):
                raise ArgumentError(name, type(value), f"None: the module was compiled without {name}=True")
        if stack.lengths:
            placed, active = place_lengths(lengths, steps, batch, arrays, x, self.library)
            found.append(placed)
        if stack.resets:
            found.append(place_resets(resets, steps, batch, arrays, x, self.library))
        if stack.sequences:
            placed, rows = place_sequences(sequences, steps, batch, self.together, arrays, x, self.library)
            found.append(placed)
        return found, active, rows

    @public
    def repack(self, weights: Mapping[str, Any]) -> None:
        """Packs weights, all of them, as of :meth:`Module.bind`, where the last ones were; the layer computes with them
        from then on. No call of it may be under way on a CPU. On a GPU the weights are tensors that lie there, and are
        packed on torch's current stream, without waiting, also in a CUDA graph: calls on other streams must be ordered
        behind that.

        Raises as :meth:`Module.bind`, and :class:`~ecornn.errors.DeviceError` on a GPU for weights that are not on it;
        nothing has changed then."""
        self._weights.repack(weights)

    def addressed(self, entry: str, steps: int, batch: int, tensors: tuple[str, ...],
                  add: bool = True) -> AddressedCall:
        """An entry of a layer as a function of addresses, for this T and B; it is kept for the next time."""
        key = entry, steps, batch, tensors, add
        found = self._addressed.get(key)
        if found is None:
            if len(self._addressed) >= 64:
                self._addressed.clear()
            found = self._addressed[key] = AddressedCall(self, *key)
        return found

    def _launch(self, arrays: Arrays, like: Any, queue: int, sizes: tuple[int, int, int], with_states: bool,
                given: list[int]) -> None:
        """Runs with a workspace, which is kept for later calls; ``sizes`` T, B and the rows of states."""
        order, (offsets, total) = self._orders[with_states], self._scratch(sizes[0])
        if not total:
            self._run(*order.of(sizes, queue, given, ()))
            return
        key = 0 if self._on_cpu else queue
        keep = self._on_cpu or arrays.keeps_workspace()
        memory = self.workspaces.take(key, total) if keep else None
        if memory is None:
            memory = arrays.workspace(total, like, self.library)
        base = memory.pointer
        self._run(*order.of(sizes, queue, given, [base + offset for offset in offsets]))
        if keep:
            self.workspaces.give(key, memory)

    def _by_copies(self, steps: int, batch: int, rows: int, with_states: bool, inputs: Sequence[Placed],
                   outputs: Sequence[Placed]) -> None:
        """Runs a CUDA module on host arrays: all to the device and back, on the legacy default stream."""
        library, device = self.library, self.device
        offsets, scratch = self._scratch(steps)
        starts, total = layout([array.nbytes for array, _ in (*inputs, *outputs)] + [scratch])
        memory = self.workspaces.take(_COPIES, total) or DeviceMemory(library, device, total)
        places = [memory.pointer + start for start in starts]
        for (array, pointer), place in zip(inputs, places, strict=False):
            library.copy(device, place, pointer, array.nbytes, 0)
        at = [places[-1] + offset for offset in offsets]
        self._run(*self._orders[with_states].of((steps, batch, rows), 0, places[:-1], at))
        sizes = [steps * batch * self.width * self.manifest.workload.itemsize]  # y, less what was not run
        sizes += [array.nbytes for array, _ in outputs[1:]]
        for (_, pointer), place, nbytes in zip(outputs, places[len(inputs):-1], sizes, strict=True):
            library.copy(device, pointer, place, nbytes, 0)
        library.synchronize(device, 0)
        self.workspaces.give(_COPIES, memory)

    def _check_x(self, arrays: Arrays, x: Any) -> tuple[int, int]:
        shape, dtype, place = arrays.facts(x)
        if len(shape) != 3 or shape[2] != self._input or not 1 <= shape[1] <= self._batch or shape[0] < 1:
            raise ShapeError("x.shape", shape, f"(T, B, {self._input}) with T >= 1 and B from 1 to "
                             f"{self._batch}, the batch that the module was compiled for")
        if shape[0] > self._longest:
            raise ShapeError("x.shape", shape, f"T up to {self._longest} in one call; the next one can go on "
                             "from the state")
        self.check_kind(arrays, "x", dtype, place)
        return shape[0], shape[1]

    def check_kind(self, arrays: Arrays, name: str, dtype: str, place: str) -> None:
        if dtype != self._dtype:
            raise DTypeError(f"{name}.dtype", dtype, f"{self._dtype}, as in the module")
        wanted = "cpu" if arrays.staged else self._place
        if place != wanted:
            raise DeviceError(f"{name}.device", place, f"{wanted}, where the layer runs")

    def _check_state(self, arrays: Arrays, state: Sequence[Any], batch: int) -> list[Placed]:
        names = self._names
        if not isinstance(state, (tuple, list)):
            raise ArgumentError("state", type(state), f"a tuple ({', '.join(names)},)")
        if len(state) != len(names):
            raise ShapeError("len(state)", len(state), f"{len(names)}: ({', '.join(names)},)")
        checked = []
        for number, value in enumerate(state):
            name = f"state[{number}]"
            array = arrays.take(value, name)
            shape, dtype, place = arrays.facts(array)
            wanted = self.state_shape(batch)
            if shape != wanted:
                raise ShapeError(f"{name}.shape", shape, f"{wanted}: {'(B, H)' if len(wanted) == 2 else '(L*D, B, H)'}")
            self.check_kind(arrays, name, dtype, place)
            checked.append(arrays.ready(array, name))
        return checked

    def _check_out(self, arrays: Arrays, out: Any, wanted: Shape, inputs: Sequence[Placed]) -> Placed:
        y = arrays.take(out, "out")
        shape, dtype, place = arrays.facts(y)
        if shape != wanted:
            raise ShapeError("out.shape", shape, f"{wanted}: (T, B, D*{'O*' if self.manifest.outputs else ''}H)")
        self.check_kind(arrays, "out", dtype, place)
        placed = arrays.in_place(y)
        if placed is None:
            raise ArgumentError("out", *UNFIT)
        start, size = placed[1], self.manifest.workload.itemsize
        end = start + prod(shape) * size
        for array, pointer in inputs:
            if start < pointer + prod(array.shape) * size and pointer < end:
                raise ArgumentError("out", "memory of x or of a state", "memory of its own")
        return placed


def rows_with(manifest: Manifest, arrays: Arrays, x: Any, inputs: Any) -> tuple[Any, Widths]:
    """A copy of ``x`` with the checked ``inputs`` behind it in its rows, and what was passed; without any x itself."""
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
    """Gradients by name, checked, as one of rows of y, zeros where one is missing; or what is no mapping."""
    if not isinstance(given, Mapping):
        return given
    names, hidden, directions = manifest.outputs or (), manifest.workload.hidden, manifest.stack.directions
    if strange := sorted({*map(str, given)} - {*names}):
        raise ArgumentError("dy", strange, f"gradients of {', '.join(names)}" if names else "an array, since there "
                            "is one output")
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
