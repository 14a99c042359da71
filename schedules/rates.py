"""The speed of each device, as estimates use it, in one table; and what calls of few steps take beside the steps.

A row is what was measured on a GPU or CPU, or fitted to trials on it. What belongs to the code of one kernel (cycles of
its instructions, an order of its loops) is a constant beside that kernel's estimate. Estimates only order
configurations and schedules, so a device that nobody has measured is served by the row of another, scaled."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ecornn.chips import ARCHITECTURES, PRODUCTS
from ecornn.device import Device
from ecornn.schedules.base import Task


@dataclass(frozen=True)
class Bounds:
    """Bounds of a GPU, for floors (ecornn/floor.py): a nanosecond's and a multiprocessor's, if nothing else is said."""

    # microseconds of one trip of a state between so many blocks; in between: linear
    exchange: tuple[tuple[int, float], ...]
    announced: int  # bytes of the state with which the trips outside of clusters were measured
    shared: float  # bytes from shared memory
    intake: float  # bytes from L2
    l2: float  # l2, memory: bytes from L2 and memory to all multiprocessors
    memory: float
    tensor: float  # 16-bit multiplications and additions


@dataclass(frozen=True)
class GPURates:
    """Rates of a GPU. Bytes a cycle and a nanosecond are of one multiprocessor, where nothing else is said."""

    clock: float  # cycles in a nanosecond; cycles below are of this clock
    threads: int  # that a multiprocessor holds
    step: float  # nanoseconds of a recurrent step that nobody knows better
    sequence: float  # nanoseconds of a sequence beside its steps: its launches, and kernels too short to be fast
    launch: float  # nanoseconds from a launch's end until threads of the next one multiply
    tensor_launch: float  # cycles of the same, until a pipeline into shared memory feeds tensor cores
    barrier: float  # cycles of a barrier of a block
    l2_exchange: float  # cycles from the store of a state until other blocks that poll for it have it
    l2_shared_sector: float  # cycles more where two blocks write to a sector
    # cycles from the store of a state until others, that waited for a counter, have copied a chunk of it
    l2_counted: float
    l2_handover: float  # cycles from the store of a partial sum until another block has it
    l2_latency: float  # cycles from an asynchronous copy's start until what it copies from L2 is there
    memory_latency: float  # cycles of the same from memory
    cluster_exchange: float  # cycles from the sending of a state until other blocks of the cluster have it
    l2_copied: float  # bytes a cycle of asynchronous copies from L2
    l2_bulk: float  # bytes a cycle of bulk copies from L2
    l2_kept: float  # bytes that are read in every step, and that L2 keeps, beside all else that goes through it
    l2_lasting: float  # the same of those that it is asked to keep, if more are read
    l2_beside: float  # bytes a nanosecond from L2 and memory, while other multiprocessors copy, too
    memory: float  # bytes a nanosecond of its share of memory's rate
    memory_beside: float  # bytes a nanosecond of all multiprocessors: what fewer bytes between two kernels gain
    shared: float  # bytes a cycle from shared memory
    fragments: float  # bytes a cycle of operands of tensor cores from shared memory
    mma: float  # cycles of an m16n8k16 product of a 16-bit type, with all four tensor cores at work
    wgmma_column: float  # cycles of a column of an m64k16 product of warpgroups, of a 16-bit type
    # mma_gemm, wgmma_gemm: 16-bit multiplications and additions a nanosecond of a large product, by either instruction
    mma_gemm: float
    wgmma_gemm: float
    bounds: Bounds  # what no kernel exceeds


@dataclass(frozen=True)
class CPURates:
    """Rates of a core. Vectors are of its widest registers."""

    adds_apart: bool  # whether additions of pairs pay, which run beside multiply-adds in units of their own
    # fma, vector_load, turn: cycles of a multiply-add, a vector from the first cache, a turn over k beside products
    fma: float
    vector_load: float
    turn: float
    fma_latency: float  # cycles; with fewer sums than this in flight the unit idles
    l2_vector: float  # cycles that a vector of weights takes from L2
    # cycles of a tile for each vector of weights that nothing hides, where multiply-adds outrun L2
    unhidden_vector: float
    unhidden_l3_vector: float  # the same of weights that L2 gets from L3 meanwhile
    unhidden_row: float  # the same for each row, which is of other cache lines
    # cycles of a barrier of threads and of the new state from another core: some 400 where they share
    # an L3 and 2,300 where they do not, between which a virtual machine's cores may be moved
    barrier: float

    @property
    def slow_l3(self) -> bool:
        """True if L3 gives a core far less than its L2 does."""
        return self.unhidden_l3_vector > self.unhidden_vector


# On one H100 80GB SXM, CUDA 13.0. Exchange: in one block a word a thread to shared memory, a barrier, another warp's
# word from there, with the fewest warps that use all four tensor cores (0.0255; with 256 threads 0.0296, with 512
# 0.0377); in clusters of 2, 4, 8 and 16 blocks a word from each to each by st.async (benchmarks/cluster_exchange.cu);
# beyond, polling 2 to 8 KB that carry their own tag, 32, 64 and 132 blocks. L2 (benchmarks/l2_rate.cu): intake of a
# region that all blocks share, l2 of one for each block. Products: 8192^3 in bfloat16. Memory: a copy. Not measured:
# 128 bytes a cycle from shared memory, at 1.98 GHz.
H100_BOUNDS = Bounds(announced=8 << 10, shared=253, intake=212, l2=7_700, memory=3_000, tensor=5_917, exchange=(
    (1, 0.026), (2, 0.101), (4, 0.110), (8, 0.121), (16, 0.149), (32, 0.79), (64, 0.89), (132, 1.13)))

H100 = GPURates(
    clock=1.7, threads=2048, step=2_000, sequence=12_000, launch=2_700, tensor_launch=3_500, barrier=60,
    l2_exchange=1_450, l2_shared_sector=168, l2_counted=2_700, l2_handover=600, l2_latency=1_200, memory_latency=1_000,
    cluster_exchange=497, l2_copied=32, l2_bulk=48, l2_kept=27 << 20, l2_lasting=24 << 20, l2_beside=36, memory=18,
    memory_beside=1_800, shared=128, fragments=64, mma=1.6, wgmma_column=0.5, mma_gemm=2_100, wgmma_gemm=3_600,
    bounds=H100_BOUNDS)

# By the product's name, or by an architecture for all others of it. For what is in neither: `from_documents`.
GPUS = {"NVIDIA H100 80GB HBM3": H100}

PLAIN_CORE = CPURates(adds_apart=False, fma=1, vector_load=1, turn=1, fma_latency=4, l2_vector=2.5, unhidden_vector=0.6,
                      unhidden_l3_vector=1.5, unhidden_row=0.3, barrier=1_100)
# AMD's since Zen: an L3 for a few cores, nearly as fast as L2
ZEN = replace(PLAIN_CORE, adds_apart=True, unhidden_vector=0, unhidden_l3_vector=0, unhidden_row=0)

# Two multiply-adds and two loads of 32 bytes a cycle. Pairs do not pay: each of their factors is loaded by itself.
ZEN_AVX2 = replace(ZEN, adds_apart=False, fma=0.5, vector_load=0.5, turn=0.3, l2_vector=2.1, unhidden_l3_vector=0.1)

# By the beginning of LLVM's name. What is not here is a plain core.
CPUS = {"znver2": ZEN_AVX2, "znver3": ZEN_AVX2, "znver": ZEN}


def gpu_rates(device: Device) -> GPURates:
    """The row of a GPU: its own, its architecture's, or one made from documents."""
    return GPUS.get(device.name) or GPUS.get(device.arch) or from_documents(device.name)


