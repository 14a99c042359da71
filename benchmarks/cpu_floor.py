"""The bounds of a CPU's layers: weights that stream from the caches, step for step, and multiply-adds of hot loops.

    python benchmarks/cpu_floor.py --output benchmarks/results/cpu_floor.json
    python benchmarks/cpu_floor.py --loops --output benchmarks/results/cpu_loops.json

Measured: GFLOP/s of vector multiply-adds in registers, alone and with as many vector additions beside them
(:mod:`ecornn.schedules.cpu.product` lives on that); and GB/s of reading again and again what each thread has of a
layer's recurrent weights, by a loop that does nothing else with them than a multiply-add. The floor of a layer is the
products W x of all steps at the peak of the multiply-adds, and each step's weights at that rate: no pointwise part, no
barrier, no latency. With results of grids/cpu.toml (--rows), also where ecornn and the faster peer stand, and the ratio
to the peer that the floor would be.

--loops: the hot loops of layers, instructions from the disassembly, and the share of the peak of multiply-adds that is
reached, on one thread and on all. A loop's own share is that of its vector operations that are multiply-adds, where one
vector multiply-add a cycle is the limit (AVX-512 on Zen 4); the rest of the difference is what waits for memory,
barriers and the pointwise part. Loops of pairs (schedules/cpu/product.py) have as many additions as multiply-adds, in
other units, and two thirds or three quarters of the multiply-adds; beside each is the loop of rows not fit for pairs.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path

from measured_rows import read
from side_by_side import options, told

from ecornn.bench.grid import Case
from ecornn.bench.measure import Plan, measure
from ecornn.build.link import find_compiler
from ecornn.compiler import generate, plan
from ecornn.host_cpu import detect
from ecornn.schedules.cpu.tiling import lanes_of
from ecornn.tune.timing import wall_clock

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
LAYERS = (("lstm", 300, 20, 800), ("gru", 300, 20, 800), ("lstm", 100, 1, 1024))  # of loops: T, B, H
KINDS = {"fma": ("vfmadd", "vfnmadd"), "additions": ("vaddps", "vsubps"), "vector_arithmetic": "v",
         "broadcasts": "vbroadcast", "loads": "vmov"}  # of instructions, by the beginnings of their names
CHAINS = 12  # enough to hide a latency of 4 cycles
HIDDEN, STEPS = (64, 128, 256, 512, 1024), 100
SECONDS, TIMES = 0.05, 7  # of one measurement, and how many
CODE = """
#include <stdlib.h>
#include <string.h>
extern "C" void multiply(long n) { while (n--) __asm__ volatile(MULTIPLY ::: TOUCHED); }
extern "C" void both(long n) { while (n--) __asm__ volatile(BOTH ::: TOUCHED); }
extern "C" void* room(long bytes) {
  void* p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(p, 0, bytes);
  return p;
}
extern "C" void stream(const char* p, long vectors, long rounds) {
  __asm__ volatile(CLEAR ::: TOUCHED);
  for (; rounds--; )
    for (long i = 0; i + 12 <= vectors; i += 12) __asm__ volatile(READ :: "r"(p + i * BYTES) : TOUCHED);
}
"""


def library(lanes: int, folder: str) -> ctypes.CDLL:
    """The loops, compiled for this CPU."""
    register = {16: "zmm", 8: "ymm", 4: "xmm"}[lanes]
    multiply, add = ([f"{name} %%{register}14,%%{register}15,%%{register}{i}" for i in range(CHAINS)]
                     for name in ("vfmadd231ps", "vaddps"))
    loops = {"MULTIPLY": multiply, "BOTH": multiply[:6] + add[6:],
             "READ": [f"vfmadd231ps {4 * lanes * i}(%0),%%{register}15,%%{register}{i}" for i in range(CHAINS)],
             "CLEAR": [f"vxorps %%xmm{i},%%xmm{i},%%xmm{i}" for i in (*range(CHAINS), 15)]}
    macros = {name: '"' + "\\n".join(lines) + '"' for name, lines in loops.items()} | {
        "BYTES": 4 * lanes, "TOUCHED": ",".join(f'"xmm{i}"' for i in range(16))}
    source, made = Path(folder, "floor.cc"), Path(folder, "floor.so")
    source.write_text("\n".join(f"#define {k} {v}" for k, v in macros.items()) + CODE)
    subprocess.run([*find_compiler(), "-O2", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    found = ctypes.CDLL(str(made))
    found.multiply.argtypes = found.both.argtypes = [ctypes.c_long]
    found.room.argtypes, found.room.restype = [ctypes.c_long], ctypes.c_void_p
    found.stream.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    return found


def rate(work: Callable[[int, int], object], threads: int) -> float:
    """Rounds a second of all threads together, the best of some; ``work``: (thread, rounds)."""
    rounds, best = 1, 0.0
    with ThreadPoolExecutor(threads) as team:
        for _ in range(TIMES):
            while (took := wall_clock(lambda n=rounds: [*team.map(work, range(threads), repeat(n))])) <= SECONDS / 2:
                rounds = int(rounds * min(100.0, 1.2 * SECONDS / took)) + 1
            best = max(best, rounds * threads / took)
    return best


def floors(threads: int, results: Path | None) -> dict:
    """The peaks, GB/s by the bytes that a thread has, and the bounds of each layer of one row: the products before the
    steps, and the weights of each step."""
    lanes = lanes_of(detect())
    with tempfile.TemporaryDirectory() as folder:
        loops = library(lanes, folder)
        flops = 2e-9 * lanes * CHAINS
        found: dict = {"fma_gflops": flops * rate(lambda _, n: loops.multiply(n), threads),
                       "fma_gflops_beside_additions": flops / 2 * rate(lambda _, n: loops.both(n), threads)}
        print(told(found))
        found |= {"stream_gb_per_s": {}, "floors": []}
        sizes = sorted({4 * gates * h * h // threads for gates in set(GATES.values()) for h in HIDDEN})
        memory = [loops.room(sizes[-1]) for _ in range(threads)]
        for size in sizes:
            vectors = size // (4 * lanes)
            found["stream_gb_per_s"][str(size)] = 1e-9 * size * rate(
                lambda thread, n, vectors=vectors: loops.stream(memory[thread], vectors, n), threads)
            print(f"{size >> 10:6} KB a thread: {found['stream_gb_per_s'][str(size)]:.0f} GB/s")
    at = {(r["cell"], r["H"]): r for r in (read(results).good if results else []) if r["group"] == "latency"}
    for (cell, gates), h in product(GATES.items(), HIDDEN):
        weights = 4 * gates * h * h
        hoisted = 2 * STEPS * gates * h * h / found["fma_gflops"] * 1e-6
        steps = STEPS * weights / found["stream_gb_per_s"][str(weights // threads)] * 1e-6
        row = {"cell": cell, "T": STEPS, "B": 1, "I": h, "H": h, "hoisted_ms": hoisted, "steps_ms": steps,
               "floor_ms": hoisted + steps}
        if r := at.get((cell, h)):
            ours = r["ecornn_us"] * r["T"] / 1e3
            row |= {"ecornn_ms": ours, "peer_ms": r["ratio"] * ours, "ratio": r["ratio"],
                    "ratio_at_the_floor": r["ratio"] * ours / row["floor_ms"]}
        found["floors"].append(row)
        print(told(row))
    return found


def loops(asm: str) -> list[dict[str, int]]:
    """Innermost loops with at least eight vector multiply-adds: what their bodies consist of."""
    found = []
    for block in re.split(r"^\.LBB\w+:.*$", asm, flags=re.M)[1:]:
        body = re.split(r"^\tj\w+\t\.LBB\w+", block, maxsplit=1, flags=re.M)
        lines = [line.split()[0] for line in body[0].splitlines() if re.match(r"\t[a-z]", line)]
        of = {kind: sum(line.startswith(names) for line in lines) for kind, names in KINDS.items()}
        if len(body) == 2 and of["fma"] >= 8 and not any(one.startswith(("vdiv", "vmin", "vmax")) for one in lines):
            of["vector_arithmetic"] -= of["broadcasts"] + of["loads"]
            found.append({"instructions": len(lines) + 1, **of, "spills": len(re.findall(r"\(%rsp|\[rsp", body[0]))})
    return found


def measured(cell: str, T: int, B: int, H: int, threads: int) -> dict:
    """One layer, I = H: its loops, and GFLOP/s of the median of a few runs."""
    planned = plan(cell, hidden=H, batch=B, seq=T, target="cpu")
    us = measure(Case(cell=cell, hidden=H, batch=B, seq=T, target="cpu", threads=threads), Plan(())).us_per_step
    return {"cell": cell, "T": T, "B": B, "I": H, "H": H, "config": dict(planned.found.config),
            "loops": loops(generate(planned).emitted["asm"]),
            "gflops": 4e-3 * B * H * H * GATES[cell] / us["ecornn"].median}


def hot_loops(threads: int) -> dict:
    """The peak, and of each layer what it reaches and the loops that it has."""
    lanes = lanes_of(detect())
    with tempfile.TemporaryDirectory() as folder:
        made = library(lanes, folder)
        one, peak = (2e-9 * lanes * CHAINS * rate(lambda _, n: made.multiply(n), count) for count in (1, threads))
    print(f"{detect().name} ({detect().arch}): FMA peak {one:.1f} GFLOP/s on 1 thread, {peak:.1f} on {threads}")
    rows = [measured(*layer, threads) for layer in LAYERS]
    for row in rows:
        row["share_of_peak"] = row["gflops"] / peak
        print("\n   loop: ".join(map(told, (row, *row["loops"]))))
    return {"peak_1_thread": one, "peak": peak, "rows": rows}


def main() -> None:
    parser = options(__doc__, threads=(detect().cores, "physical cores"))
    parser.add_argument("--rows", type=Path, help="results of grids/cpu.toml, to stand beside the floors")
    parser.add_argument("--loops", action="store_true", help="the hot loops of layers in place of floors")
    arguments = parser.parse_args()
    found = hot_loops(arguments.threads) if arguments.loops else floors(arguments.threads, arguments.rows)
    if arguments.output:
        where = {"cpu": detect().name, "arch": detect().arch, "threads": arguments.threads}
        arguments.output.write_text(json.dumps(where | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
