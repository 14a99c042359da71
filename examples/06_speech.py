"""Trains a speech recognizer with connectionist temporal classification (CTC): five bidirectional layers read sound."""

from __future__ import annotations

import copy
import string
import sys

import click

# PyTorch after that, which says how its threads wait
# isort: split
import numpy as np
import torch
from python_text import reference, words
from stages import stage
from torch import nn
from training_steps import DEVICE, Step, middle, take_turns

import ecornn.torch

HELP = f"""Trains a recognizer like Deep Speech 2 (Amodei et al. 2016), several bidirectional recurrent layers with CTC.
`ecornn.torch.replace(model)` is all that compiled layers need. The program makes the sound itself, from words of
Python's reference: each letter is two tones that glide into the next ones, of varying length, pitch and loudness, in
noise. The model gets the spectrum of each 20 ms.

\b
    pip install ".[examples]"    # in the checkout
    python examples/06_speech.py
    python examples/06_speech.py --hidden 800 --frames 300 --batch 20   # the real size, as on a GPU

At the end it times a step of compiled layers and of torch.nn's, interleaved: as it is written, on a GPU also with the
model in CUDA graphs. On a GPU it trains in bfloat16 by autocast. It exits with 1 if more than --limit of the letters of
new sound are wrong (insertions, deletions and substitutions). The defaults are for {DEVICE}; on a CPU they take three
minutes at most.
"""
SIZES = {"cuda": {"hidden": 800, "layers": 5, "frames": 300, "batch": 20, "updates": 2000, "rate": 5e-4},
         "cpu": {"hidden": 48, "layers": 5, "frames": 32, "batch": 16, "updates": 500, "rate": 4e-3}}
DEFAULT = SIZES[DEVICE]
LETTERS = "-" + " " + string.ascii_lowercase  # the first one is CTC's blank
RATE, HOP, WINDOW = 8000, 160, 200  # samples a second, between frames, and in one
BANDS = WINDOW // 2 + 1
SETS, HELD_BACK = 64, 4  # the number of batches, and of those for testing


class Recognizer(nn.Module):
    """Maps spectra (T, B, BANDS) to log-probabilities of letters (T, B, 28)."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(BANDS, hidden, layers, bidirectional=True)
        self.letters = nn.Linear(2 * hidden, len(LETTERS))
        # with PyTorch's initial weights, CTC on five layers needs many more steps before it finds the first letter
        for name, weight in self.recurrent.named_parameters():
            if "weight_hh" in name:
                for gate in weight.detach().split(hidden):
                    nn.init.orthogonal_(gate)
            elif "weight_ih" in name:
                nn.init.normal_(weight, std=2 / weight.shape[1] ** 0.5)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        return self.letters(self.recurrent(spectra)[0]).log_softmax(-1)


def spoken(text: str, samples: int, random: np.random.Generator) -> np.ndarray:
    """The sound of a text, (samples,), with silence before and after it; the text must be short enough."""
    pitch = random.uniform(0.93, 1.07)
    lengths = random.integers(45 * RATE // 1000, 75 * RATE // 1000, len(text))
    start = random.integers(0, samples - lengths.sum() + 1)
    tones, loudness = np.zeros((2, samples)), np.zeros(samples)
    for letter, length in zip(text, lengths, strict=True):
        number = LETTERS.index(letter) - 2  # 0 to 25, a space is silent
        part = slice(start, start + length)
        tones[:, part] = [[300 + 170 * (number % 6)], [1600 + 400 * (number // 6)]]
        loudness[part] = (number >= 0) * random.uniform(0.5, 1) * np.hanning(length) ** 0.5
        start += length
    glide = np.hanning(RATE // 100)
    tones = np.stack([np.convolve(track, glide / glide.sum(), "same") for track in tones])
    phases = 2 * np.pi * pitch * np.cumsum(tones, 1) / RATE
    return (np.sin(phases) * loudness).sum(0) + 0.05 * random.standard_normal(samples)


def spectra_of(sounds: np.ndarray) -> torch.Tensor:
    """Log-spectra (T, B, BANDS) of sounds (B, samples), with mean 0 and deviation 1."""
    found = torch.stft(torch.from_numpy(sounds), WINDOW, HOP, window=torch.hann_window(WINDOW, dtype=torch.float64),
                       return_complex=True).abs().add(1e-3).log()
    return ((found - found.mean()) / found.std()).permute(2, 0, 1).float().contiguous()


def batch_of(vocabulary: list[str], frames: int, batch: int, random: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Spectra (T, B, BANDS), letters (B, S) padded with blanks, and the number of letters of each row (B,)."""
    samples = (frames - 1) * HOP
    room = samples * 1000 // RATE // 75  # letters that always fit
    texts = []
    for _ in range(batch):
        text = str(random.choice(vocabulary))[:room]
        while len(longer := f"{text} {random.choice(vocabulary)}") <= room:
            text = longer
        texts.append(text)
    sounds = np.stack([spoken(text, samples, random) for text in texts])
    letters = torch.zeros(batch, room, dtype=torch.int64)
    for row, text in zip(letters, texts, strict=True):
        row[:len(text)] = torch.tensor([LETTERS.index(letter) for letter in text])
    return spectra_of(sounds).to(DEVICE), letters.to(DEVICE), torch.tensor([len(text) for text in texts])


