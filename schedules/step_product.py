"""Products on the plain float32 units: any cell, any size, every CUDA GPU.

A block computes all gates of ``units`` hidden units for ``rows`` batch rows. Tiles of the operands
and of the weights go through shared memory; a thread holds every gate of one unit for ``thread_rows``
batch rows. The K axis of a tile may be split among threads, whose partial sums meet in shared
memory, where they are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ecornn.analysis import Row
from ecornn.program import Buffer, Extent, Packing
from ecornn.schedules.base import Config, Task

UNROLL = 4  # steps along K


@dataclass(frozen=True)
class Tile:
    """The part of a product that one block computes, and how its threads share it."""

    units: int
    thread_rows: int  # batch rows of a thread
    groups: int  # of threads, over batch rows
    split: int  # of threads, over K
    depth: int  # K of a tile

    @property
    def rows(self) -> int:
        """Batch rows of a block."""
        return self.thread_rows * self.groups

    @property
    def threads(self) -> int:
        return self.units * self.groups * self.split

    def weight_floats(self, gates: int) -> int:
        return self.depth * gates * self.units

    def shared(self, gates: int, operands: int) -> int:
        """Bytes of shared memory: tiles while multiplying, partial sums afterwards."""
        tiles = self.weight_floats(gates) + operands * self.rows * (self.depth + 1)
        return 4 * max(tiles, self.split * self.rows * gates * self.units, 4)


def tile_of(config: Config) -> Tile:
    """The tile of a configuration of ``fused_step``."""
    return Tile(*(int(config[k]) for k in ("units", "thread_rows", "groups", "split", "depth")))


def weights_buffer(name: str, task: Task, tile: Tile, rows: tuple[Row, ...], inputs: int) -> Buffer:
    """Packed weights in the order (unit block, K tile, k, gate, unit): a block's tile is contiguous."""
    blocks, chunks = -(-task.workload.hidden // tile.units), -(-inputs // tile.depth)
    pad = (len(rows), blocks * tile.units, chunks * tile.depth)
    split = (len(rows), blocks, tile.units, chunks, tile.depth)
    packing = Packing(tuple((r.weight, r.gate) for r in rows), pad, split, (1, 3, 4, 0, 2), task.workload.dtype)
    return Buffer(name, "packed", task.workload.dtype, Extent(pad[0] * pad[1] * pad[2]), packing)


class Product:
    """Emits the products ``rows`` of one block.

    Parameters
    ----------
    memory : the block's shared memory, float32
    thread : the thread's number
    operand : ``operand(o, row, k)``: operand number o at a row of the block and an index k below the
        padded K, float32; zero or finite wherever a weight is padding
    """

    def __init__(self, T: Any, tile: Tile, rows: tuple[Row, ...], memory: Any, thread: Any) -> None:
        self.T, self.tile, self.rows, self.memory, self.thread = T, tile, rows, memory, thread
        self.operands = {v: o for o, v in enumerate(dict.fromkeys(r.operand for r in rows))}  # as in the phase
        self.unit = T.Bind(thread % tile.units)
        self.group = T.Bind(thread // tile.units % tile.groups)
        self.part = T.Bind(thread // (tile.units * tile.groups))

    def run(self, weights: Any, block: Any, inputs: int, operand: Callable[[int, Any, Any], Any]) -> None:
        """Leaves the partial sums in shared memory, for :meth:`sums`."""
        T, tile, gates = self.T, self.tile, len(self.rows)
        if not gates:
            return
        acc = T.alloc_buffer((gates, tile.thread_rows), "float32", scope="local")
        with T.unroll(gates) as g, T.unroll(tile.thread_rows) as r:
            T.buffer_store(acc, T.float32(0), [g, r])
        chunks, size = -(-inputs // tile.depth), tile.weight_floats(gates)
        with T.serial(0, chunks) as chunk:
            T.evaluate(T.cuda.cta_sync())
            first = T.Bind(T.cast(block * chunks + chunk, "int64") * size)
            with T.unroll(-(-size // tile.threads)) as turn:
                index = T.Bind(turn * tile.threads + self.thread)
                with T.If(index < size), T.Then():
                    T.buffer_store(self.memory, T.cast(weights[first + index], "float32"), [index])
            vectors = len(self.operands) * tile.rows
            with T.unroll(-(-vectors * tile.depth // tile.threads)) as turn:
                index = T.Bind(turn * tile.threads + self.thread)
                with T.If(index < vectors * tile.depth), T.Then():
                    vector, k = T.Bind(index // tile.depth), T.Bind(index % tile.depth)
                    value = operand(vector // tile.rows, vector % tile.rows, chunk * tile.depth + k)
                    T.buffer_store(self.memory, value, [size + vector * (tile.depth + 1) + k])
            T.evaluate(T.cuda.cta_sync())
            steps = tile.depth // tile.split
            inner = min(steps, UNROLL)  # whole tiles unrolled compile for seconds
            with T.serial(0, steps // inner) as outer, T.unroll(inner) as turn:
                self._multiply(acc, (outer * inner + turn) * tile.split + self.part, size)
        T.evaluate(T.cuda.cta_sync())  # partial sums overwrite the tiles
        for g in range(gates):
            for r in range(tile.thread_rows):
                row = self.group * tile.thread_rows + r
                T.buffer_store(self.memory, acc[g, r], [self._place(self.part, row, g, self.unit)])
        T.evaluate(T.cuda.cta_sync())

    def _multiply(self, acc: Any, k: Any, size: int) -> None:
        T, tile, gates = self.T, self.tile, len(self.rows)
        row = self.group * tile.thread_rows
        values = [[T.Bind(self.memory[size + (o * tile.rows + row + r) * (tile.depth + 1) + k])
                   for r in range(tile.thread_rows)] for o in range(len(self.operands))]
        for g, source in enumerate(self.rows):
            weight = T.Bind(self.memory[(k * gates + g) * tile.units + self.unit])
            for r in range(tile.thread_rows):
                value = values[self.operands[source.operand]][r]
                T.buffer_store(acc, acc[g, r] + weight * value, [g, r])

    def _place(self, part: Any, row: Any, gate: int, unit: Any) -> Any:
        return ((part * self.tile.rows + row) * len(self.rows) + gate) * self.tile.units + unit

    def sums(self, row: Any, unit: Any) -> dict[Any, Any]:
        """The finished products of a row and a unit of the block."""
        found = {}
        for g, source in enumerate(self.rows):
            total = self.memory[self._place(0, row, g, unit)]
            for part in range(1, self.tile.split):
                total = total + self.memory[self._place(part, row, g, unit)]
            found[source.var] = self.T.Bind(total)
        return found
