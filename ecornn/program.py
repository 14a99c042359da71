"""Programs, which schedules make: functions in TIR, the buffers they share, and entries that call them in order. A
module file is built from it: host code that carries it out (``ecornn/build/host_cuda.py``), and a manifest, by which
the loader packs weights and knows how much workspace a call needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from ecornn.dtypes import ITEMSIZE, SERVED
from ecornn.workload import summed

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

Source = tuple[str, int]  # (parameter, gate)
WHOLE = -1  # in place of a gate: all of them, one behind the other
ON_GPU = (*SERVED["cuda"], "tf32")  # the kinds of packings that build/pack_weights.cu makes
FINITE = {"pairs", "scale", "int16_scale", "int21_scale"}  # an infinite weight would make NaN of what floats make of it

# In ``sequences``, beside the number of a sequence that lies in two pieces, in neighbouring columns: this one is the
# first or the second of them in x's time. The one that a kernel works on first ends at least as many steps as
# ``PIECES_APART`` before the other begins, and leaves its state for it.
EARLIER, LATER = 1 << 30, 1 << 29
PIECES_APART = 2

# Roles of buffers: those that a caller passes in, those that a call writes for the caller, those that forward writes
# for backward to read, weights as kernels read them, and memory whose contents are undefined before a call.
ROLES = GIVEN, MADE, KEPT, PACKED, WORKSPACE = "given", "made", "kept", "packed", "workspace"

RUN, FORWARD, BACKWARD = "run", "forward", "backward"
_ALL = RUN, FORWARD, BACKWARD
SUMS = "sums"  # in place of a data type: the one that a layer adds up in


@dataclass(frozen=True)
class Tensor:
    """An array that a module exchanges with its caller, contiguous. ``axes``: the sizes of its axes: T, B, I and H as
    of a :class:`~ecornn.workload.Workload`, W of a row of y (D H), V of a row of values that are kept beside each other
    (H of each)."""

    role: str
    axes: tuple[str, ...]
    entries: tuple[str, ...] = _ALL  # the functions of a module that exchange it
    dtype: str | None = None  # data type, or SUMS; None: the layer's
    by_state: bool = False  # there is one for each state of each sequence of a stack; or for each value, by its number
    by_parameter: bool = False  # there is one for each parameter of each sequence of a stack, of the parameter's shape
    optional: bool = False  # only where the field of its name of a Traversal is set
    switch: bool = False  # no array: its pointer is null or not, which says something. Programs may have none

    def row(self, sizes: Mapping[str, int]) -> int | None:
        """Elements of one step and batch row, for sizes by axis; None where the tensor has no axis of time."""
        return prod(sizes[axis] for axis in self.axes[2:]) if self.axes[0] == "T" else None


# With ``sequences``, which has the number of each step's sequence, B of states is S, the number of sequences.
# ``state_kept`` is a state after each step, zero where a row takes no part, ``value_kept`` any other value of the step,
# anything finite there, ``values_kept`` several of these, one beside the other; gradients are of the layer's output
# with respect to what their names say, those of parameters (G, H, K) or (G, H). These are written where ``existing``
# is null, and else, or in a program that has none, added to what is there.
TENSORS = {
    "x": Tensor(GIVEN, ("T", "B", "I")),
    "y": Tensor(MADE, ("T", "B", "W")),
    "state_in": Tensor(GIVEN, ("B", "H"), by_state=True),
    "state_out": Tensor(MADE, ("B", "H"), (RUN, FORWARD), by_state=True),
    "lengths": Tensor(GIVEN, ("B",), dtype="int32", optional=True),
    "resets": Tensor(GIVEN, ("T", "B"), dtype="uint8", optional=True),
    "sequences": Tensor(GIVEN, ("T", "B"), dtype="int32", optional=True),
    "state_kept": Tensor(KEPT, ("T", "B", "H"), (FORWARD, BACKWARD), by_state=True),
    "value_kept": Tensor(KEPT, ("T", "B", "H"), (FORWARD, BACKWARD), by_state=True),
    "values_kept": Tensor(KEPT, ("T", "B", "V"), (FORWARD, BACKWARD), by_state=True),
    "dy": Tensor(GIVEN, ("T", "B", "W"), (BACKWARD,)),
    "dstate_out": Tensor(GIVEN, ("B", "H"), (BACKWARD,), by_state=True),
    "dx": Tensor(MADE, ("T", "B", "I"), (BACKWARD,)),
    "dstate_in": Tensor(MADE, ("B", "H"), (BACKWARD,), by_state=True),
    "gradient": Tensor(MADE, ("G", "H", "K"), (BACKWARD,), SUMS, by_parameter=True),
    "existing": Tensor(GIVEN, ("1",), (BACKWARD,), "uint8", switch=True),
}
# entry -> the tensors that it exchanges with its caller; of kept ones there are those that backward reads
ENTRIES = {entry: tuple(name for name, tensor in TENSORS.items() if entry in tensor.entries) for entry in _ALL}


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size that may grow with the sequence: ``fixed + per_step * T`` elements."""

    fixed: int = 0
    per_step: int = 0

    def at(self, steps: int) -> int:
        return self.fixed + self.per_step * steps


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe of a packed weight buffer, by which ``bind`` makes it once from the cell's parameters.

    The ``sources`` are stacked on a new first axis (each is ``parameter[gate]``: (H, K) or (H,); ``("", 0)`` is zeros,
    and gate :data:`WHOLE` of a matrix (G*H, K), as PyTorch has it), padded at the end with zeros to ``pad``, reshaped
    to ``split``, transposed by ``order`` and stored as ``dtype``: a floating-point type; ``tf32``, float32 rounded to
    10 bits of mantissa; ``int8``, each row (last axis of ``pad``) divided by its scale, rounded to nearest even, plus
    128; ``scale``, float32, a row's largest magnitude / 127, without the last axis; ``int16`` and ``int21`` with
    ``int16_scale`` and ``int21_scale``, see ``ecornn/build/c_pack.h``; ``balanced``, float32, each row divided by the
    power of two at or below its mean magnitude of nonzeros; ``balance``, those powers; ``pairs``, float32, of such rows
    as ``split`` has them, (..., sections, k): minus the sum over k of the products of sections 0 and 1, every other one
    negated."""

    sources: tuple[Source, ...]
    pad: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    dtype: str


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of the program, named in the calls."""

    name: str
    role: str  # one of ROLES
    dtype: str
    extent: Extent = Extent()  # none of those that the caller has; a workspace is 256-byte aligned
    packing: Packing | None = None  # the recipe of a packed one
    tensor: str | None = None  # the one of TENSORS that a given or made one is
    state: str | None = None  # the state's name, for a tensor of each state; the parameter's, for one of each parameter
    part: int = 0  # the number of the sequence of a stack that it belongs to; 0 where all share it

    @classmethod
    def of(cls, tensor: str, dtype: str, state: str | None = None) -> Buffer:
        """The buffer of a tensor, of a layer of ``dtype``; ``h_in`` is the name of the state h's ``state_in``, and
        ``gradient_bias`` that of the gradient of the parameter ``bias``."""
        kind = TENSORS[tensor]
        name = tensor
        if state is not None:
            name = f"{tensor}_{state}" if kind.by_parameter else tensor.replace("state", state)
        own = summed(dtype) if kind.dtype == SUMS else kind.dtype or dtype
        return cls(name, kind.role, own, tensor=tensor, state=state)

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype == "uint8" else ITEMSIZE.get(self.dtype, 4)

    def nbytes(self, steps: int) -> int:
        return self.extent.at(steps) * self.itemsize


