"""Trains a word language model with torch.nn's LSTMs and with compiled ones: the same curves, and words a second."""

from __future__ import annotations

import copy
import sys
from typing import Any

import click

# PyTorch after that, which says how its threads wait
# isort: split
import torch
from python_text import docstrings, in_columns, numbered, reference, words
from stages import stage
from torch import nn
from training_steps import DEVICE, Step, middle, take_turns

import ecornn.torch

POINTS = 10  # of a curve
ERRORS = 3.5
HELP = f"""Trains a language model of words on Python's own documentation. The model has two LSTMs with dropout, like
the medium one of Zaremba et al. 2014 (arXiv 1409.2329). It is trained with torch.nn's LSTMs, and after
`ecornn.torch.replace(model)`, from the same weights, for several seeds.

\b
    pip install ".[examples]"    # in the checkout
    python examples/05_language_model.py
    python examples/05_language_model.py --hidden 650 --text docstrings   # the real size, as on a GPU

Then it times a training step of both, interleaved: as it is written, on a GPU also as a CUDA graph, and with --compile
under torch.compile. On a GPU it trains in bfloat16 by autocast. It exits with 1 if ecornn's curve, the mean of its
seeds, differs from torch.nn's by more than {ERRORS} standard errors of such a difference, or if the models learned
nothing. The defaults are for {DEVICE}; on a CPU they take two minutes at most.
"""
SIZES = {"cuda": {"hidden": 650, "steps": 35, "batch": 20, "vocabulary": 10000, "updates": 1000, "text": "docstrings"},
         "cpu": {"hidden": 96, "steps": 20, "batch": 16, "vocabulary": 2000, "updates": 100, "text": "reference"}}
DEFAULT = SIZES[DEVICE]
LAYERS = 2


