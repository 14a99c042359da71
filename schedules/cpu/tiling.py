"""Register tiles: how large they are, what fits a CPU, how a workload is padded for them, and what they cost as the
heuristic estimates it; the features of the tuner's cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import gcd

from ecornn.analysis.heads import heads_of, multiplied
from ecornn.analysis.narrow import columns_of
from ecornn.device import Device
from ecornn.dtypes import ITEMSIZE
from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.cpu import matrix
from ecornn.schedules.cpu.product import STORED
from ecornn.schedules.rates import CPURates, cpu_rates
from ecornn.workload import Workload, summed

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28)
VECTORS = (1, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Tile:
    """Batch rows and vectors of units that one task computes, and how."""

    rows: int
    vectors: int
    unroll: int  # how far k is unrolled
    pairs: int = 0  # of how many values of k two are multiplied as a pair, see product.py; 0: none
    ahead: bool = False  # whether the next tile's weights are asked for meanwhile
    gates: int = 0  # of how many gates sums are in registers at the same time; 0: of all
    matrix: bool = False  # whether the CPU's matrix unit multiplies, see matrix.py

    def columns(self, gates: int) -> list[int]:
        """Vectors of weights of each product loop, of a stage of so many gates."""
        each = self.gates or max(1, gates)
        return [min(each, gates - first) * self.vectors for first in range(0, gates, each)] or [self.vectors]

    def short(self, batch: int) -> int:
        """Rows of the last row tile of a step where it is lower than the others, else 0."""
        return 0 if self.pairs or self.matrix else batch % self.rows


@dataclass(frozen=True)
class Shape:
    """Sizes that the code is generated for."""

    batch: int
    input: int
    hidden: int
    lanes: int
    chunk: int
    tiles: dict[str, Tile]  # stage name -> its tile
    weights: str = "float32"  # their data type
    dtype: str = "float32"  # the layer's
    team: int = 0  # the most threads; 0: any number

    @property
    def narrow(self) -> bool:
        """True if x, y and states are narrower than what it computes in."""
        return self.real != self.dtype

    @property
    def by_matrix(self) -> bool:
        return any(tile.matrix for tile in self.tiles.values())

    @property
    def real(self) -> str:
        """The data type that it computes in."""
        return summed(self.dtype)

    def units(self, tile: Tile) -> int:
        return -(-self.hidden // (tile.vectors * self.lanes))  # unit tiles of a stage

    @property
    def width(self) -> int:
        """Elements of a row of workspace: H, padded for the widest tile."""
        return max(self.units(t) * t.vectors * self.lanes for t in self.tiles.values())

    @property
    def padded_batch(self) -> int:
        """Rows of a state in workspace: B, padded for every tile of the steps."""
        return max(-(-self.batch // t.rows) * t.rows for name, t in self.tiles.items() if name != "hoisted")


def lanes_of(device: Device, dtype: str = "float32") -> int:
    wide = {"avx2", "avx"} & set(device.features)
    return (64 if "avx512f" in device.features else 32 if wide else 16) // ITEMSIZE[summed(dtype)]


def head_size(task: Task) -> int:
    """The number that a tile's units must divide: units of a head, of all phases in common; 0 without heads."""
    heads = {heads_of(phase) for phase in task.graph.phases} - {1}
    return gcd(*(task.workload.hidden // n for n in heads)) if heads else 0


def head_vectors(task: Task) -> int:
    return head_size(task) // lanes_for(task)  # a head in vectors; 0 without heads


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
    if tile.matrix:
        return 0  # its own registers, see matrix.registers
    if tile.pairs:  # the weights of both values of k, and room for sums on their way: LLVM has many under way
        return tile.rows * columns + 2 * columns + 6
    if weights == "int21":  # both words, a weight of them, and two masks
        return tile.rows * columns + 3 * columns + 2
    if weights in ("bfloat16", "float16", "int16") and tile.rows > 1:  # the pair, one of it widened, and a mask
        return tile.rows * columns + 2 * columns + 2
    # with one row a weight is used once, straight from memory
    return tile.rows * columns + (columns if tile.rows > 1 else 0) + 1


def vectors_of(columns: int, gates: int, head: int = 0) -> int:
    """Vectors of units in a tile of ``columns`` vectors of all gates; a head of ``head`` (0: none) has whole tiles."""
    return max(v for v in range(1, max(1, columns // max(1, gates)) + 1) if head % v == 0)


def row_choices(device: Device, most: int) -> tuple[int, ...]:
    return tuple(r for r in ROWS if r <= min(most, registers_of(device) - 2)) or (1,)


def column_choices(device: Device, gates: int, workload: Workload) -> tuple[int, ...]:
    """Vectors of all ``gates`` of H units that a tile may have."""
    most = -(-workload.hidden // lanes_of(device, workload.dtype))
    return tuple(gates * v for v in VECTORS if v == 1 or (gates * v <= registers_of(device) // 2 and v <= most))


LEAST_ROWS = 3  # of a batch that the matrix unit multiplies: of one row vector registers take 0.6 times as long
PAIRS = (0, 3, 4)
PAIRS_REACH = 0.75  # of the rate that the units would allow: layers of pairs
# cycles to copy the operand for pairs: of a vector, of a row, and of the barrier behind it
COPY_VECTOR, COPY_ROW, COPY_BARRIER = 8, 200, 2000


class CPUKnobs(Knobs):
    rows: int = knob("batch rows in a register tile. More: more reuse of weights, but more registers")
    columns: int = knob("vectors of gates and units in a tile. More: more reuse of the state, less even work")
    unroll: int = knob("products without a jump between them. More: fewer jumps, but larger code")
    project_rows: int = knob("rows of x in a register tile of the hoisted product")
    project_columns: int = knob("vectors of gates and units in a tile of the hoisted product")
    team: int = knob("the most threads of a call (0: all it may use). Fewer: no barriers, but more work for each",
                     before=0)
    pairs: int = knob("values of k of which two are multiplied as a pair (0: none). This moves work from the units "
                      "that multiply to those that add", before=0)
    project_pairs: int = knob("as pairs, for the hoisted product", before=0)
    gates: int = knob("gates whose sums are in registers at the same time (0: all). Fewer: higher tiles, which reuse "
                      "weights, but loops that read the state again", before=0)
    project_gates: int = knob("as gates, for the hoisted product", before=0)
    ahead: int = knob("1: tiles prefetch the weights of the next units while they multiply, so that L3 works at the "
                      "same time; this needs more instructions", before=0)
    matrix: int = knob("1: the CPU's matrix unit multiplies, on tiles of 16 or 32 rows", before=0)
    chunk: int = knob("steps projected at once. More: more reuse of input weights; fewer: results stay in caches")


def tiles(task: Task, knobs: CPUKnobs) -> dict[str, Tile]:
    """The tiles of the hoisted product, of each phase that has products, and of ``prologue``, the pointwise part."""
    graph, unroll, head, project = task.graph, knobs.unroll, head_vectors(task), len(task.graph.hoisted_products)
    hoisted = Tile(knobs.project_rows, vectors_of(knobs.project_columns, project), unroll,
                   knobs.project_pairs if project else 0, False, knobs.project_gates, bool(knobs.matrix and project))
    found = {"hoisted": hoisted, "prologue": Tile(knobs.rows, 1, unroll)}
    for p, phase in enumerate(graph.phases, 1):
        if gates := len(phase.products):
            vectors = vectors_of(knobs.columns, gates, head)
            found[f"phase{p}"] = Tile(knobs.rows, vectors, unroll, knobs.pairs, bool(knobs.ahead), knobs.gates,
                                       bool(knobs.matrix))
    return found


def gates_of(task: Task, name: str) -> int:
    if name.startswith("phase"):
        return len(task.graph.phases[int(name.removeprefix("phase")) - 1].products)
    return len(task.graph.hoisted_products) if name == "hoisted" else 0


def shape_of(task: Task, knobs: CPUKnobs) -> Shape:
    w = task.workload
    return Shape(w.batch, task.own_input, w.hidden, lanes_for(task), knobs.chunk, tiles(task, knobs), w.stored,
                 w.dtype, knobs.team)


def cycles(heights: Mapping[int, int], hidden: int, tile: Tile, gates: int, lanes: int, threads: int, rates: CPURates,
           stalls: tuple[float, float] = (0.0, 0.0), exact: bool = False) -> float:
    """Estimated cycles of the busiest thread for one k of a product. ``heights``: by :func:`heights_of`; ``stalls``:
    cycles of a tile for each column and row, on top; ``exact``: of its very tasks, not of mean ones."""
    count, units = sum(heights.values()), -(-hidden // (tile.vectors * lanes))

    def of(rows: int, columns: int) -> float:
        if tile.matrix:
            return max(rows * columns / matrix.DEPTH, rates.l2_vector * columns / 2) + rates.turn / matrix.DEPTH
        # two broadcasts a cycle; weights come from L2 more slowly than from the cache before it
        sums, from_l2 = rows * columns, rates.l2_vector * columns
        each = max(rates.fma * sums, rates.fma_latency, rates.vector_load * columns + rows / 2, from_l2)
        if tile.pairs:  # every factor of the operand is a broadcast
            each = max(rates.fma * sums * (1 - 1 / tile.pairs), rates.fma_latency,
                       rates.vector_load * columns + sums / 2, from_l2) / PAIRS_REACH
        return each + rates.turn + stalls[0] * columns + stalls[1] * rows

    costs = [(sum(of(rows, columns) for columns in tile.columns(gates)), many) for rows, many in heights.items()]
    if exact:
        return busiest(costs, units, threads)
    return -(-count * units // threads) * sum(many * cost for cost, many in costs) / count


def busiest(costs: Sequence[tuple[float, int]], times: int, threads: int) -> float:
    """The most that a thread's part, by Worker.share, costs; ``costs``: (of a task, how many), ``times`` over."""
    count, whole = sum(many for _, many in costs), sum(cost * many for cost, many in costs)

    def until(task: int) -> float:
        rounds, rest = divmod(task, count)
        total = rounds * whole
        for cost, many in costs:
            total += cost * min(rest, many)
            rest -= min(rest, many)
        return total

    ends = [until(times * count * thread // threads) for thread in range(threads + 1)]
    return max(end - begin for begin, end in pairwise(ends))


def heights_of(rows: int, tile: Tile, hoisted: bool) -> dict[int, int]:
    """Rows of a row tile of a stage -> how many tiles have these."""
    full, short = divmod(rows, tile.rows)
    last = 0 if hoisted else tile.short(rows)
    counts = {tile.rows: full + bool(short and not last), last: int(bool(last))}
    return {height: count for height, count in counts.items() if count}


def matrix_pays(task: Task) -> bool:
    """True if the CPU has a matrix unit, and it can multiply all operands of the layer."""
    depths = [t.columns or 0 for p in task.graph.phases for q in p.products for t in q.terms]
    return (matrix.available(task.device, task.workload.dtype) and lanes_for(task) == matrix.UNITS
            and head_size(task) % matrix.DEPTH == 0 and all(k % matrix.DEPTH == 0 for k in depths))


def pairs_pay(task: Task) -> bool:
    """True if products of pairs may gain anything; with one batch row the bytes take the time."""
    work = task.workload
    return work.weights is None and work.dtype == "float32" and work.batch > 1 and cpu_rates(task.device).adds_apart


def left_for_read_out(task: Task) -> int:
    """Values of a unit and step that lie in memory between the steps of a chunk and what follows them."""
    if task.after is None:
        return 0
    graph = task.after.graph
    products = len(graph.hoisted_products) + sum(len(p.products) for p in graph.phases)
    return len(task.graph.outputs) + products + len(graph.outputs)


def beyond_l2(task: Task) -> bool:
    """True if a thread has more recurrent weights than its L2 holds."""
    weights = multiplied(task.graph, task.workload.hidden) * STORED[task.workload.stored].bytes
    return weights > task.device.l2 * max(1, task.device.cores)


def best_tile(task: Task, rows: int, gates: list[int], row_choices: tuple[int, ...], column_choices: tuple[int, ...],
              pair_choices: tuple[int, ...], hoisted: bool, head: int = 0,
              exact: bool = False) -> tuple[int, int, int, int]:
    """(rows, columns, pairs, gates) with the smallest estimate; ``head``: as of :func:`vectors_of`."""
    lanes, registers = lanes_for(task), registers_of(task.device)
    alone = task.workload.batch == 1 and best_team(task) == 1  # then no other thread has part of the tiles
    threads = 1 if alone else max(1, task.device.cores)
    hidden, rates, stalls = task.workload.hidden, cpu_rates(task.device), (0.0, 0.0)
    if task.workload.batch > 1:
        from_l3 = not hoisted and beyond_l2(task)
        stalls = rates.unhidden_l3_vector if from_l3 else rates.unhidden_vector, rates.unhidden_row

    def estimate(choice: tuple[int, int, int, int]) -> tuple[float, int, int]:
        total, sums, wide = 0.0, -choice[0] * choice[1], 0
        for g in gates:
            tile = Tile(choice[0], vectors_of(choice[1], g, head), 1, choice[2] if g else 0, gates=choice[3])
            need = registers_used(tile, g, task.workload.stored)
            if (choice[2] and choice[3]) or (need > registers and (tile.rows, tile.vectors) != (1, 1)):
                return float("inf"), 0, 0
            total += cycles(heights_of(rows, tile, hoisted), hidden, tile, g, lanes, threads, rates, stalls, exact)
            if tile.pairs:  # the copy of the operand, and a barrier
                total += (rows / threads * (COPY_VECTOR * hidden / lanes + COPY_ROW) + COPY_BARRIER) / hidden
            if choice[3]:
                sums, wide = -choice[0] * max(tile.columns(g)), choice[1]
        # large tiles; those of some gates with the fewest sums that are not in registers
        return total, sums, wide

    # with few registers the gates that have their sums there at the same time are a choice, too (0: all)
    few = registers < 32 and task.workload.batch > 1 and task.workload.weights != "int8"
    return min(product(row_choices, column_choices, pair_choices, (0, 1, 2) if few else (0,)), key=estimate)


def tile_for(task: Task, rows: int, gates: int, pairs: tuple[int, ...] = (0,), hoisted: bool = True, head: int = 0,
             exact: bool = False) -> Tile:
    """The tile of a stage with that estimate; parameters as of :func:`best_tile`."""
    if not gates:
        return Tile(1, 1, 1)
    height, width, of_pairs, at_once = best_tile(
        task, rows, [gates], row_choices(task.device, rows), column_choices(task.device, gates, task.workload), pairs,
        hoisted, head, exact)
    return Tile(height, vectors_of(width, gates, head), unrolled(height, width), of_pairs, gates=at_once)


def matrix_tile(rows: int, gates: int, head: int = 0) -> tuple[int, int, int]:
    """(rows, columns, gates) of a stage that the matrix unit multiplies: a register for each sum. Weights that two row
    tiles use are loaded once; with one, more columns use each part of the operand."""
    height = matrix.ROWS * (2 if rows > matrix.ROWS else 1)
    most = next(n for n in range(matrix.REGISTERS, 0, -1) if matrix.registers(height, n) <= matrix.REGISTERS)
    vectors = vectors_of(most, gates, head)
    return height, gates * vectors, 0 if gates * vectors <= most else min(most, 2)


def unrolled(rows: int, columns: int) -> int:
    return 4 if rows * columns <= 12 else 2


def best_team(task: Task) -> int:
    """1 where a step is so short that waiting for another thread takes longer than half of it; else 0."""
    graph, workload = task.graph, task.workload
    values = multiplied(task.graph, task.workload.hidden) * workload.batch
    barriers = cpu_rates(task.device).barrier * len(graph.phases)
    return int(bool(graph.phases) and values <= 2 * barriers * lanes_for(task))


def features(task: Task, shape: Shape) -> dict[str, float]:
    """Numbers a cost model can rank configurations by, from sizes alone."""
    workload = task.workload
    threads = max(1, min(task.device.cores, shape.team or task.device.cores))
    found, rates = dict[str, float](), cpu_rates(task.device)
    weights = padded = useful = busiest = 0.0
    for name, tile in shape.tiles.items():
        if not (gates := gates_of(task, name)):
            continue
        hoisted = name == "hoisted"
        deep = workload.input if hoisted else columns_of(task.graph.phases[int(name[5:]) - 1], workload.hidden)
        rows = shape.chunk * workload.batch if hoisted else workload.batch
        heights, units = heights_of(rows, tile, hoisted), shape.units(tile)
        row_tiles, computed = sum(heights.values()), sum(height * count for height, count in heights.items())
        prefix = "project" if hoisted else name
        found[f"{prefix}_registers"] = float(registers_used(tile, gates, shape.weights))
        found[f"{prefix}_sums"] = float(tile.rows * gates * tile.vectors)
        found[f"{prefix}_tasks"] = float(row_tiles * units)
        found[f"{prefix}_imbalance"] = -(-row_tiles * units // threads) * threads / (row_tiles * units)
        found[f"{prefix}_waste"] = computed * units * tile.vectors * shape.lanes / (rows * workload.hidden)
        found[f"{prefix}_cycles"] = cycles(heights, workload.hidden, tile, gates, shape.lanes, threads, rates)
        found[f"{prefix}_tile_bytes"] = STORED[shape.weights].bytes * gates * tile.vectors * shape.lanes * deep
        if not hoisted:
            weights += STORED[shape.weights].bytes * gates * shape.width * deep
            useful += 2.0 * gates * workload.batch * workload.hidden * deep
            padded += 2.0 * gates * computed * shape.width * deep
            busiest += found[f"{prefix}_cycles"] * deep
    hoisted_bytes = workload.itemsize * shape.chunk * workload.batch * shape.width * len(task.graph.hoisted_outputs)
    return found | {"threads": float(threads), "thread_weight_bytes": weights / threads, "step_flops": useful,
                    "step_padded_flops": padded, "step_cycles": busiest, "hoisted_bytes": float(hoisted_bytes)}
