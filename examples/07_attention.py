"""Trains a sequence to sequence model with attention to read dates; prints the memory that each layer keeps."""

from __future__ import annotations

import calendar
import copy
import datetime
import random
import sys
from collections.abc import Mapping

import click

# PyTorch after that, which says how its threads wait
# isort: split
import torch
from stages import stage
from torch import nn
from training_steps import DEVICE, Step, memory_by_layer, middle, peak, take_turns

import ecornn.torch

HELP = f"""Trains a bidirectional encoder and a decoder with additive attention (Bahdanau et al. 2015, arXiv 1409.0473)
with compiled layers. The model reads lines of dates, written in many ways, and writes them as 1984-03-27.

\b
    pip install ".[examples]"    # in the checkout
    python examples/07_attention.py
    python examples/07_attention.py --hidden 512 --dates 4 --batch 64   # the real size, as on a GPU

The program prints the memory that each layer keeps for the backward pass, as Echo does (Zheng et al. 2018, arXiv
1805.08899), for torch.nn's layers and for compiled ones; on a GPU also the peak of a step. Attention keeps a value for
each unit and pair of steps in both models. Then it times a step of both, interleaved; on a GPU in bfloat16 by autocast,
plain and as a CUDA graph. It exits with 1 if fewer than --limit of new dates are right, or if a compiled layer keeps
more than torch.nn's. The defaults are for {DEVICE}; on a CPU they take three minutes at most.
"""
SIZES = {"cuda": {"hidden": 512, "dates": 4, "batch": 64, "updates": 1500, "rate": 5e-4},
         "cpu": {"hidden": 48, "dates": 1, "batch": 32, "updates": 500, "rate": 5e-3}}
DEFAULT = SIZES[DEVICE]
LETTERS = " ,-./0123456789" + "".join(sorted({*"".join([*calendar.month_name, *calendar.day_name])}))  # 0 pads
CENTURIES = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
LONGEST, WRITTEN = 29, 11  # letters of a date and the space after it: those that are read, and those that are written
STYLES = ("{d} {month} {y}", "{month} {d}, {y}", "{weekday}, {d} {month} {y}", "{d}.{m}.{y}", "{m:02}/{d:02}/{y}",
          "{short} {d} {y}", "{d}-{short}-{y}")
START = LETTERS.index("/")  # the letter that the decoder is given first


