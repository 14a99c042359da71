"""A layer, ready to run, and the calls of one that trains: forward, which keeps values, and the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

from ecornn.boundary import public
from ecornn.errors import ArgumentError, CopyError, DTypeError, ModuleError, ShapeError
from ecornn.program import BACKWARD, FORWARD
from ecornn.runtime.arrays import Arrays, Placed, Shape
from ecornn.runtime.caller import UNFIT, Caller, Widths, named, parts_of, rows_of, rows_with
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.memory import GivenMemory, Memory, Pool
from ecornn.runtime.plan import MASKS, SCALARS, EntryPlan, entry_plan, kept_layout
from ecornn.workload import summed


@dataclass
class Kept:
    """Values of :meth:`Layer.forward` for :meth:`Layer.backward`, once; x and y must not be written before. ``room``,
    if no part of ``memory``, is what the gradient of x may be written over, and lives on as that."""

    owner: Any
    arrays: Arrays
    x: Placed
    y: Placed
    states: list[Placed]
    masks: dict[str, Placed]
    memory: Memory | None
    steps: int
    batch: int
    rows: int  # of states: B, or S with ``sequences``
    widths: Widths = field(default_factory=dict)
    taken: bool = False
    room: Memory | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept besides x, y and the first states."""
        return sum(part.nbytes for part in (self.memory, self.room) if part is not None)


@dataclass(frozen=True)
class Gradients:
    """The result of :meth:`Layer.backward`.

    Attributes
    ----------
    x : (T, B, I), of the module's data type
    weights : by name, of the weights' shapes, float32; of a module of float64 that
    state : of the first states, as they were passed to ``forward``: (B, H), or (L*D, B, H); S rows with ``sequences``.
        () where they were not wanted
    inputs : of the sequences beside x that were passed as ``inputs``, by name, each of its shape"""

    x: Any
    weights: dict[str, Any]
    state: tuple[Any, ...]
    inputs: dict[str, Any] = field(default_factory=dict)


