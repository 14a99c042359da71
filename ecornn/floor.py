"""The least that a step of a layer can take on a GPU: exchange of h, products, bytes.

The floor of a layer is the least sum of these terms over every way to cut it: ``groups`` of rows of the batch, each
owned by ``blocks`` multiprocessors that hold all recurrent weights and exchange h once a step.

    exchange    one trip of h between the blocks of a group, by how many they are (`Machine.exchange`; clusters up to 16
                blocks; in a single block between its warps), and what of h exceeds `announced` bytes (in a cluster
                all of it): taken in by every block, and out of L2 once for every 16, since a cluster can multicast
    recurrent   2 G H H rows at the tensor cores' rate of the blocks; an instruction multiplies at least 8 rows
    projection  2 G H I B at the rate of the whole chip
    bytes       weights beyond the registers, once a step from shared memory; beyond that too, from L2, or from device
                memory where L2 does not hold them; x and y once, from and to device memory

The terms are added, so a kernel that hides one behind another (the projection in the wait for h) may go below. What is
left out: gate math, synchronisation of warps, padding, the weights' first load, registers that other values need.
"""

from __future__ import annotations

from dataclasses import dataclass

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "tf32": 4}
SLOWER = {"float16": 1.0, "bfloat16": 1.0, "tf32": 2.0, "float32": 6.0}  # TF32 has half the rate; float32 is three
TILE = 8  # rows that one mma or wgmma multiplies at least


@dataclass(frozen=True)
class Machine:
    """Measured constants of a GPU; rates in bytes or operations a microsecond."""

    cores: int
    registers: int  # bytes of one multiprocessor
    shared: int  # bytes of one multiprocessor that a kernel can use
    l2: int
    exchange: tuple[tuple[int, float], ...]  # most blocks -> µs; in between: linear
    cluster: int  # blocks up to here exchange inside a cluster
    clusters: tuple[tuple[int, int], ...]  # most blocks -> how many clusters are on the chip at once
    announced: int  # bytes of h that `exchange` was measured with, outside of clusters
    shared_rate: float  # of one multiprocessor
    intake_rate: float  # of one multiprocessor, from L2
    l2_rate: float
    memory_rate: float
    tensor_rate: float  # operations of 16-bit products, whole chip


# Measured on one H100 80GB SXM, CUDA 13.0, driver 580. Exchange: in one block a word a thread to shared memory, a
# barrier, another warp's word from there, with the fewest warps that use all four tensor cores (0.0255; with 256
# threads 0.0296, with 512 0.0377); in clusters of 2, 4, 8 and 16 blocks a word from each to each by st.async
# (cluster_exchange.cu); beyond, polling 2 to 8 KB that carry their own tag, 32, 64 and 132 blocks. Clusters on the
# chip at once: cudaOccupancyMaxActiveClusters, one block a multiprocessor. L2: the slope between 16 and 128 KB
# fetched by each of 132 blocks (1.26 and 4.70 µs). Products: 8192^3 in bfloat16. Memory: a copy. NVIDIA's figures,
# not measured: 128 bytes a cycle from shared memory and 64 from L2 into a multiprocessor, at 1755 MHz.
H100 = Machine(cores=132, registers=256 << 10, shared=227 << 10, l2=50 << 20,
               exchange=((1, 0.026), (2, 0.101), (4, 0.110), (8, 0.121), (16, 0.149), (32, 0.79), (64, 0.89),
                         (132, 1.13)), cluster=16, clusters=((1, 132), (2, 66), (4, 30), (8, 15), (16, 7)),
               announced=8 << 10, shared_rate=225e3, intake_rate=112e3,
               l2_rate=132 * (112 << 10) / (4.70 - 1.26), memory_rate=3.0e6, tensor_rate=781e6)

# By what the product's name has. SXM; other products have other numbers of multiprocessors.
MACHINES = {"H100 80GB HBM3": H100}


