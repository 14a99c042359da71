"""Times layers in bfloat16 on a CPU beside torch.nn's of that type, and beside ecornn's in float32.

    taskset -c 0,1 python benchmarks/cpu_16_bits.py --output cpu_16_bits.json

A side is the forward pass of a layer without gradients (``run``), or both passes (``train``), as ``replace`` has them.
Sides take turns, on fresh inputs; a row has medians in microseconds a step, and errors against float64. A float32 layer
computes with the same weights and inputs.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
from side_by_side import host_clock, options, relative, write

import ecornn.torch
from ecornn.bench.results import environment

# torch.nn's name, T, B, I, H
LAYERS = (("LSTM", (50, 64, 256, 256)), ("LSTM", (50, 32, 512, 512)), ("LSTM", (100, 20, 800, 800)),
          ("LSTM", (50, 32, 1024, 1024)), ("LSTM", (100, 16, 128, 128)), ("LSTM", (100, 1, 128, 128)),
          ("LSTM", (50, 1, 512, 512)), ("LSTM", (50, 1, 1024, 1024)), ("GRU", (50, 64, 256, 256)),
          ("GRU", (50, 32, 512, 512)), ("GRU", (50, 32, 1024, 1024)), ("GRU", (100, 1, 512, 512)),
          ("RNN", (50, 32, 512, 512)), ("RNN", (100, 1, 256, 256)))
WARM = 2


def row_of(name: str, size: tuple[int, int, int, int], train: bool, repeats: int) -> dict[str, Any]:
    """Medians of each side."""
    steps, batch, width, hidden = size
    torch.manual_seed(0)
    half = torch.bfloat16
    nets = {"ecornn": getattr(torch.nn, name)(width, hidden).to(half)}
    for side, dtype in (("torch", half), ("float32", torch.float32), ("exact", torch.float64)):
        nets[side] = getattr(torch.nn, name)(width, hidden).to(dtype)
        nets[side].load_state_dict(nets["ecornn"].state_dict())
    for side in ("ecornn", "float32"):
        ecornn.torch.replace(nets[side], wait=True)
    dtypes = {side: net.weight_hh_l0.dtype for side, net in nets.items()}

    def call(side: str, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(train):
            y = nets[side](x)[0]
            if train:
                y.backward(dy)
                nets[side].zero_grad()
        return y.detach()

    times: dict[str, list[float]] = {"ecornn": [], "torch": [], "float32": []}
    errors: dict[str, float] = {}
    for turn in range(WARM + repeats):
        x, dy = torch.randn(steps, batch, width).to(half), torch.randn(steps, batch, hidden).to(half)
        exact = call("exact", x.double(), dy.double()) if turn == 0 else None
        for side, taken in times.items():
            given = x.to(dtypes[side]), dy.to(dtypes[side])
            made: list[torch.Tensor] = []
            us = host_clock(lambda side=side, given=given, made=made: made.append(call(side, *given)))  # type: ignore[misc]
            if exact is not None:
                errors[side] = relative(made[0], exact)
            if turn >= WARM:
                taken.append(us / steps)
    found = {side: statistics.median(taken) for side, taken in times.items()}
    return {"layer": name, "T": steps, "B": batch, "I": width, "H": hidden, "passes": "train" if train else "run",
            "us": found, "errors": errors, "torch/ecornn": found["torch"] / found["ecornn"],
            "float32/ecornn": found["float32"] / found["ecornn"]}


def main() -> None:
    arguments = options(__doc__, repeats=(15, "turns of all sides")).parse_args()
    rows, about = [], environment() | {"threads": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    for train in (False, True):
        for layer in LAYERS:
            rows.append(row_of(*layer, train, arguments.repeats))
            print(rows[-1], flush=True)
            write(arguments.output, about, rows)
        for over in ("torch/ecornn", "float32/ecornn"):
            print(over, statistics.geometric_mean(row[over] for row in rows[-len(LAYERS):]), flush=True)


if __name__ == "__main__":
    main()
