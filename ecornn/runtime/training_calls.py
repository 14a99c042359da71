"""The calls of a layer that trains: forward, which keeps what the backward pass reads, and that pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ecornn.boundary import public
from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.runtime.arrays import Arrays, Placed, Shape
from ecornn.runtime.caller import Caller
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.inputs import Widths, parts_of, rows_with
from ecornn.runtime.memory import GivenMemory, Memory
from ecornn.runtime.outputs import named, rows_of
from ecornn.runtime.training import Gradients, Kept, Training
from ecornn.workload import summed


class TrainingCalls(Caller):
    """:meth:`forward` and :meth:`backward` of a layer, on arrays of a caller."""

    @cached_property
    def training(self) -> Training:
        """The entries of a training step; :class:`~ecornn.errors.ModuleError` where the module has none."""
        return Training(self)

    @public
    def forward(self, x: Any, state: Sequence[Any] | None = None, *, lengths: Any = None, resets: Any = None,
                sequences: Any = None, inputs: Mapping[str, Any] | None = None,
                memory: Any = None) -> tuple[Any, tuple[Any, ...], Kept]:
        """Computes a call of the layer, and keeps what its gradients need. For modules compiled with ``training=True``.

        Parameters
        ----------
        x : (T, B, I), T >= 1, 1 <= B <= the compiled batch, of the module's data type: a NumPy array or a torch.Tensor
        state : one array for each state, (B, H) or (L*D, B, H), with ``sequences`` S rows; None: zeros
        lengths, resets, sequences, inputs : as of a call
        memory : for what is kept, (:meth:`kept_bytes`,) uint8, contiguous; default: made

        Returns
        -------
        y : (T, B, D*H), the output of each step; of several outputs a dict, by name
        state : the states after the last step
        kept : for :meth:`backward`. It holds x and y: do not write them before; ``kept.nbytes`` is what it holds
            besides, :meth:`kept_bytes` says it before the call

        Raises as a call of the layer, and :class:`~ecornn.errors.ModuleError` for a module that does not train.
        """
        training = self.training  # a module that does not train says so
        x, widths = self._with_inputs(x, inputs)
        arrays, placed, masks, states, steps, batch, rows = self._first(x, state, lengths, resets, sequences)
        like, shape, room = placed[0], self.state_shape(rows), self._memory(arrays, memory, steps, batch)
        y = arrays.empty((steps, batch, self.width), like, self.library)
        after = [arrays.empty(shape, like, self.library) for _ in self.manifest.states]
        kept = training.forward(arrays, placed, states, masks, y, after, steps, batch, rows, room)
        kept.widths = widths
        rows = arrays.give(y[0])
        return rows if self.whole_rows else named(self.manifest, rows), tuple(arrays.give(a) for a, _ in after), kept

    @public
    def kept_in(self, memory: Any, x: Any, y: Any, state: Sequence[Any] | None = None, *, lengths: Any = None,
                resets: Any = None, sequences: Any = None, inputs: Mapping[str, Any] | None = None) -> Kept:
        """Returns what a call of :meth:`forward` with these arguments kept in ``memory``, for :meth:`backward` and for
        callers that hold arrays alone. ``memory`` (:meth:`kept_bytes`,) uint8 may be a copy; :meth:`backward` leaves it
        as it is. ``y`` has the rows of all outputs, if there are several."""
        x, widths = self._with_inputs(x, inputs)
        arrays, placed, masks, states, steps, batch, rows = self._first(x, state, lengths, resets, sequences)
        result = self._gradient(arrays, y, "y", (steps, batch, self.width), placed[0])
        room = self._memory(arrays, memory, steps, batch)
        return Kept(self, arrays, placed, result, states, masks, room, steps, batch, rows, widths)

    @public
    def backward(self, kept: Kept, dy: Any = None, dstate: Sequence[Any] | None = None, *,
                 gradients: Mapping[str, Any] | None = None, want_state: bool = True) -> Gradients:
        """The gradients of a call of :meth:`forward`.

        Parameters
        ----------
        kept : what that call gave, which is used up
        dy : (T, B, D*H), the gradient of y; None: zeros. Of several outputs a dict by name, whose missing ones are
            zeros; or rows of all
        dstate : the gradients of the final states, shaped as these; None: zeros
        gradients : arrays by the weights' names to add those of the weights to: of the type and shapes of
            :attr:`Gradients.weights`, contiguous; default: new ones
        want_state : whether the gradients of the first states are; without them a GPU has less to do

        Raises :class:`~ecornn.errors.ArgumentError` and its subclasses where an argument does not fit, also for a
        ``kept`` of another layer, or one that was used before; nothing has run then.
        """
        training = self.training  # a module that does not train says so
        if not isinstance(kept, Kept) or kept.owner is not self:
            raise ArgumentError("kept", type(kept).__name__, "what forward() of this very layer gave")
        if kept.taken:
            raise ArgumentError("kept", "used by an earlier backward()", "what one call of forward() gave: it serves "
                                "one backward()")
        arrays, like, shape = kept.arrays, kept.x[0], self.state_shape(kept.rows)
        wanted = kept.steps, kept.batch, self.width
        dy = rows_of(self.manifest, arrays, dy, kept.steps, kept.batch, like)
        placed = self._gradient(arrays, dy, "dy", wanted, like)
        states = [None] * len(self.manifest.states) if dstate is None else dstate
        if not isinstance(states, (tuple, list)) or len(states) != len(self.manifest.states):
            raise ArgumentError("dstate", type(dstate), f"None, or a tuple of {len(self.manifest.states)} arrays: of "
                                f"{', '.join(self.manifest.states)}")
        dstates = [self.zero_state(kept.batch) if value is None else
                   self._gradient(arrays, value, f"dstate[{n}]", shape, like) for n, value in enumerate(states)]
        sums = dict(self._sums(arrays, gradients, like))
        dx = training.room_for_dx(kept) or arrays.empty((kept.steps, kept.batch, self.manifest.workload.input), like,
                                                        self.library)
        needed = want_state or "dstate_in" not in (self.manifest.optional or ())
        before = [arrays.empty(shape, like, self.library) for _ in states] if needed else []
        kept.taken = True
        training.backward(kept, placed, dstates, dx, before, sums.values(), add=gradients is not None)
        of_x, of_inputs = parts_of(self.manifest, arrays.give(dx[0]), kept.widths)
        return Gradients(of_x, {n: arrays.give(a) for n, (a, _) in sums.items()},
                         tuple(arrays.give(a) for a, _ in before if want_state), of_inputs)

    def kept_bytes(self, steps: int, batch: int | None = None) -> int:
        """Bytes that :meth:`forward` keeps at T = ``steps`` and this B (default: the compiled one), besides x, y and
        first states."""
        return self.training.kept_bytes(steps, self.manifest.workload.batch if batch is None else batch)

    def training_workspace_bytes(self, steps: int) -> int:
        """Bytes of workspace of the larger one of :meth:`forward` and :meth:`backward` at T = ``steps``; it stays with
        the layer. ``backward`` of memory that the caller gave may take more: what is kept there stays as it is."""
        return self.training.workspace_bytes(steps)

    def _with_inputs(self, x: Any, inputs: Mapping[str, Any] | None) -> tuple[Any, Widths]:
        """x with sequences beside it in its rows, where there are some."""
        if not self.manifest.inputs and inputs is None:
            return x, {}
        arrays = arrays_of(x, "x")
        return rows_with(self.manifest, arrays, arrays.take(x, "x"), inputs)

    def _first(self, x: Any, state: Sequence[Any] | None, lengths: Any, resets: Any,
               sequences: Any) -> tuple[Arrays, Placed, dict[str, Placed], list[Placed], int, int, int]:
        """The arguments of a call as ``prepared`` has them, with zeros for states that are not given."""
        arrays, placed, masks, states, steps, batch, rows = self.prepared(x, state, lengths, resets, sequences)
        if states is None:
            states = [self.zero_state(rows)] * len(self.manifest.states)
        return arrays, placed, masks, states, steps, batch, rows

    def _memory(self, arrays: Arrays, memory: Any, steps: int, batch: int) -> Memory | None:
        """A caller's memory, checked; None where there is none, or nothing to keep."""
        if memory is None:
            return None
        array, wanted = arrays.take(memory, "memory"), (self.kept_bytes(steps, batch),)
        shape, dtype, _ = arrays.facts(array)
        if shape != wanted or dtype != "uint8":
            raise ShapeError("memory.shape", f"{shape} {dtype}", f"{wanted} uint8")
        if not wanted[0]:
            return None
        placed = arrays.in_place(array)
        if placed is None:
            raise ArgumentError("memory", "a strided, misaligned or read-only array",
                                "contiguous, writable memory, aligned to 16 bytes")
        return GivenMemory(*placed, wanted[0])

    def _gradient(self, arrays: Arrays, value: Any, name: str, wanted: Shape, like: Any) -> Placed:
        if value is None:
            return arrays.zeros(wanted, like, self.manifest.workload.dtype)
        array = arrays.take(value, name)
        shape, dtype, place = arrays.facts(array)
        if shape != wanted:
            raise ShapeError(f"{name}.shape", shape, str(wanted))
        self.check_kind(arrays, name, dtype, place)
        return arrays.ready(array, name)

    def _sums(self, arrays: Arrays, gradients: Mapping[str, Any] | None,
              like: Any) -> Iterator[tuple[str, Placed]]:
        parameters, wanted = self.manifest.parameters, summed(self.manifest.workload.dtype)
        if gradients is None:
            made = arrays.several([p.shape for p in parameters], like, wanted, zeros=not self.training.writes)
            yield from zip((p.name for p in parameters), made, strict=True)
            return
        names = [p.name for p in parameters]
        if not isinstance(gradients, Mapping) or {*gradients} != {*names}:
            raise ArgumentError("gradients", sorted(map(str, gradients)), f"arrays by name: {', '.join(names)}")
        for p in parameters:
            name = f"gradients[{p.name!r}]"
            array = arrays.take(gradients[p.name], name)
            shape, dtype, _ = arrays.facts(array)
            if shape != p.shape:
                raise ShapeError(f"{name}.shape", shape, str(p.shape))
            if dtype != wanted:
                raise DTypeError(f"{name}.dtype", dtype, wanted)
            placed = arrays.in_place(array)
            if placed is None:
                raise ArgumentError(name, "a strided, misaligned or read-only array",
                                    "contiguous, writable memory, aligned to 16 bytes")
            yield p.name, placed