def ctc(scores: torch.Tensor, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The loss of log-probabilities (T, B, 28). No CUDA graph can have it: PyTorch reads the lengths on the host."""
    return nn.functional.ctc_loss(scores, letters, torch.full_like(lengths, len(scores)), lengths)


def read(scores: torch.Tensor) -> list[str]:
    """The text of each row: the most likely letter of each frame, without repetitions and blanks."""
    return ["".join(LETTERS[n] for n in row.unique_consecutive().tolist() if n) for row in scores.argmax(-1).T.cpu()]


def distance(found: str, wanted: str) -> int:
    """The number of letters to insert, delete or substitute (Levenshtein)."""
    row = list(range(len(wanted) + 1))
    for n, letter in enumerate(found, 1):
        before, row[0] = row[0], n
        for m, other in enumerate(wanted, 1):
            before, row[m] = row[m], min(row[m] + 1, row[m - 1] + 1, before + (letter != other))
    return row[-1]


def errors(step: Step, batches: list[tuple[torch.Tensor, ...]]) -> tuple[float, str, str]:
    """The share of letters that are wrong, one text, and that text as the model reads it."""
    wrong = letters_in_all = 0
    for spectra, letters, lengths in batches:
        with torch.no_grad(), step.autocast():
            texts = read(step.model(spectra))
        for found, row, length in zip(texts, letters.cpu(), lengths.tolist(), strict=True):
            wanted = "".join(LETTERS[n] for n in row[:length])
            wrong, letters_in_all = wrong + distance(found, wanted), letters_in_all + length
    return wrong / letters_in_all, wanted, found


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--hidden", default=DEFAULT["hidden"], help="Units of each layer and direction.")
@click.option("--layers", default=DEFAULT["layers"], help="Recurrent layers.")
@click.option("--frames", type=click.IntRange(min=24), default=DEFAULT["frames"], help="Frames of 20 ms in a sound, T.")
@click.option("--batch", default=DEFAULT["batch"], help="Sounds in a batch, B.")
@click.option("--updates", default=DEFAULT["updates"], help="The most training steps.")
@click.option("--rate", default=DEFAULT["rate"], help="Learning rate.")
@click.option("--limit", default=0.05, help="The share of letters that may be wrong; training ends at half of it.")
@click.option("--seconds", default=3.0, help="Seconds to time.")
def main(hidden: int, layers: int, frames: int, batch: int, updates: int, rate: float, limit: float,
         seconds: float) -> None:
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    vocabulary = sorted({word for word in words(reference()) if word.isalpha() and 1 < len(word) < 9})
    with stage(f"making {SETS} batches of sound"):
        batches = [batch_of(vocabulary, frames, batch, random) for _ in range(SETS)]
    test, seen = batches[:HELD_BACK], batches[HELD_BACK:]
    theirs = Recognizer(hidden, layers).to(DEVICE)
    ours = copy.deepcopy(theirs)
    print(f"replaced: {ecornn.torch.replace(ours, wait=True)}")

    def step_of(model: nn.Module) -> Step:
        return Step(model, ctc, test[0][:1], test[0][1:], rate)

    step, share = step_of(ours), 1.0
    with stage("compiling and training"):
        for number in range(1, updates + 1):
            spectra, *targets = seen[number % len(seen)]
            step.load([spectra], targets)
            step()
            if number % 50 == 0 or number == updates:
                share, wanted, found = errors(step, test)
                print(f"step {number}: loss {step.loss:.3f}, {share:.1%} of the letters of new sound are wrong: "
                      f"\"{wanted}\" is read as \"{found}\"", flush=True)
                if share <= limit / 2:
                    break

    steps = {"torch.nn": step_of(theirs), "ecornn": step}
    for how in ("plain", *(["CUDA graphs"] if DEVICE == "cuda" else [])):
        sides = {name: s.graphed(with_loss=False) if how == "CUDA graphs" else s for name, s in steps.items()}
        with stage(f"timing, {how}"):
            times = take_turns(sides, seconds)
        rates = {name: [1 / t for t in middle(found)] for name, found in times.items()}
        print(f"{how}: " + ", ".join(f"{name} {r[0]:.2f} steps a second [{r[2]:.2f}, {r[1]:.2f}]"
                                     for name, r in rates.items())
              + f", {rates['ecornn'][0] / rates['torch.nn'][0]:.2f} times as fast")
    if not share <= limit:
        sys.exit(f"{share:.1%} of the letters are wrong, limit {limit:.1%}")


if __name__ == "__main__":
    main()
