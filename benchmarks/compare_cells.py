"""Cells called in a loop, as policies and decoders call them, against torch.nn's, interleaved in one run.

    python benchmarks/compare_cells.py --output benchmarks/results/cpu_cells.json

A sample is a loop of --steps calls, each from the states of the one before: without gradients, or in training with the
loss of all states, its backward pass and an optimizer's step (SGD, so that weights change and are packed again).
Outputs and gradients are compared with float64's first, within 1e-5 and 2e-5 relative. Both sides have the same
weights, the same fresh input in every repetition and the same number of threads, and take turns; the next one waits
until the threads of the one before have stopped spinning. A row is a median of microseconds a step with its 20th and
80th percentile.

On a GPU (--device cuda) replace() leaves cells to PyTorch: this measures whether it should, by the operator that
compiled layers are there.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import ecornn
import ecornn.torch
from ecornn.bench.turns import settle
from ecornn.host_cpu import detect
from ecornn.torch import cells

CELLS = ("LSTMCell", "GRUCell", "RNNCell")
SIZES = [(1, 64), (1, 256), (1, 512), (8, 128), (32, 256), (64, 512)]  # B, H; I is H
LIMITS = {"inference": 1e-5, "training": 2e-5}


def loop(cell: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output states of all steps."""
    hx, found = None, []
    for row in x:
        hx = cell(row, hx)
        found.append(hx[0] if isinstance(hx, tuple) else hx)
    return torch.stack(found)


def train(cell: torch.nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """A training step; the gradients."""
    cell.zero_grad()
    loop(cell, x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    return [p.grad for p in cell.parameters()]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def error(side: torch.nn.Module, exact: torch.nn.Module, x: torch.Tensor, kind: str) -> float:
    """The largest relative error of what this kind of call gives."""
    if kind == "inference":
        with torch.no_grad():
            return relative(loop(side, x), loop(exact, x.double().cpu()))
    pairs = zip(train(side, x), train(exact, x.double().cpu()), strict=True)
    return max(relative(one, other) for one, other in pairs)


def compare(name: str, batch: int, hidden: int, kind: str, arguments: argparse.Namespace) -> dict:
    """One row."""
    torch.manual_seed(0)
    device = arguments.device
    library = getattr(torch.nn, name)(hidden, hidden)
    exact, library = copy.deepcopy(library).double(), library.to(device)
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours, wait=True)
    sides = {"ecornn": ours, "torch": library}
    row: dict = {"cell": name, "B": batch, "H": hidden, "kind": kind, "steps": arguments.steps, "device": device,
                 "threads": torch.get_num_threads()}
    x = torch.randn(arguments.steps, batch, hidden, device=device)
    for side, cell in sides.items():
        row[f"{side}_error"] = error(cell, exact, x, kind)
        if not row[f"{side}_error"] <= LIMITS[kind]:
            sys.exit(f"{name} B={batch} H={hidden}: {side} has error {row[f'{side}_error']:.2e}")

    def runs(cell: torch.nn.Module) -> Callable[[], object]:
        if kind == "inference":
            return lambda: loop(cell, x)
        optimizer = torch.optim.SGD(cell.parameters(), 1e-6)
        return lambda: train(cell, x, optimizer)

    times: dict[str, list[float]] = {side: [] for side in sides}
    called = {side: runs(cell) for side, cell in sides.items()}
    for _ in range(arguments.repeats):
        x = torch.randn(arguments.steps, batch, hidden, device=device)
        for side, run in called.items():
            settle()
            with torch.set_grad_enabled(kind == "training"):
                run()  # wakes the threads, brings the weights back to the caches
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                run()
                if device == "cuda":
                    torch.cuda.synchronize()
            times[side].append((time.perf_counter() - begin) / arguments.steps * 1e6)
    for side, values in times.items():
        row[f"{side}_p20"], row[f"{side}_us"], row[f"{side}_p80"] = np.percentile(values, [20, 50, 80]).tolist()
    row["ratio"] = row["torch_us"] / row["ecornn_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions a row")
    parser.add_argument("--steps", type=int, default=32, help="calls of a loop")
    parser.add_argument("--threads", type=int, default=detect().cores, help="of both sides (default: physical cores)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cell", choices=CELLS, action="append", help="only this cell; may repeat")
    parser.add_argument("--only", metavar="BxH", action="append", help="only this size; may repeat")
    parser.add_argument("--kind", choices=list(LIMITS), action="append", help="only this; may repeat")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        cells.SERVED.add("cuda")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for name in arguments.cell or CELLS:
        for batch, hidden in SIZES:
            if f"{batch}x{hidden}" not in (arguments.only or [f"{batch}x{hidden}"]):
                continue
            for kind in arguments.kind or LIMITS:
                row = compare(name, batch, hidden, kind, arguments)
                rows.append(row)
                print(f"{name:8} B={batch:<3} H={hidden:<4} {kind:9} " + "  ".join(
                    f"{side} {row[f'{side}_us']:.1f} [{row[f'{side}_p20']:.1f}, {row[f'{side}_p80']:.1f}]"
                    for side in ("ecornn", "torch")) + f" us a step  {row['ratio']:.2f}x", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.2f}x, least {min(ratios):.2f}x, {len(rows)} rows")
    if arguments.output:
        environment = {"cpu": detect().name, "ecornn": ecornn.__version__, "torch": torch.__version__,
                       "command": "python benchmarks/compare_cells.py",
                       "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
        arguments.output.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
