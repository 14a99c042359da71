"""The pictures of docs/EXAMPLES.md, from files of results, a tuning log that ships, and a trained model.

    python docs/site/site_gallery.py     writes docs/images/examples/*.svg
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ecornn.svg import LEFT, RIGHT, VALUES, WIDTH, Axis, curve, dot, figure, grid, text

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ROOT / "docs" / "images" / "examples"
TITLE = 28  # px above a picture for its title
NAMES, BAR, GAP = 106, 14, 8  # px: the width of names, the height of a bar, and the room between groups of bars
SIDES = ("ecornn", "PyTorch")
STYLE = """
  .page { fill: #fff } text { font: 12px system-ui, sans-serif; fill: #24292f } .tick, .name { fill: #59636e }
  .title { font-weight: 600 } .grid { stroke: #d0d7de } .side0, .trial { fill: #0969da } .side1 { fill: #8c959f }
  .best { stroke: #0969da; stroke-width: 2; fill: none } .default { stroke: #bc4c00; stroke-dasharray: 6 4 }
  .trial { fill-opacity: .6 } .halo { paint-order: stroke; stroke: #fff; stroke-width: 4px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22 } text { fill: #c9d1d9 } .tick, .name { fill: #9198a1 } .grid { stroke: #30363d }
    .side0, .trial { fill: #58a6ff } .side1 { fill: #6e7681 } .best { stroke: #58a6ff } .default { stroke: #f0883e }
    .halo { stroke: #161b22 }
  }
"""

Bars = Sequence[tuple[str, Sequence[float]]]


def results(name: str) -> Any:
    """A file of benchmarks/results: JSON, or JSON on each line."""
    content = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    return json.loads(content) if name.endswith(".json") else [json.loads(line) for line in content.splitlines()]


def titled(title: str, drawn: str, sides: Sequence[str] = ()) -> str:
    """A file of its own, of a picture by svg.py: with a ground, colours of light and dark pages, a title and the names
    of its sides."""
    found = re.fullmatch(r'<svg viewBox="0 0 \d+ (\d+)" role="img" aria-label="[^"]*">(.*)</svg>', drawn, re.DOTALL)
    assert found is not None
    top = TITLE + 16 * bool(sides)
    height = int(found[1]) + top
    names = "".join(f'<rect class="side{n}" x="{12 + 90 * n}" y="28" width="10" height="10"/>'
                    + text(28 + 90 * n, 37, side, "tick", "start") for n, side in enumerate(sides))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>\n{text(12, 20, title, "title", "start")}'
            f'{names}\n<g transform="translate(0 {top})">{found[2]}</g>\n</svg>\n')


def bars(title: str, rows: Bars, unit: str = "", sides: Sequence[str] = SIDES) -> str:
    """A group of bars for each row, one for each side."""
    high, parts, y = max(max(values) for _, values in rows), [], 4
    for name, values in rows:
        parts.append(text(NAMES - 6, y + BAR * len(values) / 2 + 4, name, "name", "end"))
        for side, value in enumerate(values):
            width = round(max(1.0, value / high * (WIDTH - VALUES - NAMES - RIGHT)), 1)
            parts += [f'<rect class="side{side}" x="{NAMES}" y="{y}" width="{width}" height="{BAR - 2}" rx="2"/>',
                      text(NAMES + width + 6, y + 10, f"{float(f'{value:.3g}'):,g}{unit}", "tick", "start")]
            y += BAR
        y += GAP
    return titled(title, figure(parts, "", y), sides if len(sides) > 1 else ())


def digits() -> str:
    """Draws the scores of the LSTM of 01_digits.py after each row of a digit, computed by the float64 reference."""
    import numpy as np
    from safetensors.numpy import load_file
    from sklearn.datasets import load_digits

    import ecornn
    from ecornn.cells import get

    tensors = load_file(ROOT / "examples" / "digits_lstm.safetensors")
    image = load_digits().images[tensors["test.index"][0]]
    weights = {name: value for name, value in tensors.items() if name.endswith("_l0")}
    y, _ = ecornn.reference(get("lstm"), image[:, None] / 16, weights)
    scores = np.exp(y[:, 0] @ tensors["classifier.weight"].T + tensors["classifier.bias"])
    side, parts = 20, [text(296, 192, "held for, after each row", "name")]
    for row, shares in enumerate(scores / scores.sum(axis=1, keepdims=True)):
        for first, values in ((12, image[row] / 16), (196, shares)):
            parts += [f'<rect class="side0" x="{first + side * n}" y="{side * row}" width="19" height="19" '
                      f'fill-opacity="{value:.2f}"/>' for n, value in enumerate(values) if value >= 0.01]
    parts += [text(206 + side * n, 8 * side + 14, str(n), "tick") for n in range(10)]
    return titled("A digit, row by row, and what an LSTM makes of it", figure(parts, "", 202))


def published(title: str, names: dict[str, str]) -> str:
    """Cells of h100_published.jsonl by their names there: µs a step."""
    rows = {one["row"]["cell"]: one["row"] for one in results("h100_published.jsonl") if "row" in one}
    return bars(title, [(name, [rows[cell][f"{side}_us"] for side in ("ecornn", "loop")])
                        for cell, name in names.items()], " µs", ("ecornn", "PyTorch's loop"))


def models(title: str, file: str, key: str, names: dict[str, str]) -> str:
    """Rows of a file of compare_models.py by their way of being called."""
    rows = {row["way"]: row for row in results(file)["rows"]}
    return bars(title, [(name, [rows[way][f"{side}_{key}"] for side in ("ecornn", "torch")])
                        for way, name in names.items()])


def programs() -> str:
    found = {row["name"]: row["faster"] for row in results("cpu_programs.json")["rows"]}
    return bars("Whole programs: times as fast, two CPU cores",
                [(name.replace("_", " "), [ratio]) for name, ratio in found.items()], "x", SIDES[:1])


def memory() -> str:
    """Draws the bytes that a layer keeps from the forward to the backward pass, and those of cuDNN in bfloat16."""
    rows = {row["keep"]: row for row in results("h100_training_memory.json")["rows"] if row["dtype"] == "bfloat16"}
    kept = [(f"{keep} kept", [rows[keep]["ecornn_mib"]]) for keep in ("states", "gates")]
    return bars("Memory of an LSTM in training, 1024 steps of 16 rows",
                [*kept, ("cuDNN", [rows["states"]["cudnn_mib"]])], " MiB", SIDES[:1])


def calls() -> str:
    """Calls of one step of host_time_cpu.json, each with states."""
    row = next(r for r in results("host_time_cpu.json")["rows"] if (r["cell"], r["T"]) == ("lstm", 1))
    names = {"torch.nn, states": "torch.nn", "drop-in, states": "ecornn.torch", "tensor, states": "with tensors",
             "NumPy, states": "with arrays", "entry": "from C"}
    return bars("A call of one step of an LSTM of 16 units, on a CPU",
                [(name, [row["us"][one]["median"]]) for one, name in names.items()], " µs", SIDES[:1])


def transfer() -> str:
    """Layers by how much is lost with another GPU's log, the least first; both directions of an H100 and an H200."""
    found = {where.split()[1]: sorted(row["loss"] for row in part["rows"])
             for where, part in results("transfer_h100_h200.json").items() if isinstance(part, dict)}
    most = max(map(len, found.values()))
    x, y = Axis(0, most, LEFT, WIDTH - RIGHT), Axis(1, 1.25, 150, 8)
    parts = list(grid(x, y, "layers, by what is lost", "times as long"))
    for side, losses in enumerate(found.values()):
        parts += [dot(f"side{side}", x(n + 0.5), y(loss), f"{loss:.3f}") for n, loss in enumerate(losses)]
    return titled("The best of another GPU's log, against one's own best", figure(parts, "", 190),
                  [f"an {gpu}'s" for gpu in found])


def serving() -> str:
    rows = results("serving_cpu.json")["rows"]
    return bars("Requests a second over HTTP, two CPU cores", [
        (f"{row['sessions']} client{'s' * (row['sessions'] > 1)}", [row[side]["rate"] for side in ("ecornn", "torch")])
        for row in rows])


def search() -> str:
    """A search of a log that ships."""
    from ecornn.report.of_log import searches
    from ecornn.tune.log import read

    run = next(run for run in searches(read(ROOT / "tuning_logs" / "epyc-znver4.jsonl.xz"))
               if str(run.best and run.best.workload) == "gru T=100 B=1 I=128 H=128 float32")
    assert run.default is not None and run.default.times is not None
    return titled("A search: GRU of 128 units on an AMD EPYC", curve(list(run.curve()), run.default.times.median))


PICTURES: dict[str, Callable[[], str]] = {
    "01_digits": digits,
    "02_own_cell": lambda: published("A minimal gated unit of 512 units on an H100: a step", {"mgu": "MGU"}),
    "03_more_cells": lambda: published("Three cells of 512 units on an H100: a step",
                                       {"ugrnn": "UGRNN", "ligru": "Light GRU", "sru": "SRU"}),
    "04_replace": programs,
    "05_language_model": lambda: models("Words a second in training, one H100", "h100_language_model.json",
                                        "per_second", {"plain": "eager", "compile": "compile", "graph": "CUDA graph",
                                                       "compiled graph": "both"}),
    "06_speech": lambda: models("Sounds a second in training, one H100", "h100_speech_model.json", "per_second",
                                {"plain": "eager", "graph": "CUDA graph"}),
    "08_hundred_layers": memory,
    "10_streaming": calls,
    "11_sharing_logs": transfer,
    "12_serving": serving,
    "15_tuning": search,
}


def pictures() -> Iterator[tuple[Path, str]]:
    """Yields each file, and what it should contain."""
    for name, made in PICTURES.items():
        yield IMAGES / f"{name}.svg", made()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for file, content in pictures():
        file.write_text(content, encoding="utf-8")
        print(f"wrote {file.name}")