class Attention(nn.Module):
    """Maps each decoder state (B, S, H) to a mean of the memory (B, T, 2H), weighted by v tanh(U state + W memory)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_state, self.of_memory = nn.Linear(hidden, hidden), nn.Linear(2 * hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, states: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        pairs = torch.tanh(self.of_state(states)[:, :, None] + self.of_memory(memory)[:, None])  # (B, S, T, H)
        return self.score(pairs).squeeze(3).softmax(2) @ memory


class Reader(nn.Module):
    """Maps letters (B, T) and those written so far (B, S) to scores of the next ones (B, S, letters)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), hidden)
        self.encoder = nn.LSTM(hidden, hidden, bidirectional=True, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.attention = Attention(hidden)
        self.scores = nn.Linear(3 * hidden, len(LETTERS))

    def forward(self, text: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        memory, state = self.encoder(self.letters(text))  # the decoder's layers start from both directions' last states
        return self.write(written, memory, state)[0]

    def write(self, written: torch.Tensor, memory: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple:
        """Scores of the next letters, and the decoder's states."""
        y, state = self.decoder(self.letters(written), state)
        return self.scores(torch.cat([y, self.attention(y, memory)], 2)), state

    def read(self, text: torch.Tensor, length: int) -> torch.Tensor:
        """The most likely letters (B, length), one after the other."""
        memory, state = self.encoder(self.letters(text))
        found = [torch.full_like(text[:, :1], START)]
        for _ in range(length):
            scores, state = self.write(found[-1], memory, state)
            found.append(scores.argmax(2))
        return torch.cat(found[1:], 1)


def written_in_some_way(date: datetime.date, style: str) -> str:
    return style.format(d=date.day, m=date.month, y=date.year, month=calendar.month_name[date.month],
                        short=calendar.month_abbr[date.month], weekday=calendar.day_name[date.weekday()])


def numbers(text: str, length: int) -> list[int]:
    return [LETTERS.index(letter) for letter in text.ljust(length)]


def batch_of(batch: int, dates: int, source: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Lines of dates (B, T), and the same dates as year-month-day (B, S)."""
    read, written = [], []
    for _ in range(batch):
        days = [datetime.date.fromordinal(source.randint(*CENTURIES)) for _ in range(dates)]
        read.append(numbers(" ".join(written_in_some_way(d, source.choice(STYLES)) for d in days), LONGEST * dates))
        written.append(numbers(" ".join(map(str, days)), WRITTEN * dates))
    return torch.tensor(read).to(DEVICE), torch.tensor(written).to(DEVICE)


def given(text: torch.Tensor, wanted: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs and targets of a step: the decoder reads each letter that it should have written before."""
    return [text, torch.cat([torch.full_like(wanted[:, :1], START), wanted[:, :-1]], 1)], [wanted]


def cross_entropy(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def table(steps: Mapping[str, Step]) -> dict[str, dict[str, int]]:
    """Bytes that each layer of each model keeps. Prints them with their sum, and with the peak of a step on a GPU."""
    found = {name: memory_by_layer(step.model, step.forward) for name, step in steps.items()}
    print("kept for the backward pass, MiB\n              " + "".join(f"{name:>12}" for name in found))
    rows = {layer or "others": [sizes[layer] for sizes in found.values()] for layer in next(iter(found.values()))}
    rows["all"] = [sum(sizes.values()) for sizes in found.values()]
    if DEVICE == "cuda":
        rows["peak of a step"] = [peak(step) for step in steps.values()]
    for layer, sizes in rows.items():
        print(f"{layer:14}" + "".join(f"{size / 2**20:12.2f}" for size in sizes))
    return found


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--hidden", default=DEFAULT["hidden"], help="Units of each layer and direction.")
@click.option("--dates", default=DEFAULT["dates"], help=f"Dates in a line; T is {LONGEST} times as many.")
@click.option("--batch", default=DEFAULT["batch"], help="Lines in a batch, B.")
@click.option("--updates", default=DEFAULT["updates"], help="The most training steps.")
@click.option("--rate", default=DEFAULT["rate"], help="Learning rate.")
@click.option("--limit", default=0.9, help="The share of new dates that must be right; training ends half way to 1.")
@click.option("--seconds", default=3.0, help="Seconds to time.")
def main(hidden: int, dates: int, batch: int, updates: int, rate: float, limit: float, seconds: float) -> None:
    torch.manual_seed(0)
    source, other = random.Random(0), random.Random(1)
    theirs = Reader(hidden).to(DEVICE)
    ours = copy.deepcopy(theirs)
    print(f"replaced:\n{ecornn.torch.replace(ours, wait=True)}")
    test = batch_of(100, dates, other)
    steps = {name: Step(model, cross_entropy, *given(*batch_of(batch, dates, source)), rate)
             for name, model in (("torch.nn", theirs), ("ecornn", ours))}
    step = steps["ecornn"]
    share = 0.0
    with stage("compiling and training"):
        for number in range(1, updates + 1):
            step.load(*given(*batch_of(batch, dates, source)))
            step()
            if number % 50 == 0 or number == updates:
                with torch.no_grad(), step.autocast():
                    found = ours.read(test[0], test[1].shape[1])
                share = (found == test[1]).view(len(found) * dates, WRITTEN).all(1).float().mean().item()
                line, text = ("".join(LETTERS[n] for n in row[0].tolist()).strip() for row in (test[0], found))
                print(f"step {number}: loss {step.loss:.3f}, {share:.1%} of new dates are right: "
                      f"\"{line}\" is written \"{text}\"", flush=True)
                if share >= (1 + limit) / 2:
                    break

    with stage("measuring memory"):
        kept = table(steps)
    for how in ("plain", *(["CUDA graph"] if DEVICE == "cuda" else [])):
        sides = {name: s.graphed() if how == "CUDA graph" else s for name, s in steps.items()}
        with stage(f"timing, {how}"):
            taken = take_turns(sides, seconds)
        times = {name: [1e3 * t for t in middle(found)] for name, found in taken.items()}
        print(f"{how}: " + ", ".join(f"{name} {t[0]:.2f} ms a step [{t[1]:.2f}, {t[2]:.2f}]"
                                     for name, t in times.items())
              + f", {times['torch.nn'][0] / times['ecornn'][0]:.2f} times as fast")
    if not share >= limit:
        sys.exit(f"{share:.1%} of the dates are right, fewer than {limit:.1%}")
    if not all(kept["ecornn"][layer] <= kept["torch.nn"][layer] for layer in ("encoder", "decoder")):
        sys.exit("compiled layers keep more than torch.nn's")


if __name__ == "__main__":
    main()
