"""Register tiles: how large they are, what fits a CPU, and how a workload is padded for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ecornn.analysis.heads import heads_of
from ecornn.device import Device
from ecornn.schedules.base import Task
from ecornn.workload import ITEMSIZE, Workload

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28)
VECTORS = (1, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Tile:
    """Batch rows and vectors of units that one task computes, how far k is unrolled, of how many values of k
    two are multiplied as a pair (0: none, see :mod:`ecornn.schedules.cpu.paired`), whether the next tile's weights
    are asked for meanwhile, and of how many gates sums are in registers at the same time (0: of all)."""

    rows: int
    vectors: int
    unroll: int
    pairs: int = 0
    ahead: bool = False
    gates: int = 0

    def columns(self, gates: int) -> list[int]:
        """Vectors of weights of each product loop, of a stage of so many gates."""
        each = self.gates or max(1, gates)
        return [min(each, gates - first) * self.vectors for first in range(0, gates, each)] or [self.vectors]

    def short(self, batch: int) -> int:
        """Rows of the last row tile of a step where it is lower than the others, else 0."""
        return 0 if self.pairs else batch % self.rows


@dataclass(frozen=True)
class Shape:
    """Sizes that the code is generated for; ``tiles``: stage name -> its tile; ``weights``: their data type;
    ``team``: the most threads, 0 for any number."""

    batch: int
    input: int
    hidden: int
    lanes: int
    chunk: int
    tiles: dict[str, Tile]
    weights: str = "float32"
    team: int = 0

    @property
    def real(self) -> str:
        """The data type that it computes in: rounded weights are of float32 layers."""
        return "float64" if self.weights == "float64" else "float32"

    def units(self, tile: Tile) -> int:
        """Unit tiles of a stage."""
        return -(-self.hidden // (tile.vectors * self.lanes))

    @property
    def width(self) -> int:
        """Elements of a row of workspace: H, padded for the widest tile."""
        return max(self.units(t) * t.vectors * self.lanes for t in self.tiles.values())

    @property
    def padded_batch(self) -> int:
        """Rows of a state in workspace: B, padded for every tile of the steps."""
        rows = [t.rows for name, t in self.tiles.items() if name != "hoisted"]
        return max(-(-self.batch // r) * r for r in rows)


def lanes_of(device: Device, dtype: str = "float32") -> int:
    """Lanes of a vector register, of that type."""
    wide = {"avx2", "avx"} & set(device.features)
    return (64 if "avx512f" in device.features else 32 if wide else 16) // ITEMSIZE[dtype]


def head_size(task: Task) -> int:
    """The number that the units of a tile must divide where products have heads: units of a head, of all phases in
    common; else 0."""
    heads = {heads_of(phase) for phase in task.graph.phases} - {1}
    return gcd(*(task.workload.hidden // n for n in heads)) if heads else 0


def head_vectors(task: Task) -> int:
    """A head in vectors; 0 without heads."""
    return head_size(task) // lanes_for(task)


def lanes_for(task: Task) -> int:
    """Lanes that a layer's code uses: as many as divide a head, which may leave a register part empty."""
    lanes = lanes_of(task.device, task.workload.dtype)
    return gcd(lanes, head_size(task) or lanes)


def registers_of(device: Device) -> int:
    """Vector registers: 32 with AVX-512 and on arm64, else 16."""
    return 32 if "avx512f" in device.features or "neon" in device.features else 16


def registers_used(tile: Tile, gates: int, weights: str = "float32") -> int:
    """Vector registers of the product loop: sums, weights of one k, and a broadcast state."""
    columns = max(tile.columns(gates)) if gates else 0
    if tile.pairs:  # the weights of both values of k, and room for sums on their way: LLVM has many under way
        return tile.rows * columns + 2 * columns + 6
    if weights == "int21":  # both words, a weight of them, and two masks
        return tile.rows * columns + 3 * columns + 2
    if weights in ("bfloat16", "int16") and tile.rows > 1:  # the pair, one of it widened, and a mask
        return tile.rows * columns + 2 * columns + 2
    # with one row a weight is used once, straight from memory
    return tile.rows * columns + (columns if tile.rows > 1 else 0) + 1


def vectors_of(columns: int, gates: int, head: int = 0) -> int:
    """Vectors of units in a tile of ``columns`` vectors that all gates of a stage share; of heads of ``head`` vectors
    (0: there are none) a whole number of tiles each."""
    most = max(1, columns // max(1, gates))
    return max(v for v in range(1, most + 1) if head % v == 0)


def row_choices(device: Device, most: int) -> tuple[int, ...]:
    """Batch rows that a tile may have where there are ``most``."""
    return tuple(r for r in ROWS if r <= min(most, registers_of(device) - 2)) or (1,)


def column_choices(device: Device, gates: int, workload: Workload) -> tuple[int, ...]:
    """Vectors of all ``gates`` of H units that a tile may have."""
    most = -(-workload.hidden // lanes_of(device, workload.dtype))
    return tuple(gates * v for v in VECTORS if v == 1 or (gates * v <= registers_of(device) // 2 and v <= most))