class Training:
    """The two entries of a module, for the :class:`~ecornn.runtime.caller.Caller` whose weights they read."""

    def __init__(self, caller: Any) -> None:
        self._caller, manifest = caller, caller.manifest
        if FORWARD not in manifest.entries:
            raise ModuleError("the module was compiled without training=True: it has no backward pass")
        self._forward, self._backward = entry_plan(manifest, FORWARD), entry_plan(manifest, BACKWARD)
        self._arguments: dict[EntryPlan, list[int]] = {}  # those that are the same in every call; 0 for all others
        for plan in (self._forward, self._backward):
            packed = {position: caller.packed[buffer.name] for position, buffer in plan.packed}
            self._arguments[plan] = [packed.get(position, 0) for position in range(plan.count)]
        self._layout = lru_cache(maxsize=64)(partial(kept_layout, manifest))
        self._room = lru_cache(maxsize=64)(EntryPlan.offsets)
        self._pool, self._kept = Pool(), Pool()
        self._dx_in, self._in_place = manifest.dx_in or "", manifest.in_place or {}
        self._apart = frozenset(self._in_place)  # workspaces that lie in what is kept, if that is the layer's
        self.writes = bool(self._backward.at["existing"])  # gradients of parameters, in place of adding to them

    def kept_bytes(self, steps: int, batch: int) -> int:
        return self._layout(steps, batch)[1]

    def workspace_bytes(self, steps: int) -> int:
        """The most bytes of workspace that one of the two calls takes; ``backward`` of a caller's memory takes more."""
        return max(self._room(plan, steps, self._apart)[1] for plan in (self._forward, self._backward))

    def forward(self, kept: Kept, after: Sequence[Placed]) -> None:
        """Runs ``forward``, whose last states are put into ``after``; without a caller's memory ``kept`` gets some."""
        arrays, like, library = kept.arrays, kept.x[0], self._caller.library
        offsets, total = self._layout(kept.steps, kept.batch)
        begin = offsets.get(self._dx_in)
        if kept.memory is None and begin is not None:  # apart: this alone lives as long as the gradient of x
            kept.room, total = arrays.workspace(total - begin, like, library), begin
        if kept.memory is None and total:
            kept.memory = self._kept.take(0, total) or arrays.workspace(total, like, library)
        self._run(library.forward, self._forward, kept, offsets,
                  {**self._given(kept), "state_out": self._by_part(after, kept.rows)})

    def backward(self, kept: Kept, dy: Placed, dstates: Sequence[Placed], dx: Placed, before: Sequence[Placed],
                 gradients: Iterable[Placed], add: bool = True) -> None:
        """Runs ``backward``. ``before`` gets gradients of the first states, unless it is empty; ``gradients``, in the
        manifest's order, are added to (``add``), or written, over zeros unless the module :attr:`writes`."""
        manifest = self._caller.manifest
        states = self._by_part(before, kept.rows) if before else [0] * (len(manifest.states) * manifest.stack.count)
        given = {**self._given(kept), "dy": [dy[1]], "dstate_out": self._by_part(dstates, kept.rows), "dx": [dx[1]],
                 "dstate_in": states, "gradient": [at for _, at in gradients]}
        if self.writes:
            given["existing"] = [int(add)]
        self._run(self._caller.library.backward, self._backward, kept, self._layout(kept.steps, kept.batch)[0], given)
        memory, kept.memory, kept.room = kept.memory, None, None
        # The system takes about as long to give a CPU new memory as its cores to fill it.
        if self._caller.threads is not None and memory is not None and not isinstance(memory, GivenMemory):
            self._kept.give(0, memory)

    def room_for_dx(self, kept: Kept) -> Placed | None:
        """The place of what is kept, for the gradient of x, where the program says that nobody reads it by then."""
        if kept.room is None:
            return None
        return kept.arrays.over(kept.room, kept.x[0], (kept.steps, kept.batch, self._caller.manifest.workload.input))

    def _given(self, kept: Kept) -> dict[str, list[int]]:
        return {"x": [kept.x[1]], "y": [kept.y[1]], "state_in": self._by_part(kept.states, kept.rows),
                **{name: [at] for name, (_, at) in kept.masks.items()}}

    def _by_part(self, states: Sequence[Placed], rows: int) -> list[int]:
        work, count = self._caller.manifest.workload, self._caller.manifest.stack.count
        size = rows * work.hidden * work.itemsize
        return [at + part * size for _, at in states for part in range(count)]

    def _run(self, function: Any, plan: EntryPlan, kept: Kept, offsets: Mapping[str, int],
             given: Mapping[str, Sequence[int]]) -> None:
        caller, arrays, steps = self._caller, kept.arrays, kept.steps
        queue = caller.threads or arrays.queue(caller.device)
        arguments = self._arguments[plan].copy()
        arguments[:SCALARS] = steps, kept.batch, caller.device, queue
        places: dict[str, int] = {}
        for position, buffer in plan.kept:
            if kept.room is not None and buffer.name == self._dx_in:
                place = kept.room.pointer
            else:
                assert kept.memory is not None
                place = kept.memory.pointer + offsets[buffer.name]
            arguments[position] = places[buffer.name] = place
        for tensor, positions in plan.at.items():
            for position, pointer in zip(positions, given.get(tensor, ()), strict=True):
                arguments[position] = pointer
        own = not isinstance(kept.memory, GivenMemory)  # backward writes into no other
        starts, total = self._room(plan, steps, self._apart if own else frozenset())
        key = 0 if caller.threads is not None else queue
        keep = caller.threads is not None or arrays.keeps_workspace()
        memory = (self._pool.take(key, total) if keep else None) or arrays.workspace(total, kept.x[0], caller.library)
        for (position, buffer), start in zip(plan.scratch, starts, strict=True):
            over = self._in_place.get(buffer.name) if own else None
            arguments[position] = memory.pointer + start if over is None else places[over]
        function(*arguments)
        if keep:
            self._pool.give(key, memory)


