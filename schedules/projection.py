"""The input projection hoisted out of time: one product over all T*B rows, on tensor cores.

    out[t, b, q, j] = projected value q of unit j, from x[t, b, :], the input weights and the biases

This file says how it is cut and what it needs; ``projection_kernel.py`` has the code. Hopper has a kernel
of its own (``projection_wgmma.py``), which :func:`project` takes where it can: 16-bit types and TF32, rows of x that
are whole words, all rows at once.

A schedule may have all rows done before its own kernel runs, or only the first ``ahead`` percent: the
rest is then for blocks of its own to do while others are busy with the recurrence (``persistent``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from ecornn.program import Buffer, Extent, Launch, Packing
from ecornn.schedules.base import Task
from ecornn.schedules.hoisted import Hoisted, in_float32
from ecornn.schedules.normalization import normalize, row_sums_buffer
from ecornn.schedules.pointwise import vector_sources
from ecornn.schedules.projection_wgmma import THREADS as HOPPER_THREADS
from ecornn.schedules.projection_wgmma import Shape as HopperShape
from ecornn.schedules.projection_wgmma import packing_of as hopper_packing
from ecornn.schedules.projection_wgmma import shape_of as hopper_shape
from ecornn.schedules.tensor_core import per_word, words

THREADS = 256
STAGES = 3  # 2 where shared memory is short
WIDE = 8  # n8 tiles of a warp, about: wider ones read less shared memory a product
WARP_COLUMNS = 4  # warps side by side over units; 2 over rows
SPAN = 2  # pairs of k-tiles (16 words each) of a stage: whole 128-byte lines of x
ROW = SPAN * 16 + 4  # words of a row of x in a stage; the 4 keep ldmatrix free of bank conflicts
LEAST_ROWS = 32  # of a tile: 2 warps of one m16 tile
CHUNK = 128  # the rows done ahead are a multiple of this, and it is one of every block's rows
WGMMA = True  # off only to compare the two kernels
SPARE_REGISTERS = 50  # addresses and loop state beside accumulators and fragments

# products and additions a nanosecond and multiprocessor, measured on an H100
WGMMA_RATE, MMA_RATE = 3600.0, 2100.0  # 16-bit types; float32 has a fifth of the latter, tf32 a half


@dataclass(frozen=True)
class Part:
    """A piece of a program that other schedules put in front of theirs."""

    functions: dict[str, Any]
    buffers: tuple[Buffer, ...]
    calls: tuple[Launch, ...]


@dataclass(frozen=True)
class Shape:
    """How 256 threads cut the projection into tiles.

    Attributes
    ----------
    rows, outputs : hoisted products and outputs that a unit has
    octets : groups of 8 units a warp computes
    tiles : m16 tiles of a warp
    columns : tiles side by side over the units
    slabs : stages' worth of K, SPAN * 16 words each
    stages : of the pipeline, each in shared memory
    """

    rows: int
    outputs: int
    octets: int
    tiles: int
    columns: int
    slabs: int
    stages: int

    @property
    def products(self) -> int:
        """n8 tiles of a warp."""
        return self.octets * max(self.rows, 1)

    @property
    def block_octets(self) -> int:
        return WARP_COLUMNS * self.octets

    @property
    def block_rows(self) -> int:
        return LEAST_ROWS * self.tiles

    @property
    def weight_words(self) -> int:
        """Words of packed weights a block needs for a slab."""
        return SPAN * self.block_octets * self.rows * 128

    @property
    def stage_words(self) -> int:
        return self.block_rows * ROW + self.weight_words

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * self.stage_words * 4 if self.rows else 16

    def registers(self, arithmetic: str) -> int:
        """Estimate of a thread's registers."""
        split = 2 if arithmetic == "float32" else 1
        return (self.tiles * self.products + split * (self.tiles + self.products)) * 4 + SPARE_REGISTERS


