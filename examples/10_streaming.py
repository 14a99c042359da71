"""A layer on a stream: one step a call, with the state kept, and how long calls take: the median and the slow ones.

    python examples/10_streaming.py [--steps 5000] [--hidden 256]

A call is timed with all that it does in Python. At the end the outputs are compared with those of one call of all
steps; exits with 1 where they differ. For less than Python costs, and for deadlines, see docs/C.md.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import ecornn
from ecornn.numpy_reference import random_weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="of the stream [5000]")
    parser.add_argument("--hidden", type=int, default=256, help="H [256]")
    arguments = parser.parse_args()
    T, H, I = arguments.steps, arguments.hidden, 64

    module = ecornn.compile("lstm", hidden=H, input=I, batch=1, seq=1, target="cpu")
    layer = module.bind(random_weights("lstm", I, H), threads=1)  # of one row there is little to share
    samples = np.random.default_rng(0).standard_normal((T, 1, I)).astype(np.float32)

    y, times, state = np.empty((T, 1, H), np.float32), np.empty(T), None
    layer(samples[:1])  # code is loaded at the first call
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