class LanguageModel(nn.Module):
    """Maps words (T, B) to scores of the next words (T, B, V). A batch starts from the last state of the one before."""

    def __init__(self, vocabulary: int, hidden: int, batch: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.recurrent = nn.LSTM(hidden, hidden, LAYERS, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(hidden, vocabulary)
        for name in ("h", "c"):
            self.register_buffer(name, torch.zeros(LAYERS, batch, hidden), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        # copies, because the backward pass reads the states that this batch started from
        y, after = self.recurrent(self.dropout(self.words(text)), (self.h.clone(), self.c.clone()))
        for state, value in zip((self.h, self.c), after, strict=True):
            state.copy_(value.detach())
        return self.scores(self.dropout(y))


def cross_entropy(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The loss in nats a word."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def batch_at(text: torch.Tensor, number: int, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Words (T, B) of columns (N, B), and the words that follow them; at the end of the text it starts again."""
    first = number % ((len(text) - 1) // steps) * steps
    return [text[first:first + steps]], [text[first + 1:first + steps + 1]]


def train(step: Step, text: torch.Tensor, updates: int, steps: int) -> torch.Tensor:
    """Trains a model and returns the curve of its loss: means (POINTS,) over equal parts of the updates."""
    losses = []
    for number in range(updates):
        step.load(*batch_at(text, number, steps))
        losses.append(step().clone())
    return torch.stack(losses)[:updates // POINTS * POINTS].view(POINTS, -1).mean(1).cpu()


def entropy(step: Step, text: torch.Tensor, steps: int) -> float:
    """The loss in nats a word on a text (N, B) that the model has not seen."""
    model: Any = step.model.eval()
    for state in (model.h, model.c):
        state.zero_()
    found = []
    for number in range((len(text) - 1) // steps):
        inputs, targets = batch_at(text, number, steps)
        with torch.no_grad(), step.autocast():
            found.append(cross_entropy(model(*inputs), *targets))
    model.train()
    return torch.stack(found).mean().item()


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--text", type=click.Choice(["reference", "docstrings"]), default=DEFAULT["text"],
              help="Python's language reference (120,000 words), or that and docstrings.")
@click.option("--hidden", default=DEFAULT["hidden"], help="Units of a layer.")
@click.option("--steps", default=DEFAULT["steps"], help="Words in each row of a batch, T.")
@click.option("--batch", default=DEFAULT["batch"], help="Rows in a batch, B.")
@click.option("--vocabulary", default=DEFAULT["vocabulary"], help="The most different words; rarer ones count as one.")
@click.option("--dropout", default=0.5, help="Dropout after the embedding and after each layer.")
@click.option("--updates", type=click.IntRange(min=POINTS), default=DEFAULT["updates"], help="Training steps.")
@click.option("--seeds", type=click.IntRange(min=2), default=3, help="Seeds of weights and dropout, for both models.")
@click.option("--rate", default=2e-3, help="Learning rate.")
@click.option("--seconds", default=3.0, help="Seconds to time.")
@click.option("--compile", "compiled", is_flag=True, help="Also time both under torch.compile.")
def main(text: str, hidden: int, steps: int, batch: int, vocabulary: int, dropout: float, updates: int, seeds: int,
         rate: float, seconds: float, compiled: bool) -> None:
    with stage("reading the text"):
        tokens, names = numbered(words(reference() + (docstrings() if text == "docstrings" else "")), vocabulary)
    kept = len(tokens) // 20
    unseen, seen = (in_columns(part, batch).to(DEVICE) for part in (tokens[-kept:], tokens[:-kept]))
    frequency = torch.bincount(tokens[:-kept], minlength=len(names)).add(1).double()
    by_frequency = -(frequency / frequency.sum()).log()[tokens[-kept:]].mean().item()
    print(f"{len(tokens)} words, {len(names)} different ones; a model of their frequencies has a loss of "
          f"{by_frequency:.3f} nats a word", flush=True)

    curves: dict[str, list[torch.Tensor]] = {"torch.nn": [], "ecornn": []}
    pairs = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        theirs = LanguageModel(len(names), hidden, batch, dropout).to(DEVICE)
        ours = copy.deepcopy(theirs)
        ecornn.torch.replace(ours, fullgraph=True, wait=True)
        for name, model in (("torch.nn", theirs), ("ecornn", ours)):
            pairs[name] = step = Step(model, cross_entropy, *batch_at(seen, 0, steps), rate)
            torch.manual_seed(seed)
            with stage(f"training {name}, seed {seed}"):
                curves[name].append(train(step, seen, updates, steps))

    both = torch.stack([torch.stack(curves[name]) for name in ("torch.nn", "ecornn")])  # (2, seeds, POINTS)
    means, deviation = both.mean(1), both[0].var(0).mean().sqrt()
    apart, allowed = (means[1] - means[0]).abs(), ERRORS * deviation * (2 / seeds) ** 0.5
    print("loss, nats a word, of all seeds\n   update            torch.nn              ecornn   means differ by")
    for point in range(POINTS):
        ranges = [f"{side[:, point].min():.4f} to {side[:, point].max():.4f}" for side in both]
        print(f"{(point + 1) * (updates // POINTS):9}  {ranges[0]:>18}  {ranges[1]:>18}   {apart[point]:.4f}")
    print(f"seeds of torch.nn deviate by {deviation:.4f}, so the means may differ by {allowed:.4f}")
    with stage("loss on other text"):
        last = {name: entropy(step, unseen, steps) for name, step in pairs.items()}
    print("new text: " + ", ".join(f"{name} {value:.3f} nats a word" for name, value in last.items()))

    for how in ("plain", *(["CUDA graph"] if DEVICE == "cuda" else []), *(["torch.compile"] if compiled else [])):
        if how == "torch.compile":
            for step in pairs.values():
                step.model = torch.compile(step.model)
        sides = {name: step.graphed() if how == "CUDA graph" else step for name, step in pairs.items()}
        with stage(f"timing, {how}"):
            times = take_turns(sides, seconds)
        rates = {name: [steps * batch / t for t in middle(found)] for name, found in times.items()}
        print(f"{how}: " + ", ".join(f"{name} {r[0]:.0f} words a second [{r[2]:.0f}, {r[1]:.0f}]"
                                     for name, r in rates.items())
              + f", {rates['ecornn'][0] / rates['torch.nn'][0]:.2f} times as fast")

    if not (apart <= allowed).all():
        sys.exit("ecornn's curve differs from torch.nn's")
    if not max(last.values()) < by_frequency:
        sys.exit("the models learned nothing")


if __name__ == "__main__":
    main()
