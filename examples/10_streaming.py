"""A layer on a stream: each call computes one step and returns the state for the next; prints percentiles of the times.

    python examples/10_streaming.py [--steps 5000] [--hidden 256]

The time of a call includes its work in Python; docs/C.md describes calls without Python, and calls with deadlines. At
the end the outputs are compared with those of one call for all steps. The program exits with 1 if they differ. On a CPU
it takes a minute at most.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from stages import stage

import ecornn
from ecornn.numpy_reference import random_weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="steps of the stream [5000]")
    parser.add_argument("--hidden", type=int, default=256, help="H [256]")
    arguments = parser.parse_args()
    T, H, I = arguments.steps, arguments.hidden, 64

    with stage("compiling"):
        module = ecornn.compile("lstm", hidden=H, input=I, batch=1, seq=1, target="cpu")
    layer = module.bind(random_weights("lstm", I, H), threads=1)  # one row is too little work for several threads
    samples = np.random.default_rng(0).standard_normal((T, 1, I)).astype(np.float32)

    y, times, state = np.empty((T, 1, H), np.float32), np.empty(T), None
    layer(samples[:1])  # the first call loads code
    with stage(f"{T} calls"):
        for t in range(T):
            begun = time.perf_counter()
            out, state = layer(samples[t:t + 1], state)
            times[t] = time.perf_counter() - begun
            y[t] = out[0]
    p50, p95, p99, most = np.percentile(times * 1e6, (50, 95, 99, 100))
    print(module)
    print(f"{T} calls of one step: p50 {p50:.1f} us, p95 {p95:.1f} us, p99 {p99:.1f} us, longest {most:.0f} us")

    whole, last = layer(samples)
    off = np.linalg.norm(y - whole) / np.linalg.norm(whole)
    states = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(state, last, strict=True))
    print(f"difference from one call of all steps: y {off:.1e}, states {states:.1e}")
    return int(not (off < 1e-5 and states < 1e-5))


if __name__ == "__main__":
    sys.exit(main())