@dataclass(frozen=True)
class Fill:
    """Sets every byte of a workspace buffer to ``byte``, over its first ``extent`` elements."""

    buffer: str
    byte: int
    extent: Extent


@dataclass(frozen=True)
class Launch:
    """One kernel launch. A parameter of the function is the buffer that ``names`` gives for it, else the one of its own
    name, or an int32 scalar: ``T``, ``B`` (of the call), ``t`` (of the step, in a loop), ``add`` (in an entry that
    takes ``existing``: 1 where gradients of parameters are added to what is there). ``early``: it may begin before the
    launch ahead of it in its stream has ended, once that allows it: the kernel itself waits for the end
    (``griddepcontrol``) before it reads what launches write, or writes what they use."""

    function: str
    grid: int
    threads: int
    shared: int = 0  # dynamic shared memory, bytes
    cooperative: bool = False
    cluster: int = 1
    names: Mapping[str, str] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()  # parameters that it makes: a call that has null for all of them leaves it out
    early: bool = False


@dataclass(frozen=True)
class Loop:
    """``calls`` for t = 0 .. T-1, in order."""

    calls: tuple[Launch, ...]


@dataclass(frozen=True)
class Relay:
    """CUDA: a :class:`Loop` whose steps pass a state on. Each finds it in ``before`` and leaves it for the next one in
    ``after``, two workspaces that change places; the first one finds it in ``given``, of ``row`` elements for each row
    of the batch, the caller's memory. Of a call of one step that is copied, if ``written``, the state afterwards, is in
    the same place: some blocks still read the one when others write the other."""

    calls: tuple[Launch, ...]
    before: str
    after: str
    given: str
    written: str
    row: int


