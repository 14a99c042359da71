"""The models that ``run_many_gpus.py`` trains on several GPUs, and what of them is compiled before.

    python benchmarks/many_gpus_models.py FILE      # compiles it into the build cache, on all cores
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import ecornn.torch
from ecornn.layer_spec import LayerSpec
from ecornn.torch.compiling import KEPT
from ecornn.torch.kind import kind_of, text_of
from ecornn.torch.replacing import compile_all

LETTERS, BLANK = 29, 0
GPU = torch.cuda.is_available()
KIND = torch.bfloat16 if GPU else torch.float32  # of autocast; weights and gradients are float32
SIDES = {"ecornn": ecornn.torch.LSTM, "torch": nn.LSTM}


@dataclass(frozen=True)
class Sizes:
    """A model: ``layers`` of LSTM, and a linear layer on them.

    Attributes
    ----------
    T, I, H : steps, values of x, units
    rows : of the batch on a GPU, ascending; each twice the one before
    """

    layers: int
    bidirectional: bool
    T: int
    I: int
    H: int
    rows: tuple[int, ...]


MODELS = {"speech": Sizes(5, True, 300, 101, 800, (4, 8, 16, 32)),
          "deep": Sizes(7, False, 300, 768, 768, (4, 8, 16, 32))} if GPU else {
    "speech": Sizes(3, True, 12, 5, 16, (2, 4)), "deep": Sizes(3, False, 12, 16, 16, (2, 4))}


class Model(nn.Module):
    """x (T, B, I) to scores (T, B, LETTERS)."""

    def __init__(self, sizes: Sizes, side: str) -> None:
        super().__init__()
        width = sizes.H * (1 + sizes.bidirectional)
        self.stack = SIDES[side](sizes.I, sizes.H, sizes.layers, bidirectional=sizes.bidirectional)
        self.stack.wait = True  # else other processes would have it compiled at other times
        self.last = nn.Linear(width, LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.stack(x)[0]).log_softmax(-1)


def made(sizes: Sizes, side: str, device: torch.device) -> Model:
    """A model with the weights that all have."""
    torch.manual_seed(0)
    return Model(sizes, side).to(device)


Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(sizes: Sizes, batch: int, device: torch.device, seed: int = 1) -> Batch:
    """x (T, B, I) and letters (B, T // 4), the same in every process."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes.T, batch, sizes.I, generator=random)
    letters = torch.randint(1, LETTERS, (batch, sizes.T // 4), generator=random)
    return x.to(device), letters.to(device)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Connectionist temporal classification of the scores, averaged over the rows."""
    x, letters = batch
    scores = model(x)
    T, B = scores.shape[:2]
    return nn.functional.ctc_loss(scores if scores.dtype == torch.float64 else scores.float(), letters,
                                  torch.full((B,), T), torch.full((B,), letters.shape[1]), BLANK)


def autocast() -> torch.autocast:
    return torch.autocast("cuda" if GPU else "cpu", KIND, enabled=GPU, cache_enabled=False)


class Step:
    """A training step of a model on one batch: forward, loss, backward, Adam; ``around`` it a context, such as
    DistributedDataParallel's ``no_sync``."""

    def __init__(self, model: nn.Module, batch: Batch, around: Callable[[], AbstractContextManager[None]] = nullcontext,
                 update: bool = True) -> None:
        self.model, self.batch, self.around = model, batch, around
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=GPU) if update else None

    def __call__(self) -> None:
        for p in self.model.parameters():
            p.grad = None
        with self.around():
            with autocast():
                loss = loss_of(self.model, self.batch)
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()


def modules() -> Iterator[LayerSpec]:
    """What the parts compile, the longest first: whole stacks for one process, and layers alone for several."""
    for sizes in MODELS.values():
        stack = ecornn.torch.LSTM(sizes.I, sizes.H, sizes.layers, bidirectional=sizes.bidirectional, device="meta")
        dtype, kept = str(KIND).removeprefix("torch."), KEPT["cuda" if GPU else "cpu"]
        layers = dict.fromkeys(text_of(stack, layer) for layer in range(sizes.layers))
        for rows in reversed(sizes.rows):
            yield kind_of(text_of(stack)).spec(rows, sizes.T, dtype, "", kept)
            if rows < sizes.rows[-1]:
                yield from (kind_of(text).spec(rows, sizes.T, dtype, "", kept) for text in layers)
    sizes = MODELS["speech"]
    stack = ecornn.torch.LSTM(sizes.I, sizes.H, sizes.layers, bidirectional=sizes.bidirectional, device="meta")
    yield kind_of(text_of(stack)).spec(sizes.rows[-1], sizes.T, dtype, "")  # for inference


def main() -> None:
    begun, wanted = time.perf_counter(), [*modules()]
    compile_all([(spec, "cuda" if GPU else "cpu") for spec in wanted], len(os.sched_getaffinity(0)))
    Path(sys.argv[1]).write_text(json.dumps({"modules": len(wanted), "seconds": time.perf_counter() - begun}))


if __name__ == "__main__":
    main()