def shape_of(task: Task) -> Shape:
    """The tiles of a kernel that has the multiprocessor to itself; its ``shared`` may still be too much."""
    w, graph = task.workload, task.graph
    rows = len(graph.hoisted_rows)
    wide = WIDE // 2 if w.arithmetic == "float32" else WIDE  # sums of k-tiles need registers, too
    octets = max(1, wide // max(rows, 1))
    accumulators = octets * max(rows, 1)
    tiles = 4 if accumulators <= 8 else 2 if accumulators <= 16 else 1
    if w.arithmetic == "float32":
        tiles = min(tiles, 2)
    columns = -(-w.hidden // (8 * WARP_COLUMNS * octets))
    slabs = -(-words(w.input, w.dtype) // (SPAN * 16)) if rows else 0
    shape = Shape(rows, len(graph.hoisted_outputs), octets, tiles, columns, slabs, STAGES)
    while shape.shared > task.device.shared and (shape.stages, shape.tiles) != (2, 1):
        shape = replace(shape, stages=2) if shape.stages > 2 else replace(shape, tiles=shape.tiles // 2)
    return shape


def shape_within(task: Task, registers: int) -> Shape | None:
    """The largest tiles for which a thread has ``registers``; None where even the smallest need more."""
    whole = shape_of(task)
    for tiles in (4, 2, 1):
        if tiles <= whole.tiles:
            shape = whole if tiles == whole.tiles else replace(whole, tiles=tiles)
            if shape.registers(task.workload.arithmetic) <= registers:
                return shape
    return None


def on_wgmma(task: Task, ahead: int) -> bool:
    """Whether the rows done ahead are Hopper's kernel's."""
    return _hopper(task, ahead) is not None


def projection_time(task: Task, ahead: int = 100) -> float:
    """Nanoseconds that one multiprocessor needs for a step's projection, by the kernel that ``ahead`` leads to."""
    w = task.workload
    work = 2.0 * w.batch * w.input * w.hidden * len(task.graph.hoisted_rows)
    slower = {"float32": 5, "tf32": 2}.get(w.arithmetic, 1)
    return work / (WGMMA_RATE if on_wgmma(task, ahead) else MMA_RATE) * slower


def _hopper(task: Task, ahead: int) -> HopperShape | None:
    return hopper_shape(task) if ahead == 100 and WGMMA else None  # workers read the other packing


def project(task: Task, layout: Hoisted | None = None, ahead: int = 100, deferred: bool = False) -> Part:
    """The projection of a task, writing workspace ``hoisted`` as ``layout`` says, by default in float32.

    Where the cell has statistics of hoisted values, a second kernel goes over the rows (``normalization.py``); where
    that is ``deferred``, it only writes the statistics, to workspace ``row_sums``.
    Adds buffers ``hoisted``, ``input_weights`` and ``vectors`` (V, H, float32; the cell's parameter vectors).
    A cell without hoisted outputs needs no projection: the part is then only ``vectors``. Of all
    rows the first ``ahead`` percent are done (``rows_ahead``); for the others there is a
    workspace ``ready`` of counters, one for each ``block_rows`` of them.
    """
    from ecornn.schedules.projection_kernel import projection_kernel

    w, graph = task.workload, task.graph
    vectors = Buffer("vectors", "packed", "float32", Extent(max(1, len(graph.vectors)) * w.hidden), Packing(
        vector_sources(graph) or (("", 0),), (max(1, len(graph.vectors)), w.hidden),
        (max(1, len(graph.vectors)), w.hidden), (0, 1), "float32"))
    shape = shape_of(task)
    if not shape.outputs:
        return Part({}, (vectors,), ())
    layout = layout or in_float32(task)
    buffers = [vectors, layout.buffer(w.batch)]
    hopper = _hopper(task, ahead)
    functions, calls = normalize(task, layout, deferred)
    if functions and deferred:
        buffers.append(row_sums_buffer(task))
    if hopper:
        from ecornn.schedules.projection_wgmma_kernel import wgmma_kernel

        buffers.append(_weights(task, hopper_packing(task, hopper, layout.span)))
        return Part({"project": wgmma_kernel(task, hopper, layout)} | functions, tuple(buffers),
                    (Launch("project", task.device.cores, HOPPER_THREADS, hopper.shared), *calls))
    if shape.rows:
        n, c, o = per_word(w.dtype), shape.columns, shape.block_octets
        units, pairs = c * o * 8, shape.slabs * SPAN
        inputs = pairs * 16 * n
        packing = Packing(tuple((r.weight, r.gate) for r in graph.hoisted_rows),
                          (shape.rows, units, inputs), (shape.rows, c, o, 8, pairs, 2, 2, 4, n),
                          (1, 4, 2, 0, 3, 7, 5, 6, 8), w.dtype)
        buffers.append(_weights(task, packing))
    if ahead < 100:
        buffers.append(Buffer("ready", "workspace", "uint32", Extent(1, -(-w.batch // LEAST_ROWS))))
    if ahead == 0:
        return Part({}, tuple(buffers), ())
    blocks = task.device.cores * (1 if shape.tiles * shape.products > 16 else 2)
    return Part({"project": projection_kernel(task, shape, layout, blocks, ahead)} | functions, tuple(buffers),
                (Launch("project", blocks, THREADS, shape.shared), *calls))


def _weights(task: Task, packing: Packing) -> Buffer:
    rows, units, inputs = packing.pad
    return Buffer("input_weights", "packed", task.workload.dtype, Extent(rows * units * inputs), packing)


def rows_ahead(rows: Any, ahead: int) -> Any:
    """Of ``rows`` = T*B (an expression, int32), how many are done ahead: a multiple of ``CHUNK``, or all."""
    common = gcd(ahead, 100)  # TVM's simplifier overflows with 75 / 100
    return rows if ahead == 100 else rows // CHUNK * (ahead // common) // (100 // common) * CHUNK
