"""Training steps on this CPU against PyTorch's, in turns, in one run.

    python benchmarks/compare_training_cpu.py --output benchmarks/results/cpu_training.json
    python benchmarks/compare_training_cpu.py --layer lstm,300,20,800,800

A step is forward and backward with the gradients of x, weights and biases, in float32; those of both sides are compared
with PyTorch's in float64 first, ours must be within 2e-5. Times are medians with 20th and 80th percentiles, and least
times, in milliseconds a step, with as many threads on both sides; the load of the machine is noted. With --processor
times are those that the process computed, on one thread, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import ecornn
from ecornn.host_cpu import detect, physical_cores
from ecornn.workload import KEEPS

CELLS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
SHAPE = "300,20,800,800"  # of MXNet's fused operator
LIMIT = 2e-5


def compare(cell: str, T: int, B: int, I: int, H: int, repeats: int, threads: int, keep: str | None,
            clock: Callable[[], float]) -> dict:
    """One row."""
    library = CELLS[cell](I, H)
    weights = {k: v.detach().numpy() for k, v in library.named_parameters()}
    module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, target="cpu", training=True, keep=keep)
    layer = module.bind(weights, threads=threads)
    generator = torch.Generator().manual_seed(0)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(T, B, I, generator=generator), torch.randn(T, B, H, generator=generator)

    def ours(x: torch.Tensor, dy: torch.Tensor) -> list[np.ndarray]:
        _, _, kept = layer.forward(x.numpy())
        found = layer.backward(kept, dy.numpy())
        return [found.x, *(found.weights[n] for n in weights)]

    def theirs(net: torch.nn.RNNBase, x: torch.Tensor, dy: torch.Tensor) -> list[np.ndarray]:
        x = x.clone().requires_grad_()
        return [g.numpy() for g in torch.autograd.grad(net(x)[0], [x, *net.parameters()], dy)]

    exact = CELLS[cell](I, H).double()
    exact.load_state_dict({k: v.double() for k, v in library.state_dict().items()})
    x, dy = drawn()
    wanted = theirs(exact, x.double(), dy.double())

    def worst(found: list[np.ndarray]) -> float:
        return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, wanted, strict=True))

    errors = worst(ours(x, dy)), worst(theirs(library, x, dy))
    assert errors[0] < LIMIT, f"{cell}: error {errors[0]:.1e}"
    times: dict[str, list[float]] = {"ecornn": [], "torch": []}
    sides: dict[str, Callable[..., object]] = {"ecornn": ours, "torch": partial(theirs, library)}
    for count in range(repeats + 1):  # the first warms up
        x, dy = drawn()
        for name, step in sides.items():
            start = clock()
            step(x, dy)
            if count:
                times[name].append((clock() - start) * 1e3)
    row: dict = {"cell": cell, "T": T, "B": B, "I": I, "H": H, "threads": threads,
                 "keep": module.manifest.stack.keep, "load": os.getloadavg()[0], "error": errors[0],
                 "torch_error": errors[1], "kept_bytes": layer.kept_bytes(T),
                 "workspace_bytes": layer.training_workspace_bytes(T), "repetitions": repeats}
    for name, values in times.items():
        p20, median, p80 = np.percentile(values, [20, 50, 80])
        row |= {f"{name}_ms": float(median), f"{name}_p20": float(p20), f"{name}_p80": float(p80),
                f"{name}_min": min(values)}
    return row | {"ratio": row["torch_ms"] / row["ecornn_ms"], "ratio_min": row["torch_min"] / row["ecornn_min"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--layer", action="append", help="CELL,T,B,I,H; may repeat  [default: all cells at " + SHAPE)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--keep", choices=KEEPS, help="what forward keeps  [default: as compile() chooses]")
    parser.add_argument("--processor", action="store_true", help="one thread, time of the processor")
    arguments = parser.parse_args()
    threads = 1 if arguments.processor else physical_cores(sorted(os.sched_getaffinity(0)))
    clock = time.process_time if arguments.processor else time.perf_counter
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows = []
    for layer in arguments.layer or [f"{cell},{SHAPE}" for cell in CELLS]:
        cell, *sizes = layer.split(",")
        T, B, I, H = map(int, sizes)
        row = compare(cell, T, B, I, H, arguments.repeats, threads, arguments.keep, clock)
        rows.append(row)
        print(f"{layer:28} ecornn {row['ecornn_ms']:7.0f} [{row['ecornn_p20']:.0f}, {row['ecornn_p80']:.0f}]  torch "
              f"{row['torch_ms']:7.0f} [{row['torch_p20']:.0f}, {row['torch_p80']:.0f}] ms  {row['ratio']:.2f}x, "
              f"least {row['ecornn_min']:.0f} and {row['torch_min']:.0f} ms  {row['ratio_min']:.2f}x  error "
              f"{row['error']:.1e} / {row['torch_error']:.1e}", flush=True)
    if arguments.output:
        environment = {"cpu": detect().name, "arch": detect().arch, "python": platform.python_version(),
                       "torch": torch.__version__, "ecornn": ecornn.__version__,
                       "clock": "processor" if arguments.processor else "wall"}
        arguments.output.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
