"""Times the host's part of a training step on a GPU, of a drop-in, by C++ and by Python, and of torch.nn's layer, in
microseconds.

    python benchmarks/host_of_training.py --output host_of_training.json

Of each layer, in turns: forward and backward as the host sees them, once on an idle GPU after other work, and many in a
row; and whole steps with Adam, five in a row. Two versions are compared by running each one's package with this file
(PYTHONPATH), in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from side_by_side import options, write

import ecornn.torch
from ecornn.bench.results import environment
from ecornn.torch import native

# torch.nn's name, T, B, I, H, and what else it has
LAYERS: tuple[tuple[str, tuple[int, int, int, int], dict[str, Any]], ...] = (
    ("GRU", (1, 1, 16, 16), {}), ("GRU", (96, 64, 8, 96), {}), ("LSTM", (16, 4, 16, 16), {}),
    ("LSTM", (128, 32, 64, 128), {"num_layers": 2, "bidirectional": True}), ("RNN", (784, 64, 1, 128), {}),
    ("LSTM", (365, 128, 12, 64), {}), ("GRU", (2, 512, 256, 256), {}))
STEPS, ROW, WARM = 5, 20, 4
SIDES = "ecornn", "python", "torch"  # python: ours without native steps


def row_of(name: str, size: tuple[int, int, int, int], options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Medians of each side, in microseconds."""
    steps, batch, width, hidden = size
    torch.manual_seed(0)
    nets = {side: getattr(torch.nn, name)(width, hidden, **options).cuda() for side in SIDES}
    for side in SIDES[:2]:
        nets[side].load_state_dict(nets["torch"].state_dict())
        ecornn.torch.replace(nets[side], wait=True)
    optimizers = {side: torch.optim.Adam(net.parameters(), 1e-3) for side, net in nets.items()}
    x = torch.randn(steps, batch, width, device="cuda")
    dy = torch.randn_like(nets["torch"](x)[0])

    def passes(side: str) -> dict[str, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        y = nets[side](x)[0]
        middle = time.perf_counter()
        torch.autograd.backward(y, dy)
        end = time.perf_counter()
        torch.cuda.synchronize()
        nets[side].zero_grad()
        return {"forward_us": middle - begin, "backward_us": end - middle, "host_us": end - begin}

    def row(side: str) -> dict[str, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(ROW):
            torch.autograd.backward(nets[side](x)[0], dy)
        end = time.perf_counter()
        torch.cuda.synchronize()
        nets[side].zero_grad()
        return {"row_us": (end - begin) / ROW}

    def step(side: str) -> dict[str, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            torch.autograd.backward(nets[side](x)[0], dy)
            optimizers[side].step()
            optimizers[side].zero_grad()
        torch.cuda.synchronize()
        return {"step_us": (time.perf_counter() - begin) / STEPS}

    def turn(side: str) -> dict[str, float]:
        native.library.functions = None if side == "python" else functions
        return passes(side) | row(side) | step(side)

    functions, native.library.calls = native.library.compile(), native.CALLS
    turns = [{side: turn(side) for side in nets} for _ in range(WARM + repeats)][WARM:]
    return {"layer": name, "T": steps, "B": batch, "I": width, "H": hidden, **options} | {
        side: {what: statistics.median(turn[side][what] for turn in turns) * 1e6 for what in turns[0][side]}
        for side in nets}


def main() -> None:
    arguments = options(__doc__, repeats=(25, "turns of both sides")).parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU")
    rows = []
    for layer in LAYERS:
        rows.append(row_of(*layer, arguments.repeats))
        print(rows[-1], flush=True)
    write(arguments.output, environment() | {"device": torch.cuda.get_device_name()}, rows)


if __name__ == "__main__":
    main()
