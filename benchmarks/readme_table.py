"""Writes the README's table of measured results from a file of ``compare_cudnn.py``.

    python benchmarks/readme_table.py benchmarks/results/h100.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NAMES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "vanilla tanh"}


def table(path: Path) -> str:
    """The table as Markdown, with its environment and the command that makes it."""
    data = json.loads(path.read_text())
    env = data["environment"]
    lines = [BEGIN, "",
             "| layer, T x B x I x H | dtype | ecornn µs/step [p20, p80] | cuDNN µs/step [p20, p80] | ratio |",
             "|---|---|---|---|---|"]
    for r in data["rows"]:
        lines.append(f"| {NAMES[r['cell']]} {r['T']}x{r['B']}x{r['I']}x{r['H']} | {r['dtype']} | "
                     f"{r['ecornn_us']:.2f} [{r['ecornn_p20']:.2f}, {r['ecornn_p80']:.2f}] | "
                     f"{r['cudnn_us']:.2f} [{r['cudnn_p20']:.2f}, {r['cudnn_p80']:.2f}] | {r['ratio']:.2f}x |")
    lines += ["", f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} through PyTorch {env['torch']} in a CUDA "
              f"graph; whole forward pass, outputs checked against float64. Data: `{path.as_posix()}`; "
              f"`{env['command']}`.", "", END]
    return "\n".join(lines)


def main() -> None:
    path = Path(sys.argv[1])
    readme = Path("README.md")
    text = readme.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(before + table(path) + after)


if __name__ == "__main__":
    main()
