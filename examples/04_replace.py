"""The recurrent layers of three PyTorch models, replaced: same outputs, and the time before and after.

    pip install ".[examples]"    # in the checkout
    python examples/04_replace.py [--seconds 5]

The models are an acoustic model like Deep Speech 2 (Amodei et al. 2016), a language model like AWD-LSTM (Merity et
al. 2018), and a translator with attention (Luong et al. 2015), each smaller than in its paper, with random weights.
They run on the GPU if PyTorch sees one. The program exits with 1 if outputs differ. On a CPU it takes two minutes at
most.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable

import torch
from stages import stage
from torch import nn

import ecornn.torch


class Acoustic(nn.Module):
    """Convolutions over time and frequency, bidirectional GRUs, letters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 16, (21, 11), (2, 2), (10, 5)), nn.BatchNorm2d(16),
                                          nn.Hardtanh(0, 20))
        self.recurrent = nn.GRU(16 * 40, 256, num_layers=3, bidirectional=True)
        self.letters = nn.Linear(512, 29)

    def forward(self, spectrogram: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        found = self.convolutions(spectrogram).permute(3, 0, 1, 2).flatten(2)  # (T, B, channels and frequencies)
        packed = nn.utils.rnn.pack_padded_sequence(found, (frames + 1) // 2, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0])
        return self.letters(y).log_softmax(-1)


class Language(nn.Module):
    """Embedding, three LSTMs, and a decoder that has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 200)
        self.layers = nn.ModuleList([nn.LSTM(200, 512), nn.LSTM(512, 512), nn.LSTM(512, 200)])

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        y = self.words(text)
        for layer in self.layers:
            y, _ = layer(y)
        return y @ self.words.weight.T


class Translator(nn.Module):
    """A bidirectional encoder, a decoder, and attention of every target to every source."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(1000, 128), nn.Embedding(1000, 128)
        self.encoder = nn.LSTM(128, 128, bidirectional=True, batch_first=True)
        self.decoder = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.words = nn.Linear(512, 1000)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, (h, c) = self.encoder(self.source(source))
        start = tuple(torch.cat([s[0], s[1]], -1).repeat(2, 1, 1) for s in (h, c))
        y, _ = self.decoder(self.target(target), start)
        seen = torch.softmax(y @ memory.transpose(1, 2), -1) @ memory
        return self.words(torch.cat([y, seen], -1))


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def race(contestants: list[Callable[[], torch.Tensor]], seconds: float, wait: Callable[[], None]) -> list[float]:
    """Median seconds of each contestant; their runs are interleaved."""
    found: list[list[float]] = [[] for _ in contestants]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < 3:
        for times, run in zip(found, contestants, strict=True):
            wait()
            begin = time.perf_counter()
            run()
            wait()
            times.append(time.perf_counter() - begin)
    return [median(times) for times in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to time each model")
    seconds = parser.parse_args().seconds
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    frames = torch.tensor([200, 160, 90, 200])
    models = [(Acoustic(), (torch.randn(4, 1, 80, 200, device=device), frames)),
              (Language(), (torch.randint(2000, (35, 16), device=device),)),
              (Translator(), tuple(torch.randint(1000, (8, T), device=device) for T in (30, 25)))]
    wrong = 0
    for model, inputs in models:
        model = model.to(device).eval()
        before = copy.deepcopy(model)
        name = type(model).__name__
        report = ecornn.torch.replace(model, wait=True)  # without wait PyTorch's layers run until ours are compiled
        with torch.inference_mode():
            with stage(f"compiling and first calls of {name}"):
                expected, found = before(*inputs), model(*inputs)
            error = float((found.double() - expected).norm() / expected.double().norm())
            with stage(f"timing {name}"):
                theirs, ours = race([lambda: before(*inputs), lambda: model(*inputs)], seconds, wait)  # noqa: B023
        print(f"{name}: {', '.join(report.swapped)} compiled; relative difference {error:.1e}; "
              f"{theirs * 1e3:.2f} ms before, {ours * 1e3:.2f} ms after, {theirs / ours:.2f} times as fast")
        wrong += not error <= 1e-5
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
