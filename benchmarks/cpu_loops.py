"""The hot loops of a CPU layer: instructions from the disassembly, and the share of the FMA peak that is reached.

    python benchmarks/cpu_loops.py --output benchmarks/results/cpu_loops.json

The peak is measured: independent fused multiply-adds in registers, on one thread and on all. A loop's own share is
that of its vector operations that are multiply-adds, where one vector multiply-add a cycle is the limit (AVX-512 on
Zen 4); the rest of the difference is what waits for memory, barriers and the pointwise part. Loops of pairs
(schedules/cpu/paired.py) have as many additions as multiply-adds, in other units, and do with two thirds or three
quarters of the multiply-adds; beside each is the loop for rows that are not fit for pairs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import ecornn
from ecornn.build.link import find_compiler
from ecornn.compiler import generate, plan
from ecornn.host_cpu import detect
from ecornn.schedules.cpu.tiling import lanes_of

LAYERS = (("lstm", 300, 20, 800), ("gru", 300, 20, 800), ("lstm", 100, 1, 1024))
CHAINS, ROUNDS = 12, 40_000_000  # enough to hide a latency of 4 cycles; a quarter of a second and more


def peak(threads: int, lanes: int) -> float:
    """GFLOP/s of multiply-adds on ``threads`` threads, the best of five."""
    register = {16: "zmm", 8: "ymm", 4: "xmm"}[lanes]
    body = "\\n".join(f"vfmadd231ps %%{register}14,%%{register}15,%%{register}{i}" for i in range(CHAINS))
    touched = ",".join(f'"xmm{i}"' for i in range(16))
    code = f'extern "C" void f(long n) {{ while (n--) __asm__ volatile("{body}" ::: {touched}); }}'
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.cc"), Path(folder, "peak.so")
        source.write_text(code)
        subprocess.run([*find_compiler(), "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).f
    function.argtypes = [ctypes.c_long]
    best = 0.0
    for _ in range(5):
        team = [threading.Thread(target=function, args=(ROUNDS,)) for _ in range(threads)]
        begin = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        best = max(best, 2e-9 * lanes * CHAINS * ROUNDS * threads / (time.perf_counter() - begin))
    return best


def loops(asm: str) -> list[dict[str, int]]:
    """Innermost loops with at least eight vector multiply-adds: what their bodies consist of."""
    found = []
    for block in re.split(r"^\.LBB\w+:.*$", asm, flags=re.M)[1:]:
        body = re.split(r"^\tj\w+\t\.LBB\w+", block, maxsplit=1, flags=re.M)
        lines = [line.split()[0] for line in body[0].splitlines() if re.match(r"\t[a-z]", line)]
        fmas = sum(line.startswith(("vfmadd", "vfnmadd")) for line in lines)
        if len(body) == 2 and fmas >= 8 and not any(line.startswith(("vdiv", "vmin", "vmax")) for line in lines):
            vector = sum(line.startswith("v") and not line.startswith(("vbroadcast", "vmov")) for line in lines)
            found.append({"instructions": len(lines) + 1, "fma": fmas,
                          "additions": sum(line.startswith(("vaddps", "vsubps")) for line in lines),
                          "vector_arithmetic": vector,
                          "broadcasts": sum(line.startswith("vbroadcast") for line in lines),
                          "loads": sum(line.startswith("vmov") for line in lines),
                          "spills": len(re.findall(r"\(%rsp|\[rsp", body[0]))})
    return found


def measure(cell: str, T: int, B: int, H: int, threads: int) -> dict:
    """One layer, I = H: its loops, and GFLOP/s of the median of a few runs."""
    planned = plan(cell, hidden=H, batch=B, seq=T, target="cpu")
    rng = np.random.default_rng(0)
    module = ecornn.compile(cell, hidden=H, batch=B, seq=T, target="cpu")
    layer = module.bind({p.name: rng.uniform(-0.03, 0.03, p.shape).astype(np.float32)
                         for p in module.manifest.parameters}, threads=threads)
    times = []
    for _ in range(15):
        x = rng.standard_normal((T, B, H), np.float32)
        begin = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - begin)
    flops = 4 * T * B * H * H * {"lstm": 4, "gru": 3}[cell]
    return {"cell": cell, "T": T, "B": B, "I": H, "H": H, "config": dict(planned.found.config),
            "loops": loops(generate(planned).emitted["asm"]), "gflops": 1e-9 * flops / float(np.median(times[3:]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    device = detect()
    parser.add_argument("--threads", type=int, default=device.cores, help="default: physical cores")
    arguments = parser.parse_args()
    one, all_threads = peak(1, lanes_of(device)), peak(arguments.threads, lanes_of(device))
    print(f"{device.name} ({device.arch}): FMA peak {one:.1f} GFLOP/s on 1 thread, {all_threads:.1f} on "
          f"{arguments.threads}")
    rows = []
    for layer in LAYERS:
        row = measure(*layer, arguments.threads)
        row["share_of_peak"] = row["gflops"] / all_threads
        rows.append(row)
        print(f"{row['cell']} {row['T']}x{row['B']}x{row['I']}x{row['H']}: {row['gflops']:.1f} GFLOP/s, "
              f"{row['share_of_peak']:.0%} of the peak")
        for loop in row["loops"]:
            print("   loop: " + ", ".join(f"{count} {name}" for name, count in loop.items()))
    if arguments.output:
        arguments.output.write_text(json.dumps({
            "cpu": device.name, "arch": device.arch, "threads": arguments.threads, "peak_1_thread": one,
            "peak": all_threads, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
