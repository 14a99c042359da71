"""Host time of training steps on a GPU: how long Python and the driver take to issue one, beside torch.nn's.

    python benchmarks/training_host_time.py

A small layer, so that the GPU is never waited for; forward and backward, without an optimizer, whose weights count as
changed at each step. Medians of runs of 100 steps each, in turns, in microseconds a step. And how long the GPU takes to
pack the weights of a large layer, with the bytes that are written and, once for each use, read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import prod

import torch

import ecornn.torch
from ecornn.dtypes import ITEMSIZE
from ecornn.torch.engine import engine_of, weights_of

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


def packing(hidden: int, kind: str) -> str:
    """Microseconds of the GPU, and how fast memory is read and written."""
    layer = ecornn.torch.LSTM(hidden, hidden, device="cuda")
    layer.wait = True
    with torch.autocast("cuda", getattr(torch, kind)):
        layer(torch.randn(8, 16, hidden, device="cuda"))[0].sum().backward()
    weights = weights_of(layer)
    with engine_of(layer).training(weights, torch.empty(8, 16, hidden, device="cuda", dtype=getattr(torch, kind)),
                                   "") as bound:
        pointers = [dict(layer.named_parameters())[p.name].data_ptr() for p in bound.manifest.parameters]
        packings = {b.packing for b in bound.manifest.buffers if b.packing is not None}
    read = 4 * sum(prod(p.pad) for p in packings)
    written = sum(prod(p.pad) * ITEMSIZE.get(p.dtype, 4) for p in packings)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream().cuda_stream
    for times in (3, 200):
        start.record()
        for _ in range(times):
            bound.repack_at(pointers, "float32", stream)
        end.record()
        end.synchronize()
    us = start.elapsed_time(end) / times * 1e3
    return (f"LSTM {hidden}, packed as {kind}: {us:.1f} us, {read / 2**20:.0f} MiB read, {written / 2**20:.0f} MiB "
            f"written, {(read + written) / us / 1e3:.0f} GB/s")


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
    for hidden in (1024, 2048):
        print(packing(hidden, "bfloat16"))


if __name__ == "__main__":
    main()
