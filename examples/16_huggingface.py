"""A model in Hugging Face's style: saved, loaded, its layers replaced, and saved again as the same file.

    pip install ".[examples]"    # in the checkout
    python examples/16_huggingface.py [--folder FOLDER] [--hidden 256]

The model is a tagger with random weights. Its class is a `PyTorchModelHubMixin` where huggingface_hub is installed;
elsewhere a few lines here write and read the same two files, config.json and model.safetensors. Nothing is downloaded.
Exits with 1 where outputs or files differ. Runs on the GPU if PyTorch sees one. On a CPU it takes a minute at most.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from stages import stage
from torch import nn

import ecornn.torch

try:
    from huggingface_hub import PyTorchModelHubMixin as Hub
except ModuleNotFoundError:
    class Hub:  # type: ignore[no-redef]
        """The part of huggingface_hub's class that needs no network, with its names of files."""

        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text(json.dumps(self.config, indent=2))
            save_model(self, str(folder / "model.safetensors"))

        @classmethod
        def from_pretrained(cls, folder: Path) -> Any:
            model = cls(**json.loads((folder / "config.json").read_text()))
            load_model(model, str(folder / "model.safetensors"))
            return model.eval()


class Tagger(nn.Module, Hub):
    """Embedding, two LSTMs in both directions, and a score for each tag of each word."""

    def __init__(self, words: int = 1000, hidden: int = 256, tags: int = 17) -> None:
        super().__init__()
        self.config = {"words": words, "hidden": hidden, "tags": tags}
        self.embedding = nn.Embedding(words, 128)
        self.encoder = nn.LSTM(128, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(2 * hidden, tags)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.tags(self.encoder(self.embedding(words))[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the files there; default: a temporary folder")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the LSTMs")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        first, again = (Path(options.folder or temporary) / name for name in ("saved", "saved_again"))
        for folder in (first, again):
            folder.mkdir(parents=True, exist_ok=True)
        with stage("saving and loading"):
            Tagger(hidden=options.hidden).save_pretrained(first)
            print(f"saved as {', '.join(sorted(path.name for path in first.iterdir()))}, by {Hub.__module__}")
            model = Tagger.from_pretrained(first).to(device)
        words = torch.randint(1000, (8, 60), device=device)
        with torch.inference_mode():
            before = model(words)
            with stage("replacing and compiling, which the build cache keeps for the next process", beats=False):
                print(ecornn.torch.replace(model))
                ecornn.torch.prepare(model, words)  # without it PyTorch's layers run until theirs are compiled
            found = model(words)
            error = float((found.double() - before).norm() / before.double().norm())
            print(f"outputs of compiled layers: relative difference {error:.1e}, limit 1e-5")
            print(model)
            with stage("timing in turns", beats=False):
                print(ecornn.torch.profile(model, words))
        with stage("saving again"):
            model.save_pretrained(again)
            same = (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
            print(f"saved again: {'the same file' if same else 'another file'}, which loads without ecornn, too")
    return int(not (error <= 1e-5 and same))


if __name__ == "__main__":
    sys.exit(main())
