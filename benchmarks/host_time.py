"""Host time of a call: how long Python and the driver take from ``layer(x)`` until it returns.

    python benchmarks/host_time.py --output benchmarks/results/host_time_h100.json        # a GPU, if there is one
    python benchmarks/host_time.py --cpu --output benchmarks/results/host_time_cpu.json

Layers of 16 units, so that what is computed takes next to nothing, without and with states. On a CPU one thread runs a
call to its end: NumPy arrays, torch tensors, and the drop-in beside torch.nn; `entry` is the module's own function with
the same arguments. On a GPU calls return before they have run: tensors of the GPU, the drop-in and torch.nn, blocks of
calls between which the GPU is waited for, outside the time. Microseconds a call: p20, median and p80 of blocks of 50
calls, all sides in turns. Aims: `layer(x)` 25 at most, the drop-in 40.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from side_by_side import environment, options

import ecornn
import ecornn.torch

CELLS = ("lstm", "gru")
STEPS = (1, 8, 100)
H, CALLS = 16, 50


def sides_of(cell: str, steps: int, device: str) -> dict[str, Callable[[], Any]]:
    """Calls of one layer by name."""
    made = ecornn.compile(cell, hidden=H, input=H, batch=1, seq=steps, target=device)
    theirs = getattr(torch.nn, cell.upper())(H, H, device=device)
    ours = getattr(ecornn.torch, cell.upper())(H, H, device=device)
    ours.wait = True  # a first call is not PyTorch's
    layer = made.bind({name: value.detach() for name, value in theirs.named_parameters()},
                      threads=1 if device == "cpu" else None)
    x = torch.randn(steps, 1, H, device=device)
    _, state = layer(x)
    _, whole = theirs(x)
    found: dict[str, Callable[[], Any]] = {
        "tensor": lambda: layer(x), "tensor, states": lambda: layer(x, state),
        "drop-in": lambda: ours(x), "drop-in, states": lambda: ours(x, whole),
        "torch.nn": lambda: theirs(x), "torch.nn, states": lambda: theirs(x, whole)}
    if device == "cpu":
        rows, before = x.numpy(), tuple(s.numpy() for s in state)
        found |= {"NumPy": lambda: layer(rows), "NumPy, states": lambda: layer(rows, before)}
    return found | {"entry": entry_of(layer, x)}


def entry_of(layer: Any, x: torch.Tensor) -> Callable[[], Any]:
    """The module's function alone, with the arguments of a call."""
    run, given = layer._run, []
    layer._run = lambda *arguments: given.append(arguments)
    kept = layer(x)  # whose memory the arguments point to
    layer._run = run
    return lambda: run(*given[0]) or kept


def timed(sides: dict[str, Callable[[], Any]], repeats: int, wait: Callable[[], None]) -> dict[str, dict[str, float]]:
    """p20, median and p80 of each, microseconds a call."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    with torch.no_grad():
        for turn in range(repeats + 2):
            for name, call in sides.items():
                wait()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                taken = time.perf_counter() - begin
                if turn > 1:
                    times[name].append(taken / CALLS * 1e6)
        wait()
    return {name: dict(zip(("p20", "median", "p80"), map(float, np.percentile(values, [20, 50, 80])), strict=True))
            for name, values in times.items()}


def main() -> None:
    parser = options(__doc__, repeats=(40, "blocks of each side"))
    parser.add_argument("--cpu", action="store_true", help="of the CPU, though there is a GPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    where = environment(cpu=device == "cpu")
    found: dict[str, Any] = {"device": where.get("gpu", where.get("cpu")), "rows": []} | {
        name: where[name] for name in ("torch", "ecornn", "time")}
    for cell, steps in product(CELLS, STEPS):
        sides = timed(sides_of(cell, steps, device), arguments.repeats, wait)
        found["rows"].append({"cell": cell, "T": steps, "B": 1, "H": H, "us": sides})
        print(f"{cell} T={steps}: " + ", ".join(f"{name} {one['median']:.1f} ({one['p20']:.1f} to {one['p80']:.1f})"
                                                for name, one in sides.items()), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
