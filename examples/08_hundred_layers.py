"""Trains a hundred recurrent layers with residual connections on one device: memory and time of a step."""

from __future__ import annotations

import copy
import sys

import click

# PyTorch after that, which says how its threads wait
# isort: split
import torch
from python_text import in_columns, numbered, reference
from stages import stage
from torch import nn
from training_steps import DEVICE, Step, memory_by_layer, middle, peak, take_turns

import ecornn.torch

HELP = f"""Trains a residual network of a hundred recurrent layers on one device, with a small batch, as Persistent RNNs
(Diamos et al. 2016) made possible: "models with over 100 layers". The model reads Python's language reference and
predicts the next letter. All layers share one compiled module; each has its own weights.

\b
    pip install ".[examples]"    # in the checkout
    python examples/08_hundred_layers.py
    python examples/08_hundred_layers.py --hidden 1152 --steps 256 --batch 4   # the real size, as on a GPU

Then it measures memory and time of a step, of compiled layers and of torch.nn's, interleaved; on a GPU in bfloat16 by
autocast, plain and as a CUDA graph. It exits with 1 if the loss is not --limit below that of a model that knows only
the frequencies of letters. The defaults are for {DEVICE}; on a CPU they take three minutes at most.
"""
SIZES = {"cuda": {"hidden": 1152, "steps": 256, "batch": 4, "updates": 400, "rate": 3e-4},
         "cpu": {"hidden": 32, "steps": 24, "batch": 8, "updates": 100, "rate": 3e-3}}
DEFAULT = SIZES[DEVICE]


class Residual(nn.Module):
    """Computes ``x + RNN(norm(x))`` for x (T, B, H)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.recurrent = nn.RNN(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.recurrent(self.norm(x))[0]


class Deep(nn.Module):
    """Maps letters (T, B) to scores of the next ones (T, B, letters)."""

    def __init__(self, letters: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, hidden)
        self.layers = nn.Sequential(*(Residual(hidden) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, letters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.letters(text)))


def cross_entropy(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The loss in nats a letter."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--layers", default=100, help="Recurrent layers.")
@click.option("--hidden", default=DEFAULT["hidden"], help="Units of a layer.")
@click.option("--steps", default=DEFAULT["steps"], help="Letters in each row of a batch, T.")
@click.option("--batch", default=DEFAULT["batch"], help="Rows in a batch, B.")
@click.option("--updates", type=click.IntRange(min=20), default=DEFAULT["updates"], help="Training steps.")
@click.option("--rate", default=DEFAULT["rate"], help="Learning rate.")
@click.option("--limit", default=0.3, help="Nats by which the loss must be below that of a model of frequencies.")
@click.option("--seconds", default=3.0, help="Seconds to time.")
def main(layers: int, hidden: int, steps: int, batch: int, updates: int, rate: float, limit: float,
         seconds: float) -> None:
    torch.manual_seed(0)
    tokens, names = numbered(list(reference()), 1000)
    shares = torch.bincount(tokens).double() / len(tokens)
    by_frequency = -(shares * shares.log()).nansum().item()
    columns = in_columns(tokens, batch).to(DEVICE)
    # each batch starts at a random place, so that no two are alike
    starts = torch.randint(len(columns) - steps - 1, (updates,)).tolist()
    theirs = Deep(len(names), hidden, layers).to(DEVICE)
    ours = copy.deepcopy(theirs)
    swapped = len(ecornn.torch.replace(ours, wait=True).swapped)
    print(f"{swapped} layers compiled, {sum(p.numel() for p in ours.parameters()) / 1e6:.1f} million weights")

    def batch_at(first: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [columns[first:first + steps]], [columns[first + 1:first + steps + 1]]

    sides = {name: Step(model, cross_entropy, *batch_at(0), rate)
             for name, model in (("torch.nn", theirs), ("ecornn", ours))}
    losses = []
    with stage("compiling and training"):
        for number, first in enumerate(starts, 1):
            sides["ecornn"].load(*batch_at(first))
            losses.append(sides["ecornn"]().item())
            if number % (updates // 10) == 0:
                mean = sum(losses[-updates // 10:]) / len(losses[-updates // 10:])
                print(f"step {number}: loss {mean:.3f} nats a letter", flush=True)

    for name, step in sides.items():
        with stage(f"measuring memory of {name}"):
            sizes = memory_by_layer(step.model, step.forward)
        each, together = sizes["layers"] / layers / 2**20, sum(sizes.values()) / 2**20
        print(f"{name}: keeps {each:.3f} MiB for each layer, {together:.1f} in all"
              + (f"; the peak of a step is {peak(step) / 2**20:.1f}" if DEVICE == "cuda" else ""))
    for how in ("plain", *(["CUDA graph"] if DEVICE == "cuda" else [])):
        runs = {name: s.graphed() if how == "CUDA graph" else s for name, s in sides.items()}
        with stage(f"timing, {how}"):
            taken = take_turns(runs, seconds)
        times = {name: [1e3 * t for t in middle(found)] for name, found in taken.items()}
        print(f"{how}: " + ", ".join(f"{name} {t[0]:.1f} ms a step [{t[1]:.1f}, {t[2]:.1f}]"
                                     for name, t in times.items())
              + f", {times['torch.nn'][0] / times['ecornn'][0]:.2f} times as fast")
    if not mean < by_frequency - limit:
        sys.exit(f"the loss is {mean:.3f}, that of a model of frequencies {by_frequency:.3f}")


if __name__ == "__main__":
    main()
