"""What a CPU's layers of one batch row are bound by: weights that stream from the caches, step for step.

    python benchmarks/cpu_floor.py --output benchmarks/results/cpu_floor.json

Measured: GFLOP/s of vector multiply-adds in registers, alone and with as many vector additions beside them
(:mod:`ecornn.schedules.cpu.paired` lives on that); and GB/s of reading again and again what each thread has of a
layer's recurrent weights, by a loop that does nothing else with them than a multiply-add. The floor of a layer is the
products W x of all steps at the peak of the multiply-adds, and each step's weights at that rate: no pointwise part, no
barrier, no latency. With results of grids/cpu.toml (--rows), also where ecornn and the faster peer stand, and the ratio
to the peer that the floor would be.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from measured_rows import read

from ecornn.build.link import find_compiler
from ecornn.host_cpu import detect
from ecornn.schedules.cpu.tiling import lanes_of

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
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
    multiply = [f"vfmadd231ps %%{register}14,%%{register}15,%%{register}{i}\\n" for i in range(6)]
    add = [f"vaddps %%{register}14,%%{register}15,%%{register}{i}\\n" for i in range(6, 12)]
    macros = {"BYTES": str(4 * lanes), "MULTIPLY": f'"{"".join(multiply)}"',
              "BOTH": '"' + "".join(multiply + add) + '"',
              "READ": '"' + "".join(f"vfmadd231ps {4 * lanes * i}(%0),%%{register}15,%%{register}{i}\\n"
                                    for i in range(12)) + '"',
              "CLEAR": '"' + "".join(f"vxorps %%xmm{i},%%xmm{i},%%xmm{i}\\n" for i in (*range(12), 15)) + '"',
              "TOUCHED": ",".join(f'"xmm{i}"' for i in range(16))}
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
    for _ in range(TIMES):
        while True:
            team = [threading.Thread(target=work, args=(n, rounds)) for n in range(threads)]
            begin = time.perf_counter()
            for thread in team:
                thread.start()
            for thread in team:
                thread.join()
            took = time.perf_counter() - begin
            if took > SECONDS / 2:
                break
            rounds = int(rounds * min(100.0, 1.2 * SECONDS / took)) + 1
        best = max(best, rounds * threads / took)
    return best


def measure(threads: int) -> dict:
    """The peaks, and GB/s by the bytes that a thread has."""
    lanes = lanes_of(detect())
    with tempfile.TemporaryDirectory() as folder:
        loops = library(lanes, folder)
        flops = 2e-9 * lanes * 6
        found: dict = {"fma_gflops": flops * rate(lambda _, n: loops.multiply(n), threads),
                       "fma_gflops_beside_additions": flops * rate(lambda _, n: loops.both(n), threads),
                       "stream_gb_per_s": {}}
        sizes = sorted({4 * gates * h * h // threads for gates in set(GATES.values()) for h in HIDDEN})
        memory = [loops.room(sizes[-1]) for _ in range(threads)]
        for size in sizes:
            vectors = size // (4 * lanes)
            found["stream_gb_per_s"][str(size)] = 1e-9 * size * rate(
                lambda thread, n, vectors=vectors: loops.stream(memory[thread], vectors, n), threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rows", type=Path, help="results of grids/cpu.toml, to stand beside the floors")
    parser.add_argument("--threads", type=int, default=detect().cores, help="default: physical cores")
    arguments = parser.parse_args()
    found = {"cpu": detect().name, "arch": detect().arch, "threads": arguments.threads, **measure(arguments.threads)}
    print(f"multiply-adds {found['fma_gflops']:.0f} GFLOP/s; {found['fma_gflops_beside_additions']:.0f} beside as many "
          "additions")
    for size, speed in found["stream_gb_per_s"].items():
        print(f"{int(size) >> 10:6} KB a thread: {speed:.0f} GB/s")
    rows = read(arguments.rows).good if arguments.rows else []
    at = {(r["cell"], r["H"]): r | {"ecornn_ms": r["ecornn_us"] * r["T"] / 1e3}
          for r in rows if r["group"] == "latency"}
    found["floors"] = []
    for cell, gates in GATES.items():
        for h in HIDDEN:
            weights = 4 * gates * h * h
            hoisted = 2 * STEPS * gates * h * h / found["fma_gflops"] * 1e-6
            steps = STEPS * weights / found["stream_gb_per_s"][str(weights // arguments.threads)] * 1e-6
            row = {"cell": cell, "T": STEPS, "B": 1, "I": h, "H": h, "hoisted_ms": hoisted, "steps_ms": steps,
                   "floor_ms": hoisted + steps}
            text = f"{cell:8} 100x1x{h}x{h}: {hoisted:.3f} + {steps:.3f} = {hoisted + steps:.3f} ms"
            if (cell, h) in at:
                r = at[cell, h]
                peer = r["ratio"] * r["ecornn_ms"]
                row |= {"ecornn_ms": r["ecornn_ms"], "peer_ms": peer, "ratio": r["ratio"],
                        "ratio_at_the_floor": peer / row["floor_ms"]}
                text += (f"; ecornn {r['ecornn_ms']:.3f} ({r['ecornn_ms'] / row['floor_ms']:.2f} floors), faster peer "
                         f"{peer:.3f}, ratio {r['ratio']:.2f}x, at the floor {row['ratio_at_the_floor']:.2f}x")
            found["floors"].append(row)
            print(text)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
