"""A product over all rows of T*B as its kernels see it: what is multiplied by what, and what is made of the sums.

    sums[r, q, j] = sum over operands o, k of o[r, k] * weights_o[q, j, k]

for products q of units j. A job does not know whether units are a cell's hidden ones or inputs of a layer. Its epilogue
computes values on accumulators, and writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ecornn.device import Device
from ecornn.dtypes import ITEMSIZE
from ecornn.program import PACKED, Buffer, Extent, Packing, Source
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa import st_global
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit, invariants

# A row stands for each step and batch row, T*B; for each batch row; or for each sequence that lies in columns.
STEPS, BATCH, SEQUENCES = "steps", "batch", "sequences"
COUNT = "count"  # the workspace that has the number of sequences
CHUNK = 16  # bytes that one instruction copies at most
LINE = 128  # bytes of K of a stage: whole lines of x
SLOWER = {"float32": 5, "tf32": 2}  # than products of 16-bit types

Vectors = Callable[[int | None], Expr]  # number of a parameter vector -> its value; None: the number of the unit


@dataclass(frozen=True)
class Columns:
    """``width`` values of each row of a buffer (T*B, ``stride``), from value ``offset`` on. ``raised``: as of
    :func:`~ecornn.schedules.cuda.isa.tensor_core.raised`."""

    name: str
    width: int
    stride: int
    offset: int = 0
    raised: bool = False

    def together(self, most: int) -> int:
        """Neighbouring values, of ``most`` at most, that are aligned to as many in every row."""
        return gcd(self.width, self.stride, self.offset, most)

    def copied(self, most: int) -> int:
        """The same, but that the last ones of a row may be fewer: what lies behind them is the row's, too."""
        return gcd(self.stride, self.offset, most)

    def place(self, row: Expr, value: Expr) -> Expr:
        """The place of a value of a row, int64."""
        first = T.cast(row, "int64") * self.stride + value
        return first + self.offset if self.offset else first