@dataclass(frozen=True)
class Step:
    """What a floor depends on of a cell: products (H, H) of a state and (H, I) of x, and exchanges of a state."""

    products: int
    hoisted: int
    exchanges: int = 1


@dataclass(frozen=True)
class Floor:
    """Microseconds a step, and the cut they are for."""

    exchange: float
    recurrent: float
    projection: float
    bytes: float
    groups: int
    blocks: int

    @property
    def total(self) -> float:
        return self.exchange + self.recurrent + self.projection + self.bytes


def machine_of(gpu: str) -> Machine | None:
    """The constants for a product's name; None where nobody measured them."""
    return next((machine for name, machine in MACHINES.items() if name in gpu), None)


def polled(machine: Machine, B: int, H: int, dtype: str, groups: int, blocks: int) -> float:
    """Microseconds of an exchange between a group's blocks that poll through L2; fewer than 32 take as long as 32."""
    return _exchange(machine, max(blocks, machine.cluster + 1)) + _fetched(
        machine, -(-B // groups), H, BYTES[dtype], groups, blocks)


def floor(machine: Machine, cell: str, B: int, I: int, H: int, dtype: str) -> Floor:
    """The floor of a step; ``dtype`` is ``float16``, ``bfloat16``, ``tf32`` or ``float32`` (three TF32 products)."""
    return floor_of(machine, Step(GATES[cell], GATES[cell]), B, I, H, dtype)


def floor_of(machine: Machine, step: Step, B: int, I: int, H: int, dtype: str, stored: int | None = None) -> Floor:
    """As :func:`floor`, of any step; ``stored``: bytes of a recurrent weight, where they are not those of ``dtype``."""
    cuts = (_cut(machine, step, B, I, H, dtype, groups, blocks, stored or BYTES[dtype])
            for groups in range(1, min(B, machine.cores) + 1) for blocks in range(1, machine.cores // groups + 1)
            if blocks > machine.cluster or groups <= next(n for most, n in machine.clusters if blocks <= most))
    return min(cuts, key=lambda f: f.total)


def _cut(m: Machine, step: Step, B: int, I: int, H: int, dtype: str, groups: int, blocks: int,
         stored: int) -> Floor:
    rows, size, rate = -(-B // groups), BYTES[dtype], m.tensor_rate / SLOWER[dtype]
    weights = step.products * H * H * stored
    each = weights / blocks
    shared = min(max(0.0, each - m.registers), m.shared)
    beyond = groups * (weights - blocks * min(each, m.registers + m.shared))
    return Floor(
        exchange=step.exchanges * (_exchange(m, blocks) + _fetched(m, rows, H, size, groups, blocks)),
        recurrent=2 * step.products * H * H * max(rows, TILE) / (rate * blocks / m.cores),
        projection=2 * step.hoisted * H * I * B / rate,
        bytes=shared / m.shared_rate + beyond / (m.l2_rate if weights <= m.l2 else m.memory_rate)
        + B * (I + H) * size / m.memory_rate, groups=groups, blocks=blocks)


def _fetched(m: Machine, rows: int, H: int, size: int, groups: int, blocks: int) -> float:
    """Microseconds for what of h exceeds the bytes that an exchange was measured with."""
    state = 0 if blocks == 1 else max(0, rows * H * size - (m.announced if blocks > m.cluster else 0))
    return max(state / m.intake_rate, state * groups * -(-blocks // m.cluster) / m.l2_rate)


def _exchange(m: Machine, blocks: int) -> float:
    """Microseconds of one trip between so many blocks; a cluster has 2, 4, 8 or 16, and beyond are at least 32."""
    for (fewer, below), (more, above) in zip(m.exchange, m.exchange[1:], strict=False):
        if blocks == fewer:
            return below
        if blocks <= more:
            return above if fewer <= m.cluster else below + (above - below) * (blocks - fewer) / (more - fewer)
    return m.exchange[-1][1]
