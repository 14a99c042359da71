"""Host time of training steps on a GPU: how long Python and the driver take to issue one, beside torch.nn's.

    python benchmarks/training_host_time.py

A small layer, so that the GPU is never waited for; forward and backward, without an optimizer, whose weights count as
changed at each step. Medians of runs of 100 steps each, in turns, in microseconds a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import ecornn.torch

CASES = [("LSTM", 1, "float32"), ("LSTM", 2, "float32"), ("GRU", 1, "bfloat16"), ("LSTM", 1, "autocast")]


def step_of(layer: torch.nn.Module, x: torch.Tensor, autocast: bool) -> Callable[[], None]:
    """One step, whose gradients take the place of the last ones."""
    dy = None

    def step() -> None:
        nonlocal dy
        for p in layer.parameters():
            p.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = layer(x)[0]
        dy = torch.ones_like(y) if dy is None else dy
        y.backward(dy)

    return step


def issued(step: Callable[[], None], count: int = 100) -> float:
    """Microseconds a step until the last one is issued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / count * 1e6


def main() -> None:
    """The command."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us a step: ours, torch.nn")
    for name, layers, kind in CASES:
        dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
        x = torch.randn(2, 4, 32, device="cuda", dtype=dtype)
        ours = getattr(ecornn.torch, name)(32, 32, layers, device="cuda", dtype=dtype)
        theirs = getattr(torch.nn, name)(32, 32, layers, device="cuda", dtype=dtype)
        steps = [step_of(layer, x, kind == "autocast") for layer in (ours, theirs)]
        for step in steps:
            issued(step, 10)
        times = [[issued(step) for step in steps] for _ in range(9)]
        medians = [statistics.median(side) for side in zip(*times, strict=True)]
        print(f"{name} {layers} {kind}: {medians[0]:.0f}, {medians[1]:.0f}")


if __name__ == "__main__":
    main()