def whole_chunks(values: int, itemsize: int) -> int:
    """``values``, rounded up to whole chunks of 16 bytes."""
    return -(-values * itemsize // CHUNK) * CHUNK // itemsize


def packing_of(sources: tuple[Source, ...], first: tuple[int, ...], made: tuple[int, ...], multiplied: tuple[int, ...],
               order: Sequence[int], dtype: str, *, transposed: bool = False, heads: int = 1) -> Packing:
    """How weights are packed, with axes (*``first``, *``made``, *``multiplied``): of the sources, of the units that a
    source makes, of the values that these multiply; ``order`` places them. ``transposed``: the axes of a source have
    changed places, and each of ``heads`` is a block on its diagonal; ``made`` begins with all heads' units."""
    if not transposed:
        pad = (prod(first), prod(made), prod(multiplied))
        return Packing(sources, pad, (*first, *made, *multiplied), tuple(order), dtype)
    own, n = (heads,) if heads > 1 else (), len(first)
    made = (made[0] // heads, *made[1:])
    before = n + len(own)  # axes before those that are multiplied, behind which come the units'
    behind = before + len(multiplied)
    place = [*([i] for i in range(n)), [*range(n, before), behind], *([behind + i] for i in range(1, len(made))),
             *([before + i] for i in range(len(multiplied)))]
    return Packing(sources, (prod(first), heads * prod(multiplied), prod(made)), (*first, *own, *multiplied, *made),
                   tuple(axis for i in order for axis in place[i]), dtype)


@dataclass(frozen=True)
class Operand:
    """Values, and the packed ``weights`` that multiply them, made of ``sources``, one for each product."""

    columns: Columns
    weights: str
    sources: tuple[Source, ...]
    transposed: bool = False  # a source is (K, units), not (units, K)
    pieces: int = 1  # sources that K is then, one behind the other, without padding between them
    heads: int = 1  # blocks on a source's diagonal: units multiply the values of their own head, which has whole tiles

    @property
    def depth(self) -> int:  # values that a unit multiplies
        return self.columns.width // self.heads

    def packing(self, rows: int, across: tuple[int, ...], along: tuple[int, ...], order: Sequence[int],
                dtype: str) -> Packing:
        """How weights are packed: axes (row, *across units, *along K), which ``order`` puts in place."""
        inputs, pieces = prod(along), self.pieces
        if self.transposed:
            assert self.heads == 1 or (inputs == self.depth and across[0] % self.heads == 0), "padding within heads"
        assert pieces == 1 or (self.transposed and inputs == self.columns.width), "padding between pieces"
        found = packing_of(self.sources, (rows,), across, along, order, dtype, transposed=self.transposed,
                           heads=self.heads)
        pad = (rows * pieces, found.pad[1] // pieces, found.pad[2])
        return Packing(self.sources, pad, found.split, found.order, dtype)

    def buffer(self, packing: Packing, dtype: str) -> Buffer:
        return Buffer(self.weights, PACKED, dtype, Extent(prod(packing.pad)), packing)


@dataclass(frozen=True)
class Job:
    """One such product."""

    name: str  # of the kernel
    device: Device
    dtype: str  # of operands and weights, as a workload has it
    arithmetic: str  # what they are rounded to, as a workload has it
    operands: tuple[Operand, ...]
    rows: int  # products of a unit
    units: int
    vectors: int = 0  # parameter vectors that it takes
    each: str = STEPS  # what there are rows of, of STEPS, BATCH and SEQUENCES
    expected: int | None = None  # rows that tiles are chosen for, any number may come; None: too many to matter
    followed: bool = False  # whether the launch behind it may begin before it has ended, and waits for its end itself

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def declare(self, epilogue: Epilogue) -> tuple[dict[str, TirBuffer], Expr]:
        """The kernel's parameters, T and B before the others, by name; and how many rows there are."""
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        found = self.declare_inputs(epilogue)
        for name, kind in ({"vectors": "float32"} | dict(epilogue.writes)).items():
            found[name] = found[name] if name in found else T.pointer(name, kind)
        return found | {"B": batch}, rows_of(self.each, found, steps, batch)

    def declare_inputs(self, epilogue: Epilogue) -> dict[str, TirBuffer]:
        """The parameters that are multiplied and read, but for ``vectors``."""
        kinds = {o.columns.name: self.dtype for o in self.operands} | dict(epilogue.reads) | counted(self.each)
        kinds |= {o.weights: self.dtype for o in self.operands}
        return {name: T.pointer(name, kind) for name, kind in kinds.items()}


@dataclass(frozen=True)
class Shape:
    """How one is cut: tiles of rows by units, and stages of 128 bytes of K of each row and weight."""

    rows: int  # products of a unit
    octets: int  # groups of 8 units of a tile
    height: int  # rows of a tile
    columns: int  # tiles side by side over the units
    parts: tuple[int, ...]  # stages' worth of K of each operand
    row_bytes: int  # of a stage, for each row
    stages: int  # of the pipeline, each in shared memory
    beside: int = 0  # bytes of shared memory that something else takes

    @property
    def slabs(self) -> int:  # stages' worth of K in all
        return sum(self.parts)

    @property
    def units(self) -> int:
        return self.octets * 8

    @property
    def width(self) -> int:  # columns of a tile: products of its units
        return self.units * self.rows

    @property
    def weight_bytes(self) -> int:  # bytes of packed weights of a stage
        return self.width * LINE

    @property
    def stage_bytes(self) -> int:
        return self.height * self.row_bytes + self.weight_bytes

    @property
    def shared(self) -> int:  # bytes of dynamic shared memory
        return self.stages * self.stage_bytes + self.beside


def rows_of(each: str, arguments: Mapping[str, TirBuffer], steps: Expr, batch: Expr) -> Expr:
    """How many rows there are; ``arguments`` has what :func:`counted` says."""
    return {STEPS: lambda: steps * batch, BATCH: lambda: batch, SEQUENCES: lambda: arguments[COUNT][0]}[each]()


def counted(each: str) -> dict[str, str]:
    """The parameter of a kernel that says how many rows there are, and its type, if there is one."""
    return {COUNT: "int32"} if each == SEQUENCES else {}


class Epilogue(ABC):
    """Makes values of a row's sums, and stores them."""

    reads: Mapping[str, str]  # names and types of buffers, beside ``vectors``
    writes: Mapping[str, str]
    span: int = 2  # or 4: the neighbouring units that one thread had best have

    def constants(self, vector: Vectors) -> Any:
        """Values of a unit that are the same for all rows."""
        return None

    @abstractmethod
    def store(self, arguments: Mapping[str, TirBuffer], row: Expr, unit: Expr, within: Callable[[Expr, int], Expr],
              constants: Sequence[Any], sums: Sequence[Sequence[Expr]]) -> None:
        """Units ``unit + e``, of products ``sums[e]``; some may be none of the job's, ``within(unit, e)`` is one."""


def write_tile(job: Job, epilogue: Epilogue, arguments: Mapping[str, TirBuffer], acc: TirBuffer,
               vector: Callable[[int, Expr], Expr], unit_of: Callable[[Expr], Expr],
               row_of: Callable[[Expr, Expr], Expr], end: Expr, span: int = 2) -> None:
    """Writes what ``epilogue`` makes of a thread's sums: of units ``unit_of(group)`` and those next to it, ``span`` in
    all, of rows ``row_of(tile, half) < end``. ``vector(i, unit)`` is the value of parameter vector i. ``acc`` has
    accumulators (m16 tile, n8 tile, 4) as ``mma`` leaves them: two neighbouring columns a thread. Tile ``octet * rows +
    row`` has product ``row`` of 8 units. With a ``span`` of 2 the columns are the units in order, with 4 those of two
    octets are dealt out so that a thread has 4 neighbouring units."""
    tiles, products = (int(n) for n in acc.shape[:2])
    def within(unit: Expr, e: int) -> Expr:  # or the last one
        return T.let("own_unit", unit + e if job.units % span == 0 else T.min(unit + e, job.units - 1))
    def vectors(unit: Expr, e: int) -> Vectors:
        return lambda i: T.cast(within(unit, e), "float32") if i is None else vector(i, within(unit, e))
    with T.unroll("o", products // max(job.rows, 1) * 2 // span) as o:
        unit = T.let("unit", unit_of(o))
        with T.when(unit < job.units):
            constants = [epilogue.constants(vectors(unit, e)) for e in range(span)]
            with T.unroll("m", tiles) as m, T.unroll("upper", 2) as half:
                here = T.let("here", row_of(m, half))
                with T.when(here < end):
                    sums = [[acc[m, (o * (span // 2) + e // 2) * job.rows + r, half * 2 + e % 2]
                             for r in range(job.rows)] for e in range(span)]
                    epilogue.store(arguments, here, unit, within, constants, sums)


class HoistedValues(Epilogue):
    """A cell's hoisted scalars, written to ``hoisted`` as ``layout`` says."""

    def __init__(self, task: Task, layout: Hoisted) -> None:
        self.graph, self.layout, self.span = task.graph, layout, layout.span
        self.offsets, self.stride = leaves_of_rows(task), task.workload.input
        self.reads = {"x": task.workload.dtype} if self.offsets else {}
        self.writes = {"hoisted": layout.dtype}

    def constants(self, vector: Vectors) -> dict[Var, Expr]:
        return invariants(self.graph, {v.var: T.let(v.var.name, vector(None if v.numbers else i))
                                       for i, v in enumerate(self.graph.vectors)})

    def store(self, arguments: Mapping[str, TirBuffer], row: Expr, unit: Expr, within: Callable[[Expr, int], Expr],
              constants: Sequence[dict[Var, Expr]], sums: Sequence[Sequence[Expr]]) -> None:
        graph, values = self.graph, []
        for e, own in enumerate(sums):
            env = constants[e] | {p.var: v for p, v in zip(graph.hoisted_products, own, strict=True)}
            for var, offset in self.offsets.items():
                at = T.cast(row, "int64") * self.stride + within(unit, e)
                env[var] = T.let(var.name, T.cast(arguments["x"][at + offset if offset else at], "float32"))
            env = emit(graph.hoisted, env)
            values.append([env[v] for v in graph.projected])
        store_hoisted(self.layout, arguments["hoisted"], row, unit, values)


def leaves_of_rows(task: Task) -> dict[Var, int]:
    """Variables that are read from a row of x as it is -> the place in it where their H values begin."""
    graph, w = task.graph, task.workload
    return ({} if graph.x is None else {graph.x: 0}) | graph.input_offsets(w.input, w.hidden)


def store_hoisted(layout: Hoisted, into: TirBuffer, row: Expr, unit: Expr, values: Sequence[Sequence[Expr]],
                  finite: bool = True) -> None:
    """``values[e][q]`` of 2 or 4 neighbouring units of a row, a multiple of as many; those beyond H are none.
    ``finite``: as of :meth:`Hoisted.store`."""
    if layout.packed:
        layout.store(into, T.cast(row, "int64"), unit, values, finite)
        return
    H, span = layout.hidden, len(values)
    step = next(n for n in (span, 2, 1) if H % n == 0)
    for q in range(layout.outputs):
        place = T.let("place", (T.cast(row, "int64") * layout.outputs + q) * H + unit)
        for e in range(0, span, step):
            with T.when(e == 0 or unit + e < H):
                if step == 1:
                    T.buffer_store(into, values[e][q], [place + e])
                else:
                    st_global(into.ptr_to([place + e]), [values[e + i][q] for i in range(step)], "f32")
