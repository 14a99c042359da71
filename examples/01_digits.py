"""Reads handwritten digits row by row with a trained LSTM: tune, compile, load, bind, run.

    pip install ".[examples]"    # in the checkout
    python examples/01_digits.py

The weights come from train_digits.py, which trained them with PyTorch. Every prediction is compared
with PyTorch's: this program computes them if PyTorch is installed, otherwise it reads them from the
file of the weights. It exits with 1 if a prediction differs. On a CPU it takes two minutes at most.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from stages import stage

import ecornn

HIDDEN, ROWS, COLUMNS, BATCH = 64, 8, 8, 128  # T = ROWS, I = COLUMNS
TRIALS = 8


def pytorch_logits(images: np.ndarray, tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """PyTorch's scores (N, 10) of the images, and their source."""
    try:
        import torch
    except ImportError:
        return tensors["test.logits"], "PyTorch's kept results"
    lstm = torch.nn.LSTM(COLUMNS, HIDDEN)
    lstm.load_state_dict({n: torch.from_numpy(v) for n, v in tensors.items() if n.endswith("_l0")})
    with torch.no_grad():
        last = lstm(torch.from_numpy(images))[0][-1].numpy()
    return classify(last, tensors), f"PyTorch {torch.__version__}"


def classify(last: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Scores (N, 10) from the LSTM's last output (N, H)."""
    return last @ tensors["classifier.weight"].T + tensors["classifier.bias"]


def main() -> int:
    tensors = load_file(Path(__file__).with_name("digits_lstm.safetensors"))
    digits = load_digits()
    labels = digits.target[tensors["test.index"]]
    images = digits.images[tensors["test.index"]].astype(np.float32) / 16  # (N, 8, 8)
    images = np.ascontiguousarray(images.transpose(1, 0, 2))  # (T, N, I): a step is a row of pixels

    sizes = {"hidden": HIDDEN, "input": COLUMNS, "batch": BATCH, "seq": ROWS, "dtype": "float32"}
    tune = Path(sysconfig.get_path("scripts"), "ecornn-tune")
    options = [f"--{name}={value}" for name, value in sizes.items()]
    with stage("search", beats=False):
        subprocess.run([tune, "--cell=lstm", *options, f"--trials={TRIALS}"], check=True)

    with stage("compiling"):
        module = ecornn.compile("lstm", **sizes)  # uses the record that the search has just written
    print(module)
    with tempfile.TemporaryDirectory() as folder, stage(f"predictions of {len(labels)} images"):
        module.save(f"{folder}/digits.so")
        layer = ecornn.load(f"{folder}/digits.so").bind(
            {name: value for name, value in tensors.items() if name.endswith("_l0")})
        outputs = []
        for first in range(0, images.shape[1], BATCH):  # the last batch is a smaller one
            y, _ = layer(np.ascontiguousarray(images[:, first:first + BATCH]))
            outputs.append(y[-1])
    logits = classify(np.concatenate(outputs), tensors)

    with stage("the same in PyTorch"):
        expected, source = pytorch_logits(images, tensors)
    predicted = logits.argmax(1)
    differ = int((predicted != expected.argmax(1)).sum())
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    print(f"accuracy {np.mean(predicted == labels):.2%} of {len(labels)} test images")
    print(f"{differ} predictions differ from {source}; relative difference of the scores {error:.1e}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