@dataclass(frozen=True)
class Parallel:
    """CPU: ``function`` once on each thread (scalars ``thread`` and ``threads`` besides T and B), of which there are
    no more than ``most`` (0: any number), and fewer where other calls run or there is not enough to do: ``work`` are
    the multiply-adds of a row of the batch in a step, about (0: nobody knows). ``names`` as of :class:`Launch`."""

    function: str
    names: Mapping[str, str] = field(default_factory=dict)
    most: int = 0
    work: int = 0


@dataclass(frozen=True)
class Concurrent:
    """CUDA: ``branches``, each some calls in order, at the same time: each on a share of the GPU and in a stream of
    its own. They must not write what another one uses. ``one_kernel``: branches of one launch each are one launch, of a
    kernel that has the blocks of all (``ecornn/build/one_kernel.py``), unless one of them exchanges between blocks."""

    branches: tuple[tuple[Call, ...], ...]
    one_kernel: bool = False


@dataclass(frozen=True)
class WaveLayer:
    """A layer of a :class:`Wave`: ``calls`` for one chunk, whose T is the chunk's steps. ``rows``: buffers that have
    rows of time -> elements of a row for each row of the batch; a chunk gets them from its first step on."""

    calls: tuple[Call, ...]
    rows: Mapping[str, int]
    states: tuple[tuple[str, str], ...]  # pairs of `state_in` and `state_out`; later chunks read the second of each


@dataclass(frozen=True)
class Wave:
    """CUDA: ``layers`` at once, in chunks, each after the one before it, and after the same one of the layer before."""

    layers: tuple[WaveLayer, ...]
    chunks: int
    least: int

    def steps(self, steps: int) -> int:
        return chunk_steps(steps, self.chunks, self.least)