class Layer(Caller):
    """One recurrent layer, ready to run; made by :meth:`Module.bind`.

    Attributes
    ----------
    module : the module that it was bound from
    manifest : what the module says about itself
    device : number of the GPU; 0 for a CPU
    threads : CPU threads of a call; None on a GPU
    together : neighbouring columns that may share a sequence, for :meth:`Columns.of`; 1: none may

    Several Python threads may call one layer at the same time. A CUDA graph that has captured a call
    reads the layer's weights: keep the layer as long as the graph."""

    def __init__(self, module: Any, weights: Mapping[str, Any], device: int, threads: int | None) -> None:
        super().__init__(module.manifest, module.library, weights, device, threads)
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        raise CopyError("a Layer cannot be copied or pickled, since it holds packed weights: copy or pickle "
                        "layer.module, and bind it to the weights again")

    def __repr__(self) -> str:
        where, m = f"GPU {self.device}" if self.threads is None else f"{self.threads} threads", self.manifest
        return f"<ecornn.Layer {', '.join(filter(None, (str(m.workload), str(m.stack), m.schedule)))} on {where}>"

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

        Raises as a call of the layer, and :class:`~ecornn.errors.ModuleError` for a module that does not train."""
        training = self.training  # a module that does not train says so
        kept = self._begun(x, state, lengths, resets, sequences, inputs, memory)
        arrays, like = kept.arrays, kept.x[0]
        kept.y = arrays.empty((kept.steps, kept.batch, self.width), like, self.library)
        after = [arrays.empty(self.state_shape(kept.rows), like, self.library) for _ in self.manifest.states]
        training.forward(kept, after)
        rows = arrays.give(kept.y[0])
        return rows if self.whole_rows else named(self.manifest, rows), tuple(arrays.give(a) for a, _ in after), kept

    @public
    def kept_in(self, memory: Any, x: Any, y: Any, state: Sequence[Any] | None = None, *, lengths: Any = None,
                resets: Any = None, sequences: Any = None, inputs: Mapping[str, Any] | None = None) -> Kept:
        """Returns what a call of :meth:`forward` with these arguments kept in ``memory``, for :meth:`backward` and for
        callers that hold arrays alone. ``memory`` (:meth:`kept_bytes`,) uint8 may be a copy; :meth:`backward` leaves it
        as it is. ``y`` has the rows of all outputs, if there are several."""
        kept = self._begun(x, state, lengths, resets, sequences, inputs, memory)
        kept.y = self._gradient(kept.arrays, y, "y", (kept.steps, kept.batch, self.width), kept.x[0])
        return kept

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
        ``kept`` of another layer, or one that was used before; nothing has run then."""
        training = self.training  # a module that does not train says so
        if not isinstance(kept, Kept) or kept.owner is not self:
            raise ArgumentError("kept", type(kept).__name__, "the value that forward() of this layer returned")
        if kept.taken:
            raise ArgumentError("kept", "used by an earlier backward()", "the value of a new forward(), since each "
                                "serves one backward()")
        arrays, like, shape = kept.arrays, kept.x[0], self.state_shape(kept.rows)
        dy = rows_of(self.manifest, arrays, dy, kept.steps, kept.batch, like)
        placed = self._gradient(arrays, dy, "dy", (kept.steps, kept.batch, self.width), like)
        states = [None] * len(self.manifest.states) if dstate is None else dstate
        if not isinstance(states, (tuple, list)) or len(states) != len(self.manifest.states):
            raise ArgumentError("dstate", type(dstate), f"None, or a tuple of {len(self.manifest.states)} arrays for "
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
        """Bytes that :meth:`forward` keeps besides x, y and first states; ``batch``: as compiled by default."""
        return self.training.kept_bytes(steps, self.manifest.workload.batch if batch is None else batch)

    def training_workspace_bytes(self, steps: int) -> int:
        """Bytes of workspace of the larger one of :meth:`forward` and :meth:`backward` at T = ``steps``; it stays with
        the layer. ``backward`` of memory that the caller gave may take more: what is kept there stays as it is."""
        return self.training.workspace_bytes(steps)

    def _begun(self, x: Any, state: Sequence[Any] | None, lengths: Any, resets: Any, sequences: Any,
               inputs: Mapping[str, Any] | None, memory: Any) -> Kept:
        """A call with these arguments, which are checked, before there is a y."""
        arrays, widths = arrays_of(x, "x"), Widths()
        x = arrays.take(x, "x")
        if self.manifest.inputs or inputs is not None:
            x, widths = rows_with(self.manifest, arrays, x, inputs)
        steps, batch = self._check_x(arrays, x)
        placed = arrays.ready(x, "x")
        found, _, rows = self._masks(arrays, placed[0], steps, batch, lengths, resets, sequences)
        masks = dict(zip((name for name in MASKS if getattr(self._stack, name)), found, strict=True))
        states = ([self.zero_state(rows)] * len(self.manifest.states) if state is None else
                  self._check_state(arrays, state, rows))
        room = self._memory(arrays, memory, steps, batch)
        return Kept(self, arrays, placed, (None, 0), states, masks, room, steps, batch, rows, widths)

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
            raise ArgumentError("memory", *UNFIT)
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

    def _sums(self, arrays: Arrays, gradients: Mapping[str, Any] | None, like: Any) -> Iterator[tuple[str, Placed]]:
        parameters, wanted = self.manifest.parameters, summed(self.manifest.workload.dtype)
        names = [p.name for p in parameters]
        if gradients is None:
            made = arrays.several([p.shape for p in parameters], like, wanted, zeros=not self.training.writes)
            yield from zip(names, made, strict=True)
            return
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
                raise ArgumentError(name, *UNFIT)
            yield p.name, placed
