"""Writes ``ecornn/torch/gains.json``, the gains that ``ecornn.torch.replace`` reports, and the tables of
``docs/GAINS.md``, from measured rows.

    python benchmarks/gains.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, OUT = ROOT / "benchmarks" / "results", ROOT / "ecornn" / "torch" / "gains.json"
PAGE, BEGIN, END = ROOT / "docs" / "GAINS.md", "<!-- gains: begin -->", "<!-- gains: end -->"
PLACES = {"cpu": "CPUs", "cuda": "GPUs"}
SIZES = (64, 128, 256, 512, 1024, math.inf)  # the largest H of each column
CELLS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}
SAME = {None: "float32", "tf32-both": "float32"}  # drop-ins have TF32 where cuDNN has it, which "tf32" has not
# file, place and pass of its rows; None: a row says it
FILES = (("h100_grid.jsonl", "cuda", "inference"), ("h100_classes.jsonl", "cuda", "inference"),
         ("h200_training.json", "cuda", "training"), ("h100_training.json", "cuda", "training"),
         ("h200_cells.json", "cuda", None), ("cpu.json", "cpu", "inference"), ("cpu_skylake.json", "cpu", "inference"),
         ("zen4_training_cpu.json", "cpu", "training"), ("zen3_training_cpu.json", "cpu", "training"),
         ("emeraldrapids_training_cpu.json", "cpu", "training"))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The measured rows of a file of results."""
    if path.suffix == ".jsonl":
        yield from (line["row"] for line in map(json.loads, path.read_text().splitlines()) if "row" in line)
    else:
        yield from json.loads(path.read_text())["rows"]


def gains() -> list[list[Any]]:
    """The rows of the table, sorted."""
    found = []
    for name, place, which in FILES:
        for row in read(RESULTS / name):
            dtype, ratio = row.get("dtype"), row.get("ratio_torch", row.get("ratio"))
            if (ratio is None or dtype == "tf32" or row.get("layers", 1) > 1 or row.get("suite") == "stacks"
                    or row.get("kind") == "graph"):
                continue
            found.append([place, CELLS.get(row["cell"], row["cell"]), SAME.get(dtype, dtype), which or row["kind"],
                          row["H"], round(ratio, 2)])
    return sorted(found)


def tables() -> str:
    """The tables of the page, in Markdown: a row for each cell and data type, a column for each range of sizes."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[list[float]]]] = {}
    for place, cell, dtype, which, hidden, ratio in gains():
        of = found.setdefault((place, which), {}).setdefault((cell, dtype), [[] for _ in SIZES])
        of[next(n for n, most in enumerate(SIZES) if hidden <= most)].append(ratio)
    lines = []
    heads = " | ".join([f"H to {most}" for most in SIZES[:-1]] + [f"above {SIZES[-2]}"])
    for (place, which), of_kinds in sorted(found.items(), key=lambda item: (item[0][0] != "cuda", item[0][1])):
        lines += [f"## {PLACES[place]}, {which}", "", f"| layer | {heads} |", "|---" * 7 + "|"]
        lines += [f"| {cell}, {dtype} | {' | '.join(map(_cell, of))} |" for (cell, dtype), of in of_kinds.items()]
        lines.append("")
    return "\n".join(lines)


def _cell(ratios: list[float]) -> str:
    if not ratios:
        return ""
    mean = f"**{geometric_mean(ratios):.1f}x**"
    return mean if len(ratios) == 1 else f"{mean} ({min(ratios):.1f} to {max(ratios):.1f}; {len(ratios)})"


def main() -> None:
    lines = ",\n".join(map(json.dumps, gains()))
    OUT.write_text(f"[\n{lines}\n]\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