def chunk_steps(steps: int, chunks: int, least: int) -> int:
    """Steps of a chunk where T = ``steps``: there are ``chunks`` chunks at most, of ``least`` steps at least. Eight
    steps of any type are whole pieces of 16 bytes, to which x is aligned."""
    return -(-max(-(-steps // chunks), least) // 8) * 8


def chunk_extent(extent: Extent, chunks: int, least: int) -> Extent:
    """The part of ``extent`` that a chunk needs, for all T: a chunk has T / chunks + least + 8 steps at most."""
    return Extent(extent.fixed + extent.per_step * (least + 8), -(-extent.per_step // chunks))


@dataclass(frozen=True)
class Chunks:
    """CUDA: ``calls`` for one chunk of ``steps`` steps after the other; the last in time may have fewer. T is the
    chunk's; all but the first have ``add`` 1. ``reverse``: the last comes first. Scalars: ``first_step`` of the chunk,
    ``all_steps``, the call's T; ``rows`` and ``states`` as of :class:`WaveLayer`. ``in_place``: pairs of a workspace
    and a buffer of ``rows``; where a call has both in one place, the workspace is where the chunk's rows are."""

    calls: tuple[Call, ...]
    rows: Mapping[str, int]
    states: tuple[tuple[str, str], ...]
    steps: int
    reverse: bool = False
    in_place: tuple[tuple[str, str], ...] = ()


Leaf = Launch | Parallel
Call = Fill | Leaf | Loop | Relay | Concurrent | Wave | Chunks


@dataclass(frozen=True)
class Entry:
    """A function of the module: its calls in order, and the names of the buffers whose pointers it takes, in order."""

    calls: tuple[Call, ...]
    takes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """Functions (by name, parameters named after buffers and scalars), buffers, and entries by name. ``in_place``:
    workspaces of ``backward`` -> a buffer that is kept, which may be where the workspace is: its values are then lost,
    and the workspace takes no memory."""

    functions: dict[str, PrimFunc]
    buffers: tuple[Buffer, ...]
    entries: Mapping[str, Entry]
    notes: dict[str, str] = field(default_factory=dict)  # shown by --emit and in the manifest
    together: int = 1  # neighbouring columns of `sequences` that may share one; 1 where none may, 0 where all may
    dx_in: str | None = None  # a kept buffer, of as many bytes as the gradient of x, in whose place that may be written
    in_place: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def running(cls, functions: dict[str, PrimFunc], buffers: Iterable[Buffer], calls: Iterable[Call],
                notes: dict[str, str] | None = None, together: int = 1) -> Program:
        """A program with the entry ``run`` alone, which takes all buffers."""
        buffers = tuple(buffers)
        run = Entry(tuple(calls), tuple(b.name for b in buffers))
        return cls(functions, buffers, {RUN: run}, notes or {}, together)

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for entry in self.entries.values() for call in entry.calls)


def mapped(call: Call, leaf: Callable[[Leaf], Leaf], name: Callable[[str], str] = str,
           together: Callable[[Concurrent], Call] = lambda call: call) -> Call:
    """The call with ``leaf`` of each launch in its place, ``name`` of each buffer that calls around them name, and
    ``together`` of those at the same time. It and :func:`every` are the only walks over calls; a kind that they do not
    know is an error."""
    def inside(calls: Iterable[Call]) -> tuple[Any, ...]:
        return tuple(mapped(one, leaf, name, together) for one in calls)

    def moved(one: Chunks | WaveLayer) -> dict[str, Any]:
        return {"calls": inside(one.calls), "rows": {name(n): size for n, size in one.rows.items()},
                "states": tuple((name(a), name(b)) for a, b in one.states)}

    match call:
        case Launch() | Parallel():
            return leaf(call)
        case Fill():
            return replace(call, buffer=name(call.buffer))
        case Loop():
            return Loop(inside(call.calls))
        case Relay():
            return Relay(inside(call.calls), name(call.before), name(call.after), name(call.given), name(call.written),
                         call.row)
        case Concurrent():
            return together(replace(call, branches=tuple(map(inside, call.branches))))
        case Wave():
            return replace(call, layers=tuple(replace(layer, **moved(layer)) for layer in call.layers))
        case Chunks():
            return replace(call, **moved(call), in_place=tuple((name(a), name(b)) for a, b in call.in_place))
    raise TypeError(f"{call!r} is no call of a program")


def every(calls: Iterable[Call]) -> Iterator[Call]:
    """Each of ``calls``, in order, and behind it those inside it."""
    for call in calls:
        yield call
        match call:
            case Loop() | Relay() | Chunks():
                yield from every(call.calls)
            case Concurrent():
                yield from every(one for branch in call.branches for one in branch)
            case Wave():
                yield from every(one for layer in call.layers for one in layer.calls)
            case Launch() | Parallel() | Fill():
                pass
            case _:
                raise TypeError(f"{call!r} is no call of a program")


def launches(calls: Iterable[Call]) -> Iterator[Launch]:
    return (one for one in every(calls) if isinstance(one, Launch))


def packs(program: Program) -> bool:
    """True where a GPU's module packs its weights itself, by the kernel of build/pack_weights.cu, which does not know
    every kind of packing."""
    packings = [b.packing for b in program.buffers if b.packing is not None]
    return bool(packings) and all(p.dtype in ON_GPU for p in packings)


def packed_for_left_out(program: Program) -> tuple[str, ...]:
    """The packed buffers that are read only by launches that a call may leave out: such a call does without them."""
    read: dict[str, bool] = {}  # by name, whether all that read it may be left out
    for one in launches(program.calls):
        for parameter in program.functions[one.function].params:
            name = one.names.get(parameter.name, parameter.name)
            read[name] = read.get(name, True) and bool(one.wanted)
    return tuple(b.name for b in program.buffers if b.role == PACKED and read.get(b.name, False))


def leaves_out(program: Program) -> tuple[str, ...]:
    """The tensors that a call of ``backward`` may have null for: only launches that are left out then make them."""
    states = {b.name for b in program.buffers if b.tensor == "dstate_in"}
    makers = [one for one in launches(program.entries[BACKWARD].calls if BACKWARD in program.entries else ())
              if any(one.names.get(p.name, p.name) in states for p in program.functions[one.function].params)]
    return ("dstate_in",) if makers and all(one.wanted for one in makers) else ()
