"""Loss curves of compiled layers beside torch.nn's: Adam from the same weights, on the same data.

    python benchmarks/loss_curves.py --device cuda --output benchmarks/results/h100_loss_curves.json
    python benchmarks/loss_curves.py --device cpu --seeds 2

A stack of LSTMs learns the running mean of a sequence. In float32 every step's loss must be within 1e-3 of torch.nn's;
under autocast (on a GPU) the means over seeds of both, of twenty steps each time, must not be further apart than
torch.nn's losses are from seed to seed. Seeds draw weights; data are the same. Exits with 1 where a curve leaves its
bound.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch

import ecornn.torch

LIMIT, WINDOW = 1e-3, 20


@dataclass(frozen=True)
class Task:
    """What is learned: T steps, B sequences, H units in each of L layers, so many steps of Adam; ``autocast``: the data
    type of products, empty for float32."""

    device: str = "cpu"
    autocast: str = ""
    length: int = 24
    batch: int = 16
    hidden: int = 32
    layers: int = 2
    steps: int = 500
    rate: float = 3e-3


def curves(task: Task, seed: int) -> tuple[list[float], list[float]]:
    """The losses of each step: ours, and torch.nn's."""
    torch.manual_seed(seed)
    ours, head = ecornn.torch.LSTM(2, task.hidden, task.layers), torch.nn.Linear(task.hidden, 2)
    ours.wait = True  # until it is compiled
    theirs = torch.nn.LSTM(2, task.hidden, task.layers)
    theirs.load_state_dict(ours.state_dict())
    models = [torch.nn.ModuleList([layer, copy.deepcopy(head)]).to(task.device) for layer in (ours, theirs)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=task.rate) for model in models]
    data = torch.Generator().manual_seed(0)
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for _ in range(task.steps):
        x = torch.randn(task.length, task.batch, 2, generator=data)
        wanted = (x.cumsum(0) / torch.arange(1, task.length + 1)[:, None, None]).to(task.device)
        x = x.to(task.device)
        for (layer, last), optimizer, losses in zip(models, optimizers, found, strict=True):
            optimizer.zero_grad()
            with torch.autocast(task.device, getattr(torch, task.autocast or "bfloat16"), enabled=bool(task.autocast)):
                y = last(layer(x)[0])
            loss = torch.nn.functional.mse_loss(y.float(), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    ours_losses, their_losses = (torch.stack(losses).tolist() for losses in found)
    return ours_losses, their_losses


def windows(losses: list[float]) -> list[float]:
    """Means of twenty steps each."""
    return [fmean(losses[n:n + WINDOW]) for n in range(0, len(losses), WINDOW)]


def in_float32(task: Task, seeds: int) -> dict[str, object]:
    """The largest difference of any step."""
    every = [curves(task, seed) for seed in range(seeds)]
    worst = max(abs(a - b) for pair in every for a, b in zip(*pair, strict=True))
    return {"task": asdict(task), "largest_difference": worst, "bound": LIMIT, "holds": worst < LIMIT,
            "last": [[pair[0][-1], pair[1][-1]] for pair in every], "ours": windows(every[0][0]),
            "theirs": windows(every[0][1])}


def in_16_bits(task: Task, seeds: int) -> dict[str, object]:
    """The largest ratio of the difference of means over seeds to the spread of torch.nn's over seeds."""
    every = [[windows(losses) for losses in curves(task, seed)] for seed in range(seeds)]
    ours, theirs = ([[pair[side][n] for pair in every] for n in range(len(every[0][0]))] for side in (0, 1))
    ratios = [abs(fmean(a) - fmean(b)) / stdev(b) for a, b in zip(ours, theirs, strict=True)]
    return {"task": asdict(task), "largest_ratio": max(ratios), "bound": 1.0, "holds": max(ratios) <= 1,
            "ours": [*map(fmean, ours)], "theirs": [*map(fmean, theirs)], "spread": [*map(stdev, theirs)]}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    found = {"device": where, "torch": torch.__version__, "float32": in_float32(Task(options.device), 1)}
    if options.device == "cuda":
        found |= {kind: in_16_bits(Task("cuda", kind), options.seeds) for kind in ("bfloat16", "float16")}
    for name, row in found.items():
        if isinstance(row, dict):
            value = row.get("largest_difference", row.get("largest_ratio"))
            print(f"{name}: {value:.2e} of {row['bound']}: {'holds' if row['holds'] else 'DOES NOT HOLD'}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["holds"] for row in found.values() if isinstance(row, dict)) else 1


if __name__ == "__main__":
    sys.exit(main())
