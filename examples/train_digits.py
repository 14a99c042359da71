"""Trains the classifier of 01_digits.py with PyTorch and writes digits_lstm.safetensors.

    pip install torch safetensors scikit-learn
    python examples/train_digits.py

The images are scikit-learn's handwritten digits (1797 of 8 x 8 pixels, values 0 to 16); each is a
sequence of its rows. A quarter is kept for testing. On a CPU it takes a minute at most.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from stages import stage

HIDDEN, EPOCHS, BATCH, SEED = 64, 120, 64, 0
OUT = Path(__file__).with_name("digits_lstm.safetensors")


def logits(lstm: torch.nn.LSTM, classifier: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Scores (B, 10) of the images x (8, B, 8): the classifier reads the last step's output."""
    return classifier(lstm(x)[0][-1])


def main() -> None:
    torch.manual_seed(SEED)
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 16).transpose(0, 1).contiguous()
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(SEED).permutation(len(labels)))
    test, train = order[:len(order) // 4], order[len(order) // 4:]

    lstm, classifier = torch.nn.LSTM(8, HIDDEN), torch.nn.Linear(HIDDEN, 10)
    weights = [*lstm.parameters(), *classifier.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=5e-3, weight_decay=1e-2)
    steps = EPOCHS * -(-len(train) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=steps)
    with stage(f"training for {EPOCHS} epochs"):
        for _ in range(EPOCHS):
            for batch in train[torch.randperm(len(train))].split(BATCH):
                noisy = images[:, batch] + 0.1 * torch.randn(8, len(batch), 8)
                loss = torch.nn.functional.cross_entropy(logits(lstm, classifier, noisy), labels[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()

    with torch.no_grad():
        scores = logits(lstm, classifier, images[:, test])
    accuracy = (scores.argmax(1) == labels[test]).float().mean().item()
    print(f"test accuracy {accuracy:.2%} of {len(test)} images")
    tensors = {name: value.detach().contiguous() for name, value in lstm.named_parameters()}
    tensors |= {f"classifier.{name}": value.detach() for name, value in classifier.named_parameters()}
    # PyTorch's scores of the test images, for a check without PyTorch
    tensors |= {"test.index": test, "test.logits": scores}
    save_file(tensors, OUT, metadata={"data": "sklearn.datasets.load_digits", "torch": torch.__version__})


if __name__ == "__main__":
    main()