# Estimates on these stay an H100's, by which their records were chosen, until one of them is measured.
AS_BEFORE = ("sm_80", "sm_86", "sm_89", "sm_90a")


@functools.cache
def from_documents(name: str) -> GPURates:
    """An H100's row scaled by clock, cache, bandwidth and tensor rate as vendors' documents have them (`chips.py`), for
    a product that nobody has measured; an H100's row for one that the table lacks. Latencies in cycles stay. Products
    of single warps are scaled only downwards: newer chips are faster by instructions that no schedule uses."""
    of = {product.name: product for product in PRODUCTS}
    if (chip := of.get(name)) is None:
        return H100
    base = of["NVIDIA H100 80GB HBM3"]
    clock, memory, cores = chip.clock / base.clock, chip.bandwidth / base.bandwidth, chip.cores / base.cores
    each = chip.tensor / base.tensor / cores  # tensor rate of a multiprocessor
    bounds = Bounds(
        exchange=tuple((blocks, us / clock) for blocks, us in H100_BOUNDS.exchange), announced=H100_BOUNDS.announced,
        shared=H100_BOUNDS.shared * clock, intake=H100_BOUNDS.intake * clock, l2=H100_BOUNDS.l2 * clock * cores,
        memory=H100_BOUNDS.memory * memory, tensor=H100_BOUNDS.tensor * each)
    if chip.arch in AS_BEFORE:
        return replace(H100, bounds=bounds)
    slower, kept = min(1.0, H100.mma * each / clock), chip.l2 / base.l2  # of an H100's rate these have 1 / H100.mma
    return replace(
        H100, clock=H100.clock * clock, threads=ARCHITECTURES[chip.arch].threads, l2_kept=H100.l2_kept * kept,
        l2_lasting=H100.l2_lasting * kept, l2_beside=H100.l2_beside * clock, memory=H100.memory * memory / cores,
        memory_beside=H100.memory_beside * memory, mma=H100.mma / slower,
        mma_gemm=H100.mma_gemm * clock * slower, wgmma_gemm=H100.wgmma_gemm * clock * slower, bounds=bounds)


def cpu_rates(device: Device) -> CPURates:
    """The row of a CPU's cores: that of its family, or a plain core's."""
    return next((row for family, row in CPUS.items() if device.arch.startswith(family)), PLAIN_CORE)


# Steps of a call up to which schedules of whole sequences save on what comes before the first one: 19 of 30 µs of LSTM
# 1024 B=16 with 8 steps, half of 16 steps, and of 100 an eighth: code of longer calls stays what records timed
SHORT = 16
OTHERS = 18_000  # nanoseconds of an H100's calls (benchmarks/results/h100_few_steps.txt) of several launches


def short(task: Task) -> bool:
    """True if calls are expected to have at most ``SHORT`` steps. Modules serve any number: this is about time."""
    return task.workload.seq <= SHORT


FEW = 4 << 20  # bytes that a launch makes in about the time that it takes to begin


def light(task: Task) -> bool:
    """True if kernels over the rows of all steps take about as long as to launch them: of short calls, and few rows."""
    w = task.workload
    return short(task) or w.seq * w.batch * w.hidden * w.itemsize <= FEW


def others(task: Task) -> float:
    """Nanoseconds that a call takes beside its steps, with a schedule that has several launches and reads all weights
    before its first step; of a layer with one exchange."""
    w, graph, rates = task.workload, task.graph, gpu_rates(task.device)
    (phase,) = graph.phases
    weights = w.hidden * w.itemsize * (len(graph.hoisted_products) * task.own_input + len(phase.products) * w.hidden)
    return OTHERS + weights / (rates.memory * task.device.cores)
