"""The least that a step of a layer can take on a GPU: exchange of h, products, bytes.

The floor of a layer is the least sum of these terms over every way to cut it: ``groups`` of rows of the batch, each
owned by ``blocks`` multiprocessors that hold all recurrent weights and exchange h once a step.

    exchange    one trip of h between the blocks of a group, by how many they are (`Bounds.exchange`; clusters up to 16
                blocks; in a single block between its warps), and what of h exceeds `announced` bytes (in a cluster
                all of it): taken in by every block, and out of L2 once for every 16, since a cluster can multicast
    recurrent   2 G H H rows at the tensor cores' rate of the blocks; an instruction multiplies at least 8 rows
    projection  2 G H I B at the rate of the whole chip
    bytes       weights beyond the registers, once a step from shared memory; beyond that too, from L2, or from device
                memory where L2 does not hold them; x and y once, from and to device memory

The terms are added, so a kernel that hides one behind another (the projection in the wait for h) may go below. What is
left out: gate math, synchronisation of warps, padding, the weights' first load, registers that other values need."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ecornn.device import Device
from ecornn.schedules.rates import GPUS, gpu_rates
from ecornn.targets import BY_NAME, KNOWN

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "tf32": 4}
SLOWER = {"float16": 1.0, "bfloat16": 1.0, "tf32": 2.0, "float32": 6.0}  # TF32 has half the rate; float32 is three
LARGEST = 16  # blocks of the largest cluster that exchanges were measured with
TILE = 8  # rows that one mma or wgmma multiplies at least
H100 = KNOWN["sm_90a"]


@dataclass(frozen=True)
class Step:
    """The numbers of a cell's step that a floor depends on: products (H, H) of a state and (H, I) of x, exchanges."""

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


def measured(gpu: str) -> Device | None:
    """The device of a product's name; None where nobody measured its rates (schedules/rates.py)."""
    return next((device for device in KNOWN.values() if device.name in GPUS and device.name in gpu), None)


def documented(gpu: str) -> Device | None:
    """The device of a product's name whose rates were measured, or are in documents; None for others and for CPUs."""
    return measured(gpu) or next((device for device in BY_NAME.values() if device.name == gpu), None)


def polled(gpu: Device, B: int, H: int, dtype: str, groups: int, blocks: int) -> float:
    """Microseconds of an exchange between a group's blocks that poll through L2; fewer than 32 take as long as 32."""
    return _exchange(gpu, max(blocks, gpu.can.cluster + 1)) + _fetched(
        gpu, -(-B // groups), H, BYTES[dtype], groups, blocks)


def floor(gpu: Device, cell: str, B: int, I: int, H: int, dtype: str) -> Floor:
    """The floor of a step; ``dtype`` is ``float16``, ``bfloat16``, ``tf32`` or ``float32`` (three TF32 products)."""
    return floor_of(gpu, Step(GATES[cell], GATES[cell]), B, I, H, dtype)


def floor_of(gpu: Device, step: Step, B: int, I: int, H: int, dtype: str, stored: int | None = None) -> Floor:
    """The floor of any step; ``stored``: bytes of a recurrent weight, where they are not those of ``dtype``."""
    cuts = (_cut(gpu, step, B, I, H, dtype, groups, blocks, stored or BYTES[dtype])
            for groups in range(1, min(B, gpu.cores) + 1) for blocks in range(1, gpu.cores // groups + 1)
            if blocks > gpu.can.cluster or groups <= gpu.clusters(1 << (blocks - 1).bit_length()))  # a cluster's size
    return min(cuts, key=lambda f: f.total)


def _cut(gpu: Device, step: Step, B: int, I: int, H: int, dtype: str, groups: int, blocks: int, stored: int) -> Floor:
    bounds = gpu_rates(gpu).bounds
    rows, size, rate = -(-B // groups), BYTES[dtype], bounds.tensor / SLOWER[dtype]
    registers, weights = 4 * gpu.registers, step.products * H * H * stored
    each = weights / blocks
    shared = min(max(0.0, each - registers), gpu.shared)
    beyond = groups * (weights - blocks * min(each, registers + gpu.shared))
    nanoseconds = shared / bounds.shared + (beyond / (bounds.l2 if weights <= gpu.l2 else bounds.memory)
                                          + B * (I + H) * size / bounds.memory)
    return Floor(step.exchanges * (_exchange(gpu, blocks) + _fetched(gpu, rows, H, size, groups, blocks)),
                 2e-3 * step.products * H * H * max(rows, TILE) / (rate * blocks),
                 2e-3 * step.hoisted * H * I * B / (rate * gpu.cores), nanoseconds / 1e3, groups, blocks)


def _fetched(gpu: Device, rows: int, H: int, size: int, groups: int, blocks: int) -> float:
    """Microseconds for the bytes of h beyond those that an exchange was measured with."""
    bounds, cluster = gpu_rates(gpu).bounds, gpu.can.cluster
    state = 0 if blocks == 1 else max(0, rows * H * size - (bounds.announced if blocks > cluster else 0))
    return max(state / bounds.intake, state * groups * -(-blocks // cluster) / bounds.l2) / 1e3


def _exchange(gpu: Device, blocks: int) -> float:
    """Microseconds of one trip between so many blocks; a cluster has 2, 4, 8 or 16, and beyond are at least 32."""
    largest = gpu.can.cluster
    exchange = [(of, us) for of, us in gpu_rates(gpu).bounds.exchange if of <= largest or of > LARGEST]
    for (fewer, below), (more, above) in itertools.pairwise(exchange):
        if blocks == fewer:
            return below
        if blocks <= more:
            return above if fewer <= largest else below + (above - below) * (blocks - fewer) / (more - fewer)
    return exchange[-1][1]
