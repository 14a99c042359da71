"""Training with Lightning: a callback compiles the layers, and checkpoints stay as they are.

    pip install ".[examples]"    # in the checkout
    python examples/17_lightning.py [--hidden 128] [--batches 40]

The adding problem (Hochreiter and Schmidhuber 1997): an LSTM reads 100 pairs of a value and a mark, and learns the sum
of the two values that are marked. It is trained twice from the same weights, with PyTorch's layer and with a compiled
one, and the checkpoint of the second run is loaded without the callback. Exits with 1 where losses or outputs differ.
Runs on the GPU if Lightning sees one. On a CPU it takes a minute at most.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import lightning
import torch
from stages import stage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ecornn.lightning import CompileLayers

STEPS, BATCH = 100, 64


class Adding(lightning.LightningModule):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.recurrent, self.sum = nn.LSTM(2, hidden, batch_first=True), nn.Linear(hidden, 1)
        self.losses: list[float] = []
        self.seconds = 0.0

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.sum(self.recurrent(pairs)[0][:, -1])[:, 0]

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        pairs, sums = batch
        loss = nn.functional.mse_loss(self(pairs), sums)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_start(self) -> None:
        self.seconds = -time.perf_counter()

    def on_train_epoch_end(self) -> None:
        self.seconds += time.perf_counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def problems(count: int) -> TensorDataset:
    """Pairs of a value and a mark (count, STEPS, 2), and the sums of the two marked values (count,)."""
    values, marks = torch.rand(count, STEPS), torch.zeros(count, STEPS)
    marks.scatter_(1, torch.rand(count, STEPS).topk(2).indices, 1.0)
    return TensorDataset(torch.stack((values, marks), -1), (values * marks).sum(1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the LSTM")
    parser.add_argument("--batches", type=int, default=40, help="batches of the one epoch")
    options = parser.parse_args()
    torch.manual_seed(0)
    data, plain = problems(BATCH * options.batches), Adding(options.hidden)
    models = {"torch.nn": plain, "ecornn": copy.deepcopy(plain)}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            callbacks = [CompileLayers(torch.zeros(BATCH, STEPS, 2))] if name == "ecornn" else []
            trainer = lightning.Trainer(max_epochs=1, callbacks=callbacks, default_root_dir=folder, devices=1,
                                        logger=False, enable_checkpointing=False, enable_model_summary=False,
                                        enable_progress_bar=False)
            with stage(f"the whole fit by {name}"):
                trainer.fit(model, DataLoader(data, BATCH))
            print(f"{name}: loss {model.losses[0]:.4f} to {model.losses[-1]:.4f}; one epoch took {model.seconds:.2f} s")
        trainer.save_checkpoint(Path(folder) / "adding.ckpt")
        loaded = Adding.load_from_checkpoint(Path(folder) / "adding.ckpt", map_location="cpu")
    apart = max(abs(a - b) / a for a, b in zip(*(model.losses for model in models.values()), strict=True))
    pairs = data[:BATCH][0]
    with torch.no_grad():
        error = float((loaded(pairs) - models["ecornn"].cpu()(pairs)).abs().max())
    print(f"losses differ by {apart:.1e} at most, limit 1e-2; {type(loaded.recurrent).__name__} of the checkpoint: "
          f"outputs differ by {error:.1e}, limit 1e-4")
    print(f"epochs: {models['torch.nn'].seconds / models['ecornn'].seconds:.2f} times as fast")
    return int(not (apart <= 1e-2 and error <= 1e-4))


if __name__ == "__main__":
    sys.exit(main())
